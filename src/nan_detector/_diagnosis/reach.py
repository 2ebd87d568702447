"""Could an operation have overflowed? A bound on the largest magnitude that inputs of these sizes can give."""

from __future__ import annotations

import math
from collections.abc import Callable

from nan_detector._diagnosis.dtypes import exp_limit, limits
from nan_detector._diagnosis.facts import (
    MATRIX_PRODUCTS,
    argument,
    by_operation,
    inputs_finite,
    largest,
    op_of,
    operand,
    operands,
    out_dtype,
    scalar,
    whole_operand,
)
from nan_detector._diagnosis.numbers import number, whole
from nan_detector._records import TensorStats
from nan_detector._trace import Birth

#: Exponentials: how an argument compares with that of exp.
EXPONENTIALS: dict[str, Callable[[float], float]] = {
    "exp": lambda x: x,
    "expm1": lambda x: x,
    "exp2": lambda x: x * math.log(2.0),
    "sinh": lambda x: abs(x) - math.log(2.0),
    "cosh": lambda x: abs(x) - math.log(2.0),
    "i0": lambda x: _bessel(x),
    "i1": lambda x: _bessel(x),
}
#: Those that grow on both sides of 0.
EVEN = ("sinh", "cosh", "i0", "i1")
SUMS = ("add", "sub", "sum", "mean", "cumsum", "lerp", "nansum", "index_add", "scatter_add", "neg", "cat", "stack")
CASTS = ("to_copy", "copy", "clone", "float", "bfloat16", "autocast_to_reduced_precision")
#: Many moderate factors: the size of one input says nothing. Or what the size does depends on more than the size.
_UNBOUNDED = (
    *("prod", "cumprod", "det", "linalg_matrix_power", "ldexp", "linalg_multi_dot", "linalg_matrix_exp"),
    *("lgamma", "digamma", "polygamma", "tan", "lstm", "gru", "rnn_tanh", "linalg_inv_ex", "linalg_solve_ex"),
)
#: Sums with one term each.
_ELEMENTWISE_SUMS = ("add", "sub", "lerp", "neg", "cat", "stack")
#: Room for the rounding of partial sums.
_SLACK = 1.01


def overflowed(birth: Birth) -> bool:
    """True when the result is too large for its dtype and finite inputs are large enough to explain it."""
    found = limits(out_dtype(birth))
    if not by_operation(birth) or found is None or not inputs_finite(birth):
        return False
    if birth.output is not None and not birth.output.bad_count:
        return False
    top = found.overflow_at if math.isfinite(found.overflow_at) else found.max
    bound = reachable(birth)
    return bound is None or bound * _SLACK >= top


def reachable(birth: Birth) -> float | None:
    """The largest magnitude that this operation can reach with inputs of these sizes; None where that is not known."""
    op = op_of(birth)
    sizes = [largest(s) for s in operands(birth) if "int" not in s.dtype and "bool" not in s.dtype]
    known = [size for size in sizes if size is not None]
    if not known or len(known) < len(sizes) or op in _UNBOUNDED:
        return None
    if op in EXPONENTIALS:
        return math.inf if any(exp_overflows(op, size, out_dtype(birth)) for size in known) else 0.0
    if op == "pow":
        return _power_reach(birth)
    if op in ("div", "reciprocal"):
        return _quotient_reach(birth)
    if op in CASTS:
        return known[0]
    extra = [abs(x) for x in (scalar(birth, "other", "1"), scalar(birth, "alpha", "value")) if x is not None]
    if op in SUMS:
        return _summands(birth) * sum([*known, *extra]) * max([1.0, *extra])
    if op == "mul":
        return math.prod([*known, *extra]) if len(known) + len(extra) > 1 else None
    if op in MATRIX_PRODUCTS and len(known) >= 2:
        bias = known[0] if len(known) > 2 else 0.0
        return depth(birth) * known[-2] * known[-1] + bias
    # Anything else: two inputs multiplied, summed over all elements, and a factor for a difference squared.
    elements = max((s.numel for s in operands(birth)), default=1)
    top = max([*known, *extra])
    return 4.0 * top * max(top, 1.0) * max(elements, 1)


