"""The scale on which `hazards()` counts: where a dtype ends, and how far the values of a tensor reach.

Distances are in decades, so that they compare: how many powers of ten the operand has yet to go, as the operation's
own scale counts them. 0 is the edge itself; 0.3 is a factor of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

Tensor = torch.Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Limits:
    """The edges of one dtype."""

    name: str
    eps: float
    largest: float
    least: float  # the smallest number that is not 0
    digits: float  # decades that it resolves
    decades: float  # of its range


_limits: dict[torch.dtype, Limits] = {}


def limits_of(dtype: torch.dtype) -> Limits:
    """The edges of a floating dtype."""
    found = _limits.get(dtype)
    if found is None:
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        found = _limits[dtype] = Limits(
            name=str(dtype).removeprefix("torch."),
            eps=info.eps,
            largest=info.max,
            least=least,
            digits=-math.log10(info.eps),
            decades=math.log10(info.max) - math.log10(info.smallest_normal),
        )
    return found


def is_plain(t: Tensor) -> bool:
    """True for a tensor whose values can be asked for: dense, of one of the four floating dtypes, not empty."""
    return t.layout is torch.strided and t.numel() > 0 and t.dtype in _FLOATS


def extremes(t: Tensor) -> tuple[float, float]:
    """The least and the greatest value."""
    least, most = torch.aminmax(t)
    return float(least), float(most)


def least_positive(t: Tensor) -> float | None:
    """The least value above 0; None where there is none."""
    least, most = extremes(t)
    if least > 0 or not most > 0:
        return least if least > 0 else None
    positive = t[t > 0]
    return float(positive.min()) if positive.numel() else None
