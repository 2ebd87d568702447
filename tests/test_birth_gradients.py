"""Code that touches gradients: hooks of every kind, clipping and edits before the step, gradients handed in, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from _backward_programs import Net, Scale, born, finite_weights, plain_step, quiet, train, two
from nan_detector import NaNDetector

Tensor = torch.Tensor
HEALTHY, ZEROS = torch.linspace(0.1, 0.4, 8).reshape(2, 4), torch.zeros(2, 4)


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x)  # <-- birth


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
        if when == "after" and not calls and not m.scale.weight._backward_hooks:
            m.scale.weight.register_hook(hook)
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
        handle = m.part.register_forward_hook(lambda mod, args, out: root(out - 1))
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
        norm = p.grad.norm()
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


# -- hooks on finished gradients ---------------------------------------------------------------------------------------


def divide_finished(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.div_(p.grad.norm())  # <-- birth


def test_post_accumulate_hook() -> None:
    model = Net(torch.exp)
    model.scale.weight.register_post_accumulate_grad_hook(divide_finished)
    born(train(model, two(HEALTHY, ZEROS)), divide_finished, op="div", layer=None)
    assert finite_weights(model)


def test_a_hook_of_the_step_itself_runs_once_in_a_replay(capsys: pytest.CaptureFixture[str]) -> None:
    def halve(grad: Tensor) -> Tensor:
        print("halved")  # what a replay cannot put back
        return grad * 0.5

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        model.weight.register_hook(halve)
        root(model(batch)).mean().backward()
        optimizer.step()

    born(train(Scale(), [ZEROS], step), root, op="sqrt", layer=None, step=0)
    assert capsys.readouterr().out.split() == ["halved"] * 2  # the step itself, the replay


def test_an_optimizer_that_steps_inside_the_backward() -> None:
    model = Net(root)
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}

    def step_now(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)

    def step(m: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        m(batch).mean().backward()

    before = model.scale.weight.detach().clone()
    det = train(model, two(HEALTHY, ZEROS), step, optimizer=torch.optim.SGD([torch.zeros(1)]))
    born(det, root, op="sqrt", layer="part")
    assert finite_weights(model)
    assert not torch.equal(before, model.scale.weight)  # the healthy step was taken


# -- gradients from outside --------------------------------------------------------------------------------------------


def handed_in(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    x, grad = batch
    model(x).backward(grad)  # <-- birth
    optimizer.step()


def handed_in_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    optimizer.zero_grad()
    x, grad = batch
    torch.autograd.backward([model(x)], grad_tensors=[grad])  # <-- birth
    optimizer.step()


@pytest.mark.parametrize("step", [handed_in, handed_in_by_name])
def test_a_bad_gradient_handed_to_backward(step: Any) -> None:
    model = Scale()
    batches = [(HEALTHY, torch.ones(2, 4)), (HEALTHY, torch.full((2, 4), torch.nan))]
    event = born(train(model, batches, step), step, op="backward", layer=None)
    assert event.cause is not None
    assert event.cause.code == "gradient_from_outside"
    assert finite_weights(model)


# -- backwards that raise ----------------------------------------------------------------------------------------------


class Refuses(torch.autograd.Function):
    """A user's own guard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if not torch.isfinite(grad).all():
            raise FloatingPointError("not with me")
        return grad


def raising(model: nn.Module, step: Callable[[Tensor], Any], error: type[Exception]) -> NaNDetector:
    det = NaNDetector(model, verbose=False)
    with pytest.raises(error), det:
        for batch in (HEALTHY, ZEROS):
            step(batch)
    return det


def test_a_function_that_refuses_a_bad_gradient() -> None:
    model = Net(lambda x: root(Refuses.apply(x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    det = raising(model, lambda batch: plain_step(model, optimizer, batch), FloatingPointError)
    born(det, root, op="sqrt", layer="part")


def test_clipping_that_refuses_a_bad_norm() -> None:
    model = Net(root)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        model(batch).mean().backward()
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()

    born(raising(model, step, RuntimeError), root, op="sqrt", layer="part")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_anomaly_mode_of_the_users_own() -> None:
    model = Net(root)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> None:
        with torch.autograd.set_detect_anomaly(True):
            plain_step(model, optimizer, batch)

    born(raising(model, step, RuntimeError), root, op="sqrt", layer="part")


def test_an_error_without_a_bad_value_is_no_event() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("for another reason")

    model = Net(lambda x: torch.exp(Fails.apply(x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    quiet(raising(model, lambda batch: plain_step(model, optimizer, batch), ValueError))
