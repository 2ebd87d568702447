"""Compiled code beside and inside a watched step: the recording goes on after it, and nothing is compiled anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from _backward_programs import Net, Scale, born, plain_step, train, two

Tensor = torch.Tensor
HEALTHY, ZEROS = torch.linspace(0.1, 0.4, 8).reshape(2, 4), torch.zeros(2, 4)

# TorchDynamo itself instantiates functions and reads .grad of what is no leaf, and warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

compiled: list[Any] = []


def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Counts what is compiled, and runs it as it is."""
    compiled.append(graph)
    return graph.forward


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    compiled.clear()
    yield
    torch.compiler.reset()


class Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (2 * x.sqrt())  # <-- birth


bound_before = Root.apply


def by_name(x: Tensor) -> Tensor:
    return Root.apply(x)


@pytest.mark.parametrize("formula", [bound_before, by_name])
@pytest.mark.parametrize("before", [True, False], ids=["compiled before attach", "compiled after attach"])
def test_a_custom_function_in_a_compiled_model(formula: Any, before: bool) -> None:
    model = Net(formula)
    fast: Any = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if before:
        plain_step(fast, optimizer, HEALTHY)
    for _ in range(2):  # attaching again is no reason either
        det = train(fast, [HEALTHY] * 3, optimizer=optimizer)
        assert det.event is None
    plain_step(fast, optimizer, HEALTHY)
    assert len(compiled) == 1
    born(train(fast, two(HEALTHY, ZEROS), optimizer=optimizer), Root, op="div", layer="part")


def root(x: Tensor) -> Tensor:
    return torch.sqrt(x)  # <-- birth


@torch.compile(backend=backend, fullgraph=True)
def shifted(x: Tensor) -> Tensor:
    return x * 2 + 1


@torch.compiler.disable
def doubled(x: Tensor) -> Tensor:
    return x * 2


def step_with(call: Callable[[Tensor], Tensor]) -> Any:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        hidden = model(batch)
        aside = call(hidden)
        loss = root(hidden).mean() + 0 * aside.mean()
        loss.backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("call", [shifted, doubled])
def test_what_comes_after_a_compiled_or_excluded_call_is_recorded(call: Any) -> None:
    born(train(Scale(), two(HEALTHY, ZEROS), step_with(call)), root, op="sqrt", layer=None)


def test_a_compiled_function_that_raises_leaves_the_recording_on() -> None:
    @torch.compile(backend=backend)
    def fails(x: Tensor) -> Tensor:
        raise ValueError("in compiled code")

    def guarded(x: Tensor) -> Tensor:
        with pytest.raises(ValueError, match="in compiled code"):
            fails(x)
        return x * 1

    born(train(Scale(), two(HEALTHY, ZEROS), step_with(guarded)), root, op="sqrt", layer=None)


@torch.compile(backend=backend, fullgraph=True)
def compiled_root(x: Tensor) -> Tensor:
    return torch.sqrt(x * 2)


def test_a_birth_inside_compiled_code_of_the_loss_is_told_or_admitted() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        optimizer.zero_grad()
        compiled_root(model(batch)).mean().backward()
        optimizer.step()

    event = train(Scale(), two(HEALTHY, ZEROS), step).event
    assert event is not None
    assert (event.step, event.phase, event.weights) == (1, "backward", "clean")
    if event.reproduced == "yes":
        assert event.op == "sqrt"
    else:
        assert event.location is None
        assert any("does not see" in note for note in event.notes)
