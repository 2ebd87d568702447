"""What Python code may change while a step runs again: lists, dicts, counters, objects, cells, globals.

A `PythonState` is a picture of the containers that can be reached from some values. It can be compared with what is
there now and put back, in place, so that everybody who holds one of the containers sees the earlier contents.
"""

from __future__ import annotations

import collections
import copy
import dis
import functools
import io
import random
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch

Tensor = torch.Tensor

#: Containers looked at, at most: a data set in memory is not the state of a module.
MAX_CONTAINERS = 5000
#: Containers with more items than this are copied but not searched.
MAX_SEARCHED = 2000
#: NumPy arrays up to this many elements are copied.
MAX_ARRAY = 1 << 20

#: A module's own bookkeeping: restored by other means, or never touched by a forward.
MACHINERY = frozenset(
    {
        "training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_pre_hooks",
        "_backward_hooks", "_is_full_backward_hook", "_forward_hooks", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_state_dict_hooks",
        "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "forward",
    }
)  # fmt: skip

_ATOMS = (int, float, str, bool, bytes, complex, type(None), Tensor, types.ModuleType, torch.Size, torch.dtype)
_SEQUENCES = (list, collections.deque)
_MISSING = object()
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


class PythonState:
    """The contents of the containers within reach of `values`.

    Args:
        values: Modules, functions (their closures and the globals they use) and anything else.
        detach: Keep tensors without the graph behind them.
        clone: Keep copies of tensors.
    """

    def __init__(self, values: Iterable[Any], *, detach: bool = False, clone: bool = False) -> None:
        self.detach = detach
        self.clone = clone
        self.versions: list[tuple[Tensor, int]] = []
        self.iterators: list[tuple[str, Any]] = []  # where an iterator stands that can be used only once
        self._contents: list[tuple[Any, Any]] = []  # container, copy
        self._names: list[tuple[Any, str, Any]] = []  # owner (class, cell or globals), name, value
        self._generators: list[tuple[Any, Any]] = []
        self._seen: dict[int, Any] = {}
        for value in values:
            self._walk(value, "", 6)

    # -- taking it ---------------------------------------------------------------------------------------------------

    def _walk(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, _ATOMS) or depth == 0 or id(value) in self._seen:
            return
        if len(self._seen) > MAX_CONTAINERS:
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._module(value, path, depth)
        elif isinstance(value, (*_SEQUENCES, set)):
            self._keep(value, list(value))
            self._items(value, path, depth)
        elif isinstance(value, (tuple, frozenset)):
            self._items(value, path, depth)
        elif isinstance(value, dict):
            self._keep(value, dict(value))
            self._items(value.values(), path, depth)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._function(value, path, depth)
        elif isinstance(value, type):
            self._class(value)
        elif not self._special(value, path):
            self._object(value, path, depth)

    def _keep(self, container: Any, contents: Any) -> None:
        values = contents.values() if isinstance(contents, dict) else contents
        self.versions += [(v, v._version) for v in values if isinstance(v, Tensor) and not v.is_inference()]
        if self.detach or self.clone:
            if isinstance(contents, dict):
                contents = {k: self._kept(v) for k, v in contents.items()}
            else:
                contents = [self._kept(v) for v in contents]
        self._contents.append((container, contents))

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self.clone and value.numel() <= MAX_ARRAY:
            return value.detach().clone()
        return value.detach() if value.grad_fn is not None else value

    def _items(self, items: Any, path: str, depth: int) -> None:
        if len(items) <= MAX_SEARCHED:
            for item in list(items):
                self._walk(item, path, depth - 1)

    def _module(self, module: torch.nn.Module, path: str, depth: int) -> None:
        own = {n: v for n, v in vars(module).items() if n not in MACHINERY}
        self._keep(vars(module), own)
        for name, v in own.items():
            self._walk(v, f"{path}.{name}" if path else name, depth - 1)
        self._class(type(module))
        for child in module._modules.values():
            self._walk(child, path, depth)
        for table in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks):
            for hook in table.values():
                self._walk(hook, path, depth - 1)
        for p in module._parameters.values():
            for hook in (p._backward_hooks or {}).values() if p is not None else ():
                self._walk(hook, path, depth - 1)
        self._walk(type(module).forward, path, depth - 1)

    def _class(self, cls: type) -> None:
        if _is_library(cls.__module__):
            return
        for name, v in vars(cls).items():
            if isinstance(v, (int, float, str)) and not name.startswith("__"):
                self._names.append((cls, name, v))
            elif isinstance(v, (list, dict, set)) and not name.startswith("__"):
                self._walk(v, name, 2)

    def _function(self, function: Any, path: str, depth: int) -> None:
        if isinstance(function, functools.partial):
            self._walk(function.func, path, depth - 1)
            self._walk((function.args, function.keywords), path, depth - 1)
            return
        if isinstance(function, types.MethodType):
            self._walk(function.__self__, path, depth - 1)
            function = function.__func__
        if not isinstance(function, types.FunctionType) or _is_library(function.__module__):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._names.append((cell, "cell_contents", content))
            self._walk(content, name, depth - 1)
        space = function.__globals__
        stored = _stored_globals(function.__code__)
        for name in function.__code__.co_names:
            value = space.get(name, _MISSING)
            if value is _MISSING or isinstance(value, type):
                continue
            if name in stored:
                self._names.append((space, name, value))
            self._walk(value, name, depth - 1)
        self._items([d for d in function.__defaults__ or ()], path, depth)

    def _special(self, value: Any, path: str) -> bool:
        """Random generators, iterators and NumPy arrays. True when that is what `value` is."""
        numpy = sys.modules.get("numpy")
        if isinstance(value, torch.Generator):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif numpy is not None and isinstance(value, numpy.ndarray):
            if value.size <= MAX_ARRAY and value.flags.writeable:
                self._contents.append((value, value.copy()))
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            bits = value.bit_generator
            self._generators.append((functools.partial(setattr, bits, "state"), copy.deepcopy(bits.state)))
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            self._generators.append((value.set_state, value.get_state()))
        elif is_iterator(value):
            self.iterators.append((path, value))
        else:
            return isinstance(value, io.IOBase)
        return True

    def _object(self, value: Any, path: str, depth: int) -> None:
        if _is_library(type(value).__module__):
            # An optimizer's state is never stepped by a replay, but its settings may be changed by the code around it.
            for group in getattr(value, "param_groups", ()) if isinstance(value, torch.optim.Optimizer) else ():
                self._keep(group, dict(group))
            if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
                self._keep(vars(value), dict(vars(value)))
            return
        self._class(type(value))
        contents = getattr(value, "__dict__", None)
        if isinstance(contents, dict):
            self._keep(contents, dict(contents))
            for name, v in list(contents.items()):
                self._walk(v, f"{path}.{name}" if path else name, depth - 1)
        for name in _slots(type(value)):
            v = getattr(value, name, _MISSING)
            if v is not _MISSING:
                self._names.append((value, name, v))
                self._walk(v, f"{path}.{name}" if path else name, depth - 1)

    # -- comparing and putting back ----------------------------------------------------------------------------------

    def changed(self) -> bool:
        """True when a container holds other things than it did."""
        return any(not _same_contents(c, kept, self.detach) for c, kept in self._contents) or any(
            not _same_value(_get(owner, name), value) for owner, name, value in self._names
        )

    def written(self) -> bool:
        """True when a tensor in one of the containers was written in place."""
        return any(t._version != version for t, version in self.versions)

    def restore(self) -> None:
        """Give every container its earlier contents back."""
        for container, kept in self._contents:
            if not _same_contents(container, kept, False):
                _refill(container, kept)
        for owner, name, value in self._names:
            if not _same_value(_get(owner, name), value):
                if isinstance(owner, dict):
                    owner[name] = value
                else:
                    setattr(owner, name, value)
        for put, state in self._generators:
            put(state)


