"""Results that the dtype cannot hold: exponentials, float16, and everything else that grew too large."""

from __future__ import annotations

import math
import re

from nan_detector._causes import cause
from nan_detector._diagnosis.dtypes import exp_limit, is_half, limits, plain
from nan_detector._diagnosis.facts import (
    MATRIX_PRODUCTS,
    Rule,
    in_backward,
    is_derivative,
    made_inf,
    mentions,
    op_of,
    operand,
    out_dtype,
    scalar,
    source_text,
    user_written,
    whole_operand,
)
from nan_detector._diagnosis.numbers import number, share
from nan_detector._diagnosis.reach import (
    CASTS,
    EVEN,
    EXPONENTIALS,
    SUMS,
    argument_limit,
    exp_overflows,
    overflowed,
    power,
    reach_in_words,
)
from nan_detector._records import Cause
from nan_detector._trace import Birth, Trace


def exp_overflow(birth: Birth, trace: Trace) -> Cause | None:
    """An exponential whose argument is beyond the logarithm of the dtype's largest number."""
    op = op_of(birth)
    if not user_written(birth) or not made_inf(birth):
        return None
    if op == "pow":
        return _number_to_the(birth)
    if op == "soft_margin_loss":
        return _soft_margin(birth)
    stats, everything = operand(birth, 0), whole_operand(birth, 0)
    if op not in EXPONENTIALS or stats is None or everything is None or stats.max is None or stats.min is None:
        return None
    dtype = out_dtype(birth)
    top = max(stats.max, -stats.min) if op in EVEN else stats.max
    if not exp_overflows(op, top, dtype):
        return None
    limit = argument_limit(op, dtype)
    bad = birth.guilty_count or (birth.output.bad_count if birth.output is not None else 0)
    total = birth.output.numel if birth.output is not None else everything.numel
    count = share(bad, total, "arguments") if bad else "arguments are"
    greatest = f"{top:.6g}" if abs(top - limit) < 0.05 else number(top)
    said = f"{count} above {limit:.4g}, where {op} leaves {plain(dtype)} (greatest {greatest})."
    return cause("exp_overflow", said, fix=_exp_fix(birth, limit))


def _soft_margin(birth: Birth) -> Cause | None:
    """The loss is computed as log(1 + exp(-y * x)), as it is written, with the large number in it."""
    x, y = whole_operand(birth, 0), whole_operand(birth, 1)
    limit = exp_limit(out_dtype(birth))
    if x is None or y is None or x.min is None or x.max is None or y.min is None or y.max is None:
        return None
    margin = max(-a * b for a in (x.min, x.max) for b in (y.min, y.max))
    if margin < limit:
        return None
    said = (
        f"-y * x reaches up to {number(margin)}, and exp of more than {limit:.4g} leaves {plain(out_dtype(birth))}: "
        "soft_margin_loss is log(1 + exp(-y * x)), computed as it is written."
    )
    return cause("exp_overflow", said, fix="F.softplus(-y * x).mean(), which is the same without the large number")


def _number_to_the(birth: Birth) -> Cause | None:
    """A fixed number to a tensor's power: an exponential under another name."""
    base, exponent = scalar(birth, "self", "0"), power(birth)[2]
    if base is None or base <= 1 or exponent is None or isinstance(exponent, float) or exponent.max is None:
        return None
    limit = exp_limit(out_dtype(birth)) / math.log(base)
    if exponent.max < limit:
        return None
    said = f"{base:g} to a power above {limit:.4g} leaves {plain(out_dtype(birth))} (greatest {number(exponent.max)})."
    return cause("exp_overflow", said, fix=f"{base:g} ** x.clamp(max={math.floor(limit) - 1})")


