"""What watching costs, measured here and now: the same training bare, with the detector, and in anomaly mode.

The variants take turns in short rounds, so that a machine that slows down slows all of them, and medians of single
steps are compared. A second bare run shows how far two equal runs lie apart: differences below that mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nan_detector._demo.model import DigitsNet
from nan_detector._demo.training import BATCH, MOMENTUM, seeded
from nan_detector._detector import NaNDetector

BARE, BARE_AGAIN = "bare", "bare again"
OURS = 'nan-detector, watch="step"'
ANOMALY = "torch.autograd.set_detect_anomaly"

_CALM_RATE = 0.01  # all variants must stay finite
_WARM = 6  # steps after each change of turn that are not counted: caches are cold, and ours has just attached
_PER_TURN = 20


@dataclass(frozen=True)
class Costs:
    """Medians of whole training steps (forward, loss, backward, optimizer).

    Attributes:
        median_ms: Milliseconds per variant, `BARE` first.
        steps: Steps counted per variant.
    """

    median_ms: dict[str, float]
    steps: int

    def ratio(self, variant: str) -> float:
        """Time of a step of `variant` over that of a bare one."""
        return self.median_ms[variant] / self.median_ms[BARE]


class _Runner:
    """One variant: a model and an optimizer of its own, and what is switched on while it has its turn."""

    def __init__(
        self, images: Tensor, labels: Tensor, seed: int, watch: Callable[[nn.Module], AbstractContextManager[object]]
    ) -> None:
        self.images, self.labels = images, labels
        self.model = seeded(DigitsNet, seed)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_CALM_RATE, momentum=MOMENTUM)
        self.watch = watch
        self.seconds: list[float] = []

    def turn(self) -> None:
        """Take a few steps under the watch, and note how long each took."""
        with self.watch(self.model):
            taken = [self._timed_step() for _ in range(_WARM + _PER_TURN)]
        self.seconds += taken[_WARM:]

    def _timed_step(self) -> float:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()
        self.optimizer.step()
        return time.perf_counter() - start


def measure(
    images: Tensor,
    labels: Tensor,
    *,
    seed: int,
    rounds: int = 20,
    budget_s: float = 15.0,
    on_round: Callable[[int, int], object] = lambda done, of: None,
) -> Costs:
    """Time the variants in turns, on one batch of the digits.

    Args:
        images: float32, shape (n, 1, 8, 8); the first `BATCH` are used.
        labels: int64, shape (n,).
        seed: Seed of the weights.
        rounds: Most rounds; each gives every variant one turn.
        budget_s: Seconds after which no further round begins.
        on_round: Called after each round with the rounds done and their most.
    """
    batch = images[:BATCH], labels[:BATCH]
    watches: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
        BARE: lambda model: nullcontext(),
        OURS: lambda model: NaNDetector(model, verbose=False),
        ANOMALY: lambda model: torch.autograd.set_detect_anomaly(True),
        BARE_AGAIN: lambda model: nullcontext(),
    }
    runners = {name: _Runner(*batch, seed, watch) for name, watch in watches.items()}
    order = list(runners.values())
    deadline = time.perf_counter() + budget_s
    for done in range(1, rounds + 1):
        for runner in order:
            runner.turn()
        # Whoever comes after the slowest variant finds other caches: everyone gets every place.
        order = order[1:] + order[:1]
        on_round(done, rounds)
        if time.perf_counter() > deadline:
            break
    return Costs(
        median_ms={name: statistics.median(r.seconds) * 1e3 for name, r in runners.items()},
        steps=len(next(iter(runners.values())).seconds),
    )
