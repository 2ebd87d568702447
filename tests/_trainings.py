"""Ordinary trainings of many kinds, each to be run watched and not (see `_sacred`)."""

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
from torch.utils.data import DataLoader, Dataset

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


# -- loops ------------------------------------------------------------------------------------------------------------


def autocast() -> Run:
    model = mlp(nn.GELU(), nn.Dropout(0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        return loss.item()

    return Run([model], [optimizer], step)


def grad_scaler() -> Run:
    model = mlp(nn.ReLU(), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    seen: list[Any] = []

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        return loss.item()

    return Run([model], [optimizer], step, seen=seen)


def two_backwards() -> Run:
    model = mlp(nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        optimizer.zero_grad()
        out = model(x)
        first = F.cross_entropy(out, y)
        first.backward(retain_graph=True)
        second = out.square().mean()
        (0.1 * second).backward()
        optimizer.step()
        return first.item() + second.item()

    return Run([model], [optimizer], step)


def accumulation() -> Run:
    model = mlp(nn.ReLU(), nn.Dropout(0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)

    def step(i: int) -> float:
        total = 0.0
        for micro in range(3):
            x, y = blobs(seed=3 * i + micro)
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            total += loss.item()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return total

    return Run([model], [optimizer], step)


def gradient_penalty() -> Run:
    model = mlp(nn.Softplus())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        x.requires_grad_()
        optimizer.zero_grad()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.cross_entropy(out, y) + grad.norm(2, 1).sub(1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Run([model], [optimizer], step)


def closures() -> Run:
    model = mlp(nn.Tanh())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    seen: list[Any] = []

    def step(i: int) -> float:
        x, y = blobs(seed=i)

        def closure() -> Tensor:
            seen.append(i)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    return Run([model], [optimizer], step, seen=seen)


def closure_of_adam() -> Run:
    run = closures()
    run.optimizers[0] = optimizer = torch.optim.Adam(run.models[0].parameters(), lr=0.01)
    model = run.models[0]

    def step(i: int) -> float:
        x, y = blobs(seed=i)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure).item()

    run.step = step
    return run


def step_inside_the_backward() -> Run:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.5) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.item()

    return Run([model], list(optimizers.values()), step)


def evaluation_in_between() -> Run:
    model = mlp(nn.BatchNorm1d(16), nn.Dropout(0.2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            validation = F.cross_entropy(model(x), y)
        with torch.inference_mode():
            validation = validation + model(x).square().mean()
        scheduler.step(validation)
        return loss.item() + validation.item()

    return Run([model], [optimizer], step)


class Noisy(Dataset):
    """Augments with Python's and NumPy's random numbers, as datasets do."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        x = torch.full((8,), i / 24) + random.random() * 0.1 + float(np.random.rand()) * 0.1 + torch.rand(8) * 0.1
        return x, i % 4


def loading(workers: int) -> Run:
    model = mlp(nn.ReLU(), nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen: list[Any] = []

    def step(i: int) -> float:
        total = 0.0
        for x, y in DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=workers):
            seen.append(x.sum().item())
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        return total

    return Run([model], [optimizer], step, seen=seen)


def data_loader() -> Run:
    return loading(0)


def hand_written_update() -> Run:
    model = mlp()

    def step(i: int) -> float:
        x, y = blobs(seed=i)
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        return loss.item()

    return Run([model], [], step)


def two_optimizers() -> Run:
    maker, critic = nn.Linear(4, 8), mlp(nn.LeakyReLU(0.2))
    optimizers = [torch.optim.Adam(maker.parameters(), lr=0.01), torch.optim.Adam(critic.parameters(), lr=0.01)]

    def step(i: int) -> float:
        real, _ = blobs(seed=i)
        fake = maker(torch.randn(32, 4))
        optimizers[1].zero_grad()
        loss = F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        other = F.softplus(-critic(fake)).mean()
        other.backward()
        optimizers[0].step()
        return loss.item() + other.item()

    return Run([nn.ModuleList([maker, critic])], optimizers, step)


LOOPS = [
    autocast, grad_scaler, two_backwards, accumulation, gradient_penalty, closures, closure_of_adam,
    step_inside_the_backward, evaluation_in_between, data_loader, hand_written_update, two_optimizers,
]  # fmt: skip
