"""Small trainings whose backward pass goes wrong, and the question every one of them is asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from nan_detector import NaNDetector, NaNEvent

Tensor = torch.Tensor
Step = Callable[[nn.Module, torch.optim.Optimizer, Any], Any]

MARK = "# <-- birth"


def marked_line(where: Any) -> tuple[str, int]:
    """File and line of the one marked line in the source of `where` (a function or class)."""
    lines, start = inspect.getsourcelines(where)
    found = [start + i for i, text in enumerate(lines) if MARK in text]
    assert len(found) == 1, f"{where} has {len(found)} marked lines"
    file = inspect.getsourcefile(where)
    assert file is not None
    return file, found[0]


class Scale(nn.Module):
    """x · w without a bias: where x is 0 the result is exactly 0, whatever the weights have become."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Formula(nn.Module):
    """A module around a formula, whose line is the user's."""

    def __init__(self, formula: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x)


class Net(nn.Module):
    """scale -> formula -> a number, so that the formula's derivative reaches `scale.weight`."""

    def __init__(self, formula: Callable[[Tensor], Tensor], size: int = 4) -> None:
        super().__init__()
        self.scale = Scale(size)
        self.part = Formula(formula)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.scale(x))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    """zero_grad, forward, mean, backward, step."""
    optimizer.zero_grad()
    out = model(batch)
    loss = (out.real if out.is_complex() else out).mean()
    loss.backward()
    optimizer.step()
    return loss


def train(
    model: nn.Module,
    batches: Iterable[Any],
    step: Step = plain_step,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float = 1e-3,
    **options: Any,
) -> NaNDetector:
    """Train in a plain loop under the watch until something is found; the detector is detached when this returns."""
    made = optimizer if optimizer is not None else torch.optim.SGD(model.parameters(), lr=lr)
    with NaNDetector(model, verbose=False, **options) as det:
        for batch in batches:
            step(model, made, batch)
            if det.triggered:
                break
    return det


def born(
    det: NaNDetector,
    where: Any,
    *,
    op: str | tuple[str, ...],
    layer: str | None,
    step: int = 1,
    phase: str = "backward",
    micro_step: int = 0,
) -> NaNEvent:
    """Assert that the event is whole and names the marked line of `where`."""
    event = det.event
    assert event is not None, "no event"
    ops = (op,) if isinstance(op, str) else op
    found = (event.location.file, event.location.line) if event.location else None
    assert (event.step, event.phase, found, event.layer_name, event.micro_step, event.reproduced) == (
        step,
        phase,
        marked_line(where),
        layer,
        micro_step,
        "yes",
    ), (
        f"{event.op} {event.step} {event.phase} {found} {event.layer_name} {event.micro_step} {event.reproduced} "
        f"{event.notes} {event.symptom}; expected {marked_line(where)}"
    )
    assert event.op in ops
    assert event.severity == "error"
    assert event.weights == "clean"
    return event


def quiet(det: NaNDetector) -> None:
    """Assert that nothing was found."""
    assert det.event is None, f"{det.event.op} {det.event.location} {det.event.notes} {det.event.symptom}"


def finite_weights(model: nn.Module) -> bool:
    """Whether every parameter of `model` is finite."""
    return all(bool(torch.isfinite(torch.view_as_real(p) if p.is_complex() else p).all()) for p in model.parameters())


def two(first: Tensor, second: Tensor) -> Iterator[Tensor]:
    """A healthy batch, then one that hits the edge."""
    yield first
    yield second
