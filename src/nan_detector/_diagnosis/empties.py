"""Averages and deviations of too little: no elements, no labels that count, a single element."""

from __future__ import annotations

from nan_detector._causes import cause
from nan_detector._diagnosis.facts import (
    LABEL_LOSSES,
    Rule,
    argument,
    made_nan,
    op_of,
    operands,
    scalar,
    user_written,
    whole_operand,
)
from nan_detector._records import Cause
from nan_detector._trace import Birth, Trace

_EMPTY_LOG_SUMS = ("logsumexp", "logcumsumexp")
_SPREADS = ("std", "var", "std_mean", "var_mean")


def reduction_of_empty(birth: Birth, trace: Trace) -> Cause | None:
    """A mean of no elements, or a loss over labels that are all ignored."""
    op = op_of(birth)
    if not user_written(birth) or not birth.inputs:
        return None
    first = birth.inputs[0].whole
    called = (birth.call or "").rpartition(".")[2]
    if called == "nanmean" and op == "div" and made_nan(birth):
        return cause(
            "reduction_of_empty",
            "Every value that nanmean was given is NaN, or every value of a row: nothing is left to average.",
            fix="x.nansum() / (~x.isnan()).sum().clamp_min(1), or skip the term when nothing is known",
        )
    if first.numel == 0 and op in _EMPTY_LOG_SUMS:
        return cause(
            "reduction_of_empty",
            f"{birth.call or op} got a tensor of shape {tuple(first.shape)}: log(0) is the logarithm of its sum.",
            fix="skip the term when nothing was selected",
        )
    if first.numel == 0:
        return cause(
            "reduction_of_empty",
            f"{birth.call or op} got a tensor of shape {tuple(first.shape)}: no elements.",
            fix="x.sum() / max(x.numel(), 1), or skip the term when nothing was selected",
        )
    if op in LABEL_LOSSES and made_nan(birth) and not any(s.bad_count for s in operands(birth)):
        labels = whole_operand(birth, 1)
        if labels is not None and labels.min is not None and labels.min == labels.max:
            said = f"All {labels.numel} labels are {labels.min:g}"
            said += f", the ignore_index {argument(birth, 'ignore_index', '4') or -100}." if labels.min < 0 else "."
        else:
            said = "The labels that count have a total weight of 0: all are ignored, or their class weights are 0."
        return cause(
            "reduction_of_empty",
            said,
            fix="F.cross_entropy(..., reduction='sum') / (labels != ignore_index).sum().clamp_min(1)",
        )
    return None


def std_of_one(birth: Birth, trace: Trace) -> Cause | None:
    """An unbiased standard deviation or variance over one element."""
    op = op_of(birth)
    if not user_written(birth, *_SPREADS) or not birth.inputs:
        return None
    stats, out = birth.inputs[0].whole, birth.output
    if out is None or not out.numel or stats.numel == 0 or any(s.bad_count for s in operands(birth)):
        return None
    elements = stats.numel // out.numel
    correction = _correction(birth)
    if elements > correction:
        return None
    return cause(
        "std_of_one",
        f"{op} runs over {elements} element{'s' if elements > 1 else ''} of a tensor of shape {tuple(stats.shape)}, "
        f"and divides by {elements} - {correction:g} = {elements - correction:g}.",
        fix=f"torch.{op}(x, dim, correction=0)",
    )


def _correction(birth: Birth) -> float:
    if argument(birth, "unbiased") == "False":
        return 0.0
    given = scalar(birth, "correction")
    return 1.0 if given is None else given


RULES: tuple[Rule, ...] = (reduction_of_empty, std_of_one)
