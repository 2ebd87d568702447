"""When gradients were set back: never since the last step, or after the backward that the step needed.

What a loop forgets here is no NaN, but leads to one: gradients that nobody zeroes are the sum of all steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from nan_detector._calls import public_name
from nan_detector._diagnosis.loop import NOT_ZEROED
from nan_detector._entries import Entry
from nan_detector._tape import Tape

#: Times that the gradient of a parameter must have been added to, to say that nobody zeroes it.
ADDED = 3
#: Steps in a row without gradients after which the loop is told: a single one may be a batch that it gave up.
EMPTY = 3


class Zeroing:
    """Who set gradients back, and when, in one run. A position is the number of steps that the run had before."""

    def __init__(self) -> None:
        self._owners: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._by_hand = -1
        self._dropped_at = -1
        self._empty = (0, -1)  # how many in a row, and the position of the last

    def zeroed(self, owner: Any, position: int) -> None:
        """`zero_grad` of an optimizer or module."""
        self._owners[owner] = position

    def look(self, tape: Tape, position: int) -> None:
        """Calls are about to leave the tape: did the loop's own code set gradients back?"""
        if any(map(_zeroes, tape.entries)):
            self._by_hand = position

    def dropped(self, position: int) -> None:
        """Gradients of a backward that no step has used were set back."""
        self._dropped_at = position

    def empties(self, position: int) -> bool:
        """A step without a backward is about to be taken: True when it is time to say that this is a fault."""
        if self._dropped_at != position:
            return False
        count, last = self._empty
        count = count + 1 if last == position - 1 else 1
        self._empty = (count, position)
        return count == EMPTY

    def note(self, optimizer: Any, p: torch.Tensor | None, last: int, tape: Tape, first: int) -> str:
        """What is known of gradients that were never set back since the optimizer's last step; "" where they were.

        Args:
            optimizer: The optimizer about to step.
            p: One of its parameters that has a gradient.
            last: Position of its last step.
            tape: What was recorded since.
            first: Number of the first backward since.
        """
        if p is None or p.grad is None or p.grad._version < ADDED or last < 0 or self._by_hand > last:
            return ""
        if any(at > last and _covers(owner, p) for owner, at in self._owners.items()):
            return ""
        if any(e.number < first and _zeroes(e) for e in tape.entries):
            return ""
        others = [type(o).__name__ for o, at in self._owners.items() if at > last]
        said = (
            f"; zero_grad() was called on another {others[0]}, which does not have these parameters" if others else ""
        )
        return (
            f"{NOT_ZEROED}: the gradients of {type(optimizer).__name__} have not been set back to zero since its last "
            f"step (optimizer.zero_grad()){said}"
        )


def _covers(owner: Any, p: torch.Tensor) -> bool:
    held: Iterable[Any] = (
        owner.parameters()
        if isinstance(owner, torch.nn.Module)
        else (q for group in owner.param_groups for q in group["params"])
    )
    return any(q is p for q in held)


def _zeroes(entry: Entry) -> bool:
    if not entry.writes:
        return False
    name = public_name(entry.func)
    kind = getattr(entry.func, "__name__", "")
    return (name == "grad" and kind in ("__set__", "__delete__")) or name in ("zero", "foreach_zero", "fill", "copy")
