"""Denominators that are zero, and why: nothing there, underflow, an epsilon that rounds away, an empty selection."""

from __future__ import annotations

import re

from nan_detector._causes import cause
from nan_detector._diagnosis import empties
from nan_detector._diagnosis.dtypes import is_half, limits, rounds_to_zero, safe_eps
from nan_detector._diagnosis.facts import (
    Rule,
    argument,
    in_optimizer_step,
    made_nan,
    mentions,
    op_of,
    operand,
    scalar,
    source_text,
    underflowed,
    user_written,
    whole_operand,
)
from nan_detector._diagnosis.numbers import number, share
from nan_detector._records import Cause, TensorStats
from nan_detector._trace import Birth, Trace

#: Which operand is divided by.
_DENOMINATOR = {"div": 1, "reciprocal": 0, "rsqrt": 0, "addcdiv": 2, "fmod": 1, "remainder": 1}
#: Library functions that guard a division with a default epsilon, and that default (torch's documentation).
_DEFAULT_EPS = {"normalize": 1e-12, "cosine_similarity": 1e-8, "cosine_embedding_loss": 1e-12, "CosineSimilarity": 1e-8}
#: An epsilon in the source: behind a plus, in clamp/max, or as eps=.
_EPS_IN_SOURCE = re.compile(
    r"(?:\+|min\s*=|eps\w*\s*=|clamp\w*\s*\(|max\w*\s*\([^()]*,)\s*(\d+(?:\.\d*)?[eE]-\d+|0?\.0+\d+)"
)
_NORM_LAYERS = ("native_layer_norm", "native_group_norm", "native_batch_norm", "native_batch_norm_legit")


def zero_denominator(birth: Birth) -> bool:
    """True when the operation divides by something that is exactly 0 at a guilty element."""
    op = op_of(birth)
    if op not in _DENOMINATOR:
        return False
    stats = operand(birth, _DENOMINATOR[op])
    if stats is not None:
        return stats.zero_count > 0
    divisor = scalar(birth, "other", "1")
    if divisor is not None:
        return divisor == 0
    return _counts_divide(birth)


def _counts_divide(birth: Birth) -> bool:
    """True when a float is divided by whole numbers, which statistics leave out: nothing but a 0 there makes it bad."""
    numerator = operand(birth, 0)
    return op_of(birth) == "div" and len(birth.inputs) == 1 and numerator is not None and not numerator.bad_count


def eps_underflow(birth: Birth, trace: Trace) -> Cause | None:
    """An epsilon stands there and is 0 in the dtype of the denominator."""
    op = op_of(birth)
    if not user_written(birth) or not (zero_denominator(birth) or _log_at_zero(birth)):
        return None
    stats = operand(birth, _DENOMINATOR.get(op, 0))
    if stats is None:
        return None
    if is_half(stats.dtype) and in_optimizer_step(birth):
        return cause(
            "eps_underflow",
            f"{_zeros(birth, op)}; the optimizer adds its eps there, and 1e-08 is 0 in float16 (least positive number "
            "5.96e-08).",
            fix="eps=1e-4 or so in the optimizer, or float32 master weights (torch.amp instead of model.half())",
        )
    eps = _guard(birth)
    if eps is None or not rounds_to_zero(eps, stats.dtype):
        return None
    floor = limits(stats.dtype)
    least = number(floor.smallest) if floor is not None else "?"
    return cause(
        "eps_underflow",
        f"{_zeros(birth, op)}; the guard {eps:g} rounds to 0 in {stats.dtype.rpartition('.')[2]} (least positive "
        f"number {least}).",
        fix=_eps_fix(birth),
    )


def _log_at_zero(birth: Birth) -> bool:
    stats = operand(birth, 0)
    return op_of(birth) in ("log", "log2", "log10") and stats is not None and stats.zero_count > 0


def _guard(birth: Birth) -> float | None:
    """The epsilon that the call, its defaults or the user's line put under this division."""
    given = argument(birth, "eps")
    if given is not None:
        return scalar(birth, "eps")
    in_source = [float(x) for x in _EPS_IN_SOURCE.findall(source_text(birth))]
    if in_source:
        return min(in_source)
    words = f"{birth.call or ''} {birth.module_type or ''}"
    return next((eps for name, eps in _DEFAULT_EPS.items() if re.search(rf"\b{name}\b", words)), None)


def _eps_fix(birth: Birth) -> str:
    if mentions(birth, r"normalize"):
        return "F.normalize(x, dim=1, eps=1e-6), or F.normalize(x.float(), dim=1)"
    if mentions(birth, r"cosine_similarity"):
        return "F.cosine_similarity(a, b, eps=1e-6), or on a.float(), b.float()"
    return "an eps of 1e-6 or more, or this step in float32: x.float()"


def underflow_to_zero(birth: Birth, trace: Trace) -> Cause | None:
    """The denominator is 0, and its neighbours, or what it divides, are near the end of the dtype."""
    op = op_of(birth)
    if not user_written(birth, "div", "reciprocal", "rsqrt") or not zero_denominator(birth):
        return None
    index = _DENOMINATOR[op]
    if said := underflowed(birth):
        return cause("underflow_to_zero", f"{_zeros(birth, op)}: {said}.")
    below = whole_operand(birth, index)
    above = whole_operand(birth, 0) if index == 1 else None
    for stats, what in ((below, "denominator"), (above, "numerator")):
        floor = limits(stats.dtype) if stats is not None else None
        if stats is None or floor is None or stats.min_nonzero is None:
            continue
        # Three quarters of the way down in exponents: nobody's data is there, only what is still falling. float16 is so
        # narrow that ordinary data reaches that far; there only the range in which digits are lost counts.
        edge = floor.smallest_normal if is_half(stats.dtype) else floor.smallest_normal**0.75
        if stats.min_nonzero < edge:
            return cause(
                "underflow_to_zero",
                f"{_zeros(birth, op)}, and the least non-zero {what} is {number(stats.min_nonzero)}: "
                f"{stats.dtype.rpartition('.')[2]} ends at {number(floor.smallest)}.",
            )
    return None


