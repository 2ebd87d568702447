"""The last good state of a training, kept so that it can go back there.

A snapshot is taken at a gate that found everything finite, before its step: parameters, buffers, optimizer state and
settings, loss scaler, schedulers and random streams are from one moment.
"""

from __future__ import annotations

import copy
import math
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._moment import MAX_COPIED, frozen_copy, own_attributes, restore_attribute
from nan_detector._quiet import quiet
from nan_detector._rng import restore_rng, rng_state

Tensor = torch.Tensor

#: Attributes of an optimizer that are not its state: kept otherwise, or PyTorch's own.
_NOT_STATE = ("state", "param_groups", "defaults", "step")


@dataclass(slots=True)
class _Kept:
    """A tensor of the user's and a copy of its values."""

    tensor: Tensor
    value: Tensor

    def put_back(self) -> None:
        # `set_` and `resize_` may have changed it since: then there is no place to put the values.
        if self.tensor.shape == self.value.shape:
            self.tensor.copy_(self.value)


@dataclass(slots=True)
class _Copy:
    """The values of a piece of state that may have to be made anew, and where it was."""

    value: Tensor
    device: torch.device

    def fresh(self) -> Tensor:
        return self.value.to(self.device, copy=True)


@dataclass(slots=True)
class _Optimizer:
    """State, settings and further attributes of an optimizer."""

    optimizer: weakref.ref[Any]
    state: dict[Any, Any]
    groups: list[dict[str, Any]]
    attributes: dict[str, Any]


@dataclass(slots=True)
class GoodState:
    """One snapshot."""

    step: int
    tensors: list[_Kept] = field(default_factory=list)
    optimizers: list[_Optimizer] = field(default_factory=list)
    holders: list[tuple[weakref.ref[Any], dict[str, Any]]] = field(default_factory=list)  # schedulers and scalers
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    generators: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)
    rng: tuple[Tensor, ...] = ()
    python_rng: Any = None
    numpy_rng: Any = None

    @property
    def nbytes(self) -> int:
        """Memory of all copied tensors, in bytes."""
        return sum(t.numel() * t.element_size() for _, t in _copies(self))

    def add_holder(self, holder: Any) -> bool:
        """Keep the state of a scheduler or scaler. False where it cannot be had (a lambda in it that does not copy)."""
        try:
            self.holders.append((weakref.ref(holder), copy.deepcopy(holder.state_dict())))
        except Exception:  # a class of the user's
            return False
        return True


class NotFinite(Exception):
    """What was to be kept is not good; the message names it."""


def keep(
    step: int,
    models: Iterable[torch.nn.Module],
    optimizers: Iterable[Any],
    holders: Iterable[Any],
    *,
    on_host: bool = False,
    instead_of: GoodState | None = None,
) -> GoodState:
    """Copy the state of a training.

    Args:
        step: Its step, for the record.
        models: Watched modules.
        optimizers: Optimizers that step them.
        holders: Further objects with ``state_dict`` and ``load_state_dict``: schedulers, loss scalers.
        on_host: Keep the copies in host memory instead of on the device.
        instead_of: An earlier snapshot, whose memory is used again: it is of no use afterwards.

    Returns:
        The snapshot.

    Raises:
        NotFinite: A parameter or a piece of optimizer state holds a NaN or Inf; nothing was changed.
    """
    models, optimizers = list(models), list(optimizers)
    with quiet():
        _must_be_finite(models, optimizers)
        return _Keeping(GoodState(step), on_host, instead_of).all(models, optimizers, holders)


def keep_optimizer(step: int, optimizer: Any, instead_of: GoodState | None = None) -> GoodState:
    """Copy the parameters and the state of one optimizer, and nothing else.

    Args:
        step: Its step, for the record.
        optimizer: The optimizer.
        instead_of: An earlier copy, whose memory is used again: it is of no use afterwards.
    """
    with quiet():
        keeping = _Keeping(GoodState(step), False, instead_of)
        keeping.optimizer(optimizer)
        keeping.finish()
        return keeping.state


