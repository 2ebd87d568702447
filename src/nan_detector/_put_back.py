"""A training is put back to a good state: its objects stay the ones that they are, and get the values of then."""

from __future__ import annotations

import copy
import random
import sys
from typing import Any

import torch

from nan_detector._good_state import Copy, GoodState, KeptOptimizer, like
from nan_detector._moment import restore_attribute
from nan_detector._quiet import quiet
from nan_detector._rng import restore_rng

Tensor = torch.Tensor


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


def _restore(optimizer: Any, saved: KeptOptimizer) -> None:
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
    if isinstance(value, Copy):
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
        return like(value, items)
    return value
