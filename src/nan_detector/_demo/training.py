"""The first training: the plain loop of the documentation, on the digits, with a schedule that somebody mistyped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from nan_detector._demo.data import batches
from nan_detector._demo.model import DigitsNet
from nan_detector._detector import NaNDetector

if TYPE_CHECKING:
    from nan_detector._history import History
    from nan_detector._records import NaNEvent

BATCH, STEPS = 128, 200
LEARNING_RATE, MOMENTUM = 0.06, 0.9
WARMUP, MILESTONE = 20, 80
FACTOR = 10.0  # 0.1 was meant: the rate should have come down here


@dataclass(frozen=True)
class Progress:
    """One step as the loop saw it; `accuracy` is that of the step's own batch."""

    step: int
    learning_rate: float
    loss: float
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """How the training ended.

    Attributes:
        progress: Every step, oldest first, the bad one included.
        event: The birth, or None where all steps were finite.
        first_warning: Step of the first gradient warning, or None.
        history: The flight recorder's rows.
        weights_finite: Whether every parameter is finite now, checked by plain PyTorch.
        overhead_ms: Milliseconds the detector took per step.
    """

    progress: tuple[Progress, ...]
    event: NaNEvent | None
    first_warning: int | None
    history: History
    weights_finite: bool
    overhead_ms: float


def schedule(step: int) -> float:
    """Factor on the learning rate: a linear warm-up, a plateau, and from `MILESTONE` on the mistake."""
    return min(1.0, (step + 1) / WARMUP) * (FACTOR if step >= MILESTONE else 1.0)


def train_digits(
    images: Tensor,
    labels: Tensor,
    *,
    seed: int,
    log_dir: Path | None,
    steps: int = STEPS,
    on_step: Callable[[Progress], object] = lambda _: None,
) -> Outcome:
    """Train a new `DigitsNet` until the detector stops it, or for `steps` steps.

    Args:
        images: float32, shape (n, 1, 8, 8).
        labels: int64, shape (n,).
        seed: Seed of the weights and of the order of the images; the caller's random state is left alone.
        log_dir: Folder of the event log; None to write none.
        steps: Most steps.
        on_step: Called after each step.
    """
    generator = torch.Generator().manual_seed(seed)
    model = seeded(DigitsNet, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    scheduler = LambdaLR(optimizer, schedule)
    progress: list[Progress] = []
    with NaNDetector(model, log_dir=log_dir, verbose=False) as det:
        loader = batches(images, labels, size=BATCH, steps=steps, generator=generator)
        for step, (inputs, targets) in enumerate(loader):
            det.set_batch(step)
            optimizer.zero_grad()
            logits = model(inputs)
            loss = F.cross_entropy(logits, targets)
            loss.backward()
            optimizer.step()
            right = (logits.argmax(1) == targets).float().mean()
            progress.append(Progress(step, float(scheduler.get_last_lr()[0]), loss.item(), right.item()))
            on_step(progress[-1])
            if det.triggered:
                break
            scheduler.step()
    return Outcome(
        progress=tuple(progress),
        event=det.event,
        first_warning=min((g.batch_idx for g in det.grad_events), default=None),
        history=det.history,
        weights_finite=weights_finite(model),
        overhead_ms=det.overhead_ms,
    )


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """What `build` makes from this seed; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        return build()


def weights_finite(model: nn.Module) -> bool:
    """True when every parameter is finite, checked by plain PyTorch rather than by the detector."""
    return all(bool(torch.isfinite(p).all()) for p in model.parameters())
