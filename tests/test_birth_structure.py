"""How a step is built around its backward: several of them, closures, sparse gradients, writes in place, recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from _backward_programs import Formula, Net, Scale, born, finite_weights, quiet, train, two

Tensor = torch.Tensor
HEALTHY, ZEROS = torch.linspace(0.1, 0.4, 8).reshape(2, 4), torch.zeros(2, 4)

# PyTorch wraps `step` of an optimizer class when the first one is made; no test is to be blamed for that.
for kind in (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.SGD):
    kind([torch.zeros(1)])


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x)  # <-- birth


# -- several backwards -------------------------------------------------------------------------------------------------


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Tensor]) -> None:
    optimizer.zero_grad()
    for part in parts:
        loss = model(part).mean() / len(parts)
        loss.backward()
    optimizer.step()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_gradient_accumulation_tells_the_micro_step(bad: int) -> None:
    model = Net(root)
    parts = [ZEROS if i == bad else HEALTHY for i in range(3)]
    det = train(model, [[HEALTHY] * 3, parts], accumulate)
    born(det, root, op="sqrt", layer="part", micro_step=bad)
    assert finite_weights(model)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_accumulation_in_the_first_step_of_a_loop_that_zeroes_last(bad: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: list[Tensor]) -> None:
        for part in parts:
            model(part).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    parts = [ZEROS if i == bad else HEALTHY for i in range(3)]
    born(train(Net(root), [parts], step), root, op="sqrt", layer="part", step=0, micro_step=bad)
    born(train(Net(root), [[HEALTHY] * 3, parts], step), root, op="sqrt", layer="part", step=1, micro_step=bad)


@pytest.mark.parametrize("bad", [0, 1])
def test_two_losses_with_a_retained_graph(bad: int) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        hidden = model(batch)
        losses = [hidden.mean(), root(hidden).mean()]
        if bad == 0:
            losses.reverse()
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        optimizer.step()

    born(train(Scale(), two(HEALTHY, ZEROS), step), root, op="sqrt", layer=None, micro_step=bad)


def test_backward_with_a_gradient() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        out = model(batch)
        out.backward(gradient=torch.ones_like(out))
        optimizer.step()

    born(train(Net(root), two(HEALTHY, ZEROS), step), root, op="sqrt", layer="part")


def test_autograd_backward_of_two_losses() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        hidden = model(batch)
        torch.autograd.backward([hidden.mean(), root(hidden).mean()])
        optimizer.step()

    born(train(Scale(), two(HEALTHY, ZEROS), step), root, op="sqrt", layer=None)


def test_gradients_from_autograd_grad_assigned_by_hand() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        loss = model(batch).mean()
        parameters = list(model.parameters())
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = g
        optimizer.step()

    model = Net(root)
    born(train(model, two(HEALTHY, ZEROS), step), root, op="sqrt", layer="part")
    assert finite_weights(model)


# -- closures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sgd", "lbfgs"])
def test_closures(kind: str) -> None:
    model = Net(root)
    optimizer: torch.optim.Optimizer
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2)

    def step(m: nn.Module, opt: torch.optim.Optimizer, batch: Tensor) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            loss: Tensor = m(batch).mean()
            loss.backward()
            return loss

        opt.step(closure)

    det = train(model, two(HEALTHY, ZEROS), step, optimizer=optimizer)
    born(det, root, op="sqrt", layer="part")
    assert finite_weights(model)


def test_a_later_evaluation_of_the_closure() -> None:
    model = Scale()
    evaluations = 0

    def step(m: nn.Module, opt: torch.optim.Optimizer, batch: Tensor) -> None:
        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            opt.zero_grad()
            out = m(batch)
            loss = out.mean() if evaluations == 1 else root(out * 0).mean()
            loss.backward()
            return loss

        opt.step(closure)

    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4)
    born(train(model, [HEALTHY], step, optimizer=optimizer), root, op="sqrt", layer=None, step=0)
    assert evaluations == 2
    assert finite_weights(model)


# -- kinds of parameters -----------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self, bag: bool = False) -> None:
        super().__init__()
        self.table: nn.Module
        if bag:
            self.table = nn.EmbeddingBag(6, 4, mode="sum", sparse=True)
        else:
            self.table = nn.Embedding(6, 4, sparse=True)
        with torch.no_grad():
            self.table.weight.fill_(0.5)
            self.table.weight[5] = 0.0
        self.bag = bag

    def forward(self, idx: Tensor) -> Tensor:
        hidden = self.table(idx)
        return hidden.sqrt()  # <-- birth


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.SGD])
def test_sparse_gradients(kind: Any, bag: bool) -> None:
    model = Lookup(bag)
    good, bad = torch.tensor([[0], [2]]), torch.tensor([[1], [5]])
    det = train(model, [good, bad], optimizer=kind(model.parameters(), lr=1e-3))
    born(det, Lookup, op="sqrt", layer="root")
    assert finite_weights(model)


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 4).to(torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.weight * x
        return torch.sqrt(hidden).real  # <-- birth


def test_complex_parameters() -> None:
    model = Spectrum()
    det = train(model, two(HEALTHY, ZEROS))
    born(det, Spectrum, op="sqrt", layer="root")
    assert finite_weights(model)


# -- in place ----------------------------------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.act = nn.LeakyReLU(inplace=True)
        self.part = Formula(root)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.scale(x)) * 1.0
        h += 0.0
        return self.part(h)


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_in_place_activation_with_check_backward(watch: str) -> None:
    det = train(InPlace(), [HEALTHY, ZEROS], watch=watch, check_backward=True)
    born(det, root, op="sqrt", layer="part")


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_in_place_activation_is_quiet(watch: str) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4), nn.ReLU(inplace=True))
    quiet(train(model, [HEALTHY, ZEROS, HEALTHY], watch=watch, check_backward=True))


def row_write(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = x[:, 1].sqrt()  # <-- birth
    return y


def view_write(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0].sqrt_()  # <-- birth
    return y


@pytest.mark.parametrize("formula", [row_write, view_write])
@pytest.mark.parametrize("place", ["module", "loss"])
def test_writes_in_place(formula: Callable[[Tensor], Tensor], place: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        formula(model(batch)).mean().backward()
        optimizer.step()

    if place == "module":
        born(train(Net(formula), two(HEALTHY, ZEROS)), formula, op="sqrt", layer="part")
    else:
        born(train(Scale(), two(HEALTHY, ZEROS), step), formula, op="sqrt", layer=None)


def test_a_write_that_cuts_the_gradient_is_quiet() -> None:
    def formula(x: Tensor) -> Tensor:
        y = x.clone()
        y[x <= 0] = 0.0  # what flows back into these elements is dropped, infinite or not
        return y.sqrt()

    quiet(train(Net(formula), [HEALTHY, ZEROS, HEALTHY]))


# -- recurrence and parametrizations -----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(4, 4, batch_first=True)
        self.part = Formula(root)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x)
        return self.part(out.abs() * x.abs().amax())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind)
    det = train(model, two(HEALTHY[None], ZEROS[None]))
    born(det, root, op="sqrt", layer="part")
    assert finite_weights(model)


@pytest.mark.parametrize("wrap", [weight_norm, spectral_norm])
def test_parametrized_modules(wrap: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(wrap(nn.Linear(4, 4, bias=False)), Formula(torch.abs), Formula(root))
    det = train(model, two(HEALTHY, ZEROS))
    born(det, root, op="sqrt", layer="2")


def test_truncated_backpropagation_through_time() -> None:
    hidden = torch.ones(2, 4)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        nonlocal hidden
        optimizer.zero_grad()
        new = model(batch) * hidden.detach()
        loss = root(new).mean()
        loss.backward()
        hidden = new.detach() + 1
        optimizer.step()

    born(train(Scale(), [HEALTHY, HEALTHY, ZEROS], step), root, op="sqrt", layer=None, step=2)


def test_backpropagation_through_earlier_steps() -> None:
    held: list[Tensor] = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        held.append(model(batch))
        loss = F.mse_loss(root(sum(held[:-1], held[-1])), batch)
        loss.backward(retain_graph=True)
        optimizer.step()

    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    det = train(model, [HEALTHY, HEALTHY, -2 * HEALTHY], step, optimizer=optimizer)
    born(det, root, op="sqrt", layer=None, step=2)
