"""Infinities that were put there on purpose, and what made NaN of them."""

from __future__ import annotations

import re

from nan_detector._causes import cause
from nan_detector._diagnosis.dtypes import limits, plain
from nan_detector._diagnosis.facts import (
    LABEL_LOSSES,
    MATRIX_PRODUCTS,
    Rule,
    argument,
    base_op,
    by_operation,
    is_derivative,
    made_inf,
    made_nan,
    mentions,
    op_of,
    operand,
    operands,
    out_dtype,
    scalar,
    user_written,
    whole_operand,
)
from nan_detector._diagnosis.numbers import number, share
from nan_detector._records import Cause, TensorStats
from nan_detector._trace import THROUGH_LOG_SOFTMAX, Birth, BirthKind, Trace

_SOFTMAXES = ("softmax", "log_softmax", "safe_softmax", "masked_softmax", "sparse_softmax")
_LOGSUMEXPS = ("logsumexp", "logaddexp", "logaddexp2", "logcumsumexp")
_PRODUCTS = (*MATRIX_PRODUCTS, "mul", "div", "addcmul", "addcdiv", "convolution")
_CTC = ("ctc_loss", "cudnn_ctc_loss", "use_cudnn_ctc_loss")


def softmax_fully_masked(birth: Birth, trace: Trace) -> Cause | None:
    """A softmax, or an attention that holds one, over rows of nothing but -inf."""
    if not by_operation(birth) or not made_nan(birth):
        return None
    made_by = birth.derivative_of if is_derivative(birth) else birth.op
    op = base_op(made_by)
    attention = "attention" in op
    if op not in _SOFTMAXES and not attention:
        return None
    masked = any(s.neginf_count for s in (*operands(birth), *birth.forward_inputs))
    met = birth.kind == BirthKind.INTENDED_MET.value
    if not masked and not met:
        return None
    # With +inf among the inputs it is inf - inf that makes the NaN: another rule.
    if not attention and not masked and any(s.posinf_count for s in operands(birth)):
        return None
    stats = next((s for s in operands(birth) if s.neginf_count), None)
    said = _rows(birth) or f"{birth.call or op} met rows that are -inf everywhere"
    if stats is not None and stats.numel == stats.neginf_count:
        said += f": all {stats.numel} logits at the NaN results are -inf"
    fix = None
    if attention or mentions(birth, r"attn|attention|padding|cross|MultiheadAttention"):
        fix = "unmask one key of such rows and zero their result: mask[mask.all(-1)] = False"
    return cause("softmax_fully_masked", said + ".", fix=fix)


def _rows(birth: Birth) -> str:
    """How many rows were bad, where the dimension of the softmax is known."""
    out, dim = birth.output, scalar(birth, "dim", "1")
    if out is None or dim is None or not out.shape or not -len(out.shape) <= int(dim) < len(out.shape):
        return ""
    length = out.shape[int(dim)]
    if length == 0 or out.nan_count % length:
        return ""
    return f"{share(out.nan_count // length, out.numel // length, 'rows')} (of length {length})"


def logsumexp_fully_masked(birth: Birth, trace: Trace) -> Cause | None:
    """The derivative of logsumexp, logaddexp or logcumsumexp where all inputs are -inf."""
    if birth.phase != "backward" or birth.derivative_of is None or base_op(birth.derivative_of) not in _LOGSUMEXPS:
        return None
    masked = sum(s.neginf_count for s in birth.forward_inputs)
    if birth.forward_inputs and not masked:
        return None
    total = sum(s.numel for s in birth.forward_inputs)
    said = f"{masked} of {total} inputs of {birth.derivative_of} are -inf, and in some rows all are." if masked else ""
    return cause("logsumexp_fully_masked", said)


def mask_value_overflow(birth: Birth, trace: Trace) -> Cause | None:
    """The lowest finite number plus something negative."""
    op = op_of(birth)
    if not user_written(birth, "add", "sub", "baddbmm", "addmm") or not made_inf(birth):
        return None
    if birth.output is not None and not birth.output.neginf_count:
        return None
    found = limits(out_dtype(birth))
    masks = [s for s in operands(birth) if _is_mask_value(s)]
    constants = [x for x in (scalar(birth, "other", "1"),) if x is not None and found and x <= -0.99 * found.max]
    if found is None or not (masks or constants):
        return None
    lowest = number(min([*constants, *(s.min for s in masks if s.min is not None)]))
    other = next((s for s in operands(birth) if s not in masks and s.min is not None), None)
    met = " was added twice"
    if other is not None and other.min is not None and other.max is not None:
        met = (
            f" met values up to {number(other.max)} to subtract"
            if op == "sub"
            else f" was added to values down to {number(other.min)}"
        )
    return cause(
        "mask_value_overflow", f"The mask value {lowest}, the lowest number of {plain(out_dtype(birth))},{met}."
    )