def _stored_globals(code: types.CodeType) -> set[str]:
    """Names of globals that a function gives values."""
    if _STORE_GLOBAL not in code.co_code[::2]:  # hardly any does, and taking each apart would take long
        return set()
    return {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}


def is_iterator(value: Any) -> bool:
    """True for what can be used only once: a generator, a loader's iterator; not for an open file."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in ("torch", "nan_detector", "builtins", "numpy", "threading", "logging")


def _slots(cls: type) -> list[str]:
    names: list[str] = []
    for klass in cls.__mro__:
        own = klass.__dict__.get("__slots__", ())
        names.extend((own,) if isinstance(own, str) else own)
    return [n for n in names if n not in ("__dict__", "__weakref__")]


def _get(owner: Any, name: str) -> Any:
    try:
        return owner.get(name, _MISSING) if isinstance(owner, dict) else getattr(owner, name, _MISSING)
    except ValueError:  # a cell that was emptied
        return _MISSING


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bytes, complex)) and bool(a == b))


def _same_contents(container: Any, kept: Any, detached: bool) -> bool:
    if isinstance(container, dict):
        if isinstance(kept, dict) and "_parameters" in container and "_modules" in container:  # of a module
            container = {n: v for n, v in container.items() if n not in MACHINERY}
            return len(container) == len(kept) and all(
                _same_item(container.get(k, _MISSING), v, detached) for k, v in kept.items()
            )
        # The order counts: it is what a cache that drops its oldest goes by.
        return len(container) == len(kept) and all(
            _same_value(k, other) and _same_item(container[k], v, detached)
            for k, (other, v) in zip(container, kept.items(), strict=True)
        )
    if isinstance(container, set):
        return len(container) == len(kept) and all(v in container for v in kept)
    if isinstance(container, _SEQUENCES):
        return len(container) == len(kept) and all(
            _same_item(a, b, detached) for a, b in zip(container, kept, strict=True)
        )
    return bool(container.shape == kept.shape and container.tobytes() == kept.tobytes())


def _same_item(a: Any, b: Any, detached: bool) -> bool:
    if detached and isinstance(a, Tensor) and isinstance(b, Tensor):
        return a is b or (b.grad_fn is None and a.grad_fn is not None and a.data_ptr() == b.data_ptr())
    return _same_value(a, b)


def _refill(container: Any, kept: Any) -> None:
    if isinstance(container, dict):
        if "_parameters" in container and "_modules" in container:
            for name in [n for n in container if n not in MACHINERY and n not in kept]:
                del container[name]
            for name, value in kept.items():
                if not _same_value(container.get(name, _MISSING), value):
                    container[name] = value
            return
        container.clear()
        container.update(kept)
    elif isinstance(container, set):
        container.clear()
        container.update(kept)
    elif isinstance(container, list):
        container[:] = kept
    elif isinstance(container, collections.deque):
        container.clear()
        container.extend(kept)
    else:
        container[...] = kept
