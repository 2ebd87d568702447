"""Copies of an optimizer through which nothing real can be reached.

A restricted deep copy: tensors, optimizers, modules and plain containers are copied; anything else is shared, because
copying an unknown object (a process group, a stream, a file) may itself do something.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

Memo = dict[int, Any]
CopyTensor = Callable[[torch.Tensor, Memo], torch.Tensor]

# By identity: a user's class may define __eq__ without __hash__.
_TWINS: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()


def is_twin(optimizer: object) -> bool:
    """Whether `twin_of` made this object."""
    # Asked before every step, where there are hardly ever any: its dict is empty sooner than `get` has looked.
    return bool(_TWINS.data) and _TWINS.get(id(optimizer)) is optimizer  # type: ignore[attr-defined]  # typeshed hides `data`


def twin_of(optimizer: Optimizer) -> Optimizer:
    """An object of the optimizer's class, made without its constructor; it has no attributes yet."""
    cls = type(optimizer)
    if hasattr(cls, "__del__"):
        # A twin dies after the step: it must not release what the real one still uses.
        metaclass: Any = type(cls)
        cls = metaclass(cls.__name__, (cls,), {"__del__": lambda self: None, "__module__": cls.__module__})
    twin: Optimizer = object.__new__(cls)
    _TWINS[id(twin)] = twin
    return twin


def share_attributes(twin: Optimizer, optimizer: Optimizer) -> None:
    """Give the twin the optimizer's own ``__dict__`` and the values of its slots, in place of those it had."""
    object.__setattr__(twin, "__dict__", vars(optimizer))
    for name, value in slots(optimizer):
        object.__setattr__(twin, name, value)


def isolated_copy(optimizer: Optimizer) -> Optimizer:
    """A copy whose tensors are clones, with gradients of zero where there is one.

    Raises:
        RuntimeError: No memory for the clones, or a tensor that cannot be cloned.
    """
    return _optimizer(optimizer, {}, _clone)


def hollow_copy(optimizer: Optimizer) -> Optimizer:
    """A copy whose tensors are empty, those without dimensions (counters) excepted: takes no memory."""
    return _optimizer(optimizer, {}, _hollow)


def slots(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Name and value of what the optimizer keeps outside its ``__dict__``."""
    for base in type(optimizer).__mro__:
        names = base.__dict__.get("__slots__", ())
        for name in [names] if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(optimizer, name):
                yield name, getattr(optimizer, name)


def _optimizer(optimizer: Optimizer, memo: Memo, tensor: CopyTensor) -> Optimizer:
    twin = twin_of(optimizer)
    memo[id(optimizer)] = twin
    attributes = vars(optimizer)
    # First, for a module copied before them would bring copies of the parameters without gradients.
    _isolated(attributes.get("param_groups"), memo, tensor)
    # A `step` on the instance (schedulers and launchers put one there) is tied to the real optimizer.
    twin.__dict__.update((k, _isolated(v, memo, tensor)) for k, v in attributes.items() if k != "step")
    for name, value in slots(optimizer):
        object.__setattr__(twin, name, _isolated(value, memo, tensor))
    return twin


def _isolated(value: Any, memo: Memo, tensor: CopyTensor) -> Any:
    """`value` without anything through which a step could reach a real tensor, optimizer or list of them."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, torch.Tensor):
        copied = tensor(value, memo)
        memo[id(value)] = copied
        for name, attribute in getattr(value, "__dict__", {}).items():
            copied.__dict__[name] = _isolated(attribute, memo, tensor)
        return copied
    if isinstance(value, Optimizer):
        return _optimizer(value, memo, tensor)
    if isinstance(value, torch.nn.Module):
        return _module(value, memo)
    if isinstance(value, MethodType) and id(value.__self__) in memo:
        return MethodType(value.__func__, memo[id(value.__self__)])
    if type(value) in (dict, OrderedDict, defaultdict):
        mapping = memo[id(value)] = copy.copy(value)
        mapping.clear()
        mapping.update((_isolated(k, memo, tensor), _isolated(v, memo, tensor)) for k, v in value.items())
        return mapping
    if type(value) in (list, deque):
        sequence = memo[id(value)] = copy.copy(value)
        sequence.clear()
        sequence.extend(_isolated(v, memo, tensor) for v in value)
        return sequence
    if type(value) is set:
        return {_isolated(v, memo, tensor) for v in value}
    if isinstance(value, tuple):
        items = [_isolated(v, memo, tensor) for v in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items) if type(value) is tuple else value
    if type(value).__module__ == "numpy" and type(value).__name__ == "ndarray":
        return value.copy()
    return value


def _module(module: torch.nn.Module, memo: Memo) -> torch.nn.Module:
    # An optimizer that holds its model (K-FAC) writes to that model's gradients. Copying a distributed wrapper would
    # start collectives, and some modules refuse to be copied: those stay shared.
    if type(module).__module__.startswith(("torch.distributed.", "torch.nn.parallel.")):
        return module
    try:
        return copy.deepcopy(module, memo)
    except Exception:
        return module


def _clone(t: torch.Tensor, memo: Memo) -> torch.Tensor:
    copied = t.detach().clone()
    if isinstance(t, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, requires_grad=t.requires_grad)
    elif t.is_leaf:
        copied.requires_grad_(t.requires_grad)
    if t.is_leaf and t.grad is not None:
        grad = torch.zeros_like(t.grad)
        memo[id(t.grad)] = grad
        if grad.dtype != copied.dtype and hasattr(t, "grad_dtype"):
            copied.grad_dtype = t.grad_dtype
        copied.grad = grad
    return copied


def _hollow(t: torch.Tensor, memo: Memo) -> torch.Tensor:
    return torch.empty(0, dtype=t.dtype, device=t.device) if t.dim() else t.detach().clone()
