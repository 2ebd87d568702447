"""Ordinary training loops of many kinds, each to be run watched and not (see `_sacred`)."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from _sacred import Run, blobs
from _trainings import mlp

Tensor = torch.Tensor


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
