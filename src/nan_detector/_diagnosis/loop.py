"""The training loop's own faults: learning rate, clipping, loss scale, optimizer state, growth over steps."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from nan_detector._causes import cause
from nan_detector._diagnosis.dtypes import is_half, plain
from nan_detector._diagnosis.facts import (
    MATRIX_PRODUCTS,
    Rule,
    by_operation,
    has_inf,
    in_optimizer_step,
    made_nan,
    mentions,
    on_gradients,
    op_of,
    operand,
    operands,
    out_dtype,
    source_text,
    user_written,
)
from nan_detector._diagnosis.growth import Growth, growth, jump, linear_growth
from nan_detector._diagnosis.numbers import number, short
from nan_detector._diagnosis.reach import overflowed
from nan_detector._records import Cause
from nan_detector._trace import Birth, BirthKind, Trace

#: The tracer's note when gradients were there before the first backward of every step.
NOT_ZEROED = "gradients_accumulated"
#: Keys of the state of torch's optimizers.
_STATE_KEYS = re.compile(
    r"exp_avg|exp_avg_sq|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta|max_exp_avg|prev_step_size|mu_product|"
    r"\bsum\b|\bax\b|\beta\b|optimizer_state|optim.*state|d_k|row_var|col_var|variance"
)
_SECOND_MOMENTS = re.compile(r"_sq\b|square_avg|\bsum\b|acc_delta|variance|row_var|col_var|second")
_RATES = ("lr", "learning_rate", "lr_schedule", "lr_scheduler")
_SCALES = ("loss_scale", "grad_scale", "scale", "scaler", "inv_scale")
_LOSS_SCALE = re.compile(r"loss|grad|scaler|\binv|(?<![\w.])1(\.0*)?\s*/", re.IGNORECASE)
_CLIPS = ("clip_grad_norm_", "clip_grads_with_norm_")
_CLIP = r"clip_grad|clip_coef|grad.*norm|total_norm|clip"
#: Operations that are innocent when they overflow: they only pass on what had grown.
_CARRIERS = (
    *MATRIX_PRODUCTS,
    *("pow", "mul", "add", "sub", "sum", "mean", "cumsum", "lerp", "addcmul", "addcdiv", "norm", "to_copy"),
    *("mse_loss", "smooth_l1_loss", "huber_loss", "mse_loss_backward", "threshold_backward"),
    *("convolution", "convolution_backward", "native_layer_norm", "native_batch_norm", "native_group_norm"),
)


def learning_rate_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """The learning rate itself is NaN or inf."""
    constant = birth.kind == BirthKind.CONSTANT.value and _named(birth, _RATES)
    last = trace.learning_rates[-1] if trace.learning_rates else 0.0
    in_step = birth.phase == "optimizer" and not math.isfinite(last)
    if not constant and not in_step:
        return None
    if math.isfinite(last):
        last = _value(birth)
    before = [r for r in trace.learning_rates if math.isfinite(r)][-3:]
    said = "The learning rate is not finite" if math.isfinite(last) else f"The learning rate is {short(last)}"
    if "complex" in birth.note:
        said = "The learning rate is complex: in Python a negative number to a fractional power is"
    said += f"; the steps before had {', '.join(short(r) for r in before)}." if before else "."
    hint = None
    if (before and before[-1] == 0) or (len(before) > 1 and before[-1] < before[0] and math.isnan(last)):
        hint = "the schedule ran past its end: lr = base * max(0.0, 1 - it / total) ** power"
    elif not before:
        hint = "a warm-up of no steps divides by 0: min(1.0, step / max(1, warmup_steps))"
    return cause("learning_rate_non_finite", said, fix=hint)


def hyperparameter_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """Another option of the optimizer, or a loss scale that grew to inf."""
    if birth.kind != BirthKind.CONSTANT.value or _named(birth, _RATES):
        return None
    option = _named(
        birth, ("beta", "betas", "beta1", "beta2", "eps", "weight_decay", "momentum", "dampening", "alpha", "rho")
    )
    scale = _named(birth, _SCALES) and _says_non_finite(birth)
    if not option and not scale:
        return None
    value = "complex" if "complex" in birth.note else short(_value(birth))
    return cause("hyperparameter_non_finite", f"{birth.tensor_name or birth.op} is {value}.")


def clip_norm_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """Clipping to a norm that is NaN."""
    if birth.note != "the number nan" or (birth.call or "").rpartition(".")[2] not in _CLIPS:
        return None
    said = "max_norm is nan, and clipping multiplies every gradient by max_norm / norm."
    found = cause("hyperparameter_non_finite", said, fix="a max_norm that is a finite number from the first step on")
    return replace(
        found,
        title="the norm to clip to is not a finite number",
        explanation="The gradients were finite; clipping to NaN makes NaN of each of them.",
    )


def loss_scale_zero(birth: Birth, trace: Trace) -> Cause | None:
    """The loss scale is 0, and something divides by it."""
    if birth.kind == BirthKind.CONSTANT.value:
        if not _named(birth, _SCALES) or _says_non_finite(birth):
            return None
        return cause("loss_scale_zero", "The loss scale is 0: unscaling divides by it.")
    if op_of(birth) == "amp_foreach_non_finite_check_and_unscale":
        inverse = next((s for s in operands(birth)[-1:] if has_inf(s)), None)
        return cause("loss_scale_zero", "The inverse of the loss scale is inf.") if inverse is not None else None
    in_loop = on_gradients(birth, trace) or birth.phase == "loss"
    if not user_written(birth, "div", "reciprocal") or not in_loop:
        return None
    below = operand(birth, 1 if op_of(birth) == "div" else 0)
    if below is None or below.numel != 1 or not below.zero_count:
        return None
    # Of what is divided by, not of what the quotient is called.
    call = birth.call or ""
    words = call.partition("/")[2] if "/" in call else source_text(birth)
    if "scale" not in f"{words} {birth.tensor_name}".lower():
        return None
    # Many things are called a scale: that of the loss divides a loss, gradients, or 1.
    if on_gradients(birth, trace) is False and not _LOSS_SCALE.search(call or source_text(birth)):
        return None
    dtype = birth.inputs[-1].whole.dtype if birth.inputs else ""
    return cause(
        "loss_scale_zero",
        f"The loss scale is exactly 0 ({plain(dtype)}), and unscaling divides by it.",
        fix="scale = (scale / 2).clamp_min(1.0), kept in float32; or torch.amp.GradScaler",
    )


def clip_spreads_nan(birth: Birth, trace: Trace) -> Cause | None:
    """Clipping met a gradient that was already bad."""
    if not _is_clip(birth) or not any(s.bad_count for s in operands(birth)):
        return None
    bad = sum(1 for s in operands(birth) if s.bad_count)
    total = len(birth.inputs)
    which = f" ({birth.tensor_name})" if birth.tensor_name else ""
    if total <= 1:
        return cause("clip_spreads_nan", f"A gradient{which} was non-finite before clipping.")
    were = "was" if bad == 1 else "were"
    return cause(
        "clip_spreads_nan", f"{bad} of {total} gradients{which} {were} non-finite before clipping; now all are."
    )


def clip_norm_overflow(birth: Birth, trace: Trace) -> Cause | None:
    """The gradients are finite, their norm is not."""
    if any(s.bad_count for s in operands(birth)) or not by_operation(birth):
        return None
    if birth.note == "the number inf" and (birth.call or "").rpartition(".")[2] in _CLIPS:
        # With a finite norm the quotient is inf, which clipping takes for 1; a bad gradient would have been the birth.
        said = "Every gradient is finite, and both max_norm and the norm over them are inf: inf / inf = NaN."
        return cause("clip_norm_overflow", said)
    outside = on_gradients(birth, trace)
    by_hand = outside and op_of(birth) in ("norm", "pow", "mul", "sum", "dot") and mentions(birth, _CLIP)
    by_norm = outside and op_of(birth) == "norm" and not in_optimizer_step(birth)
    if not _is_clip(birth) and not by_hand and not by_norm:
        return None
    sizes = [max(abs(s.min), abs(s.max)) for s in operands(birth) if s.min is not None and s.max is not None]
    greatest = f" (greatest element {number(max(sizes))})" if sizes else ""
    return cause(
        "clip_norm_overflow",
        f"Every gradient is finite{greatest}, and the norm over them overflows "
        f"{plain(out_dtype(birth)) or 'its dtype'}.",
    )


def _is_clip(birth: Birth) -> bool:
    return op_of(birth) in ("clip_grad_norm", "clip_grads_with_norm") and by_operation(birth)


def optimizer_state_overflow(birth: Birth, trace: Trace) -> Cause | None:
    """A second moment beyond its dtype: seen as it is made, or found in the state."""
    op = op_of(birth)
    if by_operation(birth):
        squares = op in ("addcmul", "pow", "mul", "lerp", "mean", "norm")
        # One of the user's own is named by a line within its step, which need not say so.
        stepping = in_optimizer_step(birth) or (birth.phase == "optimizer" and (birth.call or "").endswith(".step"))
        if not squares or not stepping or not overflowed(birth):
            return None
        sizes = [max(abs(s.min), abs(s.max)) for s in operands(birth)[-1:] if s.min is not None and s.max is not None]
        if sizes and sizes[0] <= 1:  # no power or square of that is too large: a pole is
            return None
        greatest = f" of up to {number(sizes[0])}" if sizes else ""
        return cause(
            "optimizer_state_overflow", f"The optimizer squares gradients{greatest}, beyond {plain(out_dtype(birth))}."
        )
    if not _is_state(birth) or not _SECOND_MOMENTS.search(birth.tensor_name or ""):
        return None
    stats = birth.output or (birth.inputs[0].whole if birth.inputs else None)
    if stats is None or stats.nan_count or not stats.posinf_count:
        return None
    return cause(
        "optimizer_state_overflow",
        f"{stats.posinf_count} of {stats.numel} values of {birth.tensor_name} are inf, none is NaN.",
        "What is divided by inf does not move any more: those weights have stopped learning.",
        fix=None if is_half(stats.dtype) else "clip the gradients before the step: clip_grad_norm_(params, 1.0)",
    )


def optimizer_state_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """A moment that was bad before the step."""
    if by_operation(birth) or birth.kind == BirthKind.CONSTANT.value or not _is_state(birth):
        return None
    stats = birth.output or (birth.inputs[0].whole if birth.inputs else None)
    counted = f"{stats.bad_count} of {stats.numel} values of " if stats is not None and stats.bad_count else ""
    return cause(
        "optimizer_state_non_finite",
        f"{counted}{birth.tensor_name or 'a moment'} {'are' if counted else 'is'} non-finite before the step.",
    )


def _is_state(birth: Birth) -> bool:
    if op_of(birth) == "optimizer_state" or "optimizer_state" in birth.note:
        return True
    return birth.phase in ("optimizer", "state") and _STATE_KEYS.search(birth.tensor_name or "") is not None


def gradients_accumulated(birth: Birth, trace: Trace) -> Cause | None:
    """Gradients that nobody zeroed: the tracer saw it, or their norm grows by the same amount each step."""
    if NOT_ZEROED in birth.note:
        return cause(
            "gradients_accumulated",
            "Gradients of the step before were still there when the backward began.",
            _norms(trace),
        )
    found = linear_growth(trace.grad_norms)
    if found is None or growth(trace.grad_norms) is not None or not _carried(birth):
        return None
    return cause(
        "gradients_accumulated",
        f"The gradient norm grew by about the same amount in each of {found.steps} steps: {_from_to(found)}.",
    )


def learning_rate_too_high(birth: Birth, trace: Trace) -> Cause | None:
    """Something overflowed after growing by a factor per step, or after the learning rate jumped."""
    if not _carried(birth):
        return None
    found = growth(trace.losses)
    risen = jump(trace.learning_rates)
    if trace.learning_rates and trace.learning_rates[-1] < 0:
        return _uphill(birth, trace, found)
    if found is None and risen is None:
        return None
    said = [_norms(trace)]
    if found is not None:
        said.insert(
            0, f"The loss grew from {_from_to(found)} in {found.steps} steps, {number(found.factor)}-fold each."
        )
    if risen is not None:
        said.append(f"The learning rate had jumped from {short(risen[0])} to {short(risen[1])}.")
    elif trace.learning_rates:
        said.append(f"The learning rate is {short(trace.learning_rates[-1])}.")
    said.append(f"{birth.call or birth.op} overflowed first; it only passed on what had grown.")
    rate = trace.learning_rates[-1] if trace.learning_rates else None
    if risen is not None:
        fix = f"the learning rate of before the jump, {short(risen[0])}, or a warm-up to {short(risen[1])}"
        return cause("learning_rate_too_high", *said, fix=f"{fix} with clip_grad_norm_(params, 1.0)")
    if rate and math.isfinite(rate):
        fix = f"a learning rate of {short(rate / 10)} or less"
    else:
        fix = "a tenth of the learning rate"
    more = "scale the inputs to unit variance, warm up, or clip_grad_norm_(params, 1.0)"
    return cause("learning_rate_too_high", *said, fix=f"{fix}; {more}")


def _uphill(birth: Birth, trace: Trace, found: Growth | None) -> Cause:
    """A rate below 0: no smaller one of its kind would help, and the steps overshoot nothing."""
    rates = trace.learning_rates
    steps = next((i for i, rate in enumerate(reversed(rates)) if not rate < 0), len(rates))
    since = f", and below 0 since {steps - 1} steps before" if 1 < steps < len(rates) else ""
    said = [f"The learning rate is {short(rates[-1])}{since}."]
    if found is not None:
        said.append(f"The loss grew from {_from_to(found)} in {found.steps} steps, {number(found.factor)}-fold each.")
    said += [_norms(trace), f"{birth.call or birth.op} overflowed first; it only passed on what had grown."]
    return replace(
        cause("learning_rate_too_high", *said, fix="end the schedule at 0: max(0.0, 1 - it / total), or stop there"),
        title="the learning rate is below 0: each step goes uphill",
        explanation="Each step then makes the loss larger, so everything grows until the largest operation overflows.",
    )


def gradient_explosion(birth: Birth, trace: Trace) -> Cause | None:
    """The gradient norm grew by a factor per step until something overflowed."""
    found = growth(trace.grad_norms)
    if found is None or not _carried(birth):
        return None
    said = f"The gradient norm grew from {_from_to(found)} in {found.steps} steps, {number(found.factor)}-fold each."
    return cause(
        "gradient_explosion", said, fix="torch.nn.utils.clip_grad_norm_(params, 1.0), and a lower learning rate"
    )


def _carried(birth: Birth) -> bool:
    """True when an operation overflowed that only passes on what had grown."""
    ran_away = ("exp", "expm1", "exp2")
    if birth.phase not in ("forward", "loss", "backward") or op_of(birth) not in (*_CARRIERS, *ran_away):
        return False
    return overflowed(birth)


def _norms(trace: Trace) -> str:
    found = growth(trace.grad_norms)
    return f"The gradient norm grew from {_from_to(found)} meanwhile." if found is not None else ""


def _from_to(found: Growth) -> str:
    return f"{number(found.first)} to {number(found.last)}"


def _named(birth: Birth, names: tuple[str, ...]) -> bool:
    words = re.split(r"[^a-z0-9_]+", f"{birth.op} {birth.tensor_name or ''}".lower())
    return any(word.strip("_") in names for word in words)


def _value(birth: Birth) -> float:
    """The number that a constant holds, as far as its arguments or note tell; NaN where they do not."""
    for text in (*birth.args, birth.note):
        found = re.search(r"(?<![\w.])[-+]?(?:inf|nan|\d+\.?\d*(?:e[-+]?\d+)?)(?![\w.])", text, re.IGNORECASE)
        if found:
            return float(found.group())
    return math.nan


def _says_non_finite(birth: Birth) -> bool:
    texts = " ".join((*birth.args, birth.note)).lower()
    return re.search(r"\b(nan|inf)\b", texts) is not None or made_nan_known(birth)


def made_nan_known(birth: Birth) -> bool:
    """True when the result is known and holds NaN."""
    return birth.output is not None and made_nan(birth)


#: In order of specificity: before the rules that look at the operation.
RULES: tuple[Rule, ...] = (
    learning_rate_non_finite,
    hyperparameter_non_finite,
    loss_scale_zero,
    clip_norm_non_finite,
    clip_spreads_nan,
    clip_norm_overflow,
    optimizer_state_overflow,
    optimizer_state_non_finite,
)
#: Explanations of an overflow by what happened over the steps before.
GROWTH: tuple[Rule, ...] = (gradients_accumulated, learning_rate_too_high, gradient_explosion)
