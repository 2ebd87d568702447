"""Several optimizers that step after one backward: they take one step, and a bad one among them has one story.

The first one's gate judges the loss, and the step leaves the tape with it; what a further one's gate finds is explained
from what the first has left. By then the first has moved its weights, so where its gate sees that the gradients of
another are bad, it keeps those weights as they are: a healthy step copies nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from nan_detector._entries import Entry, Outside
from nan_detector._gate import beside
from nan_detector._hazards import Hazards, Judged
from nan_detector._norms import norms
from nan_detector._quiet import quiet
from nan_detector._records import NaNEvent
from nan_detector._run import Run
from nan_detector._stepped import Stepped
from nan_detector._tape import Tape

Tensor = torch.Tensor


class Kept(Judged):
    """A judged step with the weights that it used, of which some have moved since."""

    __slots__ = ("weights",)

    def __init__(self, judged: Judged) -> None:
        self.entries, self.boundary, self.call, self.step = judged.entries, judged.boundary, judged.call, judged.step
        self.weights: dict[int, Outside] = {}

    def keep(self, parameters: list[Tensor], tape: Tape) -> None:
        """Copy these, as far as the tape may hold them."""
        with quiet():
            spent = sum(token.bytes for token in self.weights.values())
            tape.held_bytes += spent
            for p in parameters:
                token = tape.outside.get(id(p))
                if token is None or not token.stands_for(p) or not (token.snapshot is not None or token.changed):
                    # One of its own: the tape's may be there in later steps, which begin with other values.
                    token = Outside(p)
                    tape.keep_earlier(token)
                self.weights[id(p)] = token
            tape.held_bytes -= spent


class SharedStep:
    """Which optimizers step after the same backward, and what there is to explain the later ones from.

    A step begins with the first call of a model (or backward) after an optimizer's step. Until the next one, each
    optimizer that has not stepped in it yet belongs to it.

    Args:
        run: The run, which counts the steps.
        steppeds: What the optimizers step, by identity.
        hazards: Holds the last step from its gate to the next call of a model.

    Attributes:
        joined: The gate that is passed is that of a further optimizer of the step.
    """

    def __init__(self, run: Run, steppeds: dict[int, Stepped], hazards: Hazards) -> None:
        self.run = run
        self.joined = False
        self._told: tuple[NaNEvent, int] | None = None  # the last event, and the position of its gate
        self._steppeds = steppeds
        self._hazards = hazards
        self._start = 0  # position of the first optimizer step of the step at hand
        self._joined_at = self._raised_at = -2  # positions
        self._first: Stepped | None = None
        self._bad = False  # gradients of the others are bad, or may be
        self._before: tuple[Any, ...] | None = None  # the tape, while the step stands on it again
        self._flipped: list[Entry] = []
        self._lent: list[Outside] = []

    # -- counting ------------------------------------------------------------------------------------------------------

    def meet(self, stepped: Stepped, pending: bool) -> bool:
        """An optimizer is at the gate. True when it has just joined the step of those before it.

        Args:
            stepped: What it steps.
            pending: A backward waits to be judged.
        """
        run = self.run
        at = run.groups
        if self._joined_at == at:  # within the step of an optimizer around it
            return False
        if self._raised_at == at and not pending and run.entered < at:  # the one before has not been counted
            self.joined, self._start, stepped.at = True, at, at
            return False
        follows = self._joined_at == at - 1
        start = self._start if follows else at - 1
        self.joined = not pending and run.entered < at and stepped.position < start
        stepped.at = at
        if not self.joined:
            return False
        if not follows:
            self._first = next((s for s in self._steppeds.values() if s.position == start), None)
        if self._first is not None:
            self._first.others = {**(self._first.others or {}), id(stepped.optimizer()): stepped}
        self._start, self._joined_at = start, at
        run.shared += 1
        return True

    def raised(self) -> None:
        """The gate at hand ends in an exception: if the loop goes on, the next optimizer comes to the same position."""
        self._raised_at = self.run.groups
        self.run.entered = min(self.run.entered, self.run.groups - 1)

    # -- at the gate of the first --------------------------------------------------------------------------------------

    def look(self, stepped: Stepped | None) -> Tensor | None:
        """A number on the device that is finite where the gradients of the others are; None where there are none.

        Before it is known who the others are, it is of all gradients of the watched models.
        """
        self._bad = False
        if stepped is None or self.joined:
            return None
        if stepped.others is None:
            mine = {id(p) for p in stepped.parameters}
            grads = [p.grad for _, p in self.run.names.parameters() if p.grad is not None and id(p) not in mine]
            stepped.others = {}
            return norms(grads).sum().reshape(1) if grads else None
        return look_at(stepped.others)

    def looked(self, value: float) -> None:
        """What the gate read of that number."""
        self._bad = not math.isfinite(value)

    def over(self, stepped: Stepped | None, tape: Tape, refused: bool) -> None:
        """The gate has judged, and the step is still on the tape: keep the weights that are about to move."""
        self._put_back(tape)
        last = self._hazards.last
        if stepped is None or refused or last is None or last.step != self.run.step:
            return
        if self._bad:
            self._bad = False
            last = self._hazards.last = Kept(last)
        elif not (self.joined and isinstance(last, Kept)):
            return
        last.keep(stepped.parameters, tape)

    # -- at the gate of a further one ----------------------------------------------------------------------------------

    def reopen(self, tape: Tape) -> list[Entry]:
        """Put the step back on the tape, for as long as this gate judges.

        Returns:
            Its backward passes; none where the optimizer at the gate shares no step, or nothing is left of it.
        """
        last = self._hazards.last
        if not self.joined or last is None or last.step != self.run.step or self._before is not None:
            return []
        self._before = (tape.entries, tape.outside, tape.boundary, tape.backwards, tape.moved)
        known = {id(e) for e in last.entries}
        tape.entries = [*last.entries, *(e for e in tape.entries if id(e) not in known)]
        tape.boundary = last.boundary
        self._flipped = [e for e in last.entries if e.judged and e.number >= last.boundary]
        for e in self._flipped:
            e.judged = False
        _, tokens = last.relevant()
        weights = last.weights if isinstance(last, Kept) else {}
        for token in tokens:
            kept = weights.get(token.ident)
            if kept is not None and kept is not token and token.snapshot is None and not token.gone:
                token.snapshot = kept.snapshot
                self._lent.append(token)
        tape.outside = {**tape.outside, **{o.ident: o for o in tokens}, **weights}
        pending = [e for e in tape.entries if e.kind == "backward" and not e.judged]
        tape.backwards = len(pending)
        tape.moved = any(
            p.requires_grad and ((o := weights.get(id(p))) is None or o.changed)
            for s in self._taken()
            for p in s.parameters
        )
        return pending

    def _put_back(self, tape: Tape) -> None:
        if self._before is None:
            return
        for e in self._flipped:
            e.judged = True
        for token in self._lent:
            token.snapshot = None
        tape.entries, tape.outside, tape.boundary, tape.backwards, tape.moved = self._before
        self._before, self._flipped, self._lent = None, [], []

    @property
    def told(self) -> NaNEvent | None:
        """The event of the step, where an earlier gate of it had one."""
        return self._told[0] if self.joined and self._told is not None and self._told[1] >= self._start else None

    def tell(self, event: NaNEvent) -> None:
        """The gate at hand had this event."""
        self._told = event, self.run.groups

    def _taken(self) -> Iterator[Stepped]:
        """Those whose step on the same backward was taken before."""
        if not self.joined:
            return
        for s in self._steppeds.values():
            if s.last is not None and self._start <= s.last.position < self.run.groups:
                yield s

    def notes(self, tape: Tape) -> tuple[str, ...]:
        """What an event of this gate has to say of the others."""
        taken = [type(o).__name__ for s in self._taken() if (o := s.optimizer()) is not None]
        if not taken:
            return ()
        said = f"the step of {' and '.join(dict.fromkeys(taken))} on the same backward was taken before"
        return (f"{said}, and the weights as they were before it were not kept" if tape.moved else said,)


def look_at(others: dict[int, Stepped]) -> Tensor | None:
    """A number on the device that is finite where the gradients of `others` are; None where there are none."""
    grads = [p.grad for s in others.values() for p in s.parameters if p.grad is not None]
    if not grads:
        return None
    with quiet():
        return norms(grads).sum().reshape(1)


def with_others(state: Tensor | None, others: dict[int, Stepped]) -> Tensor | None:
    """`state`, to be read to the host, with what `look_at` gives."""
    found = look_at(others)
    if found is None or state is None:
        return state if found is None else found
    with quiet():
        return torch.cat([state, beside(found, state)])
