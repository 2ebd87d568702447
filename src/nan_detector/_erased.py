"""Steps that do nothing: a norm overflowed, and clipping by it multiplied every gradient by 0.

Loss and gradients are finite then, and nothing is damaged; only the training stands still. What the gate has read
anyway tells: the total norm is exactly 0. Whether an overflow is behind it, the replay answers.
"""

from __future__ import annotations

from dataclasses import replace

from nan_detector import _finite
from nan_detector._births import birth_of, sites
from nan_detector._entries import Entry
from nan_detector._finding import Finding
from nan_detector._lineage import Gen
from nan_detector._quiet import quiet
from nan_detector._replayed import Replayed
from nan_detector._tape import Tape
from nan_detector._trace import BirthKind, Trace

#: What is seen of such a step.
SYMPTOM = "every gradient is exactly 0: clipping by a norm that overflowed erased them, and the step would do nothing"


#: Steps between two of one optimizer's that still are in a row: others may step in between.
NEAR = 8


class Erasures:
    """Decides which steps without any gradient are worth a replay."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, int]] = {}  # by optimizer: how many in a row, and where the last was

    def suspected(self, tape: Tape, pending: list[Entry], optimizer: int, position: int) -> bool:
        """All gradients of this step are 0. True where code of the loop's may have made them so.

        Args:
            tape: What was recorded of the step.
            pending: Its backward passes.
            optimizer: Identity of the optimizer; 0 where there is none.
            position: How many steps the run had before.
        """
        if not pending or not _wrote_after(tape, pending[-1].number):
            return False
        count, last = self._rows.get(optimizer, (0, position))
        count = count + 1 if position - last <= NEAR else 1
        self._rows[optimizer] = (count, position)
        # A dead network has such steps for ever, and its loop may clip: 1st, 2nd, 4th, 8th ... in a row.
        return count & (count - 1) == 0

    def over(self, optimizer: int) -> None:
        """An erasure was explained: the next one is looked at, too."""
        self._rows.pop(optimizer, None)


def _wrote_after(tape: Tape, number: int) -> bool:
    for entry in reversed(tape.entries):
        if entry.number <= number:
            return False
        if entry.writes:
            return True
    return False


def erased(replayed: Replayed, notes: list[str]) -> Finding:
    """The overflow after the last backward that left gradients of 0, where the replay shows one."""
    notes = [*notes, *replayed.notes]
    gen = _overflow_after_backward(replayed)
    if gen is None or replayed.same is False or replayed.raised is not None:
        return Finding(None, "no", tuple(notes))
    with quiet():
        emptied = [
            name for name, g in replayed.gradients.items() if g.numel() and _finite.stats(g).zero_count == g.numel()
        ]
    if not emptied:
        return Finding(None, "no", tuple(notes))
    birth = replace(birth_of(gen), phase="backward")  # of gradients, whichever way the step is run again
    trace = Trace(birth=birth, spread=sites(gen), reached=("gradient",))
    return Finding(trace, "yes", tuple(notes), replayed.micro_step_of(birth.number))


def _overflow_after_backward(replayed: Replayed) -> Gen | None:
    if not replayed.backward_ends:
        return None
    end = replayed.backward_ends[-1]
    return next(
        (
            g
            for g in sorted(replayed.tracer.births, key=lambda g: g.order)
            if g.overflow and not g.intended and g.kind is BirthKind.OPERATION and g.record.index > end
        ),
        None,
    )