def exp_overflows(op: str, argument: float, dtype: str) -> bool:
    """True when an exponential of this argument is infinite in `dtype`, after rounding."""
    return EXPONENTIALS[op](argument) >= exp_limit(dtype)


def argument_limit(op: str, dtype: str) -> float:
    """The argument from which on the exponential `op` is infinite in `dtype`."""
    limit = argument = exp_limit(dtype)
    for _ in range(64):  # each has a slope near that of exp, so that the gap shrinks by two thirds or more each time
        argument += limit - EXPONENTIALS[op](argument)
    return argument


def _bessel(x: float) -> float:
    """Logarithm of the modified Bessel functions at large arguments: exp(x) / sqrt(2 pi x)."""
    return abs(x) - 0.5 * math.log(2.0 * math.pi * max(abs(x), 1.0))


def power(birth: Birth) -> tuple[TensorStats | None, TensorStats | None, float | TensorStats | None]:
    """Base (at the guilty elements, whole) and exponent of a power; the exponent a number or a tensor's statistics."""
    if birth.op.strip("_").endswith("square"):
        return operand(birth, 0), whole_operand(birth, 0), 2.0
    if argument(birth, "self", "0") is not None:  # number ** tensor
        return None, None, operand(birth, len(birth.inputs) - 1) if birth.inputs else None
    exponent = scalar(birth, "exponent", "1")
    return operand(birth, 0), whole_operand(birth, 0), operand(birth, 1) if exponent is None else exponent


def depth(birth: Birth) -> int:
    """How many products are summed in one element of a matrix product."""
    left = birth.inputs[-2].whole
    return max(1, left.shape[-1] if left.shape else 1)


def reach_in_words(birth: Birth) -> str:
    """The sizes that make the overflow plausible: the first half of a sentence."""
    op = op_of(birth)
    sizes = [number(s) for s in (largest(s) for s in operands(birth)) if s is not None]
    if not sizes:
        return f"{birth.call or op} made {birth.guilty_count or 'some'} results that are too large"
    if op in CASTS:
        top = largest(operand(birth, 0))
        return f"Values up to {whole(top) if top is not None else sizes[0]} were cast"
    if op == "pow" and argument(birth, "self", "0") is None:
        exponent = power(birth)[2]
        raised = f"to {exponent:g}" if isinstance(exponent, float) else f"to powers up to {sizes[-1]}"
        return f"Magnitudes up to {sizes[0]} were raised {raised}"
    if op in MATRIX_PRODUCTS and len(sizes) >= 2:
        return f"Magnitudes up to {sizes[-2]} and {sizes[-1]} were multiplied and summed over {depth(birth)} products"
    if op in ("div", "reciprocal"):
        over = operand(birth, 1 if op == "div" else 0)
        if over is not None and over.min_nonzero is not None:
            return f"Something was divided by as little as {number(over.min_nonzero)}"
    return f"The inputs of {op} reach {' and '.join(sizes[:3])} in magnitude"


def _power_reach(birth: Birth) -> float | None:
    base, _, exponent = power(birth)
    if base is None or not isinstance(exponent, float):
        return None
    size = largest(base) if exponent >= 0 else base.min_nonzero
    if size is None or size <= 0:
        return None
    try:
        return float(size**exponent)
    except OverflowError:
        return math.inf


def _quotient_reach(birth: Birth) -> float | None:
    is_div = op_of(birth) == "div"
    over = operand(birth, 1 if is_div else 0)
    least = over.min_nonzero if over is not None else scalar(birth, "other", "1")
    top = largest(operand(birth, 0)) if is_div else 1.0
    if top is None or not least:
        return None
    try:
        return top / abs(least)
    except OverflowError:
        return math.inf


def _summands(birth: Birth) -> int:
    """How many elements a sum runs over, at most."""
    return 1 if op_of(birth) in _ELEMENTWISE_SUMS else max(1, birth.inputs[0].whole.numel)
