"""A call is met again by its place in the source: in a loop, through a module of the library, on another line."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import _faults as faults
from _programs import train
from nan_detector._call_site import Called, CallSite, caller
from nan_detector._source import Mark, here


def _nobody() -> None:
    return None


def one(x: Tensor) -> Called:
    return Called(torch.log, caller(_nobody.__code__, 1))


def two(x: Tensor) -> tuple[Called, Called]:
    first = Called(torch.log, caller(_nobody.__code__, 1))
    second = Called(torch.log, caller(_nobody.__code__, 1))
    return first, second


def test_the_same_line_is_met_and_another_is_not_unless_the_whole_function_is_meant() -> None:
    first, second = two(torch.ones(1))
    assert first.caller is not None
    site = CallSite(torch.log, first.caller, first.caller)
    assert site.meets(first, first.caller)
    assert not site.meets(second, second.caller)
    assert site.meets(second, second.caller, whole_function=True)


def test_another_function_of_the_source_is_never_met() -> None:
    first, _ = two(torch.ones(1))
    other = one(torch.ones(1))
    assert first.caller is not None
    site = CallSite(torch.log, first.caller, first.caller)
    assert not site.meets(other, other.caller, whole_function=True)


def test_another_function_of_the_library_on_the_line_is_not_met() -> None:
    first = one(torch.ones(1))
    assert first.caller is not None
    assert not CallSite(torch.sqrt, first.caller, first.caller).meets(first, first.caller)
    assert CallSite(None, first.caller, first.caller).meets(first, first.caller)


def test_through_a_module_of_the_library_the_users_line_counts_too() -> None:
    inner = one(torch.ones(1))
    mine = here()
    also_mine = here()
    assert inner.caller is not None and mine is not None
    site = CallSite(torch.log, inner.caller, mine)
    assert site.meets(inner, mine)
    assert not site.meets(inner, also_mine)
    assert not site.meets(inner, None)


def test_the_runner_itself_is_nobodys_line() -> None:
    def runner() -> Mark | None:
        return caller(runner.__code__, 1)

    assert runner() is None


class Twice(nn.Module):
    """Two modules of the library with the same code, only one of which goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = faults.Net()
        self.sound = nn.Softmax(-1)
        self.masked = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        weights: Tensor = self.sound(h)
        bad: Tensor = self.masked(h - torch.full_like(h, torch.inf))
        return weights * bad


def test_of_two_modules_that_share_their_code_the_one_on_the_users_line_is_repaired() -> None:
    run = train(Twice(), [faults.ones()], lambda model, x: model(x).sum())
    fix = next(t for t in run.event.trials if t.name == "fix")
    assert fix.finite is True, fix
    assert "so too" not in fix.detail