def division_by_zero(birth: Birth, trace: Trace) -> Cause | None:
    """A denominator that is exactly 0, and the norm of a zero vector inside weight norm."""
    op = op_of(birth)
    if not user_written(birth):
        return None
    if op.startswith("weight_norm"):
        stats = operand(birth, 0)
        if stats is None or not stats.zero_count or not made_nan(birth):
            return None
        return cause(
            "division_by_zero",
            f"weight norm divides by the norm of each row, and a row of zeros has none ({stats.zero_count} of "
            f"{stats.numel} weights are 0).",
            fix="initialise the weight away from 0 before applying weight norm",
        )
    if not zero_denominator(birth):
        return None
    above = operand(birth, 0) if _DENOMINATOR[op] == 1 else None
    also = ""
    if above is not None and above.numel and above.zero_count == above.numel:
        also = "The numerators there are 0 as well: 0/0 = NaN."
    elif op == "rsqrt":
        also = "rsqrt(0) is 1/0."
    return cause("division_by_zero", f"{_zeros(birth, op)}.", also, fix=_division_fix(birth, op))


def spread_of_zero(birth: Birth, trace: Trace) -> Cause | None:
    """A norm layer without an epsilon, over values that are all the same: their spread is 0."""
    op, eps = op_of(birth), scalar(birth, "eps")
    if op not in _NORM_LAYERS or eps is None or not user_written(birth) or not birth.inputs:
        return None
    given = birth.inputs[0].whole
    # In a half the kernel works in float32.
    works_in = "torch.float32" if is_half(given.dtype) else given.dtype
    if given.bad_count or not made_nan(birth) or not rounds_to_zero(eps, works_in):
        return None
    guilty = birth.output.nan_count if birth.output is not None else birth.guilty_count
    total = birth.output.numel if birth.output is not None else given.numel
    return cause(
        "division_by_zero",
        f"{share(guilty, total, 'results')} NaN: there all values that are normalised together are equal, so their "
        f"spread is 0, and eps={eps:g} adds nothing to it.",
        fix=f"eps=1e-5 in {birth.module_type or birth.call or op}",
    )


def _zeros(birth: Birth, op: str) -> str:
    """The start of a sentence, "3 of 32 denominators are exactly 0", or whatever stands under the bar."""
    whole = whole_operand(birth, _DENOMINATOR.get(op, 0))
    noun = "inputs" if op == "rsqrt" else "denominators"
    if whole is None and argument(birth, "other", "1") is None:
        return "a whole-number divisor (a count) is 0"
    if whole is None:
        return "the divisor is the number 0"
    return (
        f"{share(whole.zero_count, whole.numel, noun)} exactly 0" if whole.zero_count else f"some {noun} are exactly 0"
    )


def _division_fix(birth: Birth, op: str) -> str:
    stats = operand(birth, _DENOMINATOR[op])
    eps = safe_eps(stats.dtype if stats is not None else "")
    if in_optimizer_step(birth):
        if stats is None:
            return "betas below 1 from the first step on: at 1 the bias correction, 1 - beta ** step, is 0"
        return "an eps above 0 in the optimizer (its default, 1e-8 or so)"
    if op == "rsqrt":
        return f"torch.rsqrt(x + {eps})"
    if birth.module_type == "_SpectralNorm":
        return "initialise the weight away from 0 before applying spectral norm"
    if mentions(birth, r"\b(OneHot|Relaxed\w*)?Categorical\("):
        return "mask the logits: Categorical(logits=z.masked_fill(~allowed, -1e9)), which leaves no row without a sum"
    if _is_count(birth, stats):
        return "x / n.clamp_min(1): a sum over nothing then stays 0"
    if op == "reciprocal":
        return f"1 / x.clamp_min({eps}), or torch.where(x > 0, x, 1.0) before the division"
    if stats is None:
        return "keep the number above 0: max(x, 1e-2) where a schedule or a setting gives it"
    if mentions(birth, r"norms?\b"):
        return f"F.normalize(x, dim=-1), or x / x.norm(dim=-1, keepdim=True).clamp_min({eps})"
    if mentions(birth, r"std|sigma|var"):
        return f"(x - mean) / (std + {eps}), or leave constant columns out"
    return f"x / n.clamp_min({eps})"


def _is_count(birth: Birth, stats: TensorStats | None) -> bool:
    """True when the denominators are numbers of things: whole numbers, by their dtype or by their words and values."""
    whole = whole_operand(birth, _DENOMINATOR[op_of(birth)])
    if stats is None or whole is None:
        return _counts_divide(birth) and argument(birth, "other", "1") is None
    least = whole.min_nonzero
    words = birth.call if "/" in (birth.call or "") else source_text(birth)
    counted = re.search(r"/.*(\.sum\(|count|len|mask|num|valid|\bn\b)", words or "", re.IGNORECASE) is not None
    return "int" in stats.dtype or (counted and (least is None or (least >= 1 and least == int(least))))


#: In order of specificity. What an epsilon should have caught comes before the plain zero.
RULES: tuple[Rule, ...] = (*(*empties.RULES, eps_underflow, underflow_to_zero, spread_of_zero, division_by_zero),)
