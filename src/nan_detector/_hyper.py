"""Hyperparameters judged as plain numbers, before the step that would use them.

A learning rate of NaN poisons every weight although every gradient is finite. Only numbers that are on the host
already are looked at: a tensor on a device is left alone, because reading it would wait for that device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

ProblemKind = Literal["nan", "inf", "complex", "negative", "eps_underflow"]

_INF = math.inf
_REAL = (float, int)
_NAMES = ("lr", "weight_decay", "momentum", "betas", "eps")


@dataclass(frozen=True, slots=True)
class HyperProblem:
    """A hyperparameter that will damage the weights.

    Attributes:
        kind: What is wrong, as a stable word. A "negative" learning rate is finite: it climbs, it makes no NaN.
        group: Index of the parameter group.
        name: Key in the group; "betas[1]" for an element of a tuple.
        value: The number.
        message: A sentence for a person, with the way out.
    """

    kind: ProblemKind
    group: int
    name: str
    value: float | complex
    message: str


def bad_hyperparameter(optimizer: Optimizer) -> HyperProblem | None:
    """The first learning rate, weight decay, momentum, beta or epsilon that is NaN, infinite or complex.

    Also a learning rate below 0. Any other key of a group is the optimizer's own business: an infinite
    ``max_norm`` means "off". About 0.5 µs for one group of Adam.

    Args:
        optimizer: The optimizer about to step.
    """
    climbing = None
    for index, group in enumerate(optimizer.param_groups):
        if _looks_sound(group):
            continue
        for name in _NAMES:
            problem = _examined(index, name, group.get(name))
            if problem is None:
                continue
            if problem.kind != "negative":
                return problem
            climbing = climbing or problem  # the least of the evils: another group may hold a NaN
    return climbing


def eps_underflow(optimizer: Optimizer) -> list[HyperProblem]:
    """Every epsilon that rounds to 0 in the dtype of a parameter it guards, such as Adam's 1e-8 in float16.

    Where the gradient of an element has been 0 since the start, the update is then 0 divided by 0. Torch's fused
    kernels compute in a wider type and are left out.

    Args:
        optimizer: Any optimizer; only groups with "eps" are looked at.

    Returns:
        One problem per group and dtype.
    """
    problems = []
    for index, group in enumerate(optimizer.param_groups):
        if group.get("fused"):
            continue
        dtypes = dict.fromkeys(p.dtype for p in group["params"] if p.is_floating_point())
        for name, value in _numbers("eps", group.get("eps")):
            for dtype in dtypes:
                if (
                    isinstance(value, float)
                    and value > 0.0
                    and torch.tensor(value, dtype=dtype, device="cpu").item() == 0.0
                ):
                    problems.append(_underflow(index, name, value, dtype, type(optimizer).__name__))
    return problems


def _looks_sound(group: dict[str, Any]) -> bool:
    # This runs before every step: a sum is finite only if all in it are (or cancel to NaN), and one comparison tells.
    # False only means "look closer": a tuple of another length, a tensor, a numpy scalar.
    get = group.get
    lr, eps, betas = get("lr", 0.0), get("eps", 0.0), get("betas")
    if type(lr) not in _REAL or type(eps) not in _REAL:
        return False
    try:
        total = lr + eps + get("weight_decay", 0.0) + get("momentum", 0.0)
        if betas is not None:
            first, second = betas
            total = total + first + second
    except (TypeError, ValueError, ArithmeticError):
        return False
    return type(total) in _REAL and lr >= 0.0 and -_INF < total < _INF


def _examined(index: int, name: str, value: object) -> HyperProblem | None:
    for key, number in _numbers(name, value):
        if isinstance(number, complex):
            why = "is complex (in Python a negative number to a fractional power is)"
            return _problem("complex", index, key, number, why)
        if math.isnan(number):
            return _problem("nan", index, key, number, "is not a number")
        if math.isinf(number):
            return _problem("inf", index, key, number, "is infinite")
        if name == "lr" and number < 0:
            return _problem("negative", index, key, number, "is below 0: each step goes uphill")
    return None


def _problem(kind: ProblemKind, index: int, name: str, value: float | complex, why: str) -> HyperProblem:
    key = name.split("[")[0]
    message = (
        f"{name}={value!r} of parameter group {index} {why}. "
        f"Look at what sets optimizer.param_groups[{index}][{key!r}]: a scheduler, or code that writes to it."
    )
    return HyperProblem(kind, index, name, value, message)


def _underflow(index: int, name: str, value: float, dtype: torch.dtype, optimizer: str) -> HyperProblem:
    least = torch.finfo(dtype).smallest_normal
    message = (
        f"{name}={value!r} of parameter group {index} rounds to 0 in {dtype}: where a gradient stays 0, "
        f"{optimizer} may divide 0 by 0. Use an eps of at least {least:.1e}, "
        "or keep the parameters in float32 under autocast."
    )
    return HyperProblem("eps_underflow", index, name, value, message)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float | complex]]:
    """The host numbers in a hyperparameter, each with its name: itself, or the elements of a tuple or list."""
    if isinstance(value, (tuple, list)):
        for i, element in enumerate(value):
            number = _number(element)
            if number is not None:
                yield f"{name}[{i}]", number
    elif (number := _number(value)) is not None:
        yield name, number


def _number(value: Any) -> float | complex | None:
    """A Python number, or None for what is not a number or could only be read by waiting for a device."""
    if isinstance(value, float):
        return float(value)  # numpy's float64 is one too
    if isinstance(value, torch.Tensor):
        # Exactly a tensor: subclasses (fake tensors) may say "cpu" and have no value.
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.device.type != "cpu" or value.numel() != 1:
            return None
        value = value.item()
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        # complex() first: numpy's complex scalars turn into a float with no more than a warning.
        number = complex(value)
    except OverflowError:  # an int beyond every float, which the step could not use either
        return _INF if value > 0 else -_INF
    except (TypeError, ValueError, ArithmeticError):
        return None
    is_complex = isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"
    return number if is_complex else number.real
