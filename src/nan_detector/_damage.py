"""Damage done by an optimizer's own arithmetic: finite gradients went in, non-finite weights came out.

It is found one gate late, when the gradients of that step are gone. What is left is the optimizer's state, so a copy of
the optimizer takes the step again from there, with the running mean of the gradient as the gradient, under the tracer:
an operation that goes bad at the same elements is the one.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._isolate import isolated_copy
from nan_detector._lineage import Gen, Line
from nan_detector._origin import birth_of
from nan_detector._quiet import quiet
from nan_detector._source import Mark, location_of
from nan_detector._trace import Birth, BirthKind
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor

#: State of torch's optimizers that is a running mean of the gradient itself.
_MEANS = ("exp_avg", "grad_avg", "momentum_buffer")


@dataclass(frozen=True, slots=True)
class LastStep:
    """The step an optimizer took last.

    Attributes:
        step: Its number.
        mark: The user's line that called ``optimizer.step()``.
        finite: True when the gate before it found everything finite.
    """

    step: int
    mark: Mark | None
    finite: bool = True


def damaged_birth(optimizer: Any, names: dict[int, str], last: LastStep) -> Birth:
    """The birth of weights that the optimizer's step `last` left non-finite.

    Args:
        optimizer: The optimizer.
        names: Names of parameters by identity.
        last: Its last step.
    """
    bad = _first_bad(optimizer)
    gen = _step_again(optimizer, bad) if bad is not None else None
    location = location_of(last.mark) if last.mark is not None else None
    name = names.get(id(bad)) if bad is not None else None
    if gen is not None:
        found = birth_of(gen)
        note = "found by taking the step again from the state that it left"
        return _moved(found, location, name, note, optimizer)
    return Birth(
        number=0,
        kind=BirthKind.OPERATION.value,
        op="step",
        aten="",
        phase="optimizer",
        call=f"{type(optimizer).__name__}.step",
        location=location,
        tensor_name=name,
        output=_finite.stats(bad) if bad is not None else None,
        note="which of the step's operations made it is not known: taken again from the state it left, it is finite",
    )


def _moved(birth: Birth, location: Any, name: str | None, note: str, optimizer: Any) -> Birth:
    from dataclasses import replace

    return replace(
        birth,
        phase="optimizer",
        call=f"{type(optimizer).__name__}.step",
        location=location,
        layer_name=None,
        module_type=None,
        tensor_name=name,
        note=note,
    )


def _first_bad(optimizer: Any) -> Tensor | None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not _finite.is_finite(p):
                return p  # type: ignore[no-any-return]  # parameters are tensors
    return None


def _step_again(optimizer: Any, bad: Tensor) -> Gen | None:
    """The birth that a copy's step has at the elements which are bad in the real parameter."""
    with quiet():
        twin = isolated_copy(optimizer)
        counterpart: Tensor | None = None
        for mine, real in zip(twin.param_groups, optimizer.param_groups, strict=True):
            mine.update({k: False for k in ("foreach", "fused", "capturable") if k in mine})
            for p, original in zip(mine["params"], real["params"], strict=True):
                if original is bad:
                    counterpart = p
                p.nan_to_num_(0.0, 0.0, 0.0)
                p.grad = _typical_gradient(twin, p)
    if counterpart is None:
        return None
    tracer = OpTracer(outside=lambda t: None)
    step = inspect.unwrap(type(optimizer).step)
    try:
        with torch.no_grad(), tracer:
            step(twin)
    except Exception:  # a user's optimizer may not like a copy: then nothing is known
        return None
    with quiet():
        line: Line = tracer.ancestry(counterpart)
        same = bool((_finite.bad_mask(counterpart) & _finite.bad_mask(bad)).any())
    born = sorted((g for g in line if not g.intended and g.kind is BirthKind.OPERATION), key=lambda g: g.order)
    return born[0] if born and same else None


def _typical_gradient(twin: Any, p: Tensor) -> Tensor:
    state = twin.state.get(p, {})
    for key in _MEANS:
        mean = state.get(key)
        if isinstance(mean, Tensor) and mean.shape == p.shape:
            return mean.detach().clone().nan_to_num_(0.0, 0.0, 0.0)
    return torch.zeros_like(p)
