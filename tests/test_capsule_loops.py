"""Loops of every kind leave a capsule that gives the same event again: accumulation, two models, closures, streams."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nan_detector import NaNDetector
from nan_detector._capsule.again import again
from nan_detector._capsule.read import open_capsule

Tensor = torch.Tensor
Watch = Callable[..., NaNDetector]

# The first one of a process has PyTorch wrap its class's `step` for good, which is nothing that a test left behind.
torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    torch.manual_seed(0)
    return lambda model, **options: NaNDetector(model, verbose=False, capsule=True, log_dir=tmp_path, **options)


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def assert_again(det: NaNDetector, factory: Callable[[], Any], op: str, phase: str, loss: Any = None) -> None:
    """The capsule of the event gives the event again, with a model whose weights are others."""
    event = det.event
    assert event is not None and event.capsule is not None
    assert (event.op, event.phase, event.reproduced) == (op, phase, "yes"), event.notes
    result = again(open_capsule(Path(event.capsule)), factory, loss)
    assert result.same, (result.differences, result.event.notes)
    assert result.event.output == event.output
    assert (Path(event.capsule) / "repro.py").exists()


def test_accumulated_gradients(watch: Watch):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model) as det:
        for j in range(3):
            out = model(torch.randn(4, 3))
            ((out.abs() if j != 1 else out * 0).log().sum() / 3).backward()
        optimizer.step()
    assert det.event is not None and det.event.micro_step == 1
    assert_again(det, linear, "log", "loss")


def gan() -> dict[str, nn.Module]:
    return {"maker": nn.Linear(2, 3), "judge": nn.Linear(3, 1)}


def test_two_models_and_two_optimizers(watch: Watch):
    models = gan()
    maker, judge = models.values()
    of_maker, of_judge = (torch.optim.Adam(m.parameters()) for m in models.values())
    with watch(models) as det:
        fake = maker(torch.randn(5, 2))
        of_judge.zero_grad()
        loss = -torch.sigmoid(judge(torch.randn(5, 3))).log().mean()
        (loss - (1 - torch.sigmoid(judge(fake.detach()))).log().mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        (judge(fake) * 0.0).sqrt().mean().backward()
        of_maker.step()
    assert_again(det, gan, "sqrt", "backward")


def test_a_step_function(watch: Watch):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) / y.sum()
        loss.backward()
        optimizer.step()
        return loss

    with watch(model) as det:
        det.run_step(step, torch.randn(4, 3), torch.zeros(4, 2))
    assert_again(det, linear, "div", "loss")


class Noisy(nn.Module):
    """Draws from a generator of its own, from Python's and from NumPy's stream, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.generator = torch.Generator().manual_seed(3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x * torch.rand(x.shape, generator=self.generator)
        x = self.linear(x) * (random.random() + float(np.random.rand()))
        return torch.log(x - x.detach() + (self.calls - 5)) + x


def test_streams_and_counters_of_the_model(watch: Watch):
    model = Noisy()
    model.calls = 4
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model) as det:
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert_again(det, Noisy, "log", "forward")


def test_a_loop_without_an_optimizer(watch: Watch):
    model = linear()
    with watch(model) as det:
        (model(torch.randn(4, 3)).sum() / 0).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]  # the backward gave it
    assert_again(det, linear, "div", "loss")


def test_autocast_with_a_scaler_and_clipping(watch: Watch):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with watch(model) as det:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(4, 3)).float()
            loss = (out * out).mean() / torch.zeros(())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert_again(det, linear, "div", "loss")


def test_a_step_that_raised(watch: Watch):
    model = linear()
    with pytest.raises(RuntimeError, match="bad loss"), watch(model) as det:
        loss = model(torch.randn(4, 3)).sum() / 0.0
        if not torch.isfinite(loss):
            raise RuntimeError("bad loss")
    assert_again(det, linear, "div", "loss")


@pytest.mark.parametrize("level", ["layers", "ops"])
def test_other_watch_levels(level: str, watch: Watch):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, watch=level) as det:
        (-model(torch.randn(4, 3)).abs() - 1).sqrt().sum().backward()
        optimizer.step()
    assert_again(det, linear, "sqrt", "loss")


@dataclass
class Output:
    logits: Tensor
    mean: Tensor


class OfADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch: dict[str, Any]) -> Output:
        out = self.linear(batch["x"])
        return Output(out, out.mean())


@pytest.mark.parametrize("named", [False, True])
def test_a_closure_a_dict_and_a_dataclass(named: bool, watch: Watch):
    model = OfADict()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    batch = {"x": torch.randn(4, 3), "y": torch.randint(0, 2, (4,)), "ids": ["a", "b", "c", "d"]}

    def closure() -> Tensor:
        optimizer.zero_grad()
        out = model(batch)
        loss = F.cross_entropy(out.logits, batch["y"]) + (out.mean * 0).sqrt()
        loss.backward()
        return loss

    def loss_of(output: Output, tensors: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(output.logits, tensors['batch["y"]']) + (output.mean * 0).sqrt()

    with watch(model) as det:
        optimizer.step(closure)
    assert_again(det, OfADict, "sqrt", "backward", loss_of if named else None)


def test_what_the_optimizer_did_has_no_capsule(watch: Watch, tmp_path: Path):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model) as det:
        optimizer.param_groups[0]["lr"] = float("nan")
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert det.event is not None and det.event.phase == "optimizer" and det.event.capsule is None
    assert not (tmp_path / "capsules").exists()
