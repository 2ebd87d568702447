"""Growth at the end of a series: where it began and how fast it is, or that there is none.

Method: single spikes are removed by a running median of three with Tukey's rule at the ends (Tukey, *Exploratory Data
Analysis*, 1977, chapter 7), then a broken stick `y = a + c·t + b·max(0, t - s)` is fitted to the logarithms by least
squares for every start `s` and the best one kept (two-phase regression: Hinkley, *Biometrika* 56, 1969), or a plain
line, unless the break pays by BIC (Schwarz, *Annals of Statistics* 6, 1978). Its slope after the break is the growth
rate, so a loss that first fell as it should does not hide that it rose later. The rise must stand clear of the series'
own noise.

Thresholds are ours: `_before` says what they were set by.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_ROWS = 5
LEAST_NOISE = 0.1  # relative; five points can lie on a line by chance
RISE_IN_NOISE = 8.0
_LEAST_TREND = 3  # rises, that is, four points
_LEAST_RISE = math.log(4)
_LEAST_SLOW_RISE = math.log(10)  # of growth that doubles in more than `_SLOW` rows
_SLOW = 25
_SLOPE_IN_ERRORS = 7.0


def fit_growth(logs: Sequence[float]) -> tuple[int, float] | None:
    """Start and rate (per row) of the exponential growth that `logs` ends in; None where there is none.

    Args:
        logs: Natural logarithms of a column's magnitudes, oldest first, all finite.
    """
    n = len(logs)
    if n < LEAST_ROWS or max(logs[-3:]) - min(logs) < _LEAST_RISE:
        return None
    start, intercept, slope, bend = _broken_stick(_median_of_three(logs))
    rises = n - 1 - start
    rate = slope + bend
    rise = rate * rises
    fitted = [intercept + slope * t + bend * max(0, t - start) for t in range(n)]
    errors = [y - f for y, f in zip(logs, fitted, strict=True)]
    noise = max(LEAST_NOISE, math.sqrt(sum(e * e for e in errors) / max(1, n - 3)))
    slope_error = noise * math.sqrt(12.0 / (rises * (rises + 1) * (rises + 2)))
    least_rise = _LEAST_RISE if rate * _SLOW > math.log(2) else _LEAST_SLOW_RISE
    if rate <= 0 or rise < max(least_rise, RISE_IN_NOISE * noise) or rate < _SLOPE_IN_ERRORS * slope_error:
        return None
    # Slow waves of ordinary noise also end in a rise now and then, but within the range that they had before.
    earlier = logs[max(0, start - max(20, 3 * rises)) : start]
    if earlier and min(logs[-2:]) < max(earlier) + math.log(2):
        return None
    return start, rate


def _median_of_three(y: Sequence[float]) -> list[float]:
    middle = [sorted(y[i - 1 : i + 2])[1] for i in range(1, len(y) - 1)]
    first = statistics.median((y[0], middle[0], 3 * middle[0] - 2 * middle[1]))
    last = statistics.median((y[-1], middle[-1], 3 * middle[-1] - 2 * middle[-2]))
    return [first, *middle, last]


def _broken_stick(y: Sequence[float]) -> tuple[int, float, float, float]:
    """Start, intercept, slope and added slope of the best `a + c·t + b·max(0, t - s)`; a plain line where s is 0."""
    n = len(y)
    mean_t, mean_y = (n - 1) / 2, math.fsum(y) / n
    s_tt = n * (n * n - 1) / 12
    s_ty = math.fsum((t - mean_t) * v for t, v in enumerate(y))
    best = (s_ty * s_ty / s_tt, 0, 0.0)  # explained sum of squares, start, added slope
    tail, h_y = 0.0, 0.0  # sums over t > s of y and of (t - s)·y
    for s in range(n - 2, 0, -1):
        tail += y[s + 1]
        h_y += tail
        m = n - 1 - s
        if m < _LEAST_TREND:
            continue
        h = m * (m + 1) / 2
        h_h = m * (m + 1) * (2 * m + 1) / 6
        s_hh = h_h - h * h / n
        s_th = h_h + s * h - mean_t * h
        s_hy = h_y - h * mean_y
        det = s_tt * s_hh - s_th * s_th
        bend = (s_tt * s_hy - s_th * s_ty) / det
        slope = (s_ty - bend * s_th) / s_tt
        explained = slope * s_ty + bend * s_hy
        if explained > best[0]:
            best = (explained, s, bend)
    total = math.fsum((v - mean_y) ** 2 for v in y)
    line_error, stick_error = (max(total - part, 1e-9) for part in (s_ty * s_ty / s_tt, best[0]))
    if n * math.log(line_error / stick_error) < 3 * math.log(n):  # BIC: the break and its place are two more parameters
        best = (0.0, 0, 0.0)
    _, s, bend = best
    m = n - 1 - s
    h = m * (m + 1) / 2
    s_th = m * (m + 1) * (2 * m + 1) / 6 + s * h - mean_t * h
    slope = (s_ty - bend * s_th) / s_tt
    return s, mean_y - slope * mean_t - bend * h / n, slope, bend
