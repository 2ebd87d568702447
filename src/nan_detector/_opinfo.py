"""What the tracer must know of each ATen operation, worked out once per operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class OpInfo:
    """Facts about one operation.

    Attributes:
        op: Plain name: "aten::_softmax" gives "softmax", "aten::sqrt_" gives "sqrt".
        aten: Full name, such as "aten.sqrt.default".
        is_view: The result shares its input's memory.
        mutates: It writes into an argument.
        pointwise: Element i of the result depends on element i of each (broadcast) input only.
        literal: It may write a non-finite literal on purpose (a mask value, a fill).
        uninitialised: Its result is whatever stood in memory.
        selects: It drops elements by a mask, an index or a comparison: what vanishes here was handled.
        absorbs: Arithmetic in which an infinity can vanish without anybody having meant it to.
        mask_aware: -inf in means weight 0: softmax and its kin.
        contracts: It multiplies and sums over a dimension: a mask value has no business in here.
        collective: It talks to other processes.
        writes_statistics: It also writes running statistics among its arguments.
        overwrites: It writes all of its first argument without reading it.
        reduction: It reduces over the dimensions of its "dim" argument.
        argument_names: Names of the positional arguments.
        written: Position and name of each argument that it writes into.
    """

    op: str
    aten: str
    is_view: bool
    mutates: bool
    pointwise: bool
    literal: bool
    uninitialised: bool
    selects: bool
    absorbs: bool
    mask_aware: bool
    contracts: bool
    collective: bool
    writes_statistics: bool
    overwrites: bool
    reduction: bool
    argument_names: tuple[str, ...]
    written: tuple[tuple[int, str], ...]


_LITERAL = {
    "full", "full_like", "new_full", "fill", "masked_fill", "where", "scalar_tensor", "constant_pad_nd",
    "masked_scatter", "lift_fresh", "lift_fresh_copy", "zero", "index_fill", "scatter", "index_put", "_index_put_impl",
    "select_scatter", "slice_scatter", "masked_fill_scalar",
}  # fmt: skip
_SELECTS = {
    "where", "masked_fill", "masked_select", "index", "index_select", "gather", "take", "nan_to_num", "embedding",
    "slice", "select", "masked_scatter", "topk", "sort", "max_pool2d_with_indices", "isnan", "isfinite", "isinf", "gt",
    "lt", "ge", "le", "eq", "ne", "argmax", "argmin", "nansum", "fmax", "fmin", "zero", "fill", "copy", "index_put",
    "scatter", "nll_loss_forward", "nll_loss_backward", "nonzero", "any", "all", "bitwise_and", "logical_and",
    "logical_or", "logical_not", "multinomial", "slice_backward", "select_backward", "masked_fill_backward",
    "ctc_loss", "sign", "nll_loss2d_forward", "resize", "set", "unique2", "sum_to_size", "is_all_true", "unbind",
    "split", "narrow",
}  # fmt: skip
_ABSORBS = {
    "rsqrt", "tanh", "sigmoid", "clamp", "clamp_min", "clamp_max", "div", "reciprocal", "atan", "erf", "minimum",
    "hardtanh", "maximum", "softsign", "threshold", "relu6", "hardsigmoid", "hardswish", "amin", "amax", "mul",
    "native_layer_norm", "exp", "fmod", "remainder", "tanh_backward", "sigmoid_backward", "min", "max", "round",
    "atan2", "erfc", "sgn",
}  # fmt: skip
_MASK_AWARE = {
    "softmax", "log_softmax", "logsumexp", "exp", "sigmoid", "safe_softmax", "amax", "max", "maximum", "logaddexp",
    "logcumsumexp", "scaled_dot_product_attention", "scaled_dot_product_flash_attention_for_cpu",
    "log_sigmoid_forward", "scaled_dot_product_efficient_attention", "scaled_dot_product_flash_attention",
    "masked_softmax", "softplus", "relu", "leaky_relu", "elu", "topk", "sort", "argmax", "minimum", "amin", "min",
}  # fmt: skip
_CONTRACTS = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "convolution", "linear", "native_batch_norm",
    "native_layer_norm", "native_group_norm", "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm_legit",
    "lstm", "gru", "mkldnn_rnn_layer", "thnn_fused_lstm_cell", "convolution_overrideable", "mkldnn_linear", "addr",
    "linalg_svd", "linalg_eigh", "linalg_inv_ex", "linalg_solve_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex",
    "cumsum",
}  # fmt: skip
_OVERWRITES = {
    "copy",
    "fill",
    "zero",
    "uniform",
    "normal",
    "bernoulli",
    "exponential",
    "random",
    "cauchy",
    "log_normal",
    "geometric",
}
_WRITES_STATISTICS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_REDUCTIONS = {
    "sum", "mean", "logsumexp", "amax", "amin", "var", "std", "linalg_vector_norm", "norm", "prod", "nansum",
    "var_mean", "std_mean",
}  # fmt: skip
_POINTWISE = {
    "add", "sub", "mul", "div", "pow", "exp", "log", "sqrt", "rsqrt", "reciprocal", "where", "masked_fill", "clamp",
    "tanh", "sigmoid", "to_copy", "neg", "abs", "log1p", "log2", "log10", "expm1", "acos", "asin", "atan", "atanh",
    "acosh", "copy", "lgamma", "digamma", "erfinv", "logit", "minimum", "maximum", "addcmul", "addcdiv", "square",
    "rsub", "threshold_backward", "sigmoid_backward", "tanh_backward", "log_sigmoid_forward", "log_sigmoid_backward",
    "gelu", "gelu_backward", "silu", "silu_backward", "softplus", "softplus_backward", "leaky_relu", "elu", "relu",
    "cosh", "sinh", "tan", "cos", "sin", "xlogy", "fmod", "lerp",
}  # fmt: skip

_infos: dict[Any, OpInfo] = {}


def info_of(func: Any) -> OpInfo:
    """Facts about `func`, an `OpOverload`."""
    found = _infos.get(func)
    if found is None:
        found = _infos[func] = _work_out(func)
    return found


def plain_name(name: str) -> str:
    """'aten::_softmax' -> 'softmax', 'aten::sqrt_' -> 'sqrt', 'aten::__ior__' -> 'ior'."""
    return name.split("::")[-1].strip("_")


def _work_out(func: Any) -> OpInfo:
    schema = getattr(func, "_schema", None)
    full = schema.name if schema is not None else str(func)
    op = plain_name(full)
    namespace = full.split("::")[0]
    tags = getattr(func, "tags", ())
    return OpInfo(
        op=op,
        aten=str(func),
        is_view=bool(getattr(func, "is_view", False)),
        # Batch norm writes its running statistics, which its schema keeps quiet about.
        mutates=bool(schema is not None and schema.is_mutable) or op in _WRITES_STATISTICS,
        writes_statistics=op in _WRITES_STATISTICS,
        pointwise=torch.Tag.pointwise in tags or op in _POINTWISE,
        literal=op in _LITERAL,
        uninitialised=op.startswith(("empty", "new_empty")),
        selects=op in _SELECTS,
        absorbs=op in _ABSORBS,
        mask_aware=op in _MASK_AWARE,
        contracts=op in _CONTRACTS,
        collective=namespace in ("c10d", "_c10d_functional", "c10d_functional", "_dtensor"),
        overwrites=op in _OVERWRITES,
        reduction=op in _REDUCTIONS,
        argument_names=tuple(a.name for a in schema.arguments) if schema is not None else (),
        written=tuple(
            (i, a.name)
            for i, a in enumerate(schema.arguments if schema is not None else ())
            if (a.alias_info is not None and a.alias_info.is_write)
            or (op in _WRITES_STATISTICS and a.name.startswith("running_"))
        ),
    )
