"""Layers whose values approach the end of their dtype's range, and parameters that get no gradient."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Container, Mapping, Sequence
from heapq import nsmallest
from typing import NamedTuple

from nan_detector._before import GRAD_NORM_OF
from nan_detector._trend import fit_growth

#: Share of the range below which nobody looks: a hundredfold growth away from its end.
RANGE_SHARE = 0.01
#: Steps that the fit looks at: growth over many more would have been seen before the values came this close.
ROWS = 32
#: Steps ahead: a forecast over more than the fit has looked at, and a little, is a guess.
HORIZON = 50
#: Growth over the last `SPAN` steps without which no fit is tried. What grows 4-fold in `ROWS` steps (`fit_growth`
#: asks for that) grows 1.4-fold in 8; a layer that sits high for good must not cost a fit a step.
SPAN, LEAST_GROWTH = 8, 1.3
#: Fits tried in a step: where a network explodes its layers do so together, and one answer is enough.
MOST_FITS = 3
#: Steps without any gradient. Sampling leaves a row of an embedding out for a few hundred steps, but never the whole
#: of a parameter; a ReLU network that is dead for one epoch of a small data set stays so.
DEAD_AFTER = 200

_NAMES = {65504.0: "float16", 448.0: "float8_e4m3fn", 57344.0: "float8_e5m2"}


class Forecast(NamedTuple):
    """A layer that will overflow.

    Attributes:
        layer: Its name.
        value: Its largest magnitude now.
        limit: Largest finite value of its dtype.
        rate: Growth per step of the logarithm.
        steps: Steps until it overflows, if it goes on like that.
    """

    layer: str
    value: float
    limit: float
    rate: float
    steps: float


class Headroom:
    """The largest magnitudes of layers over the last steps."""

    __slots__ = ("_least", "_limits", "_rows", "_watched")

    def __init__(self) -> None:
        self._rows: deque[Mapping[str, float]] = deque(maxlen=ROWS)
        self._limits: Mapping[str, float] = {}
        self._watched: dict[str, float] = {}
        self._least = math.inf  # of what is watched

    def feed(self, abs_max: Mapping[str, float], limits: Mapping[str, float]) -> Forecast | None:
        """The layer that will overflow first; None where none is about to.

        Args:
            abs_max: Largest magnitude by layer. Kept, not copied, for `ROWS` steps: give a new mapping each time.
            limits: Largest finite value of each layer's dtype; layers without one are passed over. What is derived
                from it is kept as long as the same mapping, with as many entries, is given.
        """
        rows = self._rows
        rows.append(abs_max)
        if limits is not self._limits or len(limits) != len(self._watched):
            self._limits, self._watched = limits, {n: RANGE_SHARE * v for n, v in limits.items()}
            self._least = min(self._watched.values(), default=math.inf)
        if not abs_max or max(abs_max.values()) <= self._least:  # as nearly always
            return None
        watched, inf = self._watched, math.inf
        high = [n for n, v in abs_max.items() if watched.get(n, inf) < v < inf]
        if not high or len(rows) <= SPAN:
            return None
        before = rows[-1 - SPAN]
        growing = [n for n in high if abs_max[n] >= LEAST_GROWTH * before.get(n, inf) > 0.0]
        if len(growing) > MOST_FITS:
            growing = nsmallest(MOST_FITS, growing, lambda n: _crude_steps(abs_max[n], before[n], limits[n]))
        found = [f for n in growing if (f := self._forecast(n, limits[n])) is not None]
        return min(found, key=lambda f: f.steps, default=None)

    def _forecast(self, layer: str, limit: float) -> Forecast | None:
        logs: list[float] = []
        for row in reversed(self._rows):
            value = row.get(layer, 0.0)
            if not 0.0 < value < math.inf:
                break
            logs.append(math.log(value))
        growth = fit_growth(logs[::-1])
        if growth is None:
            return None
        steps = max(0.0, (math.log(limit) - logs[0]) / growth[1])
        value = self._rows[-1][layer]
        return Forecast(layer, value, limit, growth[1], steps) if steps <= HORIZON else None


def _crude_steps(value: float, before: float, limit: float) -> float:
    return math.log(limit / value) / math.log(value / before)


def dtype_named(limit: float) -> str:
    """The name of the dtype whose largest finite value is `limit`, for a person; "its dtype" where it is not known."""
    if limit in _NAMES:
        return _NAMES[limit]
    for name, exponent in (("bfloat16", 3.389e38), ("float32", 3.402e38), ("float64", 1.797e308)):
        if math.isclose(limit, exponent, rel_tol=1e-3):
            return name
    return "its dtype"


def newly_dead(zero_streaks: Mapping[str, int], known: Container[str]) -> list[str]:
    """Parameters whose gradient has been 0 for `DEAD_AFTER` steps, without those already known."""
    return [name for name, n in zero_streaks.items() if n >= DEAD_AFTER and name not in known]


def zero_streaks(columns: Mapping[str, Sequence[float]]) -> dict[str, int]:
    """How many steps in a row, up to the last one, each parameter's gradient norm has been exactly 0.

    Nothing has to be counted every step: asked once in `DEAD_AFTER` steps, this finds all there is to find.

    Args:
        columns: The flight recorder's columns, oldest row first; those of gradient norms are looked at.

    Returns:
        Parameters with a streak of at least 1. A float32 norm is also 0 where every element is below about 1e-23.
    """
    streaks = {}
    for column, values in columns.items():
        if not column.startswith(GRAD_NORM_OF) or not len(values) or values[-1] != 0.0:
            continue
        streak = 0
        for value in reversed(values):
            if value != 0.0:
                break
            streak += 1
        streaks[column[len(GRAD_NORM_OF) :]] = streak
    return streaks
