"""Trainings for the tests of policies that protect the weights: batches by number, bad ones on demand."""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nan_detector import NaNDetector, NaNEvent


class Net(nn.Module):
    """A classifier with everything that a step moves: weights, running statistics, dropout, a counter, a list."""

    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)
        self.norm = nn.BatchNorm1d(12) if batch_norm else nn.Identity()
        self.calls = 0
        self.means: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.means.append(float(x.mean()))
        h = F.dropout(torch.relu(self.norm(self.first(x))), 0.2, self.training)
        return self.second(h)


def batch(i: int, bad: bool = False) -> tuple[Tensor, Tensor]:
    """Batch number `i`: always the same, whatever the random streams."""
    return _batch(i, bad)


@functools.cache
def _batch(i: int, bad: bool) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 + i)
    y = torch.randint(0, 3, (16,), generator=g)
    x = torch.randn(16, 6, generator=g) + F.one_hot(y, 6) * 2.0
    if bad:
        x[3, 2] = float("nan")
    return x, y


# Made before any watch begins, as a loader's worker does it.
for _i in range(12):
    batch(_i, False), batch(_i, True)


# PyTorch wraps the step of a class when its first instance is made, for good: none of our doing.
torch.optim.LBFGS([torch.zeros(1)])


def seed_all(seed: int = 5) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def picture(model: nn.Module, optimizer: Any, *more: Any) -> dict[str, Any]:
    """A copy of all that a rollback has to put back."""
    return copy.deepcopy(
        {
            "model": dict(model.state_dict()),
            "attributes": [
                {n: v for n, v in vars(m).items() if isinstance(v, (int, list, float))} for m in model.modules()
            ],
            "optimizer": optimizer.state_dict(),
            "more": [m.state_dict() for m in more],
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
    )


def same(a: Any, b: Any) -> bool:
    """Bit for bit, NaN included."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return a.detach().cpu().numpy().tobytes() == b.detach().cpu().numpy().tobytes()
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b or (a != a and b != b))


def detector(model: Any, **options: Any) -> NaNDetector:
    """Quiet, and without thresholds that a test is not about."""
    return NaNDetector(model, **{"verbose": False, "grad_norm_warn": float("inf"), **options})


def marked(function: Callable[..., Any], mark: str = "# <-- here") -> tuple[str, int]:
    """File name and line of the marked line of `function`."""
    lines, first = inspect.getsourcelines(function)
    at = [first + i for i, line in enumerate(lines) if mark in line]
    assert len(at) == 1, at
    return Path(inspect.getsourcefile(function) or "").name, at[0]


def line_of(event: NaNEvent) -> tuple[str, int] | None:
    """The same of an event."""
    return None if event.location is None else (Path(event.location.file).name, event.location.line)
