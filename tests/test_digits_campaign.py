"""A real training into which bad batches are thrown at random: "skip" and "rollback" get as far as the clean run."""

from __future__ import annotations

import random
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from nan_detector import NaNDetector

SHARE = 0.01


@cache
def digits() -> tuple[Tensor, Tensor]:
    datasets = pytest.importorskip("sklearn.datasets", reason="the digits come with scikit-learn")
    data = datasets.load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16.0, torch.tensor(data.target)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def accuracy(seed: int, steps: int, on_nan: str | None) -> tuple[float, int, NaNDetector | None]:
    """Percent right on the held-out digits, the number of bad batches, and the detector; None is the clean run."""
    torch.manual_seed(seed)
    x, y = digits()
    order = torch.randperm(len(x))
    train, test = order[:1200], order[1200:]
    dice, thrown = random.Random(seed), 0

    def collate(samples: list[Any]) -> Any:
        nonlocal thrown
        inputs, labels = default_collate(samples)
        if on_nan is not None and dice.random() < SHARE:
            inputs[dice.randrange(len(inputs)), dice.randrange(64)] = float("nan")
            thrown += 1
        return inputs, labels

    loader = DataLoader(TensorDataset(x[train], y[train]), batch_size=64, shuffle=True, collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    det = None if on_nan is None else NaNDetector(model, on_nan=on_nan, stop_on_first=False, verbose=False)
    if det is not None:
        det.attach()
    step = 0
    while step < steps:
        for inputs, labels in islice(loader, steps - step):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            scheduler.step()
            step += 1
    if det is not None:
        det.detach()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    model.eval()
    if on_nan == "skip":
        mend(model, x[train])
    with torch.no_grad():
        right = (model(x[test]).argmax(1) == y[test]).float().mean().item()
    return 100.0 * right, thrown, det


def mend(model: nn.Module, x: Tensor) -> None:
    """Running statistics that a bad batch has spoilt are the user's to restore: the events say so."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
            module.momentum = None
    model.train()
    with torch.no_grad():
        model(x)
    model.eval()


def check(on_nan: str, seed: int, steps: int) -> tuple[float, float]:
    clean, _, _ = accuracy(seed, steps, None)
    kept, thrown, det = accuracy(seed, steps, on_nan)
    assert det is not None and thrown > 0
    assert det.skipped_steps == thrown and len(det.all_events) == thrown
    actions: set[Any] = {(e.phase, e.op is not None, e.action) for e in det.all_events}
    assert actions == {("data", True, on_nan)}, actions
    return clean, kept


@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
def test_a_short_run_gets_there(on_nan: str) -> None:
    clean, kept = check(on_nan, seed=1, steps=300)
    assert clean > 90.0 and kept > clean - 3.0, (clean, kept)


@pytest.mark.campaign
@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
def test_the_final_accuracy_is_that_of_the_clean_run(on_nan: str) -> None:
    """2,000 steps, five seeds, one batch in a hundred bad: within half a point."""
    results = [check(on_nan, seed, 2000) for seed in range(5)]
    clean = sum(c for c, _ in results) / len(results)
    kept = sum(k for _, k in results) / len(results)
    assert abs(clean - kept) <= 0.5 and all(abs(c - k) <= 1.0 for c, k in results), results
