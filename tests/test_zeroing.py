"""Gradients that nobody sets back, in every form of that fault, and the ways of setting them back that are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector

STEPS = 12
Zero = Callable[[nn.Module, Any, Any], object]


def train(
    zero: Zero,
    *,
    when: str = "before",
    last: Callable[[int], float] = lambda i: 1e25 if i == STEPS - 1 else 1.0,
    numbered: bool = False,
    **options: Any,
) -> NaNDetector:
    """An overflow in the last step: that of a value that is merely too large."""
    torch.manual_seed(0)
    model, other = nn.Linear(4, 2), nn.Linear(2, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    another = torch.optim.Adam(other.parameters())
    with NaNDetector(model, verbose=False, grad_norm_warn=float("inf"), **options) as det:
        for i in range(STEPS):
            if numbered:
                det.set_batch(i)
            if when == "before":
                zero(model, opt, another)
            loss = (model(torch.ones(3, 4)) * last(i)).square().sum()
            loss.backward()
            if when == "between":
                zero(model, opt, another)
            opt.step()
            if when == "after":
                zero(model, opt, another)
            if det.triggered:
                break
    return det


def accumulated(det: NaNDetector) -> list[str]:
    assert det.event is not None and det.event.step == STEPS - 1
    return [n for n in det.event.notes if n.startswith("gradients_accumulated")]


def never(model: nn.Module, opt: Any, another: Any) -> None:
    return None


def of_another(model: nn.Module, opt: Any, another: Any) -> None:
    another.zero_grad()


def by_optimizer(model: nn.Module, opt: Any, another: Any) -> None:
    opt.zero_grad()


def by_filling(model: nn.Module, opt: Any, another: Any) -> None:
    opt.zero_grad(set_to_none=False)


def by_model(model: nn.Module, opt: Any, another: Any) -> None:
    model.zero_grad()


def by_none(model: nn.Module, opt: Any, another: Any) -> None:
    for p in model.parameters():
        p.grad = None


def by_hand(model: nn.Module, opt: Any, another: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()


def by_data(model: nn.Module, opt: Any, another: Any) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("zero", [never, of_another])
def test_gradients_that_nobody_zeroes_are_the_cause(zero: Zero, when: str, numbered: bool) -> None:
    det = train(zero, when=when, numbered=numbered)
    [note] = accumulated(det)
    assert det.event is not None and det.event.cause is not None
    assert det.event.cause.code == "gradients_accumulated", det.event.cause
    assert "zero_grad" in det.event.cause.fix
    assert ("zero_grad() was called on another Adam" in note) == (zero is of_another)


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("zero", [by_optimizer, by_filling, by_model, by_none, by_hand, by_data])
def test_gradients_that_are_zeroed_are_not_suspected(zero: Zero, when: str, numbered: bool) -> None:
    det = train(zero, when=when, numbered=numbered)
    assert accumulated(det) == []
    assert det.event is not None and (det.event.cause is None or det.event.cause.code != "gradients_accumulated")


def test_accumulation_on_purpose_is_not_suspected() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    with NaNDetector(model, verbose=False, grad_norm_warn=float("inf")) as det:
        for i in range(STEPS):
            for k in range(4):
                factor = 1e25 if i == STEPS - 1 and k == 3 else 1.0
                (model(torch.ones(3, 4)) * factor).square().sum().backward()
            opt.step()
            opt.zero_grad()
    assert accumulated(det) == []


@pytest.mark.parametrize("zero", [by_optimizer, by_model, by_filling])
def test_zeroing_between_backward_and_step_is_another_fault(zero: Zero) -> None:
    det = train(zero, when="between", last=lambda i: 1.0)
    assert det.event is None
    [warning] = [w for w in det.warnings if w.kind == "zeroed_before_step"]
    assert warning.message.endswith(
        "zero_grad() is called between backward() and step(), so 3 steps in a row had no gradients: call it before "
        "backward(), or after step()"
    )


@pytest.mark.parametrize("zero", [never, of_another, by_optimizer, by_model, by_none, by_hand])
@pytest.mark.parametrize("when", ["before", "after"])
def test_other_orders_are_not_taken_for_it(zero: Zero, when: str) -> None:
    det = train(zero, when=when, last=lambda i: 1.0)
    assert det.event is None and [w for w in det.warnings if w.kind == "zeroed_before_step"] == []


def test_a_loop_that_gives_up_single_batches_is_quiet() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False) as det:
        for i in range(20):
            opt.zero_grad()
            model(torch.ones(3, 4)).square().sum().backward()
            if i % 2:
                opt.zero_grad()
            opt.step()
    assert det.event is None and det.warnings == []
