"""The images: scikit-learn's handwritten digits, which come with the package and need no network."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Numbers of classes and of pixels along an edge.
CLASSES, EDGE = 10, 8
_WHITE = 16.0  # pixel values are counts from 0 to 16


def digits() -> tuple[Tensor, Tensor]:
    """All 1,797 digits.

    Returns:
        Images, float32 in [0, 1], shape (1797, 1, 8, 8), and labels, int64, shape (1797,), both on the CPU.

    Raises:
        ImportError: scikit-learn is not installed.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = torch.from_numpy(loaded.images).to(torch.float32).unsqueeze(1) / _WHITE
    return images, torch.from_numpy(loaded.target).to(torch.int64)


def batches(
    images: Tensor, labels: Tensor, *, size: int, steps: int, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches over as many epochs as `steps` take; the rest of an epoch that fills no batch is left out.

    Args:
        images: float32, shape (n, ...).
        labels: int64, shape (n,).
        size: Samples in a batch, at most n.
        steps: Number of batches.
        generator: Source of the shuffling.
    """
    order = torch.empty(0, dtype=torch.int64)
    for _ in range(steps):
        if len(order) < size:
            order = torch.randperm(len(images), generator=generator)
        chosen, order = order[:size], order[size:]
        yield images[chosen], labels[chosen]