def _exp_fix(birth: Birth, limit: float) -> str:
    text = source_text(birth).replace(" ", "")
    if op_of(birth) in ("i0", "i1"):
        name = op_of(birth)
        return f"torch.log(torch.special.{name}e(x)) + x.abs() for torch.log(torch.special.{name}(x))"
    if "log(1+" in text or "log1p(" in text or "softplus" in text:
        return "F.softplus(x), which is log(1 + exp(x)) without the large number"
    # Beside something that it is multiplied with, exp(-x) is a weight.
    if "/(1+" in text or re.search(r"exp\(-[^()]*\)(?!\*)", text):
        return "torch.sigmoid(x), which is 1 / (1 + exp(-x)) without the large number"
    if mentions(birth, r"/.*\.sum\(|softmax"):
        return "torch.softmax(x, -1), or subtract the maximum first: (x - x.amax(-1, keepdim=True)).exp()"
    if mentions(birth, r"log_?scale|logit_scale|temp|tau"):
        return "log_scale.clamp(max=math.log(100)).exp(), as CLIP does"
    if mentions(birth, r"log_?var|log_?std|log_?sigma"):
        return "logvar.clamp(-20, 20).exp()" if limit > 20 else "logvar.clamp(-10, 10).exp()"
    if mentions(birth, r"ratio|old|log_?p"):
        return "(new - old).clamp(-10, 10).exp(): clamp the log-ratio, not the ratio"
    return f"x.clamp(max={math.floor(limit) - 1}).{op_of(birth)}()"


def half_overflow(birth: Birth, trace: Trace) -> Cause | None:
    """A float16 result beyond 65504."""
    if in_backward(birth) or not is_half(out_dtype(birth)) or not overflowed(birth):
        return None
    return cause("half_overflow", f"{reach_in_words(birth)}.", fix=_half_fix(birth))


def _half_fix(birth: Birth) -> str:
    op = op_of(birth)
    if op in ("mm", "bmm", "matmul", "baddbmm") or mentions(birth, r"@|matmul|einsum"):
        return "scale before the product: (q * d**-0.5) @ k.transpose(-2, -1), or bfloat16"
    if op == "pow" or (op not in CASTS and mentions(birth, r"pow\(2\)|\*\*\s*2")):
        reduced = ".mean(-1, keepdim=True)" if mentions(birth, r"\bmean\(") else ""
        return f"square in float32: x.float().pow(2){reduced}"
    stats = operand(birth, 0)
    source = limits(stats.dtype) if stats is not None else None
    if op in CASTS and stats is not None and source is not None and stats.min == -source.max:
        return "take the mask value from the dtype that is used: torch.finfo(scores.dtype).min"
    if op in CASTS:
        return "keep this tensor in float32 (or bfloat16): it does not fit into float16"
    if op in ("sum", "mean", "cumsum"):
        return f"x.{op}(..., dtype=torch.float32)"
    return "run this operation in float32 (x.float()), or the model in bfloat16"


def overflow(birth: Birth, trace: Trace) -> Cause | None:
    """A result beyond the range of any other dtype."""
    dtype = out_dtype(birth)
    found = limits(dtype)
    if found is None or is_half(dtype) or not overflowed(birth):
        return None
    said = f"{reach_in_words(birth)}; {plain(dtype)} ends at {number(found.max)}."
    return cause("overflow", said, fix=_overflow_fix(birth))


def _overflow_fix(birth: Birth) -> str | None:
    op = op_of(birth)
    if op in ("lgamma", "multigammaln"):
        return "bound the argument: torch.lgamma(x.clamp(max=1e30)), or cap the parameter behind it"
    if op in ("prod", "cumprod"):
        return f"stay in log space: x.log().{'sum' if op == 'prod' else 'cumsum'}(-1)"
    if op == "det":
        return "torch.linalg.slogdet instead of det"
    if op in ("div", "reciprocal"):
        return "x / n.clamp_min(1e-12): the divisor is next to 0"
    return None


def half_gradient_overflow(birth: Birth, trace: Trace) -> Cause | None:
    """A float16 gradient beyond 65504."""
    if not in_backward(birth) or not is_half(out_dtype(birth)) or not overflowed(birth):
        return None
    return cause("half_gradient_overflow", f"{reach_in_words(birth)}.")


def gradient_overflow(birth: Birth, trace: Trace) -> Cause | None:
    """A gradient beyond the range of float32, bfloat16 or float64: it grew on its way through the layers."""
    dtype = out_dtype(birth)
    found = limits(dtype)
    if not is_derivative(birth) or found is None or is_half(dtype) or not overflowed(birth):
        return None
    if op_of(birth) not in (*MATRIX_PRODUCTS, *SUMS, "mul", "convolution_backward"):
        return None
    return cause("gradient_explosion", f"{reach_in_words(birth)}; {plain(dtype)} ends at {number(found.max)}.")


#: Before the domains.
EXP: tuple[Rule, ...] = (exp_overflow,)
#: When no domain explains the value.
RULES: tuple[Rule, ...] = (half_gradient_overflow, gradient_overflow, half_overflow, overflow)
