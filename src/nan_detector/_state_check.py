"""Is the state of a training finite? Parameters, buffers and optimizer state, exactly, with names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._answers import StateProblem
from nan_detector._moment import is_passive_buffer
from nan_detector._naming import is_wrapper, join, plain_path
from nan_detector._quiet import quiet

Tensor = torch.Tensor


def first_problem(
    models: Mapping[str, torch.nn.Module],
    optimizers: Iterable[Any],
    further: Mapping[str, torch.nn.Module],
) -> StateProblem | None:
    """The first non-finite parameter, buffer or optimizer state, in this order; None where all is finite.

    Args:
        models: The trained modules by key; a single one has the key "".
        optimizers: Those that train them.
        further: Modules that are not trained, by key.
    """
    with quiet():
        names: dict[int, str] = {}
        found = next(problems_of_modules(models, names), None)
        if found is None:
            found = next(problems_of_modules(further, {}), None)
        for optimizer in optimizers if found is None else ():
            found = next(_of_optimizer(optimizer, names), None)
            if found is not None:
                break
    return found


def problems_of_modules(models: Mapping[str, torch.nn.Module], names: dict[int, str]) -> Iterator[StateProblem]:
    """Non-finite parameters and buffers; `names` learns the parameters' names by identity."""
    for key, model in models.items():
        wrapped = is_wrapper(model)
        for name, p in model.named_parameters():
            names.setdefault(id(p), join(key, plain_path(name, wrapped)))
        for p in model.parameters():
            if not _finite.is_finite(p):
                yield _of_tensor("parameter", names[id(p)], p)
    for key, model in models.items():
        wrapped, seen = is_wrapper(model), set()
        for path, module in model.named_modules():
            for name, b in module._buffers.items():
                if b is None or id(b) in seen:
                    continue
                seen.add(id(b))
                if not _finite.is_finite(b) and not _is_mask(module, name, b):
                    yield _of_tensor("buffer", join(join(key, plain_path(path, wrapped)), name), b)


def _is_mask(module: torch.nn.Module, name: str, b: Tensor) -> bool:
    """-inf in a buffer of the user's is meant; in running statistics it is not."""
    s = _finite.stats(b)
    return s.nan_count == 0 and s.posinf_count == 0 and not is_passive_buffer(module, name)


def _of_tensor(kind: str, name: str, t: Tensor, owner: str | None = None) -> StateProblem:
    layer = (name if owner is None else owner).rpartition(".")[0]
    return StateProblem(kind=kind, tensor_name=name, layer_name=layer or "root", value=_finite.stats(t))


def _of_optimizer(optimizer: Any, names: Mapping[int, str]) -> Iterator[StateProblem]:
    own: dict[int, str] = {}
    count = 0
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            name = own[id(p)] = names.get(id(p), f"optimizer parameter {count}")
            count += 1
            if id(p) not in names and isinstance(p, Tensor) and not _finite.is_finite(p):
                yield StateProblem("parameter", name, None, _finite.stats(p))
        for key, value in group.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(number, float) and (math.isnan(number) or (key == "lr" and math.isinf(number))):
                yield StateProblem("optimizer", f"optimizer.param_groups[{index}][{key!r}]", None, None, number)
    for p, state in optimizer.state.items():
        if isinstance(state, Mapping):
            where = own.get(id(p))
            label = f"optimizer.state[{where if where is not None else '?'}]"
            yield from _of_value(label, state, where if where in names.values() else None)
        elif isinstance(state, Tensor):
            yield from _of_value(f"optimizer.state[{p!r}]", state, None)


def _of_value(name: str, value: Any, owner: str | None, depth: int = 4) -> Iterator[StateProblem]:
    if isinstance(value, Tensor):
        if not _finite.is_finite(value):
            layer = None if owner is None else owner.rpartition(".")[0] or "root"
            yield StateProblem("optimizer", name, layer, _finite.stats(value))
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield StateProblem("optimizer", name, None, None, value)
    elif depth and isinstance(value, Mapping):
        for k, v in value.items():
            yield from _of_value(f"{name}[{k!r}]", v, owner, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from _of_value(f"{name}[{i}]", v, owner, depth - 1)
