"""After a skipped step the training is bit for bit one in which the optimizer never saw that batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _sacred import LEVELS, Run, assert_same, blobs, picture, seed_all
from nan_detector import NaNDetector

BAD = 4


class Moody(nn.Module):
    """Draws from every random stream, counts its calls, and has no square root for a poisoned batch."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()))
        self.generator = generator
        self.calls = 0
        self.history: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.history.append(x.mean().item())
        x = x + torch.rand(x.shape, generator=self.generator) * 0.01 + random.random() * float(np.random.rand())
        h = F.dropout(torch.tanh(self.norm(self.first(x))), 0.2, self.training)
        return self.second(h) + torch.sqrt(100.0 + x.mean())


def batch(i: int) -> tuple[Tensor, Tensor]:
    x, y = blobs(seed=i)
    return (x - 1e4 if i == BAD else x), y


def loop(optimizer_of: Callable[[Any], Any], *, drop: bool) -> Run:
    """The plain loop; with `drop` it leaves the bad batch's step out by itself."""
    generator = torch.Generator().manual_seed(1)
    model = Moody(generator)
    optimizer = optimizer_of(model.parameters())

    def step(i: int) -> float:
        x, y = batch(i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if not (drop and i == BAD):
            optimizer.step()
        return loss.item()

    return Run([model], [optimizer], step, generators=[generator])


def with_closure(optimizer_of: Callable[[Any], Any], *, drop: bool) -> Run:
    run = loop(optimizer_of, drop=drop)
    model, optimizer = run.models[0], run.optimizers[0]

    def step(i: int) -> float:
        x, y = batch(i)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return (closure() if drop and i == BAD else optimizer.step(closure)).item()

    run.step = step
    return run


def accumulating(optimizer_of: Callable[[Any], Any], *, drop: bool) -> Run:
    run = loop(optimizer_of, drop=drop)
    model, optimizer = run.models[0], run.optimizers[0]

    def step(i: int) -> float:
        total = 0.0
        for x, y in (batch(i), batch(10 + i)):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not (drop and i == BAD):
            optimizer.step()
        optimizer.zero_grad()
        return total

    run.step = step
    return run


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def run_of(make: Any, optimizer: str, watch: str | None, steps: int = 9, **options: Any) -> dict[str, Any]:
    seed_all()
    run = make(OPTIMIZERS[optimizer], drop=watch is None)
    if watch is None:
        losses = [run.step(i) for i in range(steps)]
    else:
        det = NaNDetector(run.models, watch=watch, verbose=False, grad_norm_warn=float("inf"), **options)
        with det:
            losses = [run.step(i) for i in range(steps)]
        assert [e.step for e in det.all_events] == [BAD]
        event = det.event
        assert event is not None and (event.op, event.reproduced, event.weights) == ("sqrt", "yes", "clean")
    return {"losses": losses, **picture(run)}


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("make", [loop, with_closure, accumulating])
def test_the_rest_is_bit_equal(make: Any, watch: str) -> None:
    assert_same(run_of(make, "adam", None), run_of(make, "adam", watch, on_nan="skip", stop_on_first=False))


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_with_other_optimizers(optimizer: str) -> None:
    assert_same(run_of(loop, optimizer, None), run_of(loop, optimizer, "step", on_nan="skip"))


def test_stop_that_was_read_goes_on_as_skip_does() -> None:
    seed_all()
    run = loop(OPTIMIZERS["adam"], drop=False)
    with NaNDetector(run.models, verbose=False, grad_norm_warn=float("inf")) as det:
        losses = []
        for i in range(9):
            losses.append(run.step(i))
            assert det.triggered == (i >= BAD)
    assert_same(run_of(loop, "adam", None), {"losses": losses, **picture(run)})
