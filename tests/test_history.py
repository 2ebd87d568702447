"""The flight recorder as the user sees it: columns, arrays, CSV, at every level."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nan_detector import NaNDetector


class Net(nn.Module):
    """The second half takes part in every second step only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(x)
        if self.calls % 2:
            x = self.second(x)
        return self.head(x)


def train(watch: str, n: int = 12, history: int = 1000) -> tuple[NaNDetector, list[float], list[float]]:
    """A run; its losses, and the largest magnitudes that `first` gave."""
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    losses, largest = [], []
    with NaNDetector(model, watch=watch, history=history, verbose=False) as det:
        for _ in range(n):
            x = torch.randn(16, 8)
            with torch.no_grad():
                largest.append(F.linear(x, model.first.weight, model.first.bias).abs().max().item())
            opt.zero_grad()
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
            loss.backward()
            opt.step()
            schedule.step()
            losses.append(loss.item())
    assert det.event is None
    return det, losses, largest


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_columns_and_arrays(watch: str) -> None:
    det, losses, _ = train(watch)
    history = det.history
    assert len(history) == 12 and history.steps.tolist() == list(range(12)) and history.steps.dtype == np.int64
    assert {"loss", "grad_norm", "max_grad_norm", "grad_norm:first.weight", "lr", "loss_scale"} <= set(history.columns)
    assert history.values["loss"] == pytest.approx(losses)
    assert history.values["lr"] == pytest.approx([0.01 * 0.9**i for i in range(12)])
    each = [history.values[c] for c in history.columns if c.startswith("grad_norm:")]
    total = np.sqrt(np.nansum(np.square(each), axis=0))
    assert history.values["grad_norm"] == pytest.approx(total, rel=1e-5)
    assert any(c.startswith("abs_max:") for c in history.columns) == (watch == "layers")


def test_largest_magnitudes_of_layers() -> None:
    det, _, largest = train("layers")
    history = det.history
    assert {c for c in history.columns if c.startswith("abs_max:")} == {
        "abs_max:first", "abs_max:second", "abs_max:head", "abs_max:root", "abs_max:root input",
    }  # fmt: skip
    assert history.values["abs_max:first"] == pytest.approx(largest, rel=1e-5)
    took_part = history.recorded["abs_max:second"]
    assert took_part.tolist() == [True, False] * 6
    assert np.isnan(history.values["abs_max:second"][~took_part]).all()
    assert np.isfinite(history.values["abs_max:second"][took_part]).all()


@pytest.mark.parametrize("watch", ["step", "layers"])
def test_csv(watch: str, tmp_path: Path) -> None:
    det, losses, largest = train(watch)
    det.history.to_csv(tmp_path / "run.csv")
    with open(tmp_path / "run.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [int(r["step"]) for r in rows] == list(range(12))
    assert [float(r["loss"]) for r in rows] == pytest.approx(losses)
    assert all(r["loss_scale"] == "" for r in rows)
    if watch == "layers":
        assert [float(r["abs_max:first"]) for r in rows] == pytest.approx(largest, rel=1e-5)
        assert [r["abs_max:second"] == "" for r in rows] == [False, True] * 6


def test_bounded_to_the_last_rows() -> None:
    det, losses, _ = train("layers", n=30, history=8)
    assert det.history.steps.tolist() == list(range(22, 30))
    assert det.history.values["loss"] == pytest.approx(losses[-8:])


def test_what_was_growing_is_told_with_the_event() -> None:
    torch.manual_seed(0)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-9)
    with NaNDetector(model, watch="layers", verbose=False, grad_norm_warn=1e30) as det:
        for i in range(60):
            x = torch.randn(16, 8) * 1e3 * 10.0 ** (max(0, i - 20))
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
            if det.triggered:
                break
    assert det.event is not None
    assert any("|activations|" in s for s in det.event.before), det.event.before
    assert math.isfinite(det.history.values["abs_max:first"][-2])


def told_before(
    model: nn.Module, rate_at: Callable[[int], float], steps: int, *, bad: int | None = None, batch: int = 32
) -> tuple[str, ...]:
    """What is said of the steps before, after a training whose learning rate is `rate_at`; step `bad` has a NaN."""
    opt = torch.optim.SGD(model.parameters(), lr=1.0)
    truth = torch.randn(8, 1)
    with NaNDetector(model, verbose=False, grad_norm_warn=1e30) as det:
        for i in range(steps):
            opt.param_groups[0]["lr"] = rate_at(i)
            x = torch.randn(batch, 8)
            y = x @ truth
            if i == bad:
                y[0] = math.nan
            opt.zero_grad()
            (model(x) - y).square().mean().backward()
            opt.step()
            if det.triggered:
                break
    assert det.event is not None
    return det.event.before


def test_growth_is_told_with_the_leap_of_the_rate_that_it_began_with() -> None:
    torch.manual_seed(0)
    said = told_before(nn.Linear(8, 1), lambda i: 0.01 if i < 60 else 1.2, 400)
    what = r"(loss|gradient norm( of \w+)?) (grew \S+x per step|doubled every \S+ steps)"
    when = r"since step 60, when the learning rate went from 0\.01 to 1\.2"
    assert re.fullmatch(f"{what} {when}", said[0]), said
    assert all(re.fullmatch(f"{what} since step 60", s) for s in said[1:]), said


@pytest.mark.parametrize(
    ("rate_at", "steps", "batch"),
    [
        (lambda i: 0.01, 600, 32),
        (lambda i: 0.002, 300, 1),  # noisy norms
        (lambda i: 0.01 * min(1.0, (i + 1) / 100), 150, 16),  # still warming up, and just after
        (lambda i: 0.01 * min(1.0, (i + 1) / 100), 60, 16),
        (lambda i: 0.02 * (1 + math.cos(math.pi * i / 200)) / 2, 190, 16),
    ],
)
def test_before_a_bad_batch_of_an_ordinary_run_nothing_grew(
    rate_at: Callable[[int], float], steps: int, batch: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    assert told_before(model, rate_at, steps, bad=steps - 1, batch=batch) == ()
