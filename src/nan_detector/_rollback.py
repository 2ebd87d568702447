"""The last good state of a training, kept so that it can go back there.

A snapshot is taken at a gate that found everything finite, before its step: parameters, buffers, optimizer state and
settings, loss scaler, schedulers and random streams are from one moment.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from nan_detector._moment import frozen_copy, own_attributes, restore_attribute
from nan_detector._quiet import quiet
from nan_detector._session import restore_rng, rng_state

Tensor = torch.Tensor


@dataclass(slots=True)
class _Kept:
    """A tensor of the user's and a copy of its values."""

    tensor: Tensor
    value: Tensor

    def put_back(self) -> None:
        self.tensor.copy_(self.value)


@dataclass(slots=True)
class GoodState:
    """One snapshot."""

    step: int
    tensors: list[_Kept] = field(default_factory=list)
    optimizers: list[tuple[Any, dict[Any, Any], list[dict[str, Any]]]] = field(default_factory=list)
    holders: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)  # schedulers and scalers
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    rng: tuple[Tensor, ...] = ()
    python_rng: Any = None
    numpy_rng: Any = None

    @property
    def nbytes(self) -> int:
        """Memory of the copied parameters and buffers, in bytes."""
        return sum(k.value.numel() * k.value.element_size() for k in self.tensors)


def keep(
    step: int,
    models: Iterable[torch.nn.Module],
    optimizers: Iterable[Any],
    holders: Iterable[Any],
    *,
    on_host: bool = False,
) -> GoodState:
    """Copy the state of a training.

    Args:
        step: Its step, for the record.
        models: Watched modules.
        optimizers: Optimizers that step them.
        holders: Further objects with ``state_dict`` and ``load_state_dict``: schedulers, loss scalers.
        on_host: Keep the copies in host memory instead of on the device.

    Returns:
        The snapshot; no read of a value to the host, except where `on_host` moves it there.
    """
    state = GoodState(step)
    modules = list(dict.fromkeys(m for model in models for m in model.modules()))
    with quiet():
        seen: set[int] = set()
        for module in modules:
            for t in [*module._parameters.values(), *module._buffers.values()]:
                if t is not None and id(t) not in seen:
                    seen.add(id(t))
                    state.tensors.append(_Kept(t, _copied(t, on_host)))
            state.attributes.extend((module, n, frozen_copy(v)) for n, v in own_attributes(module))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if id(p) not in seen:
                        seen.add(id(p))
                        state.tensors.append(_Kept(p, _copied(p, on_host)))
            groups = [{k: _value(v, on_host) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            per_parameter = {p: _value(s, on_host) for p, s in optimizer.state.items()}
            state.optimizers.append((optimizer, per_parameter, groups))
        for holder in holders:
            state.holders.append((holder, copy.deepcopy(holder.state_dict())))
        state.rng = rng_state()
        state.python_rng = random.getstate()
        numpy = sys.modules.get("numpy")
        state.numpy_rng = numpy.random.get_state() if numpy is not None else None
    return state


def put_back(state: GoodState) -> None:
    """Give everything the values it had at `state`; the objects stay the ones they are."""
    with quiet():
        for kept in state.tensors:
            kept.put_back()
        for module, name, value in state.attributes:
            restore_attribute(module, name, value)
        for optimizer, per_parameter, groups in state.optimizers:
            _restore_state(optimizer, per_parameter)
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                for key, value in saved.items():
                    if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                        group[key].copy_(value)
                    else:
                        group[key] = value
        for holder, saved_state in state.holders:
            holder.load_state_dict(copy.deepcopy(saved_state))
        restore_rng(state.rng)
        random.setstate(state.python_rng)
        if state.numpy_rng is not None:
            sys.modules["numpy"].random.set_state(state.numpy_rng)


def _restore_state(optimizer: Any, per_parameter: dict[Any, Any]) -> None:
    """In place where a tensor of the same shape stands (compiled and captured steps hold on to it)."""
    for p in [p for p in optimizer.state if p not in per_parameter]:
        del optimizer.state[p]
    for p, saved in per_parameter.items():
        current = optimizer.state.get(p)
        if not isinstance(saved, dict) or not isinstance(current, dict):
            optimizer.state[p] = _value(saved, False, like=p)
            continue
        for key in [k for k in current if k not in saved]:
            del current[key]
        for key, value in saved.items():
            there = current.get(key)
            if isinstance(value, Tensor) and isinstance(there, Tensor) and there.shape == value.shape:
                there.copy_(value)
            else:
                current[key] = _value(value, False, like=p)


def _copied(t: Tensor, on_host: bool) -> Tensor:
    return t.detach().to("cpu", copy=True) if on_host else t.detach().clone()


def _value(value: Any, on_host: bool, like: Any = None) -> Any:
    """A copy of a piece of optimizer state: tensors copied, containers rebuilt, anything else itself."""
    if isinstance(value, Tensor):
        fresh = _copied(value, on_host)
        return fresh.to(like.device) if like is not None and value.dim() and not on_host else fresh
    if isinstance(value, dict):
        return {k: _value(v, on_host, like) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_value(v, on_host, like) for v in value)
    return value
