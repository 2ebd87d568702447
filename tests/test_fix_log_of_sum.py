"""An exponential that overflows on its way into log(sum(exp(z))): the way out bounds nothing, it never forms it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector, NaNEvent

Tensor = torch.Tensor


def in_one_line(z: Tensor) -> Tensor:
    return torch.log(torch.exp(z).sum(1))


def over_lines(z: Tensor) -> Tensor:
    weights = z.exp()
    total = weights.sum(dim=-1, keepdim=True)
    return total.log()


def in_a_loop(z: Tensor) -> Tensor:
    a = z
    for _ in range(3):
        a = torch.log(torch.exp(a[:, :, None] + z[:, None, :]).sum(1))
    return a


def on_its_own(z: Tensor) -> Tensor:
    return torch.exp(z).sum(1)


def normalised(z: Tensor) -> Tensor:
    """The sum of the exponentials is used, and the logarithm is of something else."""
    e = torch.exp(z)
    return torch.log(1 + z.square()) * (e / e.sum(1, keepdim=True))


def event_of(loss_of: Callable[[Tensor], Tensor]) -> NaNEvent:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        loss_of(200 * model(torch.full((2, 3), 2.0))).mean().backward()
        optimizer.step()
        assert det.triggered
    assert det.event is not None and det.event.cause is not None and det.event.cause.code == "exp_overflow"
    return det.event


def fix_of(event: NaNEvent) -> str:
    return next(t.detail for t in event.trials if t.name.startswith("fix") and t.finite)


@pytest.mark.parametrize(
    ("loss_of", "written"),
    [
        (in_one_line, "torch.logsumexp(z, 1) where torch.exp(z).sum(1) is the sum of torch.exp(z)"),
        (over_lines, "torch.logsumexp(z, -1, keepdim=True) where total is the sum of torch.exp(z)"),
    ],
)
def test_logsumexp_is_the_fix_and_its_loss_is_the_true_one(loss_of: Callable[[Tensor], Tensor], written: str) -> None:
    event = event_of(loss_of)
    assert fix_of(event).startswith(written)
    exact = next(t.detail for t in event.trials if t.name == "float64")
    assert f"loss {exact.split('loss ')[1].rstrip('.)')}" in fix_of(event)


def test_each_round_of_a_loop_is_mended() -> None:
    assert "torch.logsumexp(z, 1)" in fix_of(event_of(in_a_loop))


@pytest.mark.parametrize("loss_of", [on_its_own, normalised])
def test_without_a_logarithm_of_the_sum_the_exponential_is_bounded(loss_of: Callable[[Tensor], Tensor]) -> None:
    assert "logsumexp" not in fix_of(event_of(loss_of))
