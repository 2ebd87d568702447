"""What a replay gave."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nan_detector._entries import Outside
from nan_detector._lineage import Line
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor


def same_values(a: Tensor, b: Tensor) -> bool:
    """True for equal values of one dtype; NaN is equal to NaN. Both have the same number of elements."""
    if a.dtype != b.dtype:
        return False
    if a.numel() == 1:  # a loss: two reads instead of six operations
        one, other = a.item(), b.item()
        return bool(one == other or (one != one and other != other))
    return bool(((a == b) | ((a != a) & (b != b))).all())


@dataclass
class Replayed:
    """What a replay gave."""

    tracer: OpTracer
    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    same: bool | None = None  # losses equal bit for bit to those of the step; None where there was none to compare
    raised: BaseException | None = None
    notes: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    results_last: list[Tensor] = field(default_factory=list)  # what the last calls gave
    changed: list[Outside] = field(default_factory=list)  # written in place after the step used them
    backward_ends: list[int] = field(default_factory=list)  # operations made when each backward ended
    drew: bool = False  # random numbers were drawn
    written: dict[str, Line] = field(default_factory=dict)  # what a buffer that was written descends from
    weights: dict[str, Line] = field(default_factory=dict)  # the same of parameters, at the end

    def micro_step_of(self, operation: int) -> int:
        """How many backward passes had ended when `operation` ran."""
        # What is done to the gradients after the last of them belongs to it.
        return min(sum(end < operation for end in self.backward_ends), max(0, len(self.backward_ends) - 1))
