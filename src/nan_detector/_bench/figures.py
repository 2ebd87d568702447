"""Numbers of a benchmark: spreads, ratios, fitted slopes. Pure arithmetic, without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond them the normal one is near enough.
_T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T95_MANY = 2.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A median between its quartiles.

    Attributes:
        median: The median.
        low: First quartile.
        high: Third quartile.
        count: Values behind it.
    """

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles.

    Raises:
        ValueError: There is no value.
    """
    if not values:
        raise ValueError("values=() has no median; measure at least one round.")
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def ratios(values: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """Each value over that of the same round: a machine that slows down slows both. Rounds without either are left out.

    Args:
        values: One per round; None where the variant sat out.
        base: The bare run's.
    """
    return [v / b for v, b in zip(values, base, strict=True) if v is not None and b]


def differences(values: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """Each value less that of the same round."""
    return [v - b for v, b in zip(values, base, strict=True) if v is not None and b is not None]


def excess(values: Sequence[float | None], floor: Sequence[float | None], base: Sequence[float | None]) -> list[float]:
    """By how much each value is above the floor of the same round, in units of its base."""
    rounds = zip(values, floor, base, strict=True)
    return [(v - f) / b for v, f, b in rounds if v is not None and f is not None and b]


@dataclass(frozen=True, slots=True)
class Slope:
    """A straight line through points, by least squares.

    Attributes:
        slope: Growth of y for one of x.
        low: Lower end of its 95 % confidence band.
        high: Upper end.
        intercept: y at x = 0.
        count: Points.
    """

    slope: float
    low: float
    high: float
    intercept: float
    count: int

    @property
    def is_flat(self) -> bool:
        """True where 0 lies within the band: no growth was seen."""
        return self.low <= 0.0 <= self.high


def fitted(xs: Sequence[float], ys: Sequence[float]) -> Slope:
    """The line through the points, with the band of its slope.

    Raises:
        ValueError: There are fewer than three points, or all have the same x.
    """
    if len(xs) < 3 or len(set(xs)) < 2:
        raise ValueError(f"{len(xs)} points at {len(set(xs))} places have no slope; give three at two places or more.")
    line = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(xs)
    free = len(xs) - 2
    residual = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    error = math.sqrt(residual / free / sum((x - mean) ** 2 for x in xs))
    reach = (_T95[free - 1] if free <= len(_T95) else _T95_MANY) * error
    return Slope(line.slope, line.slope - reach, line.slope + reach, line.intercept, len(xs))
