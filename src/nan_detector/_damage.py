"""Damage done by an optimizer's own arithmetic: finite gradients went in, non-finite weights came out.

It is mostly found one gate late, when the gradients of that step are gone. What is left is the optimizer's state, so a
copy of the optimizer takes the step again from there, with the running mean of the gradient as the gradient, under the
tracer: an operation that goes bad at the same elements is the one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from nan_detector import _finite
from nan_detector._births import birth_of
from nan_detector._lineage import Gen, Line
from nan_detector._quiet import quiet
from nan_detector._retake import Retake, step_of, stepping, twin_of_step
from nan_detector._source import Mark, is_user_code, location_of
from nan_detector._trace import Birth, BirthKind
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor

#: State of torch's optimizers that is a running mean of the gradient itself.
_MEANS = ("exp_avg", "grad_avg", "momentum_buffer")
_MOST_MEANS = 4  # of a user's optimizer, each of which is tried
#: Arithmetic of these is done step by step only when asked.
FAST_FORMS = ("foreach", "fused", "capturable")


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
) -> tuple[Birth, Retake] | None:
    """The operation of a step that made a tensor non-finite, found by taking the step again on a copy.

    Args:
        optimizer: The optimizer; `exact`: as it was before the step, its gradients those of the step.
        harm: What the step made non-finite, with the values that it made.
        mark: The line that called ``step``.
        exact: Nothing has to be guessed. Otherwise the step starts from the state that it left, less what is not
            finite in it.
        gradients: The gradients are still those of the step. Otherwise their running mean stands for them.

    Returns:
        The birth, and how the step was taken again; None where no operation goes bad at the same elements.
    """
    means: Sequence[str | None] = [None] if exact or gradients else _means_of(optimizer, harm)
    for mean in means:
        retake = Retake(optimizer, mean, mend_weights=not exact, mend_state=not exact)
        gen = _step_again(retake, harm)
        if gen is not None:
            return _told(birth_of(gen), optimizer, harm, mark, exact), retake
    return None


def retake_with_state(optimizer: Any, harm: Harm, *, gradients: bool) -> Retake:
    """How a step is taken again that state is to blame for: the state is as it was.

    Args:
        optimizer: The optimizer.
        harm: The state.
        gradients: The gradients are still those of the step.
    """
    return Retake(optimizer, None if gradients else _means_of(optimizer, harm)[0], mend_weights=True)


def _told(birth: Birth, optimizer: Any, harm: Harm, mark: Mark | None, exact: bool) -> Birth:
    # An optimizer of the user's own has a line in its step; of torch's, the line that called it is the innermost one.
    within = birth.location if is_user_code(getattr(step_of(optimizer), "__code__", None)) else None
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


def _means_of(optimizer: Any, harm: Harm) -> Sequence[str]:
    """Keys of the state, the likelier first, whose values may be a running mean of the gradient."""
    state = optimizer.state.get(harm.parameter) if harm.parameter in optimizer.state else None
    if not isinstance(state, dict):
        return [""]
    alike = [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == harm.parameter.shape]
    known = [k for k in _MEANS if k in alike]
    if known or type(optimizer).__module__.startswith("torch.optim."):
        return known[:1] or [""]
    return [*alike[:_MOST_MEANS], ""]  # under a name of the user's own


def _step_again(retake: Retake, harm: Harm) -> Gen | None:
    try:
        twin = twin_of_step(retake, _step_by_step)
    except (RuntimeError, TypeError, MemoryError):
        return None
    mine = twin.parameters.get(id(harm.parameter))
    if mine is None:
        return None
    tracer = OpTracer(outside=lambda t: None)
    with stepping(retake, twin, tracer) as step:
        # A user's optimizer may not like a copy, and some need a closure: then what it did until then is all there is.
        with contextlib.suppress(Exception):
            step()
        with quiet():
            made = mine if harm.key is None else twin.optimizer.state.get(mine, {}).get(harm.key)
            if not isinstance(made, Tensor) or made.shape != harm.tensor.shape:
                return None
            line: Line = tracer.ancestry(made)
            same = bool((_finite.bad_mask(made) & _finite.bad_mask(harm.tensor)).any())
    born = sorted((g for g in line if not g.intended and g.kind is BirthKind.OPERATION), key=lambda g: g.order)
    return born[0] if born and same else None


def _step_by_step(twin: Any) -> None:
    for group in twin.param_groups:
        group.update({k: False for k in FAST_FORMS if k in group})
