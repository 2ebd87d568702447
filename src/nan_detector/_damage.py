"""Damage done by an optimizer's own arithmetic: finite gradients went in, non-finite weights came out.

It is mostly found one gate late, when the gradients of that step are gone. What is left is the optimizer's state, so a
copy of the optimizer takes the step again from there, with the running mean of the gradient as the gradient, under the
tracer: an operation that goes bad at the same elements is the one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nan_detector import _finite
from nan_detector._isolate import isolated_copy
from nan_detector._lineage import Gen, Line
from nan_detector._origin import birth_of
from nan_detector._quiet import quiet
from nan_detector._source import Mark, is_user_code, location_of
from nan_detector._trace import Birth, BirthKind
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor

#: State of torch's optimizers that is a running mean of the gradient itself.
_MEANS = ("exp_avg", "grad_avg", "momentum_buffer")
_MOST_MEANS = 4  # of a user's optimizer, each of which is tried
#: Arithmetic of these is done step by step only when asked.
_FAST_FORMS = ("foreach", "fused", "capturable")


class LastStep(NamedTuple):  # made in every step
    """The step an optimizer took last, after a gate that found everything finite.

    Attributes:
        step: Its number.
        mark: The user's line that called ``optimizer.step()``.
        position: How many steps the run had before, whatever their numbers.
    """

    step: int
    mark: Mark | None
    position: int = 0


@dataclass(frozen=True, slots=True)
class Harm:
    """A tensor of an optimizer that is not finite.

    Attributes:
        name: Its name, for a person.
        tensor: The tensor itself.
        parameter: The parameter it is, or belongs to.
        key: Its key in the parameter's state; None for the parameter itself.
    """

    name: str
    tensor: Tensor
    parameter: Tensor
    key: str | None = None


def harms(optimizer: Any, names: Mapping[int, str], *, state: bool = False) -> Iterator[Harm]:
    """What is not finite of an optimizer's parameters or (`state`) of its state, by exact checks.

    Args:
        optimizer: The optimizer.
        names: Names of parameters by identity.
        state: Look at the state instead. Only at what stands for the elements of a parameter; infinities only in
            torch's own optimizers, as others may mean them.
    """
    position = 0
    infinities_count = type(optimizer).__module__.startswith("torch.optim.")
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names.get(id(p)) or f"optimizer parameter {position}"
            position += 1
            if not state:
                if not _finite.is_finite(p):
                    yield Harm(name, p, p)
                continue
            held = optimizer.state.get(p) if p in optimizer.state else None
            for key, value in held.items() if isinstance(held, dict) else ():
                if not isinstance(value, Tensor) or not value.dim() or _finite.is_finite(value):
                    continue
                if infinities_count or bool(value.isnan().any()):
                    yield Harm(f"optimizer.state[{name}][{key!r}]", value, p, key)


def birth_in_state(optimizer: Any, harm: Harm, mark: Mark | None) -> Birth:
    """The birth of weights that were, or would be, spoilt by state which held non-finite values before the step."""
    return Birth(
        number=0,
        kind=BirthKind.BUFFER.value,
        op="optimizer_state",
        aten="",
        phase="optimizer",
        call=f"{type(optimizer).__name__}.step",
        location=location_of(mark) if mark is not None else None,
        tensor_name=harm.name,
        output=_finite.stats(harm.tensor),
        first_bad_index=_finite.first_bad_index(harm.tensor),
    )


def birth_unknown(optimizer: Any, harm: Harm, mark: Mark | None) -> Birth:
    """The birth of weights that a step left non-finite, nobody knows how."""
    return Birth(
        number=0,
        kind=BirthKind.OPERATION.value,
        op="step",
        aten="",
        phase="optimizer",
        call=f"{type(optimizer).__name__}.step",
        location=location_of(mark) if mark is not None else None,
        tensor_name=harm.name,
        output=_finite.stats(harm.tensor),
        note="which of the step's operations made it is not known: taken again from the state it left, it is finite",
    )


def birth_in_step(
    optimizer: Any, harm: Harm, mark: Mark | None, *, exact: bool, gradients: bool = False
) -> Birth | None:
    """The operation of a step that made a tensor non-finite, found by taking the step again on a copy.

    Args:
        optimizer: The optimizer; `exact`: as it was before the step, its gradients those of the step.
        harm: What the step made non-finite, with the values that it made.
        mark: The line that called ``step``.
        exact: Nothing has to be guessed. Otherwise the step starts from the state that it left, less what is not
            finite in it.
        gradients: The gradients are still those of the step. Otherwise their running mean stands for them.

    Returns:
        None where no operation goes bad at the same elements.
    """
    means = [""] if exact or gradients else _means_of(optimizer, harm)
    gen = next(filter(None, (_step_again(optimizer, harm, exact, exact or gradients, m) for m in means)), None)
    if gen is None:
        return None
    birth = birth_of(gen)
    # An optimizer of the user's own has a line in its step; of torch's, the line that called it is the innermost one.
    within = birth.location if is_user_code(getattr(_step_of(optimizer), "__code__", None)) else None
    return replace(
        birth,
        phase="optimizer",
        call=f"{type(optimizer).__name__}.step",
        location=within or (location_of(mark) if mark is not None else None),
        layer_name=None,
        module_type=None,
        tensor_name=harm.name,
        note="" if exact else "found by taking the step again from the state that it left",
    )


def _means_of(optimizer: Any, harm: Harm) -> list[str]:
    """Keys of the state, the likelier first, whose values may be a running mean of the gradient."""
    state = optimizer.state.get(harm.parameter) if harm.parameter in optimizer.state else None
    if not isinstance(state, dict):
        return [""]
    alike = [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == harm.parameter.shape]
    known = [k for k in _MEANS if k in alike]
    if known or type(optimizer).__module__.startswith("torch.optim."):
        return known[:1] or [""]
    return [*alike[:_MOST_MEANS], ""]  # under a name of the user's own


def _step_again(optimizer: Any, harm: Harm, exact: bool, gradients: bool, mean: str) -> Gen | None:
    with quiet():
        try:
            twin = isolated_copy(optimizer)
        except (RuntimeError, TypeError, MemoryError):
            return None
        mine: Tensor | None = None
        for copied, real in zip(twin.param_groups, optimizer.param_groups, strict=True):
            copied.update({k: False for k in _FAST_FORMS if k in copied})
            for p, original in zip(copied["params"], real["params"], strict=True):
                if original is harm.parameter:
                    mine = p
                state = twin.state.get(p, {})
                if not exact:
                    _make_finite(p, state)
                if gradients and original.grad is not None:
                    p.grad = original.grad.detach().clone()
                elif not exact:
                    p.grad = _typical_gradient(p, state, mean)
    if mine is None:
        return None
    tracer = OpTracer(outside=lambda t: None)
    try:
        with torch.no_grad(), tracer:
            _step_of(optimizer)(twin)
    except Exception:  # a user's optimizer may not like a copy, and some need a closure: then this is all there is
        pass
    with quiet():
        made = mine if harm.key is None else twin.state.get(mine, {}).get(harm.key)
        if not isinstance(made, Tensor) or made.shape != harm.tensor.shape:
            return None
        line: Line = tracer.ancestry(made)
        same = bool((_finite.bad_mask(made) & _finite.bad_mask(harm.tensor)).any())
    born = sorted((g for g in line if not g.intended and g.kind is BirthKind.OPERATION), key=lambda g: g.order)
    return born[0] if born and same else None


def _step_of(optimizer: Any) -> Any:
    """The function of its class that takes a step, without what torch wraps around it."""
    return inspect.unwrap(type(optimizer).step)


def _make_finite(p: Tensor, state: Any) -> None:
    for t in [p, *(state.values() if isinstance(state, dict) else ())]:
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
            t.detach().nan_to_num_(0.0, 0.0, 0.0)


def _typical_gradient(p: Tensor, state: Any, key: str) -> Tensor | None:
    if not isinstance(state, dict) or not state:
        return None if p.grad is None else torch.zeros_like(p)  # a copy has a gradient where the parameter has one
    mean = state.get(key)
    known = isinstance(mean, Tensor) and mean.shape == p.shape
    return mean.detach().clone() if known and isinstance(mean, Tensor) else torch.zeros_like(p)
