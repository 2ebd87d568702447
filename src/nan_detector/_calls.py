"""What kind of call a torch function is, for the tape: decided once per function."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch


class CallKind(Enum):
    """How a call is recorded."""

    IGNORE = "ignore"  # bookkeeping that makes no tensor
    PLAIN = "plain"
    IN_PLACE = "in place"  # arguments must be looked at before they change
    RANDOM = "random"  # the generator's state must be kept
    STATE = "state"  # changes what autograd does with a tensor, not its values
    BACKWARD = "backward"
    IMPORT = "import"  # makes a tensor of what may be data from outside


_IMPORTS = (torch.tensor, torch.as_tensor, torch.asarray)

_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward)

_RANDOM_WORDS = (
    "rand", "normal", "uniform", "bernoulli", "multinomial", "poisson", "exponential", "geometric", "cauchy", "dropout",
    "rrelu", "gumbel", "gamma", "dirichlet", "binomial", "scaled_dot_product_attention", "multi_head_attention_forward",
    "trunc_normal", "kaiming", "xavier", "orthogonal",
)  # fmt: skip

_IGNORED_NAMES = {
    "_record_function_enter_new", "_record_function_exit", "_set_grad_enabled", "size", "dim", "stride", "numel",
    "element_size", "data_ptr", "is_floating_point", "is_complex",
    "__hash__", "__len__", "__repr__", "__format__", "is_contiguous", "storage_offset", "untyped_storage", "nelement",
    "get_device", "register_post_accumulate_grad_hook", "is_set_to", "__dlpack_device__", "is_inference", "_is_view",
}  # fmt: skip

#: Attributes of a tensor that are tensors; reading any other makes nothing to record.
_TENSOR_ATTRIBUTES = ("grad", "data", "T", "mT", "H", "mH", "real", "imag", "_base")

#: Functions whose kind is remembered: PyTorch has about half as many that a training can call.
MOST = 4096
#: What `kind_of` has decided.
kinds: dict[Any, CallKind] = {}


def kind_of(func: Callable[..., Any]) -> CallKind:
    """The kind of `func`, a function as `__torch_function__` receives it."""
    try:
        found = kinds.get(func)
    except TypeError:  # an unhashable callable
        return CallKind.PLAIN
    if found is None:
        found = _classify(func)
        if not _is_made_on_the_spot(func):
            if len(kinds) >= MOST:
                kinds.clear()
            kinds[func] = found
    return found


def _is_made_on_the_spot(func: Callable[..., Any]) -> bool:
    """True for what a library makes anew for each call: remembering it would keep alive what it holds, a batch say."""
    if isinstance(func, functools.partial) or isinstance(getattr(func, "__self__", None), torch.Tensor):
        return True
    if isinstance(func, types.MethodType):
        return not isinstance(func.__self__, (type, types.ModuleType))
    if isinstance(func, types.FunctionType) and func.__closure__:
        return not (func.__module__ or "").startswith("torch")
    return False


def _classify(func: Callable[..., Any]) -> CallKind:
    if getattr(func, "__wrapped__", func) in _BACKWARDS:  # while a detector is attached, ours stands for it
        return CallKind.BACKWARD
    if func in _IMPORTS:
        return CallKind.IMPORT
    name = getattr(func, "__name__", "") or ""
    owner = getattr(func, "__self__", None)
    if name == "__get__" and owner is not None:
        attribute = getattr(owner, "__name__", "")
        return CallKind.PLAIN if attribute in _TENSOR_ATTRIBUTES else CallKind.IGNORE
    if name in ("__set__", "__delete__"):
        attribute = getattr(owner, "__name__", "")
        return CallKind.IN_PLACE if attribute in ("grad", "data", "requires_grad") else CallKind.IGNORE
    if name in _IGNORED_NAMES or type(func).__name__ == "_RecordFunction" or "_record_function" in str(name):
        return CallKind.IGNORE
    if "profiler" in str(getattr(func, "__module__", "")) or "record_function" in str(
        getattr(func, "__qualname__", "")
    ):
        return CallKind.IGNORE
    if name in ("requires_grad_", "register_hook", "retain_grad"):
        return CallKind.STATE
    if any(word in name for word in _RANDOM_WORDS):
        return CallKind.RANDOM
    if is_in_place(name):
        return CallKind.IN_PLACE
    return CallKind.PLAIN


def is_in_place(name: str) -> bool:
    """True when a torch function of this name writes into its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_") or name in ("set_", "copy_") or (name.startswith("_foreach_") and name.endswith("_"))


def public_name(func: Callable[..., Any]) -> str:
    """The plain name a user knows `func` by: "cross_entropy", "truediv" -> "div", "grad"."""
    name = getattr(func, "__name__", "") or type(func).__name__
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    plain = name.strip("_")
    return _OPERATOR_NAMES.get(plain, plain)


_OPERATOR_NAMES = {
    "truediv": "div", "rtruediv": "div", "itruediv": "div", "rdiv": "div", "idiv": "div", "rmul": "mul", "imul": "mul",
    "radd": "add", "iadd": "add", "rsub": "sub", "isub": "sub", "rpow": "pow", "ipow": "pow", "matmul": "matmul",
    "rmatmul": "matmul", "getitem": "index", "setitem": "index_put",
}  # fmt: skip
