"""What rules ask of a birth, in one vocabulary: operands, scalars, dtypes, who wrote the operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from nan_detector._records import Cause, TensorStats
from nan_detector._trace import UNDERFLOWED, Birth, BirthKind, GuiltyInput, Trace

Rule = Callable[[Birth, Trace], "Cause | None"]

#: Kinds of birth in which an operation of the step made the value.
OPERATION_KINDS = (BirthKind.OPERATION.value, BirthKind.INTENDED_MET.value, BirthKind.INTENDED_REACHED.value)
#: A lineage of this many sites may have been cut off.
_SITES_SHOWN = 20
#: The note on a birth in the backward of a user's autograd.Function.
CUSTOM_FUNCTION = "custom_function"
#: Losses that take labels, by whatever name the tracer sees them.
LABEL_LOSSES = (
    "nll_loss",
    "nll_loss_forward",
    "nll_loss2d",
    "nll_loss2d_forward",
    "nll_loss_nd",
    "cross_entropy",
    "cross_entropy_loss",
)
#: Matrix products: an element of the result sums over a row and a column.
MATRIX_PRODUCTS = (
    *("mm", "bmm", "addmm", "baddbmm", "addbmm", "matmul", "linear", "mv", "addmv", "dot", "vdot", "inner", "einsum"),
)

_ALIASES = {
    **{"arccos": "acos", "arcsin": "asin", "arctanh": "atanh", "arccosh": "acosh", "psi": "digamma"},
    **{
        "true_divide": "div",
        "divide": "div",
        "rdiv": "div",
        "truediv": "div",
        "rtruediv": "div",
        "floor_divide": "div",
    },
    **{"subtract": "sub", "rsub": "sub", "multiply": "mul", "square": "pow", "float_power": "pow", "rpow": "pow"},
    **{
        "gammaln": "lgamma",
        "svd": "linalg_svd",
        "symeig": "linalg_eigh",
        "qr": "linalg_qr",
        "matrix_exp": "linalg_matrix_exp",
    },
    **{"frobenius_norm": "norm", "linalg_norm": "norm", "linalg_vector_norm": "norm", "vector_norm": "norm"},
    **{"euclidean_dist": "cdist", "cdist_forward": "cdist", "linalg_det": "det", "log_ndtr": "ndtr"},
    **{"to": "to_copy", "half": "to_copy", "type": "to_copy", "convert_element_type": "to_copy"},
}
#: Operations that write a number the code gives: a NaN from there is the user's, not the library's.
_LITERAL_WRITERS = (
    *(
        "full",
        "full_like",
        "new_full",
        "fill",
        "masked_fill",
        "where",
        "scalar_tensor",
        "tensor",
        "new_tensor",
        "as_tensor",
    ),
    *("constant_pad_nd", "pad", "index_fill", "scatter", "index_put", "setitem", "lift_fresh"),
)
#: A result depends on elements at other places: statistics at the guilty places do not show its inputs.
_MIXING = (
    *MATRIX_PRODUCTS,
    *("cumsum", "cumprod", "logcumsumexp", "prod", "convolution", "convolution_backward", "det"),
    *("native_batch_norm", "native_layer_norm", "native_group_norm", "cudnn_batch_norm", "native_batch_norm_legit"),
)


def base_op(op: str | None) -> str:
    """One name for all spellings of an operation: 'foreach_sqrt' -> 'sqrt', 'arccos' -> 'acos', 'square' -> 'pow'."""
    name = (op or "").strip("_").removeprefix("foreach_").removeprefix("special_")
    return _ALIASES.get(name, name)


def op_of(birth: Birth) -> str:
    """The operation whose arithmetic made the value.

    In a derivative `birth.op` may name the forward operation, because that is what a person knows; `aten` names the
    one that ran.
    """
    if is_derivative(birth) and birth.aten:
        return base_op(birth.aten.removeprefix("aten.").removeprefix("aten::").split(".")[0])
    return base_op(birth.op)


def by_operation(birth: Birth) -> bool:
    """True when an operation made the value, rather than a source (a parameter, the batch, a number) bringing it."""
    # Some composite functions of the library (logdet) choose a literal NaN for arguments they have no value for.
    chosen = birth.kind == BirthKind.CONSTANT.value and birth.in_library and base_op(birth.op) not in _LITERAL_WRITERS
    return birth.kind in OPERATION_KINDS or chosen


def is_custom(birth: Birth) -> bool:
    """True for a birth in the code of a user's `autograd.Function.backward`."""
    if birth.phase != "backward":
        return False
    return CUSTOM_FUNCTION in birth.note or (birth.derivative_of is None and _method(birth) == "backward")


def is_derivative(birth: Birth) -> bool:
    """True when the operation belongs to a derivative that PyTorch wrote: its arithmetic is not the user's."""
    return birth.phase == "backward" and birth.derivative_of is not None and not is_custom(birth)


def in_backward(birth: Birth) -> bool:
    """True for a gradient; a forward that is computed again during the backward (checkpointing) makes none."""
    again = birth.derivative_of is None and _method(birth) == "forward"
    return birth.phase == "backward" and not again


