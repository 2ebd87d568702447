"""Growth over the steps before the birth, read from the flight recorder's history."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: How many of the last steps are looked at.
_WINDOW = 10
#: Growth means at least this factor in each of the last two steps,
_EACH = 2.0
#: or this much in all without a step back, over three steps or more,
_TOTAL = 100.0
#: or this much in a single step.
_JUMP = 1e4


@dataclass(frozen=True, slots=True)
class Growth:
    """A quantity that grew: from, to, over how many steps, by which factor a step on average."""

    first: float
    last: float
    steps: int

    @property
    def factor(self) -> float:
        """Mean factor per step (geometric)."""
        exponent = (math.log(self.last) - math.log(self.first)) / self.steps
        return math.exp(min(exponent, 709.0))


def growth(series: Sequence[float]) -> Growth | None:
    """The growth at the end of `series` (oldest first), or None. The step that failed may be in it: it is left out."""
    values = _magnitudes(series)
    run = _rising_tail(values)
    if len(run) < 2:
        return None
    found = Growth(run[0], run[-1], len(run) - 1)
    total = run[-1] / run[0]
    each = len(run) >= 3 and all(b >= _EACH * a for a, b in _pairs(run[-3:]))
    if each or (len(run) >= 3 and total >= _TOTAL) or total >= _JUMP:
        return found
    return None


def linear_growth(series: Sequence[float]) -> Growth | None:
    """Growth by about the same amount each step: what a sum over all steps does. At least five steps."""
    run = _rising_tail(_magnitudes(series))
    if len(run) < 5 or run[-1] < 3 * run[0]:
        return None
    increments = [b - a for a, b in _pairs(run)]
    mean = sum(increments) / len(increments)
    if any(abs(i - mean) > 0.5 * mean for i in increments):
        return None
    return Growth(run[0], run[-1], len(run) - 1)


def jump(rates: Sequence[float]) -> tuple[float, float] | None:
    """The last tenfold rise of the learning rate from one step to the next: before, after."""
    values = [r for r in rates[-_WINDOW:] if math.isfinite(r)]
    for before, after in reversed(list(_pairs(values))):
        if before > 0 and after >= 10 * before:
            return before, after
    return None


def _magnitudes(series: Sequence[float]) -> list[float]:
    values = list(series)
    while values and not math.isfinite(values[-1]):
        values.pop()
    finite: list[float] = []
    for value in reversed(values[-_WINDOW:]):
        if not math.isfinite(value) or value == 0:
            break
        finite.append(abs(value))
    return finite[::-1]


def _rising_tail(values: list[float]) -> list[float]:
    start = len(values) - 1
    while start > 0 and values[start - 1] < values[start]:
        start -= 1
    return values[max(start, 0) :]


def _pairs(values: list[float]) -> Iterator[tuple[float, float]]:
    return ((values[i - 1], values[i]) for i in range(1, len(values)))
