"""How a step is built around its backward: several of them, hooks, clipping, closures, sparse gradients, recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from _backward_programs import Formula, Net, Scale, born, finite_weights, plain_step, quiet, train, two

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


# -- hooks -------------------------------------------------------------------------------------------------------------


def divide(grad: Tensor) -> Tensor:
    return grad / grad.abs().sum().sub(grad.abs().sum())  # <-- birth


def scale_down(grad: Tensor) -> Tensor:
    return grad * 0.5


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scale(x)
        hidden.register_hook(divide if bool((x == 0).all()) else scale_down)
        return hidden.exp()


def test_hook_on_an_intermediate_in_the_model() -> None:
    born(train(Hooked(), two(HEALTHY, ZEROS)), divide, op="div", layer="scale")


def test_hook_on_an_intermediate_outside_the_model() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        hidden = model(batch)
        hidden.register_hook(divide if bool((batch == 0).all()) else scale_down)
        loss = hidden.exp().mean()
        loss.backward()
        optimizer.step()

    event = born(train(Scale(), two(HEALTHY, ZEROS), step), divide, op="div", layer="root")
    assert event.location is not None


@pytest.mark.parametrize("when", ["before", "after"])
def test_hook_on_a_parameter(when: str) -> None:
    model = Net(torch.exp)
    calls = 0

    def hook(grad: Tensor) -> Tensor | None:
        nonlocal calls
        calls += 1
        return divide(grad) if bool((grad == 0).all()) else None

    if when == "before":
        model.scale.weight.register_hook(hook)

    def step(m: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        if when == "after" and not calls and not m.scale.weight._backward_hooks:  # type: ignore[union-attr]
            m.scale.weight.register_hook(hook)  # type: ignore[union-attr, operator]
        plain_step(m, optimizer, batch)

    born(train(model, two(HEALTHY, ZEROS), step), divide, op="div", layer=None)


def test_module_full_backward_hook() -> None:
    model = Net(torch.exp)

    def hook(module: nn.Module, grads_in: tuple[Tensor, ...], grads_out: tuple[Tensor, ...]) -> Any:
        (g,) = grads_in
        if bool((g == g.flatten()[0]).all()):
            return (divide(g),)
        return None

    model.part.register_full_backward_hook(hook)
    born(train(model, two(HEALTHY, ZEROS)), divide, op="div", layer="part")


def test_forward_hook_that_replaces_an_output() -> None:
    model = Net(torch.exp)

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return root(out - 1)

    model.part.register_forward_hook(hook)
    born(train(model, two(HEALTHY, ZEROS)), root, op="sqrt", layer="part")


def test_forward_hook_registered_after_attach() -> None:
    def step(m: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        handle = m.part.register_forward_hook(lambda mod, args, out: root(out - 1))  # type: ignore[union-attr, operator]
        plain_step(m, optimizer, batch)
        handle.remove()

    # The hook is gone when the step is judged at the next one: it is judged before the optimizer steps.
    born(train(Net(torch.exp), two(HEALTHY, ZEROS), step), root, op="sqrt", layer="part")


def test_a_hook_that_repairs_the_gradient_is_quiet() -> None:
    model = Net(lambda x: torch.sqrt(x))
    model.scale.weight.register_hook(lambda g: torch.nan_to_num(g, 0.0, 0.0, 0.0))
    quiet(train(model, [HEALTHY, ZEROS, HEALTHY]))
    assert finite_weights(model)


# -- between backward and step -----------------------------------------------------------------------------------------


def with_edit(edit: Callable[[nn.Module], Any]) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        edit(model)
        optimizer.step()

    return step


EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "clip_grad_norm": lambda m: clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_norm_qualified": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "clip_grad_value": lambda m: clip_grad_value_(m.parameters(), 1.0),
    "mul": lambda m: [p.grad.mul_(0.5) for p in m.parameters() if p.grad is not None],
    "data": lambda m: [p.grad.data.div_(2.0) for p in m.parameters() if p.grad is not None],
    "assign": lambda m: [setattr(p, "grad", p.grad * 0.5) for p in m.parameters() if p.grad is not None],
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_between_backward_and_step(name: str) -> None:
    model = Net(root)
    born(train(model, two(HEALTHY, ZEROS), with_edit(EDITS[name])), root, op="sqrt", layer="part")
    assert finite_weights(model)


def normalise(model: nn.Module) -> None:
    for p in model.parameters():
        norm = p.grad.norm()  # type: ignore[union-attr]
        p.grad = p.grad / norm  # <-- birth


def normalise_in_place(model: nn.Module) -> None:
    for p in model.parameters():
        g = p.grad
        assert g is not None
        g.div_(g.norm())  # <-- birth


@pytest.mark.parametrize("edit", [normalise, normalise_in_place])
def test_a_division_by_the_gradients_norm(edit: Callable[[nn.Module], None]) -> None:
    model = Net(torch.exp)
    det = train(model, two(HEALTHY, ZEROS), with_edit(edit))
    born(det, edit, op="div", layer=None)
    assert finite_weights(model)


@pytest.mark.parametrize("name", ["clip_grad_norm", "mul", "assign"])
def test_healthy_edits_are_quiet(name: str) -> None:
    quiet(train(Net(torch.exp), [HEALTHY, ZEROS, HEALTHY], with_edit(EDITS[name])))


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
            self.table.weight.fill_(0.5)  # type: ignore[union-attr, operator]
            self.table.weight[5] = 0.0  # type: ignore[index, operator]
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
        loss = F.mse_loss(root(sum(held[:-1], held[-1])), batch)  # type: ignore[arg-type]
        loss.backward(retain_graph=True)
        optimizer.step()

    model = Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    det = train(model, [HEALTHY, HEALTHY, -2 * HEALTHY], step, optimizer=optimizer)
    born(det, root, op="sqrt", layer=None, step=2)