def _is_mask_value(stats: TensorStats) -> bool:
    """True when the guilty elements hold (nearly) the lowest finite number of their own dtype."""
    found = limits(stats.dtype)
    return found is not None and stats.min is not None and stats.min <= -0.99 * found.max


def masked_logit_in_loss(birth: Birth, trace: Trace) -> Cause | None:
    """An infinity that a mask put there was counted by the loss."""
    op = op_of(birth)
    reached = birth.kind == BirthKind.INTENDED_REACHED.value and _weighs_classes(birth, op)
    nll = (
        op in LABEL_LOSSES and by_operation(birth) and any(s.neginf_count for s in operands(birth)) and made_inf(birth)
    )
    if not reached and not nll:
        return None
    smoothing = argument(birth, "label_smoothing")
    said = [f"An infinity of a mask reached {birth.call or op}."]
    masked = next((s for s in operands(birth) if s.neginf_count), None)
    if masked is not None:
        values = f"values that {birth.call or op} gets"
        said = [f"{share(masked.neginf_count, masked.numel, values)} -inf."]
    fix = None
    if (smoothing and smoothing != "0.0") or mentions(birth, "label_smoothing"):
        said.append("Label smoothing puts weight on every class, the masked ones too.")
        fix = (
            "mask with a large finite value (-1e4) where label_smoothing is on, or smooth over the unmasked classes "
            "only"
        )
    elif op in LABEL_LOSSES:
        said.append("A target names a class that is masked.")
        fix = "check the targets: logits.gather(1, y[:, None]).isfinite().all()"
    elif reached and THROUGH_LOG_SOFTMAX in birth.note:
        said = [
            f"The log-probability of a masked class is -inf, and {birth.call or op} counts it with a weight above 0."
        ]
        fix = "leave masked classes out: torch.where(lp == -torch.inf, 0.0, weight * lp), or mask with -1e4"
    return cause("masked_logit_in_loss", *said, fix=fix)


def _weighs_classes(birth: Birth, op: str) -> bool:
    """True for losses over classes, in which a mask of -inf is at home; elsewhere an infinity is just a number."""
    named = f"{op} {birth.call or ''}"
    return THROUGH_LOG_SOFTMAX in birth.note or any(
        word in named for word in ("entropy", "nll", "kl_div", "softmax", "logsumexp", "margin")
    )


def infinity_written_down(birth: Birth, trace: Trace) -> Cause | None:
    """An infinity that the program wrote itself reached the loss, and no mask is in sight."""
    if birth.kind != BirthKind.INTENDED_REACHED.value or _weighs_classes(birth, op_of(birth)):
        return None
    return cause(
        "literal_nan",
        f"An infinity that the code writes itself, as a number, reached {birth.call or op_of(birth)}.",
        fix="see where inf is written into what this line reads: a fill, an assignment, a mask that stayed",
    )


def ctc_no_alignment(birth: Birth, trace: Trace) -> Cause | None:
    """A CTC loss that is infinite because no alignment exists."""
    made_by = birth.derivative_of if is_derivative(birth) else birth.op
    if base_op(made_by).removesuffix("_backward") not in _CTC or not by_operation(birth):
        return None
    if any(s.bad_count for s in operands(birth)) and birth.phase != "backward":
        return None
    frames = _longest(birth, 2, "input_lengths")
    symbols = _longest(birth, 3, "target_lengths")
    shape = whole_operand(birth, 0)
    said = []
    if frames is not None and symbols is not None:
        said.append(f"Inputs have at most {frames} frames and targets up to {symbols} symbols.")
    elif shape is not None and shape.shape:
        said.append(f"The log-probabilities have {shape.shape[0]} frames.")
    if birth.output is not None and birth.output.posinf_count:
        said.append(f"{share(birth.output.posinf_count, birth.output.numel, 'samples', 'has have')} no alignment.")
    return cause("ctc_no_alignment", *said)


def _longest(birth: Birth, index: int, name: str) -> int | None:
    """The longest of the lengths handed to CTC, as a tensor or a list."""
    listed = argument(birth, name, str(index))
    if listed is not None:
        lengths = [int(x) for x in re.findall(r"\d+", listed)]
        return max(lengths) if lengths else None
    stats = operand(birth, index)
    return int(stats.max) if stats is not None and "int" in stats.dtype and stats.max is not None else None


#: In order of specificity: before everything that looks at the operation alone.
RULES: tuple[Rule, ...] = (
    masked_logit_in_loss,
    infinity_written_down,
    ctc_no_alignment,
    logsumexp_fully_masked,
    softmax_fully_masked,
    mask_value_overflow,
)
