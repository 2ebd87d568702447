"""How numbers and counts are written in evidence: one place, so that all sentences read alike."""

from __future__ import annotations

import math


def number(x: float) -> str:
    """`x` with three significant digits, in e notation outside 0.001 ... 9999: -10.0, 0.250, 1.20e+05."""
    if not math.isfinite(x):
        return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
    if x == 0:
        return "0"
    rounded = float(f"{x:.3g}")
    if not 1e-3 <= abs(rounded) < 1e4:
        return f"{x:.2e}"
    return f"{x:.0f}" if abs(rounded) >= 100 else f"{x:#.3g}"


def short(x: float) -> str:
    """`x` as a person would type it, three significant digits at most: 0.2, 3e-04, 1e+05."""
    return f"{x:.3g}" if math.isfinite(x) else number(x)


def whole(x: float) -> str:
    """`x` as a whole number where it is one of moderate size (65504), otherwise as `number` has it."""
    return str(int(x)) if math.isfinite(x) and x == int(x) and abs(x) < 1e6 else number(x)


def against(x: float, edge: float) -> str:
    """`x` so that its side of `edge` can be seen: near the edge by the distance, "1 + 1.19e-07"."""
    gap = x - edge
    if gap == 0 or not math.isfinite(gap):
        return whole(x)
    if edge != 0 and abs(gap) < 0.01 * abs(edge):
        return f"{whole(edge)} {'+' if gap > 0 else '-'} {number(abs(gap))}"
    return number(x)


def share(part: int, total: int, noun: str, verb: str = "is are") -> str:
    """The start of a sentence: "22 of 64 inputs are", "the input is" when there is only one in all."""
    one, many = verb.split()
    if total == 1:
        return f"the {_singular(noun)} {one}"
    return f"{part} of {total} {noun} {one if part == 1 else many}"


def _singular(noun: str) -> str:
    first, space, rest = noun.partition(" ")
    return f"{first.removesuffix('s')}{space}{rest}"
