"""The trainings that are measured. Models and batches are small, and of the kinds that people train."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """Many small layers: `depth` residual ones of the same width."""

    def __init__(self, depth: int, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, 10), of inputs of shape (batch, width)."""
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        out: Tensor = self.head(x)
        return out


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, layers: int, width: int, length: int, words: int, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, shape (batch * length, words), of token numbers of shape (batch, length)."""
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x)).flatten(0, 1)
        return out


class _Basic(nn.Module):
    def __init__(self, planes: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(planes, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.short: nn.Module = nn.Identity()
        if stride != 1 or planes != width:
            self.short = nn.Sequential(nn.Conv2d(planes, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.short(x))


class ResNet(nn.Module):
    """The 18 layers of the well-known network, with its stem for small pictures."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        before = [width, *widths[:-1]]
        self.blocks = nn.Sequential(*(_Basic(p, w, 2 if w > p else 1) for p, w in zip(before, widths, strict=True)))
        self.head = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, shape (batch, 10), of pictures of shape (batch, 3, height, width)."""
        out: Tensor = self.head(self.blocks(F.max_pool2d(self.stem(x), 3, 2, 1)).mean((2, 3)))
        return out


def perceptron(width: int = 256, inputs: int = 64) -> nn.Module:
    """A multilayer perceptron with one hidden layer more than inputs and outputs."""
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


class Task:
    """A model, its optimizer and a batch: what takes a training step.

    Args:
        model: The model; it gives logits.
        x: Its input.
        y: int64 class numbers, one per row of the logits.
        autocast: Dtype of an autocast region around forward and loss; None for none.
    """

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, autocast: torch.dtype | None = None) -> None:
        self.model, self.x, self.y, self.autocast = model, x, y, autocast
        # A small rate: one batch is trained on for a long time, and must stay finite.
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self.bad = False

    def loss(self) -> Tensor:
        """The loss; not finite where the step is to be a bad one."""
        with self._region():
            loss = F.cross_entropy(self.model(self.x), self.y)
        if self.bad:
            loss = loss - torch.log(0.0 * loss)
        return loss

    def step(self) -> float:
        """One training step; gives the moment at which the loss was there."""
        self.optimizer.zero_grad()
        loss = self.loss()
        moment = time.perf_counter()
        loss.backward()
        self.optimizer.step()
        return moment

    def bad_step(self) -> float:
        """A step whose loss is not finite; gives the moment at which the optimizer was about to be stepped."""
        self.bad = True
        self.optimizer.zero_grad()
        self.loss().backward()
        if self.x.is_cuda:  # the rest of the step's work is no part of the answer
            torch.cuda.synchronize()
        moment = time.perf_counter()
        self.optimizer.step()
        self.bad = False
        return moment

    def _region(self) -> Any:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.x.device.type, dtype=self.autocast)


@dataclass(frozen=True)
class Workload:
    """A training that is measured.

    Attributes:
        name: Short name.
        title: What it is.
        make: Makes it on a device.
        steps: Steps of a block: where parameters are looked at every 16 steps, a block has to have 16.
        limits: The largest ratios of a full step that are to hold, by watch level.
    """

    name: str
    title: str
    make: Callable[[str], Task]
    steps: int
    limits: dict[str, float]


def _classes(rows: int, device: str, classes: int = 10) -> Tensor:
    return torch.randint(0, classes, (rows,), device=device)


def _residual(depth: int) -> Callable[[str], Task]:
    return lambda device: Task(Residual(depth).to(device), torch.randn(64, 128, device=device), _classes(64, device))


def _language(layers: int, width: int, shape: tuple[int, int], autocast: torch.dtype | None) -> Callable[[str], Task]:
    def make(device: str) -> Task:
        words = 1000
        model = Transformer(layers, width, shape[1], words).to(device)
        ids = torch.randint(0, words, shape, device=device)
        return Task(model, ids, ids.roll(-1, 1).flatten(), autocast)

    return make


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "W1",
        "MLP 64-256-256-10, batch 64",
        lambda device: Task(perceptron().to(device), torch.randn(64, 64, device=device), _classes(64, device)),
        96,
        {"step": 1.10, "layers": 1.20},
    ),
    Workload(
        "W2",
        "transformer, 12 layers of 256, 4×128 tokens",
        _language(12, 256, (4, 128), None),
        4,
        {"step": 1.02, "layers": 1.05},
    ),
    *(
        Workload(
            f"W3-{depth}",
            f"residual MLP, {depth} layers of 128",
            _residual(depth),
            16 if depth == 25 else 4,
            {"step": 1.03, "layers": 1.12},
        )
        for depth in (25, 50, 100, 200)
    ),
    Workload(
        "W4",
        "ResNet-18, 8×3×64×64",
        lambda device: Task(ResNet().to(device), torch.randn(8, 3, 64, 64, device=device), _classes(8, device)),
        4,
        {"step": 1.02, "layers": 1.05},
    ),
    Workload(
        "W5",
        "small GPT under bfloat16 autocast, 4 layers of 128, 4×64 tokens",
        _language(4, 128, (4, 64), torch.bfloat16),
        4,
        {},
    ),
)


def named(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ValueError: There is none; the message names those that there are.
    """
    for workload in WORKLOADS:
        if workload.name == name:
            return workload
    raise ValueError(f"workload={name!r} is not one of {', '.join(w.name for w in WORKLOADS)}.")


def made(workload: Workload, device: str = "cpu", seed: int = 0) -> Task:
    """The workload with weights and batch of that seed; the global random state is left alone."""
    # Seeding seeds the devices' generators as well.
    with torch.random.fork_rng(devices=[torch.device(device)] if device.startswith("cuda") else []):
        torch.manual_seed(seed)
        return workload.make(device)
