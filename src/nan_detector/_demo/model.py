"""The network of the demo, with a normalisation layer as people write them by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nan_detector._demo.data import CLASSES


class ChannelNorm(nn.Module):
    """Normalises each channel over the batch and the image, then scales and shifts it.

    The variance is the textbook's E[x²] - E[x]², which takes one pass over the activations where E[(x - E[x])²] takes
    two. In exact arithmetic they are equal. In float32 both terms are rounded to about seven digits, and where a
    channel hardly varies that is all there was: the difference may come out below zero, and further below than `eps`.

    Args:
        channels: Number of channels.
        eps: Added to the variance.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x`, float32, shape (batch, channels, height, width)."""
        mean = x.mean((0, 2, 3), keepdim=True)
        var = (x * x).mean((0, 2, 3), keepdim=True) - mean**2
        x = (x - mean) / torch.sqrt(var + self.eps)
        return x * self.gain + self.bias


class DigitsNet(nn.Module):
    """Two convolutions, the hand-written normalisation and a linear classifier: about 7,000 parameters.

    Args:
        narrow: Channels of the first convolution.
        wide: Channels of the second one.
    """

    def __init__(self, narrow: int = 6, wide: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, narrow, kernel_size=3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(narrow, wide, kernel_size=3, padding=1)
        self.norm = ChannelNorm(wide)
        self.head = nn.Linear(wide * 4 * 4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, shape (batch, 10), of `images`, float32, shape (batch, 1, 8, 8)."""
        x = self.pool(torch.relu(self.conv1(images)))
        x = self.norm(torch.relu(self.conv2(x)))
        return self.head(x.flatten(1))  # type: ignore[no-any-return]  # nn.Module.__call__ is untyped
