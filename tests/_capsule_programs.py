"""Trainings of different make, each with a fault: what the capsule tests watch, and replay in another process.

A replay imports this file by name: the factories are what a user names with ``--model``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


class PlainNorm(nn.Module):
    """Divides by the spread, whose square it works out in a way that loses its digits."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        var = (x * x).mean(-1, keepdim=True) - mean**2
        return (x - mean) / torch.sqrt(var)


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), PlainNorm(), nn.Dropout(0.2), nn.Linear(8, 3))


def classifier_batches() -> list[Any]:
    g = torch.Generator().manual_seed(1)
    batches = [(torch.randn(16, 4, generator=g), torch.randint(0, 3, (16,), generator=g)) for _ in range(3)]
    batches[2][0][5] = 0.0  # with the bias at 1000, all of this row is 1000: no spread, and no digits to see it
    return batches


def classifier_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Masks what is padded, whole sequences included."""

    causal: Tensor

    def __init__(self, words: int = 11, width: int = 8, length: int = 6) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("causal", torch.tril(torch.ones(length, length, dtype=torch.bool)))
        self.drop = nn.Dropout(0.1)

    def forward(self, tokens: Tensor, *, padding: Tensor) -> dict[str, Tensor]:
        t = tokens.shape[1]
        x = self.drop(self.words(tokens) + self.places(torch.arange(t)))
        mask = self.causal[:t, :t] & padding[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        return {"logits": self.head(self.norm(x))}


def gpt() -> nn.Module:
    return TinyGPT()


def gpt_batches() -> list[Any]:
    g = torch.Generator().manual_seed(2)
    batches = [
        {"tokens": torch.randint(0, 11, (4, 6), generator=g), "padding": torch.ones(4, 6, dtype=torch.bool)}
        for _ in range(3)
    ]
    batches[2]["padding"][1] = False
    return batches


def gpt_loss(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch["tokens"], padding=batch["padding"])["logits"]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())


class SmallCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.head(self.drop(x.mean((2, 3))))


def cnn() -> nn.Module:
    return SmallCNN()


def cnn_batches() -> list[Any]:
    g = torch.Generator().manual_seed(3)
    batches = [(torch.randn(6, 1, 8, 8, generator=g), torch.rand(6, 5, generator=g)) for _ in range(3)]
    batches[2][1][4] = 0.0  # a target without any weight
    return batches


def cnn_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
        logp = F.log_softmax(out.float(), -1)
        weight = y.sum(-1)
        return -((logp * y).sum(-1) / weight).mean()


def distance() -> nn.Module:
    return nn.Linear(3, 2, bias=False)


def distance_batches() -> list[Any]:
    g = torch.Generator().manual_seed(4)
    batches = [torch.randn(5, 3, generator=g) for _ in range(2)]
    batches[1][2] = 0.0  # its length is 0, where the square root has no slope
    return batches


def distance_loss(model: nn.Module, batch: Any) -> Tensor:
    squares = model(batch).square().sum(-1)
    return squares.sqrt().mean()


class Doubled(torch.autograd.Function):
    """A function of the user's own, which no capsule can name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def doubled_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(Doubled.apply(model(x)), y)


def loss_of_output(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """What a user gives to ``--loss`` for `doubled_loss`."""
    return F.cross_entropy(Doubled.apply(output), batch["y"])


def loss_without_labels(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return batch["labels"].sum()


def not_a_model() -> int:
    return 3


def other_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 9), PlainNorm(), nn.Dropout(0.2), nn.Linear(9, 3))


def shorter_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8))


#: Name -> factory, batches, loss.
PROGRAMS: dict[str, tuple[Any, Any, Any]] = {
    "classifier": (classifier, classifier_batches, classifier_loss),
    "gpt": (gpt, gpt_batches, gpt_loss),
    "cnn": (cnn, cnn_batches, cnn_loss),
    "distance": (distance, distance_batches, distance_loss),
    "doubled": (classifier, classifier_batches, doubled_loss),
}


def train_watched(name: str, **options: Any) -> Any:
    """Train the program until something is found; gives the detector."""
    from nan_detector import NaNDetector

    factory, batches, loss_of = PROGRAMS[name]
    torch.manual_seed(0)
    model = factory()
    if factory is classifier:
        with torch.no_grad():
            model[0].bias.fill_(1000.0)
            model[0].weight.mul_(1e-3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False, **options) as det:
        for i, batch in enumerate(batches()):
            det.set_batch(i)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            if det.triggered:
                break
    return det
