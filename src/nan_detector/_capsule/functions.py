"""Which functions a capsule can name: those of PyTorch that take tensors, by a closed list, and no others.

A name is looked up in the list; it is never imported. So a capsule from elsewhere can make tensors and nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import get_overridable_functions

from nan_detector._capsule.layout import MAX_EXPANDED
from nan_detector._errors import CapsuleError
from nan_detector._recorded_whole import scale

Function = Callable[..., Any]

_SPACES: dict[str, Any] = {
    "torch": torch,
    "torch.Tensor": torch.Tensor,
    "torch.nn.functional": torch.nn.functional,
    "torch.linalg": torch.linalg,
    "torch.fft": torch.fft,
    "torch.special": torch.special,
}

#: Beside what goes through ``__torch_function__``.
_FURTHER = ("torch.tensor", "torch.as_tensor", "torch.asarray", "torch.autograd.grad", "torch.autograd.backward")
#: What makes a tensor of numbers; sizes are looked at before one is made.
_FACTORIES = (
    "arange bartlett_window blackman_window empty eye full hamming_window hann_window linspace logspace normal ones "
    "rand randint randn randperm scalar_tensor tril_indices triu_indices zeros"
).split()
#: What makes a tensor so many times larger.
_REPEATING = ("torch.Tensor.repeat", "torch.Tensor.repeat_interleave", "torch.Tensor.tile", "torch.repeat_interleave",
              "torch.tile")  # fmt: skip
_ATTRIBUTES = ("grad", "data", "T", "mT", "H", "mH", "real", "imag", "_base", "requires_grad")
#: Parts of names: what reaches beyond tensors (memory of others, files, code), or sizes memory freely.
_REFUSED = (
    "storage hook numpy array dlpack reduce setstate deepcopy share_memory set_ resize apply_ map_ map2_ data_ptr "
    "pin_memory from_file module_load ipu __dir__ __format__ __repr__ tolist"
).split()
_SCALE = "nan_detector.scale"


@functools.cache
def functions() -> dict[str, Function]:
    """Every function that a capsule may name, by its name."""
    allowed = {f for fs in get_overridable_functions().values() for f in fs}
    found: dict[str, Function] = {}
    for space, holder in _SPACES.items():
        for name in dir(holder):
            f = getattr(holder, name, None)
            if any(word in name for word in _REFUSED):
                continue
            if name in _ATTRIBUTES and space == "torch.Tensor":
                found[f"{space}.{name}.__get__"] = f.__get__  # type: ignore[union-attr]  # a descriptor
                found[f"{space}.{name}.__set__"] = f.__set__  # type: ignore[union-attr]  # as above
            elif callable(f) and _hashable(f) and (f in allowed or (name.startswith("_foreach_") and space == "torch")):
                found[f"{space}.{name}"] = f
    found.update({f"torch.{name}": _bounded(getattr(torch, name)) for name in _FACTORIES})
    found.update({name: _bounded(found[name], repeats=True) for name in _REPEATING})
    for full in _FURTHER:
        found[full] = getattr(torch.autograd if ".autograd." in full else torch, full.rpartition(".")[2])
    # While a detector is attached, ours stands for it.
    found["torch.Tensor.backward"] = getattr(torch.Tensor.backward, "__wrapped__", torch.Tensor.backward)
    found[_SCALE] = scale
    return found


@functools.cache
def _names() -> dict[Function, str]:
    found = {f: name for name, f in reversed(functions().items())}
    found.update({getattr(torch, name): f"torch.{name}" for name in _FACTORIES})
    found.update({functions()[name].__wrapped__: name for name in _REPEATING})  # type: ignore[attr-defined]  # `_bounded` wraps
    return found


def name_of(func: Function) -> str | None:
    """The name by which a capsule knows `func`; None where it has none (an extension's function, a user's)."""
    if not _hashable(func):
        return None
    found = _names().get(func)
    wrapped = getattr(func, "__wrapped__", None)
    return _names().get(wrapped) if found is None and wrapped is not None and _hashable(wrapped) else found


def function_named(name: object) -> Function | None:
    """The function of that name, if it is one of the list."""
    return functions().get(name) if isinstance(name, str) else None


def _bounded(factory: Function, *, repeats: bool = False) -> Function:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *(v for name, v in kwargs.items() if name != "output_size"))
        numbers = [abs(n) for n in _numbers(given) if abs(n) > 1]
        if repeats and given and isinstance(given[0], torch.Tensor):
            numbers.append(max(1, given[0].numel()))
        if math.prod(numbers) > MAX_EXPANDED:
            raise CapsuleError(f"step.json: {factory.__name__} of {numbers[:8]} is larger than any step's.")
        return factory(*args, **kwargs)

    return made


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _numbers(v)


def _hashable(f: Any) -> bool:
    try:
        hash(f)
    except TypeError:
        return False
    return True
