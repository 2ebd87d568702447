"""Infinities that met: 0 times infinity, infinity minus infinity."""

from __future__ import annotations

import math

from nan_detector._causes import cause
from nan_detector._diagnosis.facts import (
    MATRIX_PRODUCTS,
    Rule,
    by_operation,
    has_inf,
    is_derivative,
    made_nan,
    mentions,
    op_of,
    operands,
    scalar,
)
from nan_detector._diagnosis.numbers import share
from nan_detector._records import Cause, TensorStats
from nan_detector._trace import Birth, BirthKind, Trace

_SOFTMAXES = ("softmax", "log_softmax", "safe_softmax", "masked_softmax", "sparse_softmax")
_PRODUCTS = (*MATRIX_PRODUCTS, "mul", "div", "addcmul", "addcdiv", "convolution")
_SUMS = (
    *("add", "sub", "sum", "mean", "cumsum", "logsumexp", "logcumsumexp", "std", "var", "std_mean", "var_mean", "lerp"),
    *("native_layer_norm", "native_batch_norm", "native_group_norm", "norm", "cdist"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
)


def zero_times_inf(birth: Birth, trace: Trace) -> Cause | None:
    """A product of 0 and an infinity, or inf / inf."""
    op = op_of(birth)
    if op not in _PRODUCTS or not by_operation(birth) or not made_nan(birth):
        return None
    if op == "mul" and is_derivative(birth):
        return None  # a value of the forward that comes back: `unselected_branch`
    stats = operands(birth)
    met = birth.kind == BirthKind.INTENDED_MET.value
    named = scalar(birth, "other", "1", "self", "0")
    by_number = met and op == "mul" and named is not None and math.isinf(named)
    if by_number and named is not None:
        count = share(birth.guilty_count, birth.output.numel if birth.output is not None else 0, "products")
        sign = "inf" if named > 0 else "-inf"
        return cause(
            "zero_times_inf",
            f"{count} 0 · {sign}. A mask times {sign} is NaN wherever the mask is 0.",
            fix=f"scores.masked_fill(mask, {sign}), or torch.where(mask, {sign}, 0.0) for an additive mask",
        )
    if not any(has_inf(s) for s in stats) and not (met and not stats):
        return None
    if op == "div":
        if len(stats) > 1 and has_inf(stats[0]) and has_inf(stats[1]):
            return cause("zero_times_inf", "Numerator and denominator are both infinite: inf / inf = inf · 0.")
        return None
    zeros = any(s.zero_count for s in _factors(op, stats)) or 0 in [scalar(birth, "other", "1", "value")]
    if stats and not zeros and op not in ("addcmul",):
        return None
    infinite = next((s for s in stats if has_inf(s)), None)
    said = "One factor is infinite and the other 0"
    if infinite is not None:
        sign = "-inf" if infinite.neginf_count and not infinite.posinf_count else "inf"
        total = birth.output.numel if birth.output is not None else birth.guilty_count
        count = share(birth.guilty_count, total, "products") if birth.guilty_count else "some products are"
        said = f"{count} {sign} · 0"
    fix = None
    if mentions(birth, r"log_?p|logp|entropy|exp\(\)|prob|\.log\("):
        fix = (
            "torch.where(p > 0, p * logp, 0.0) on a finite logp: logp = torch.where(mask, logp, 0.0) first; or "
            "torch.special.entr(p)"
        )
    return cause("zero_times_inf", said + ".", fix=fix)


def _factors(op: str, stats: tuple[TensorStats, ...]) -> tuple[TensorStats, ...]:
    """Of the operands of a product, those that are multiplied: a bias of 0 makes nothing of an infinity."""
    if op in ("addmm", "baddbmm", "addbmm", "addmv", "addcmul"):
        return stats[1:]
    return stats[:2] if op in ("linear", "convolution") else stats


def inf_minus_inf(birth: Birth, trace: Trace) -> Cause | None:
    """Infinities that cancel in a sum, a difference, a mean or a norm layer."""
    op = op_of(birth)
    if not by_operation(birth) or is_derivative(birth) or not made_nan(birth):
        return None
    stats = operands(birth)
    if op in _SOFTMAXES:
        positive = next((s for s in stats if s.posinf_count), None)
        if positive is None:
            return None
        count = share(positive.posinf_count, positive.numel, "logits")
        return cause("inf_minus_inf", f"{count} +inf: the softmax subtracts the maximum, inf - inf.")
    summing = op in _SUMS
    in_product = op in _PRODUCTS and op not in ("mul", "div") and not any(s.zero_count for s in _factors(op, stats))
    if not summing and not in_product:
        return None
    counts = sum(s.posinf_count for s in stats), sum(s.neginf_count for s in stats)
    if not sum(counts):
        return None
    said = f"At the NaN results {op} met {counts[0]} values of +inf and {counts[1]} of -inf."
    fix = None
    if op == "sub" and not all(counts):
        sign = "inf" if counts[0] else "-inf"
        said = f"{share(birth.guilty_count, birth.output.numel if birth.output else 0, 'differences')} {sign} - {sign}."
        if counts[1] and mentions(birth, r"max|logsumexp|\bm\b|exp\("):
            fix = "torch.logsumexp, or take a maximum of -inf for 0 before subtracting it: m.masked_fill(m == -inf, 0)"
    elif in_product and not all(counts):
        said += " Weights of both signs make +inf and -inf of them, which meet in the sum."
        fix = "x.masked_fill(torch.isinf(x), 0.0) before the product, or a finite value where nothing was written"
    return cause("inf_minus_inf", said, fix=fix)


#: A result as undefined as one outside a domain, and dropped by masks as often.
RULES: tuple[Rule, ...] = (zero_times_inf, inf_minus_inf)
