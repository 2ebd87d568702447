"""Trainings that drift towards an edge, a little each step, until they fall over it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor


@dataclass(frozen=True)
class Drift:
    """One training.

    Attributes:
        model: Makes the model.
        lr: Learning rate of a plain SGD.
        loss: Takes the model and the number of the step.
        guilty: The function or class in which the line is marked.
        kinds: Kinds by which the line may be named before it fails.
    """

    model: Callable[[], nn.Module]
    lr: float
    loss: Callable[[Any, int], Tensor]
    guilty: Any
    kinds: tuple[str, ...]


def data(step: int, *shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(step))


class Boltzmann(nn.Module):
    """An energy that is pushed up without a bound, weighed by hand."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.exp(self.energy(x))  # <-- birth
        return torch.log(weight.sum(-1) + 1.0)


class Gain(nn.Module):
    """Halves, multiplied by a gain that grows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 6)
        self.gain = nn.Parameter(torch.tensor(100.0))

    def forward(self, x: Tensor) -> Tensor:
        h = F.softplus(self.inner(x)).half()
        return (h * self.gain.half() * 16).float()  # <-- birth


class Survival(nn.Module):
    """The logarithm of 1 - p, where p tends to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.tensor([1.0, 1.1, 1.2]))

    def forward(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.rate + 0 * x)
        return p


def survival_loss(model: Any, step: int) -> Tensor:
    p = model(data(step, 3))
    alive = torch.log(1 - p)  # <-- birth
    return alive.mean()


class OnePass(nn.Module):
    """A variance in one pass, beside a mean that runs away."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        var = (x * x).mean(-1) - x.mean(-1) ** 2
        return x.mean() - 1e-3 * torch.sqrt(var).mean()  # <-- birth


class Width(nn.Module):
    """A width that shrinks until it is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor([1.0, 0.33, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        width = self.width * (self.width > 0)
        return (x - 0.5) / width  # <-- birth


def width_loss(model: Any, step: int) -> Tensor:
    return model(data(step, 3)).clamp(-1, 1).mean() + model.width.sum()


class Angle(nn.Module):
    """The angle between two directions that become one."""

    def __init__(self) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.tensor([0.5, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        d = F.normalize(self.direction, dim=0)
        return torch.acos(d @ x)  # <-- birth


def angle_loss(model: Any, step: int) -> Tensor:
    return model(torch.tensor([1.0, 0.0])) ** 2 + 0.0 * data(step, 1).sum()


DRIFTS = {
    "exp": Drift(Boltzmann, 3.0, lambda m, i: -m(data(i, 8, 6)).mean(), Boltzmann.forward, ("exp_overflow",)),
    "half": Drift(Gain, 0.004, lambda m, i: -m(data(i, 8, 6)).mean(), Gain.forward, ("overflow",)),
    "survival": Drift(Survival, 6.0, survival_loss, survival_loss, ("log_zero", "cancellation")),
    "variance": Drift(OnePass, 5.0, lambda m, i: -m(data(i, 4, 8)), OnePass.forward, ("cancellation",)),
    "width": Drift(Width, 0.03, width_loss, Width.forward, ("small_denominator",)),
    "angle": Drift(Angle, 0.3, angle_loss, Angle.forward, ("domain_edge",)),
}
