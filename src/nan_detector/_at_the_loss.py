"""Where a bad loss comes from, told in the midst of a replay: before the backward is made again, half of the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nan_detector import _finite
from nan_detector._lineage import EMPTY, Line
from nan_detector._origin import trace_of_line
from nan_detector._quiet import quiet
from nan_detector._replayed import Replayed, same_values
from nan_detector._state import logger, strict
from nan_detector._trace import BirthKind, Trace

Tensor = torch.Tensor

#: Births that are told only when the replay is over: it may yet show what has made them.
_LATER = (BirthKind.PARAMETER, BirthKind.BUFFER, BirthKind.OPAQUE, BirthKind.GRADIENT)


class AtTheLoss:
    """Is shown each loss that a replay is about to make a backward of, and tells where the first bad one comes from.

    Args:
        tell: Takes the trace and how many backward passes had ended before its birth, once at most. Nothing that it
            does is seen by the replay.
    """

    def __init__(self, tell: Callable[[Trace, int], None]) -> None:
        self._tell = tell
        self._told = False

    def __call__(self, replayed: Replayed, losses: Sequence[Tensor], recorded: Sequence[Tensor]) -> None:
        """A backward is about to be made.

        Args:
            replayed: The replay so far.
            losses: What the backward begins at, those with one element.
            recorded: The same of the step that is replayed.
        """
        if self._told or not losses or len(losses) != len(recorded) or replayed.written:
            return
        try:
            with quiet():
                self._look(replayed, losses, recorded)
        except Exception:
            # The replay is to go on: what it finds is written down when it is over.
            if strict():
                raise
            logger.exception("the place of the bad loss could not be written down early")

    def _look(self, replayed: Replayed, losses: Sequence[Tensor], recorded: Sequence[Tensor]) -> None:
        if all(map(_finite.is_finite, losses)):
            return
        self._told = True
        if not all(same_values(a.detach(), b) for a, b in zip(losses, recorded, strict=True)):
            return
        trace = _trace_of(replayed, losses)
        if trace is not None and trace.birth is not None:
            self._tell(trace, sum(end < trace.birth.number for end in replayed.backward_ends))


def _trace_of(replayed: Replayed, losses: Sequence[Tensor]) -> Trace | None:
    tracer = replayed.tracer
    harm: Line = EMPTY
    for t in losses:
        harm |= tracer.ancestry(t)
    # What the backward of an earlier loss has made may go back to a line of the forward.
    if any(g.kind in _LATER or g.record.phase == "backward" for g in harm):
        return None
    return trace_of_line(tracer, harm)
