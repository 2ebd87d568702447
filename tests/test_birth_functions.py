"""Custom `autograd.Function`s, double backward, checkpointing, `torch.func`: backwards that users write or repeat."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from _backward_programs import Formula, Net, Scale, born, finite_weights, plain_step, quiet, train, two

Tensor = torch.Tensor
HEALTHY, ZEROS = torch.linspace(0.1, 0.4, 8).reshape(2, 4), torch.zeros(2, 4)


class Ratio(torch.autograd.Function):
    """sqrt with a hand-written derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        half = grad * 0.5
        return half / y  # <-- birth


class WithSetup(torch.autograd.Function):
    """The same in the newer style."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad / (2 * y)  # <-- birth


class Once(torch.autograd.Function):
    """A backward that cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0).sqrt()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.rsqrt()  # <-- birth


CLASSES: list[tuple[type[torch.autograd.Function], str]] = [(Ratio, "div"), (WithSetup, "div"), (Once, "rsqrt")]


def lossy(formula: Callable[[Tensor], Tensor]) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        loss = formula(model(batch)).mean()
        loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(("function", "op"), CLASSES)
def test_custom_backward_in_a_module(function: Any, op: str) -> None:
    model = Net(lambda x: function.apply(x))
    det = train(model, two(HEALTHY, ZEROS))
    born(det, function, op=op, layer="part")
    assert finite_weights(model)


@pytest.mark.parametrize(("function", "op"), CLASSES)
def test_custom_backward_in_the_loss(function: Any, op: str) -> None:
    det = train(Scale(), two(HEALTHY, ZEROS), lossy(lambda x: function.apply(x)))
    born(det, function, op=op, layer=None)


captured = Ratio.apply
captured_setup = WithSetup.apply


@pytest.mark.parametrize(("apply", "function"), [(captured, Ratio), (captured_setup, WithSetup)])
def test_apply_captured_before_attach_in_a_module(apply: Any, function: Any) -> None:
    det = train(Net(apply), two(HEALTHY, ZEROS))
    born(det, function.backward, op="div", layer="part")


@pytest.mark.skipif(
    not isinstance(getattr(torch.autograd.Function.__dict__["apply"], "__func__", None), types.FunctionType),
    reason="from PyTorch 2.14 on `apply` is no Python: what was bound before the watch began cannot be seen",
)
@pytest.mark.parametrize(("apply", "function"), [(captured, Ratio), (captured_setup, WithSetup)])
def test_apply_captured_before_attach_in_the_loss(apply: Any, function: Any) -> None:
    det = train(Scale(), two(HEALTHY, ZEROS), lossy(lambda x: apply(x)))
    born(det, function.backward, op="div", layer=None)


def unseen(x: Tensor) -> Tensor:
    """Past everything that can be seen from Python."""
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, Ratio)(x)


def test_a_function_that_cannot_be_seen_is_admitted() -> None:
    model = Scale()
    det = train(model, two(HEALTHY, ZEROS), lossy(unseen))
    event = det.event
    assert event is not None
    assert (event.step, event.reproduced, event.location, event.weights) == (1, "no", None, "clean")
    assert "does not see" in event.notes[0]
    assert finite_weights(model)


class ThroughNumpy(torch.autograd.Function):
    """A backward that leaves torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sqrt(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with np.errstate(all="ignore"):
            slope = 0.5 / np.sqrt(x.numpy())
        return grad * torch.from_numpy(slope)  # <-- birth


@pytest.mark.parametrize("place", ["module", "loss"])
def test_numpy_in_a_backward(place: str) -> None:
    if place == "module":
        det = train(Net(ThroughNumpy.apply), two(HEALTHY, ZEROS))
    else:
        det = train(Scale(), two(HEALTHY, ZEROS), lossy(lambda x: ThroughNumpy.apply(x)))
    event = born(det, ThroughNumpy.backward, op="mul", layer="part" if place == "module" else None)
    assert event.cause is None or event.cause.code == "opaque_kernel"


class Clean(torch.autograd.Function):
    """Divides by zero, and masks it before it gets out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.nan_to_num(grad * x / x.abs())


@pytest.mark.parametrize("place", ["module", "loss"])
def test_a_masked_division_in_a_backward_is_quiet(place: str) -> None:
    if place == "module":
        quiet(train(Net(Clean.apply), two(HEALTHY, ZEROS)))
    else:
        quiet(train(Scale(), two(HEALTHY, ZEROS), lossy(lambda x: Clean.apply(x))))


# -- double backward ---------------------------------------------------------------------------------------------------


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.inner.weight, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * x)


def penalty_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    x = batch.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    squares = (slope**2).sum(-1)
    penalty = ((squares.sqrt() - 1) ** 2).mean()  # <-- birth
    loss = out.mean() + penalty
    loss.backward()
    optimizer.step()


