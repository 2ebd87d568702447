"""The second training: a gradient explosion, which announces itself steps before the first value overflows."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nan_detector._demo.data import CLASSES, EDGE, batches
from nan_detector._demo.training import seeded, weights_finite
from nan_detector._detector import NaNDetector

if TYPE_CHECKING:
    from nan_detector._records import GradEvent, NaNEvent

BATCH, STEPS, HIDDEN = 128, 60, 128
LEARNING_RATE = 10.0  # absurd, and one keystroke away from 0.1


@dataclass(frozen=True)
class Explosion:
    """What the detector said.

    Attributes:
        losses: Loss of every step, oldest first.
        warning: The first gradient beyond the threshold, and the largest of its step; or None.
        event: The first overflow, or None.
        weights_finite: Whether every parameter is finite now.
    """

    losses: tuple[float, ...]
    warning: GradEvent | None
    event: NaNEvent | None
    weights_finite: bool


def network() -> nn.Module:
    """A plain network of three layers, 64 → 128 → 128 → 10."""
    return nn.Sequential(
        OrderedDict(
            input=nn.Linear(EDGE * EDGE, HIDDEN),
            relu1=nn.ReLU(),
            hidden=nn.Linear(HIDDEN, HIDDEN),
            relu2=nn.ReLU(),
            output=nn.Linear(HIDDEN, CLASSES),
        )
    )


def explode(images: Tensor, labels: Tensor, *, seed: int) -> Explosion:
    """Regress the labels, one-hot, at a learning rate that no network survives.

    Args:
        images: float32, shape (n, 1, 8, 8).
        labels: int64, shape (n,).
        seed: Seed of the weights and of the order of the images.
    """
    generator = torch.Generator().manual_seed(seed)
    model = seeded(network, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    with NaNDetector(model, verbose=False) as det:
        loader = batches(images.flatten(1), labels, size=BATCH, steps=STEPS, generator=generator)
        for step, (inputs, targets) in enumerate(loader):
            det.set_batch(step)
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), F.one_hot(targets, CLASSES).float())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if det.triggered:
                break
    return Explosion(
        losses=tuple(losses),
        warning=min(det.grad_events, key=lambda g: (g.batch_idx, -g.grad_norm), default=None),
        event=det.event,
        weights_finite=weights_finite(model),
    )