def on_gradients(birth: Birth, trace: Trace) -> bool:
    """True for the user's own arithmetic on gradients after the backward: unscaling, clipping by hand."""
    if is_derivative(birth) or not by_operation(birth):
        return False
    return birth.phase in ("backward", "optimizer") or (trace.reached == ("gradient",) and not _met_backward(trace))


def _met_backward(trace: Trace) -> bool:
    """True when the lineage passed the backward; also where the list of sites is too short to tell, or missing."""
    cut_off = len(trace.spread) == 0 or len(trace.spread) >= _SITES_SHOWN
    return cut_off or any(site.phase == "backward" for site in trace.spread)


def _method(birth: Birth) -> str:
    """Name of the function at the birth without its class: 'MySqrt.backward' gives 'backward'."""
    return birth.location.function.rpartition(".")[2] if birth.location is not None else ""


def user_written(birth: Birth, *ops: str) -> bool:
    """True when an operation that the user called, in whatever phase, made the value; with `ops`, one of these."""
    return by_operation(birth) and not is_derivative(birth) and (not ops or op_of(birth) in ops)


def operand(birth: Birth, index: int) -> TensorStats | None:
    """Statistics of a tensor operand at the guilty elements, or of the whole where these do not correspond."""
    found = _input(birth, index)
    return None if found is None else _relevant(birth, found)


def whole_operand(birth: Birth, index: int) -> TensorStats | None:
    """Statistics of a whole tensor operand, for the counts in sentences."""
    found = _input(birth, index)
    return None if found is None else found.whole


def operands(birth: Birth) -> tuple[TensorStats, ...]:
    """Every tensor operand at the guilty elements (see `operand`)."""
    return tuple(_relevant(birth, g) for g in birth.inputs)


def _input(birth: Birth, index: int) -> GuiltyInput | None:
    found = next((g for g in birth.inputs if g.position == index), None)
    return birth.inputs[index] if found is None and index < len(birth.inputs) else found


def _relevant(birth: Birth, given: GuiltyInput) -> TensorStats:
    return given.whole if given.at_guilty is None or op_of(birth) in _MIXING else given.at_guilty


def scalar(birth: Birth, *keys: str) -> float | None:
    """A number among the non-tensor arguments by any of its names or positions, as in `("exponent", "1")`."""
    for key, value in _arguments(birth):
        if key in keys:
            try:
                return float(value)
            except ValueError:
                continue
    return None


def argument(birth: Birth, *keys: str) -> str | None:
    """A non-tensor argument as its repr, by any of its names or positions."""
    return next((value for key, value in _arguments(birth) if key in keys), None)


def _arguments(birth: Birth) -> Iterator[tuple[str, str]]:
    for text in birth.args:
        key, separator, value = text.partition("=")
        if separator:
            yield key.strip(), value.strip()


def out_dtype(birth: Birth) -> str:
    """The dtype of the result, or of the first operand where the result is not known; "" where neither is."""
    if birth.output is not None:
        return birth.output.dtype
    return birth.inputs[0].whole.dtype if birth.inputs else ""


def made_nan(birth: Birth) -> bool:
    """True when the result holds NaN, or is not known."""
    return birth.output is None or birth.output.nan_count > 0


def made_inf(birth: Birth) -> bool:
    """True when the result holds an infinity, or is not known."""
    return birth.output is None or birth.output.posinf_count + birth.output.neginf_count > 0


def has_inf(stats: TensorStats | None) -> bool:
    """True when a tensor holds an infinity of either sign."""
    return stats is not None and stats.posinf_count + stats.neginf_count > 0


def inputs_finite(birth: Birth) -> bool:
    """True when no operand is bad at the guilty elements."""
    return not any(s.bad_count for s in operands(birth))


def largest(stats: TensorStats | None) -> float | None:
    """The largest finite magnitude, or None where it is not known."""
    if stats is None or stats.min is None or stats.max is None:
        return None
    return max(abs(stats.min), abs(stats.max))


def underflowed(birth: Birth) -> str:
    """Which operation made the 0 of something else, as the tracer has found it: "pow made 0 of 8.76e-27 in float32"."""
    found, _, _ = birth.note.partition(";")
    return found.removeprefix(UNDERFLOWED).strip() if found.startswith(UNDERFLOWED) else ""


def source_text(birth: Birth) -> str:
    """The user's words at the birth: the call and the line, for hints in a fix."""
    line = birth.location.source_line if birth.location is not None else ""
    return f"{birth.call or ''} {line}"


def mentions(birth: Birth, pattern: str) -> bool:
    """True when the user's words at the birth match a regular expression, whatever the case."""
    return re.search(pattern, source_text(birth), re.IGNORECASE) is not None


def in_optimizer_step(birth: Birth) -> bool:
    """True for arithmetic inside an optimizer's `step`, where the user's innermost line is the call of it."""
    return birth.phase == "optimizer" and (birth.location is None or mentions(birth, r"\bstep\s*\(|optim"))


def only_gradients(trace: Trace) -> bool:
    """True when a birth of the forward left the loss finite and reached gradients alone, through the backward."""
    in_forward = trace.birth is not None and trace.birth.phase != "backward"
    return in_forward and trace.reached == ("gradient",) and _met_backward(trace)