def slope_of(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    x = batch.clone().requires_grad_()
    out = model(x)
    slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    squares = (slope * slope).sum(-1)
    return out, squares**0.5  # <-- birth


def helper_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    out, slope = slope_of(model, batch)
    (out.mean() + ((slope - 1) ** 2).mean()).backward()
    optimizer.step()


def test_gradient_penalty_in_the_loss() -> None:
    model = Critic()
    det = train(model, two(HEALTHY, ZEROS), penalty_step)
    born(det, penalty_step, op="sqrt", layer=None)
    assert finite_weights(model)


def test_gradient_penalty_in_a_helper() -> None:
    det = train(Critic(), two(HEALTHY, ZEROS), helper_step)
    born(det, slope_of, op="pow", layer=None)


def test_gradient_penalty_with_norm_is_quiet() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        x = batch.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + ((slope.norm(dim=-1) - 1) ** 2).mean()).backward()
        optimizer.step()

    quiet(train(Critic(), [HEALTHY, ZEROS, HEALTHY], step))


class Force(nn.Module):
    """An energy model whose output is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.scale(x).pow(1.5).sum()  # <-- birth
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force


def test_double_backward_in_the_model() -> None:
    # The second derivative of x**1.5 is infinite at 0.
    det = train(Force(), two(HEALTHY, ZEROS))
    born(det, Force, op="pow", layer="root")


# -- torch.func --------------------------------------------------------------------------------------------------------


class PerSample(nn.Module):
    def __init__(self, transform: Callable[..., Any]) -> None:
        super().__init__()
        self.scale = Scale()
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        w = self.scale.weight

        def energy(row: Tensor) -> Tensor:
            squares = (row * row * w).sum()
            return squares.sqrt()  # <-- birth

        return self.transform(energy, x)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda rows: f(rows.reshape(-1)[:4]))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "vmap_grad": lambda f, x: torch.func.vmap(torch.func.grad(f))(x),
    "hessian": lambda f, x: torch.func.jacrev(torch.func.jacrev(f))(x[0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_in_a_model(name: str) -> None:
    model = PerSample(TRANSFORMS[name])
    det = train(model, two(HEALTHY, ZEROS))
    # What is born inside a transform is born in the forward: there the derivative is part of the model's output.
    born(
        det,
        PerSample.forward,
        op=("sqrt", "div"),
        layer="root",
        phase=det.event.phase if det.event and name != "vmap" else "backward",
    )
    assert finite_weights(model)


def functional_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (batch,)).sqrt().mean()

    gradients = torch.func.grad(loss)(dict(model.named_parameters()))
    for name, p in model.named_parameters():
        p.grad = gradients[name]
    optimizer.step()


def test_a_transform_around_the_loss_is_found_or_admitted() -> None:
    model = Scale()
    event = train(model, two(HEALTHY, ZEROS), functional_step).event
    assert event is not None
    assert (event.step, event.phase, event.weights) == (1, "backward", "clean")
    assert finite_weights(model)
    if event.reproduced == "no":
        assert event.location is None
        assert "torch.func" in event.notes[0]
    else:
        assert event.op == "sqrt"


# -- checkpointing -----------------------------------------------------------------------------------------------------


def body(x: Tensor) -> Tensor:
    y = x * 2
    return y.sqrt()  # <-- birth


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.scale = Scale()
        self.part = Formula(body)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.part, self.scale(x), use_reentrant=self.reentrant)


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Sequential(Scale(), Formula(body), Formula(torch.tanh), Formula(torch.exp))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint_sequential(self.stack, 2, x, use_reentrant=False)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    det = train(model, two(HEALTHY, ZEROS))
    born(det, body, op="sqrt", layer="part")
    assert finite_weights(model)


def test_checkpoint_sequential() -> None:
    det = train(Sequence(), two(HEALTHY, ZEROS))
    born(det, body, op="sqrt", layer="stack.1")


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_in_the_loss(reentrant: bool) -> None:
    det = train(Scale(), two(HEALTHY, ZEROS), lossy(lambda x: checkpoint(body, x, use_reentrant=reentrant)))
    born(det, body, op="sqrt", layer=None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_custom_function_under_a_checkpoint(reentrant: bool) -> None:
    model = Net(lambda x: checkpoint(Ratio.apply, x, use_reentrant=reentrant))
    born(train(model, two(HEALTHY, ZEROS)), Ratio, op="div", layer="part")


@pytest.mark.parametrize("reentrant", [True, False])
def test_healthy_checkpointing_is_quiet(reentrant: bool) -> None:
    quiet(train(Checkpointed(reentrant), [HEALTHY, HEALTHY + 1, HEALTHY], plain_step))
