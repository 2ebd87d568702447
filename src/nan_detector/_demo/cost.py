"""What watching costs, measured here and now: the same training bare, with the detector, and in anomaly mode.

The variants take turns in short rounds, so that a machine that slows down slows all of them, and medians of single
steps are compared. A second bare run shows how far two equal runs lie apart: differences below that mean nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nan_detector._bench.results import BARE, BARE_AGAIN
from nan_detector._bench.timing import Contestant, Step, in_turns
from nan_detector._demo.model import DigitsNet
from nan_detector._demo.training import BATCH, MOMENTUM, seeded
from nan_detector._detector import NaNDetector

OURS = 'nan-detector, watch="step"'
ANOMALY = "torch.autograd.set_detect_anomaly"

_CALM_RATE = 0.01  # all variants must stay finite
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


_Watch = Callable[[nn.Module], AbstractContextManager[object]]


def _contestant(name: str, images: Tensor, labels: Tensor, seed: int, watch: _Watch) -> Contestant:
    """One variant: a model and an optimizer of its own, and what is switched on while it has its turn."""
    model = seeded(DigitsNet, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=_CALM_RATE, momentum=MOMENTUM)

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        forward = time.perf_counter()
        loss.backward()
        optimizer.step()
        return forward

    @contextmanager
    def watched() -> Iterator[Step]:
        with watch(model):
            yield step

    return Contestant(name, watched, _PER_TURN)


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
    watches: dict[str, _Watch] = {
        BARE: lambda model: nullcontext(),
        OURS: lambda model: NaNDetector(model, verbose=False),
        ANOMALY: lambda model: torch.autograd.set_detect_anomaly(True),
        BARE_AGAIN: lambda model: nullcontext(),
    }
    found = in_turns(
        [_contestant(name, *batch, seed, watch) for name, watch in watches.items()],
        rounds=rounds,
        budget_s=budget_s,
        on_round=on_round,
    )
    seconds = {name: [s for b in blocks if b is not None for s in b.steps] for name, blocks in found.items()}
    return Costs({name: statistics.median(s) * 1e3 for name, s in seconds.items()}, len(seconds[BARE]))
