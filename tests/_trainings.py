"""Ordinary trainings of models of many kinds, each to be run watched and not (see `_sacred`)."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from _sacred import Run, blobs

Tensor = torch.Tensor


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), *(middle or (nn.ReLU(),)), nn.Linear(16, 4))


def plain(
    model: nn.Module, optimizer: Any, loss_of: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy, **more: Any
) -> Run:
    """The usual loop."""

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Run([model], [optimizer], step, **more)


# -- models -----------------------------------------------------------------------------------------------------------


def dropout_and_batch_norm() -> Run:
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Dropout2d(0.2), nn.Flatten(), nn.BatchNorm1d(48), nn.Dropout(0.3), nn.Linear(48, 4),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return loss.item()

    return Run([model], [optimizer], step)


def spectral_norm_of_old() -> Run:
    model = mlp()
    nn.utils.spectral_norm(model[0])
    return plain(model, torch.optim.Adam(model.parameters(), lr=0.01))


def weight_norm_of_old() -> Run:
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in every second repository
        nn.utils.weight_norm(model[0])
    return plain(model, torch.optim.Adam(model.parameters(), lr=0.01))


def parametrizations() -> Run:
    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[-1])
    return plain(model, torch.optim.AdamW(model.parameters(), lr=0.01))


class Recurrent(nn.Module):
    """An LSTM that carries its state from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(6, 4)
        self.state: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out, state = self.lstm(x.view(-1, 4, 2), self.state)
        self.state = tuple(s.detach() for s in state)
        return self.head(out[:, -1])


def lstm() -> Run:
    model = Recurrent()
    return plain(model, torch.optim.RMSprop(model.parameters(), lr=0.01))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        return self.head(self.layer(x.view(-1, 4, 8), src_mask=mask).mean(1)).repeat_interleave(4, 0)


def transformer() -> Run:
    model = Attention()
    return plain(model, torch.optim.NAdam(model.parameters(), lr=0.003))


class Restless(nn.Module):
    """Draws from every stream there is, writes a buffer, a list and a gate of its own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.register_buffer("ema", torch.zeros(4))
        self.generator = generator
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.01 * torch.randn(x.shape, generator=self.generator) + random.random() * 0.01
        x = x * float(np.random.uniform(0.9, 1.1))
        out = self.lin(F.dropout(x, 0.1, self.training))
        with torch.no_grad():
            self.ema.mul_(0.9).add_(out.mean(0), alpha=0.1)
        self.log.append(float(out.detach().abs().max()))
        return out + self.ema


def every_random_stream() -> Run:
    generator = torch.Generator().manual_seed(5)
    model = Restless(generator)
    return plain(model, torch.optim.Adagrad(model.parameters(), lr=0.05), generators=[generator])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda t: F.dropout(torch.tanh(self.second(t)), 0.2), self.first(x), use_reentrant=False)
        h = checkpoint(lambda t: F.dropout(torch.tanh(self.second(t)), 0.2), h, use_reentrant=True)
        return self.third(h)


def checkpointing() -> Run:
    model = Checkpointed()
    return plain(model, torch.optim.Adam(model.parameters(), lr=0.01))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def custom_functions() -> Run:
    model = mlp(nn.Tanh())
    return plain(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        lambda out, y: Double.apply(out - F.one_hot(y, 4)).mean() + Double.apply(model[0].weight).sum() * 1e-3,
    )


def sparse_gradients() -> Run:
    table, head = nn.EmbeddingBag(50, 8, sparse=True, mode="sum"), nn.Linear(8, 4)
    model = nn.Sequential(table, head)
    optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.01), torch.optim.SGD(head.parameters(), lr=0.01)]

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        for o in optimizers:
            o.zero_grad()
        loss = F.cross_entropy(model((x * 10).long().abs() % 50), y)
        loss.backward()
        for o in optimizers:
            o.step()
        return loss.item()

    return Run([model], optimizers, step)


def user_hooks() -> Run:
    """Hooks of the user's on modules, tensors and parameters, each of which counts and some of which change."""
    model = mlp()
    seen: list[Any] = []
    model[0].register_forward_hook(lambda m, a, out: seen.append("forward") or out * 1.01)
    model[0].register_forward_pre_hook(lambda m, a: seen.append("pre"))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append("backward"))
    model[2].weight.register_hook(lambda g: seen.append("grad") or g * 0.5)
    model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *a: seen.append("step"))
    optimizer.register_step_post_hook(lambda *a: seen.append("stepped"))
    return plain(model, optimizer, seen=seen)


MODELS = [
    dropout_and_batch_norm, spectral_norm_of_old, weight_norm_of_old, parametrizations, lstm, transformer,
    every_random_stream, checkpointing, custom_functions, sparse_gradients, user_hooks,
]  # fmt: skip
