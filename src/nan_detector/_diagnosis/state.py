"""Values that were bad before any operation of the step: state, data, and code that PyTorch does not see."""

from __future__ import annotations

import re

from nan_detector._causes import cause
from nan_detector._diagnosis.dtypes import is_half, plain
from nan_detector._diagnosis.facts import Rule, by_operation
from nan_detector._diagnosis.numbers import number
from nan_detector._records import Cause, TensorStats
from nan_detector._trace import Birth, BirthKind, Trace

#: Notes of the tracer and of the trials.
UNINITIALISED, COMPILED_ONLY, NOT_REPRODUCED = "uninitialised", "compiled_only", "not_reproduced"
_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted")
_AVERAGED = re.compile(
    r"(^|[._\[\"'])(ema|swa|averaged?|shadow|teacher|target_network|n_averaged)([._\]\"'0-9]|$)|AveragedModel",
    re.IGNORECASE,
)
#: Beyond any weight that training makes; what memory holds, read as float32, is as often beyond it as not.
_ABSURD = 1e30


def not_reproducible(birth: Birth, trace: Trace) -> Cause | None:
    """The trials say that the step was finite when it was run again."""
    return cause("not_reproducible", _where(birth)) if birth.note.startswith(NOT_REPRODUCED) else None


def compiler(birth: Birth, trace: Trace) -> Cause | None:
    """The trials say that the step is finite in eager mode."""
    return cause("compiler", _where(birth)) if birth.note.startswith(COMPILED_ONLY) else None


def uninitialised_memory(birth: Birth, trace: Trace) -> Cause | None:
    """Allocated and never written: by the tracer's note, by the operation, or by absurd values beside NaN."""
    kinds = (BirthKind.PARAMETER.value, BirthKind.BUFFER.value)
    stats = _stats(birth)
    noted = birth.note.startswith(UNINITIALISED)
    allocated = birth.op.strip("_") in _EMPTY
    absurd = birth.kind in kinds and stats is not None and stats.nan_count > 0 and _magnitude(stats) > _ABSURD
    if not noted and not allocated and not absurd:
        return None
    said = _counts(birth, stats)
    if absurd and stats is not None:
        said += f" The others reach {number(_magnitude(stats))} in magnitude, which no training makes."
    return cause("uninitialised_memory", said)


def ema_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """A parameter or buffer of an averaged copy."""
    if birth.kind not in (BirthKind.PARAMETER.value, BirthKind.BUFFER.value):
        return None
    words = " ".join(x for x in (birth.tensor_name, birth.layer_name, birth.module_type, birth.note) if x)
    if not any(_AVERAGED.search(word) for word in words.split()):
        return None
    return cause("ema_non_finite", _counts(birth, _stats(birth)))


def parameter_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """A parameter that was bad before the step."""
    return (
        cause("parameter_non_finite", _counts(birth, _stats(birth)))
        if birth.kind == BirthKind.PARAMETER.value
        else None
    )


def buffer_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """A buffer that was bad before the step."""
    if birth.kind != BirthKind.BUFFER.value:
        return None
    fix = None
    if not re.search(r"running_|num_batches|Norm", f"{birth.tensor_name} {birth.module_type}"):
        fix = 'Reset it, and look at what writes it in the module: watch="ops" names the operation when it happens.'
    return cause("buffer_non_finite", _counts(birth, _stats(birth)), fix=fix)


def input_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """The batch brought a bad input."""
    return cause("input_non_finite", _counts(birth, _stats(birth))) if birth.kind == BirthKind.INPUT.value else None


def label_non_finite(birth: Birth, trace: Trace) -> Cause | None:
    """The batch brought a bad target."""
    return cause("label_non_finite", _counts(birth, _stats(birth))) if birth.kind == BirthKind.LABEL.value else None


def opaque_kernel(birth: Birth, trace: Trace) -> Cause | None:
    """Written by code that the dispatcher does not see."""
    if birth.kind != BirthKind.OPAQUE.value:
        return None
    call = birth.call or birth.op
    return cause(
        "opaque_kernel",
        f"{call} made or first used the tensor; no operation that PyTorch saw wrote its values.",
        _counts(birth, _stats(birth)),
    )


def literal_nan(birth: Birth, trace: Trace) -> Cause | None:
    """The code wrote a NaN (or an infinity) as a number."""
    if birth.kind != BirthKind.CONSTANT.value or by_operation(birth):
        return None
    values = f" ({birth.note})" if birth.note else f" with {', '.join(birth.args)}" if birth.args else ""
    return cause("literal_nan", f"It stands in {birth.call or birth.op}{values}.")


def gradient_from_outside(birth: Birth, trace: Trace) -> Cause | None:
    """A gradient that was handed to autograd."""
    if birth.kind != BirthKind.GRADIENT.value:
        return None
    stats = _stats(birth)
    if stats is not None and is_half(stats.dtype) and not stats.nan_count and stats.bad_count:
        return cause("half_gradient_overflow", f"{_counts(birth, stats)} It is float16, which ends at 65504.")
    return cause("gradient_from_outside", _counts(birth, stats))


def _stats(birth: Birth) -> TensorStats | None:
    return birth.output or (birth.inputs[0].whole if birth.inputs else None)


def _magnitude(stats: TensorStats) -> float:
    return max(abs(stats.min or 0.0), abs(stats.max or 0.0))


def _counts(birth: Birth, stats: TensorStats | None) -> str:
    """A sentence, "head.bias: of 4 values (float32) 3 NaN and 1 -inf.", as far as it is known."""
    name = birth.tensor_name or birth.op
    if stats is None:
        return f"{name} is non-finite."
    kinds = ((stats.nan_count, "NaN"), (stats.posinf_count, "+inf"), (stats.neginf_count, "-inf"))
    counted = [f"{count} {what}" for count, what in kinds if count]
    first = f", first at {list(birth.first_bad_index)}" if birth.first_bad_index else ""
    if birth.bad_column is not None:
        first += f", all in column {birth.bad_column}"
    said = " and ".join(counted) or "some non-finite"
    meant = " -inf is what log(0) gives." if stats.neginf_count and stats.neginf_count == stats.bad_count else ""
    return f"{name}: of {stats.numel} values ({plain(stats.dtype)}) {said}{first}.{meant}"


def _where(birth: Birth) -> str:
    place = f" in {birth.layer_name}" if birth.layer_name else ""
    return f"The step went non-finite at {birth.call or birth.op}{place}."


#: In order of specificity.
RULES: tuple[Rule, ...] = (
    not_reproducible,
    compiler,
    uninitialised_memory,
    ema_non_finite,
    parameter_non_finite,
    buffer_non_finite,
    input_non_finite,
    label_non_finite,
    opaque_kernel,
    literal_nan,
    gradient_from_outside,
)
