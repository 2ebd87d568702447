"""What the code itself guarantees of a value: its range, and the rounding error that a subtraction left in it.

A `log(p)` is near an edge where p is small, unless the program has clamped p or added something to it: then it is
guarded, however small the numbers are. The range is followed from operation to operation, only as far as is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Range = tuple[float, float]

ALL: Range = (-math.inf, math.inf)
_NON_NEGATIVE: Range = (0.0, math.inf)

#: Whatever goes in, this is where the result lies.
_FIXED: dict[str, Range] = {
    "sigmoid": (0.0, 1.0),
    "softmax": (0.0, 1.0),
    "safe_softmax": (0.0, 1.0),
    "hardsigmoid": (0.0, 1.0),
    "tanh": (-1.0, 1.0),
    "erf": (-1.0, 1.0),
    "sin": (-1.0, 1.0),
    "cos": (-1.0, 1.0),
    "abs": _NON_NEGATIVE,
    "square": _NON_NEGATIVE,
    "softplus": _NON_NEGATIVE,
    "linalg_vector_norm": _NON_NEGATIVE,
    "norm": _NON_NEGATIVE,
    "var": _NON_NEGATIVE,
    "std": _NON_NEGATIVE,
    "cdist_forward": _NON_NEGATIVE,
    "rand": (0.0, 1.0),
    "bernoulli": (0.0, 1.0),
    "log_softmax": (-math.inf, 0.0),
    "log_sigmoid_forward": (-math.inf, 0.0),
}
#: The result holds values of the first argument, or means of them.
_SAME = frozenset(
    "to_copy clone copy mean amax amin max min index index_select gather select slice sort topk take cummax cummin "
    "expand_copy repeat flip roll detach_copy view_copy contiguous median max_pool2d_with_indices avg_pool2d embedding "
    "adaptive_avg_pool2d masked_select".split()
)
_SUMS = frozenset("sum cumsum nansum".split())
#: Operations by which a rounding error passes on unchanged.
_KEEPS_ERROR = frozenset("to_copy clone copy add sub rsub neg mean sum clamp clamp_min abs index select relu".split())


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of one tensor.

    Attributes:
        range: Least and greatest value that it can have.
        error: Absolute rounding error of its smallest magnitudes, where a subtraction of nearly equal numbers left one
            that matters; 0.0 where none is known.
    """

    range: Range = ALL
    error: float = 0.0


UNKNOWN = Fact()


def range_of(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], known: Callable[[Any], Range]) -> Range:
    """Where the result of an operation lies.

    Args:
        op: Its plain name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        known: The range of an argument.
    """
    fixed = _FIXED.get(op)
    if fixed is not None:
        return fixed
    if not args:
        return ALL
    rule = _RULES.get(op)
    if rule is not None:
        try:
            low, high = rule(args, kwargs, known)
        except (TypeError, ValueError, IndexError, OverflowError):  # an overload of another shape: nothing is known
            return ALL
        return (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)
    return known(args[0]) if op in _SAME else ALL


