"""What an in-place call of the loop's own writes into: parameters, where it updates them itself; and who wrote last.

What is written between two steps (weights that are normalised, averaged, loaded) shows only when the next step uses it:
then the line is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nan_detector._calls import public_name
from nan_detector._entries import Made, Outside, tensors_in
from nan_detector._lineage import key_of
from nan_detector._source import Mark
from nan_detector._tape import Tape

Tensor = torch.Tensor


#: Tensors whose last writer is remembered; when there are more, those that are gone are forgotten.
MOST = 4096


class Written(NamedTuple):
    """The last call of the loop's own that wrote into a tensor."""

    tensor: weakref.ref[Tensor]
    mark: Mark | None
    name: str  # of the function; "data" where that attribute was set
    step: int  # the step that was running, or that had just been taken
    before: bool  # that step had not called the model yet


class Writers:
    """Who wrote last into what came from outside the step, of one thread."""

    def __init__(self) -> None:
        self._last: dict[int, Written] = {}

    def note(
        self, targets: list[Tensor], func: Callable[..., Any], mark: Mark | None, told: int | None, called: int | None
    ) -> None:
        """`func`, called at `mark`, is about to write into `targets`.

        Args:
            targets: Tensors from outside the step.
            func: The function.
            mark: The user's line.
            told: The step that the loop has named last.
            called: The step in which a watched model was last called; None before the first.
        """
        before = called is None or (told is not None and told != called)
        step = (told if before else called) or 0
        name = public_name(func)
        if len(self._last) >= MOST:
            self._last = {i: w for i, w in self._last.items() if w.tensor() is not None}
        for t in targets:
            self._last[id(t)] = Written(weakref.ref(t), mark, name, step, before)

    def of(self, t: Tensor) -> Written | None:
        """The last call that wrote into `t`."""
        found = self._last.get(id(t))
        return found if found is not None and found.tensor() is t else None

    def clear(self) -> None:
        """Forget all."""
        self._last.clear()


def targets_of(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an in-place call writes into."""
    if getattr(func, "__name__", "") in ("__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute != "data":
            return []
    return written_arguments(args, kwargs)


def written_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call is given to write into, or an attribute of them."""
    if kwargs.get("out") is not None:
        return list(tensors_in(kwargs["out"]))
    return list(tensors_in(args[:1] or kwargs.get("tensor", kwargs.get("input"))))  # `torch.nn.init` names its argument


def outside_behind(tape: Tape, t: Tensor) -> Tensor | None:
    """The tensor from outside the step that `t` is, or is a view or the `.data` of; None where the step made it."""
    if isinstance(t, torch.nn.Parameter):
        return t
    if isinstance(t._base, torch.nn.Parameter):
        return t._base
    entry = tape.made_by(t)
    if entry is None:
        return t if t._base is None else t._base
    while entry is not None and entry.args:
        source = entry.args[0]
        if isinstance(source, Outside):
            p = None if source.gone else source.tensor
            return p if p is not None and p.data_ptr() <= t.data_ptr() and _shares(p, t) else None
        entry = source.entry if isinstance(source, Made) else None
    return None


def parameter_behind(tape: Tape, t: Tensor) -> Tensor | None:
    """The parameter that `t` is, or is a view or the `.data` of."""
    found = outside_behind(tape, t)
    return found if isinstance(found, torch.nn.Parameter) else None


def is_worked_out(tape: Tape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True where what a call writes was made by a recorded call that did more than read an attribute."""
    makers = [tape.made_by(t) for t in tensors_in((args[1:], kwargs))]
    return any(e is not None and getattr(e.func, "__name__", "") != "__get__" for e in makers)


def _shares(a: Tensor, b: Tensor) -> bool:
    return key_of(a) == key_of(b) != 0