class _Keeping:
    """The making of one snapshot."""

    def __init__(self, state: GoodState, on_host: bool, instead_of: GoodState | None) -> None:
        self.state, self.on_host = state, on_host
        self._pool = dict(_copies(instead_of)) if instead_of is not None else {}
        self._seen: set[int] = set()
        self._used: list[Tensor] = []  # memory of the earlier snapshot, and what goes there
        self._into: list[Tensor] = []

    def all(self, models: list[torch.nn.Module], optimizers: list[Any], holders: Iterable[Any]) -> GoodState:
        state = self.state
        for module in dict.fromkeys(m for model in models for m in model.modules()):
            self._module(module)
        for optimizer in optimizers:
            self.optimizer(optimizer)
        self.finish()
        for holder in holders:
            state.add_holder(holder)
        state.rng = rng_state()
        state.python_rng = random.getstate()
        numpy = sys.modules.get("numpy")
        state.numpy_rng = numpy.random.get_state() if numpy is not None else None
        return state

    def optimizer(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                self._tensor(p)
        self.state.optimizers.append(
            _Optimizer(
                weakref.ref(optimizer),
                {p: self._value(s) for p, s in optimizer.state.items()},
                [{k: self._value(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
                {n: self._value(v) for n, v in _own_state(optimizer)},
            )
        )

    def finish(self) -> None:
        """Fill the memory that is used again, in one call."""
        if self._used:
            torch._foreach_copy_(self._used, self._into)

    def _module(self, module: torch.nn.Module) -> None:
        for t in [*module._parameters.values(), *module._buffers.values()]:
            if t is not None:
                self._tensor(t)
        for name, value in own_attributes(module):
            if isinstance(value, torch.Generator):
                self.state.generators.append((value, value.get_state()))
            elif isinstance(value, Tensor) and value.is_leaf and value.numel() <= MAX_COPIED:
                self._tensor(value)
            self.state.attributes.append((module, name, _without_graph(value)))

    def _tensor(self, t: Tensor) -> None:
        if id(t) not in self._seen:
            self._seen.add(id(t))
            self.state.tensors.append(_Kept(t, self._copied(t)))

    def _copied(self, t: Tensor) -> Tensor:
        used = self._pool.pop(id(t), None)
        t = t.detach()
        device = torch.device("cpu") if self.on_host else t.device
        if used is not None and (used.shape, used.dtype, used.device) == (t.shape, t.dtype, device):
            self._used.append(used)
            self._into.append(t)
            return used
        return t.to(device, copy=True)

    def _value(self, value: Any) -> Any:
        """A copy of a piece of optimizer state: tensors copied, containers rebuilt, anything else itself."""
        if isinstance(value, Tensor):
            return _Copy(self._copied(value), value.device)
        if isinstance(value, dict):
            return {k: self._value(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return _like(value, [self._value(v) for v in value])
        return value


def _without_graph(value: Any) -> Any:
    """An attribute as it is kept: containers copied, and no graph of the step held on to."""
    if isinstance(value, Tensor):
        return value if value.is_leaf else value.detach()
    kept = frozen_copy(value)
    if type(kept) is list:
        kept[:] = [v.detach() if isinstance(v, Tensor) and not v.is_leaf else v for v in kept]
    elif type(kept) is dict:
        kept.update((k, v.detach()) for k, v in kept.items() if isinstance(v, Tensor) and not v.is_leaf)
    return kept


def _like(sequence: Any, items: list[Any]) -> Any:
    """`items` in a sequence of the kind of another."""
    return sequence._make(items) if hasattr(sequence, "_make") else type(sequence)(items)


def _own_state(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """What a user's optimizer keeps outside its state: buffers by position, counters."""
    for name, value in vars(optimizer).items():
        if not name.startswith("_") and name not in _NOT_STATE and not callable(value):
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if isinstance(value, (Tensor, int, float)) or any(isinstance(v, (Tensor, int, float)) for v in items):
                yield name, value


def copied_value(value: Any) -> Any:
    """A piece of optimizer state as it is kept: of a tensor, the copy itself."""
    return value.value if isinstance(value, _Copy) else value


def _copies(state: GoodState) -> Iterator[tuple[int, Tensor]]:
    """Every copy, with the identity of what it is a copy of where that is known."""
    for kept in state.tensors:
        yield id(kept.tensor), kept.value
    for kept_optimizer in state.optimizers:
        optimizer = kept_optimizer.optimizer()
        for p, values in kept_optimizer.state.items():
            current = optimizer.state.get(p) if optimizer is not None else None
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, _Copy):
                    yield id(current.get(key)) if isinstance(current, dict) else id(value), value.value


def was_finite(state: GoodState, t: Tensor) -> bool | None:
    """Whether a tensor (of those that keep their identity) held only finite values at `state`; None: not known."""
    for at, value in _copies(state):
        if at == id(t):
            return _finite.is_finite(value)
    return None


def _must_be_finite(models: list[torch.nn.Module], optimizers: list[Any]) -> None:
    found: list[tuple[str, Tensor]] = [
        (f"parameter {n}", p) for m in models for n, p in m.named_parameters() if p.requires_grad
    ]
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor) and value.dim():
                    found.append((f"{key!r} in the state of {type(optimizer).__name__}", value))
    if math.isfinite(sum(_finite.read(_finite.norms([t for _, t in found])))):
        return
    for name, t in found:
        if not _finite.is_finite(t):
            raise NotFinite(name)


def put_back(state: GoodState, *, with_rng: bool = True) -> None:
    """Give everything the values it had at `state`; the objects stay the ones they are.

    Args:
        state: The snapshot; it can be used again.
        with_rng: False leaves the random streams where they are.
    """
    with quiet():
        for module, name, value in state.attributes:
            if isinstance(value, Tensor):
                vars(module)[name] = value  # the tensor itself: its values are put back below
            else:
                restore_attribute(module, name, value)
        for kept in state.tensors:
            kept.put_back()
        for saved in state.optimizers:
            optimizer = saved.optimizer()
            if optimizer is not None:
                _restore(optimizer, saved)
        for ref, saved_state in state.holders:
            holder = ref()
            if holder is not None:
                holder.load_state_dict(copy.deepcopy(saved_state))
        if not with_rng or not state.rng:
            return
        for generator, generator_state in state.generators:
            generator.set_state(generator_state)
        restore_rng(state.rng)
        random.setstate(state.python_rng)
        if state.numpy_rng is not None:
            sys.modules["numpy"].random.set_state(state.numpy_rng)


def _restore(optimizer: Any, saved: _Optimizer) -> None:
    for p in [p for p in optimizer.state if p not in saved.state]:
        del optimizer.state[p]
    for p, value in saved.state.items():
        optimizer.state[p] = _merged(optimizer.state.get(p), value)
    for group, settings in zip(optimizer.param_groups, saved.groups, strict=False):
        for key, value in settings.items():
            group[key] = _merged(group.get(key), value)
    for name, value in saved.attributes.items():
        vars(optimizer)[name] = _merged(vars(optimizer).get(name), value)


def _merged(there: Any, value: Any) -> Any:
    """`value`, in place where a tensor of its shape or a container stands: others may hold on to it.

    The tensors in a list are made anew: LBFGS moves them from one to another.
    """
    if isinstance(value, _Copy):
        if isinstance(there, Tensor) and there.shape == value.value.shape and there.dtype == value.value.dtype:
            return there.copy_(value.value)
        return value.fresh()
    if isinstance(value, dict):
        target = there if isinstance(there, dict) else {}
        for key in [k for k in target if k not in value]:
            del target[key]
        for key, v in value.items():
            target[key] = _merged(target.get(key), v)
        return target
    if isinstance(value, (list, tuple)):
        items = [_merged(None, v) for v in value]
        if isinstance(there, list) and isinstance(value, list):
            there[:] = items
            return there
        return _like(value, items)
    return value