def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as a tensor of `dtype` holds it."""
    if not math.isfinite(value):
        return value
    return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())


def error_of(
    op: str, args: tuple[Any, ...], before: list[Fact], values: list[Tensor], out: Tensor, eps: float
) -> float:
    """The rounding error of `out`'s smallest magnitudes, where it is not small against them.

    Args:
        op: Plain name of the operation.
        args: Its arguments.
        before: What is known of its floating arguments.
        values: Their values.
        out: Its result, floating, on the CPU or a device.
        eps: Resolution of the result's dtype.
    """
    carried = max((f.error for f in before), default=0.0)
    if op == "mul" and len(values) == 1:
        factor = next((abs(a) for a in args if isinstance(a, (int, float))), 1.0)
        return carried * factor
    found = carried if op in _KEEPS_ERROR else 0.0
    if op not in ("sub", "add", "rsub"):
        return found
    # How large the operands were where the result is smallest: so much of it is rounding.
    flat = out.reshape(-1)
    at = int(flat.abs().argmin())
    smallest = abs(float(flat[at]))
    largest = max((abs(a) for a in args[:2] if isinstance(a, (int, float)) and not isinstance(a, bool)), default=0.0)
    for t in values:
        try:
            largest = max(largest, abs(float(t.expand(out.shape).reshape(-1)[at])))
        except RuntimeError:  # written with out=, or not element by element
            return found
    return max(found, eps * largest) if smallest < 0.25 * largest else found


# -- rules by operation: (args, kwargs, known) -> range ---------------------------------------------------------------


def _scale(kwargs: dict[str, Any]) -> float:
    return float(kwargs.get("alpha", 1))


def _add(args: Any, kwargs: Any, known: Any) -> Range:
    (a, b), (c, d) = known(args[0]), known(args[1])
    k = _scale(kwargs)
    low, high = sorted((k * c if c or k else 0.0, k * d if d or k else 0.0))
    return a + low, b + high


def _sub(args: Any, kwargs: Any, known: Any) -> Range:
    return _add(args, {"alpha": -_scale(kwargs)}, known)


def _rsub(args: Any, kwargs: Any, known: Any) -> Range:
    return _sub((args[1], args[0]), kwargs, known)


def _mul(args: Any, kwargs: Any, known: Any) -> Range:
    if args[0] is args[1]:
        return _NON_NEGATIVE
    (a, b), (c, d) = known(args[0]), known(args[1])
    products = [0.0 if 0.0 in (x, y) else x * y for x in (a, b) for y in (c, d)]
    return min(products), max(products)


def _div(args: Any, kwargs: Any, known: Any) -> Range:
    (a, b), (c, d) = known(args[0]), known(args[1])
    if c > 0:
        quotients = [x / y if math.isfinite(y) else 0.0 for x in (a, b) for y in (c, d)]
        return min(quotients), max(quotients)
    return (0.0 if a >= 0 and c >= 0 else -math.inf), math.inf


def _neg(args: Any, kwargs: Any, known: Any) -> Range:
    a, b = known(args[0])
    return -b, -a


def _pow(args: Any, kwargs: Any, known: Any) -> Range:
    a, b = known(args[0])
    n = args[1]
    if isinstance(n, (int, float)) and n > 0:
        if a >= 0:
            return a**n, b**n
        if n % 2 == 0:
            return _NON_NEGATIVE
    return (0.0 if a >= 0 else -math.inf), math.inf


def _exp(args: Any, kwargs: Any, known: Any) -> Range:
    a, b = known(args[0])
    return _exp_of(a), _exp_of(b)


def _exp_of(x: float) -> float:
    return 0.0 if x == -math.inf else math.exp(x) if x < 700.0 else math.inf


def _sqrt(args: Any, kwargs: Any, known: Any) -> Range:
    a, b = known(args[0])
    return math.sqrt(max(a, 0.0)), math.sqrt(max(b, 0.0))


def _relu(args: Any, kwargs: Any, known: Any) -> Range:
    a, b = known(args[0])
    return max(a, 0.0), max(b, 0.0)


def _clamp(args: Any, kwargs: Any, known: Any) -> Range:
    a, b = known(args[0])
    low = args[1] if len(args) > 1 else kwargs.get("min", kwargs.get("min_val"))
    high = args[2] if len(args) > 2 else kwargs.get("max", kwargs.get("max_val"))
    lows, highs = known(low), known(high)
    if low is not None:
        a, b = max(a, lows[0]), max(b, lows[1])
    if high is not None:
        a, b = min(a, highs[0]), min(b, highs[1])
    return a, b


def _clamp_max(args: Any, kwargs: Any, known: Any) -> Range:
    return _clamp((args[0], None, args[1]), {}, known)


def _maximum(args: Any, kwargs: Any, known: Any) -> Range:
    (a, b), (c, d) = known(args[0]), known(args[1])
    return max(a, c), max(b, d)


def _minimum(args: Any, kwargs: Any, known: Any) -> Range:
    (a, b), (c, d) = known(args[0]), known(args[1])
    return min(a, c), min(b, d)


def _union(args: Any, kwargs: Any, known: Any) -> Range:
    ranges = [known(t) for t in (args[0] if isinstance(args[0], (list, tuple)) else args[1:3])]
    return min(r[0] for r in ranges), max(r[1] for r in ranges)


def _sum(args: Any, kwargs: Any, known: Any) -> Range:
    a, b = known(args[0])
    return (0.0 if a >= 0 else -math.inf), (0.0 if b <= 0 else math.inf)


def _filled(args: Any, kwargs: Any, known: Any) -> Range:
    (a, b), (c, d) = known(args[0]), known(args[2])
    return min(a, c), max(b, d)


_RULES: dict[str, Callable[[Any, Any, Callable[[Any], Range]], Range]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _mul,
    "div": _div,
    "neg": _neg,
    "pow": _pow,
    "exp": _exp,
    "sqrt": _sqrt,
    "relu": _relu,
    "clamp": _clamp,
    "hardtanh": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "maximum": _maximum,
    "minimum": _minimum,
    "where": _union,
    "cat": _union,
    "stack": _union,
    "masked_fill": _filled,
    **dict.fromkeys(_SUMS, _sum),
}
