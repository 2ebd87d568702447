"""The state of a training is copied, so that it can go back there.

A snapshot is taken at a gate that found everything finite, before its step: parameters, buffers, optimizer state and
settings, loss scaler, schedulers and random streams are from one moment.
"""

from __future__ import annotations

import math
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._good_state import Copy, GoodState, KeptOptimizer, KeptTensor, copies, like
from nan_detector._moment import MAX_COPIED, frozen_copy, own_attributes
from nan_detector._quiet import quiet
from nan_detector._rng import rng_state

Tensor = torch.Tensor

#: Attributes of an optimizer that are not its state: kept otherwise, or PyTorch's own.
_NOT_STATE = ("state", "param_groups", "defaults", "step")


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
        self._pool = dict(copies(instead_of)) if instead_of is not None else {}
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
            KeptOptimizer(
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
            self.state.tensors.append(KeptTensor(t, self._copied(t)))

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
            return Copy(self._copied(value), value.device)
        if isinstance(value, dict):
            return {k: self._value(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return like(value, [self._value(v) for v in value])
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


def _own_state(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """What a user's optimizer keeps outside its state: buffers by position, counters."""
    for name, value in vars(optimizer).items():
        if not name.startswith("_") and name not in _NOT_STATE and not callable(value):
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
            if isinstance(value, (Tensor, int, float)) or any(isinstance(v, (Tensor, int, float)) for v in items):
                yield name, value


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
