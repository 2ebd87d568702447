"""Births in models that are not called as a whole: through a child, a method, in halves, or several models at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _programs import Run, assert_born, assert_quiet, train
from nan_detector import NaNDetector
from test_birth_forward import BAD, Nested, Normalise, batches


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.norm = Normalise()
        self.decoder = nn.Linear(4, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(self.norm(x))

    def decode(self, h: Tensor) -> Tensor:
        return self.decoder(h)

    def scaled(self, x: Tensor) -> Tensor:
        return self.decoder(x / x.sum(-1, keepdim=True))  # <-- scaled


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_model_called_through_its_children(bad: int) -> None:
    data = batches(bad=False)
    data[bad][0][1] = 0.0
    run = train(AutoEncoder(), data, lambda m, b: F.mse_loss(m.decode(m.encode(b[0])), b[1]))
    assert_born(run, Normalise, step=bad, phase="forward", layer="norm", op="div")


@pytest.mark.parametrize("bad", [0, 3])
def test_a_method_of_the_model_that_is_not_its_forward(bad: int) -> None:
    data = batches(bad=False)
    data[bad][0][1] = 0.0
    run = train(AutoEncoder(), data, lambda m, b: F.mse_loss(m.scaled(b[0]), b[1]))
    assert_born(run, AutoEncoder, step=bad, phase="loss", layer=None, op="div", mark="# <-- scaled")


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def free(self, x: Tensor) -> Tensor:
        return self.lin(x / x.sum(-1, keepdim=True))  # <-- birth


@pytest.mark.parametrize("bad", [0, 3])
def test_a_method_of_a_child_that_is_not_its_forward(bad: int) -> None:
    data = batches(bad=False)
    data[bad][0][1] = 0.0
    run = train(nn.ModuleDict({"energy": Energy()}), data, lambda m, b: F.mse_loss(m["energy"].free(b[0]), b[1]))
    assert_born(run, Energy, step=bad, phase="forward", layer="energy", op="div")


@pytest.mark.parametrize("bad", [0, 3])
def test_forward_called_by_name(bad: int) -> None:
    data = batches(bad=False)
    data[bad][0][1] = 0.0
    run = train(Nested(), data, lambda m, b: F.mse_loss(m.forward(b[0]), b[1]))
    assert_born(run, Normalise, step=bad, phase="forward", layer="stages.0.body.norm", op="div")


class Gan(nn.Module):
    """Never called: the loop calls its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 4), Normalise())
        self.critic = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def gan_loop(model: Any, halves: Any, data: list[tuple[Tensor, Tensor]]) -> Any:
    generator, critic = halves
    opt_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False) as det:
        for i, (x, _) in enumerate(data):
            det.set_batch(i)
            opt_c.zero_grad()
            real, fake = critic(x), critic(x.flip(0) * 0.5)
            loss_c = F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.softplus(fake).mean()
            loss_c.backward()
            opt_c.step()
            opt_g.zero_grad()
            loss_g = F.softplus(-critic(generator(x))).mean()
            loss_g.backward()
            opt_g.step()
            if det.triggered:
                break
    weights = [*generator.parameters(), *critic.parameters()]
    return Run(det.all_events, all(bool(torch.isfinite(p).all()) for p in weights), det.warnings)


def zeroed(generator: nn.Sequential, data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Batches with which the generator's linear layer gives zeros in one row of step `BAD`."""
    nn.init.zeros_(generator[0].bias)
    generator[0].bias.requires_grad_(False)
    return data


def test_halves_of_a_gan_called_by_themselves() -> None:
    gan = Gan()
    run = gan_loop(gan, (gan.generator, gan.critic), zeroed(gan.generator, batches()))
    assert_born(run, Normalise, step=BAD, phase="forward", layer="generator.1", op="div")
    gan = Gan()
    assert_quiet(gan_loop(gan, (gan.generator, gan.critic), zeroed(gan.generator, batches(bad=False))))


@pytest.mark.parametrize("form", ["dict", "list"])
def test_several_models_with_an_optimizer_each(form: str) -> None:
    gan = Gan()
    halves = gan.generator, gan.critic
    model: Any = {"gen": halves[0], "critic": halves[1]} if form == "dict" else list(halves)
    run = gan_loop(model, halves, zeroed(gan.generator, batches()))
    key = "gen" if form == "dict" else "0"
    assert_born(run, Normalise, step=BAD, phase="forward", layer=f"{key}.1", op="div")
