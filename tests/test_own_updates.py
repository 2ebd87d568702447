"""Weights that are written outside an optimizer: by the loop's own update, by clipping, averaging and loading."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from _steps import Tensor, assert_born, batches, loss_of
from nan_detector import NaNDetector, NonFiniteError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sqrt(x)  # <-- birth
        return self.last(torch.tanh(self.first(h)))


def _subtract(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad


def _subtract_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.sub_(p.grad, alpha=0.01)


def _assign_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data - 0.01 * p.grad


def _foreach(model: nn.Module) -> None:
    with torch.no_grad():
        weights = list(model.parameters())
        torch._foreach_add_(weights, [p.grad for p in weights], alpha=-0.01)


def _momentum(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            velocity = p.__dict__.setdefault("velocity", torch.zeros_like(p))
            velocity.mul_(0.9).add_(p.grad)
            p.add_(velocity, alpha=-0.01)


UPDATES = [_subtract, _subtract_data, _assign_data, _foreach, _momentum]


def _run(model: nn.Module, update: Callable[[nn.Module], None], **options: Any) -> NaNDetector:
    with NaNDetector(model, verbose=False, **options) as det:
        for i, (x, y) in enumerate(batches()):
            det.set_batch(i)
            for p in model.parameters():
                p.grad = None
            loss_of(model, x, y).backward()
            update(model)
            if det.triggered:
                break
    return det


@pytest.mark.parametrize("update", UPDATES, ids=lambda f: f.__name__)
def test_an_update_by_hand_is_judged_before_it_is_made_and_refused(update: Callable[[nn.Module], None]) -> None:
    model = Net()
    det = _run(model, update)
    assert_born(det.event, Net, step=4, phase="forward", op="sqrt", layer_name="root", weights="clean")
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert len(det.all_events) == 1


@pytest.mark.parametrize("update", UPDATES, ids=lambda f: f.__name__)
def test_a_healthy_update_by_hand_is_bit_equal(update: Callable[[nn.Module], None]) -> None:
    watched, bare = Net(), Net()
    with NaNDetector(watched, verbose=False) as det:
        for x, y in batches(bad=-1, last=6):
            watched.zero_grad()
            loss_of(watched, x, y).backward()
            update(watched)
    for x, y in batches(bad=-1, last=6):
        bare.zero_grad()
        loss_of(bare, x, y).backward()
        update(bare)
    assert det.event is None
    assert all(torch.equal(p, q) for p, q in zip(watched.parameters(), bare.parameters(), strict=True))
    assert det.history.steps.tolist() == list(range(6))


def test_a_warned_update_goes_on_and_the_event_says_so() -> None:
    model = Net()
    det = _run(model, _subtract, on_nan="warn")
    assert_born(det.event, Net, step=4, weights="damaged since step 4")
    assert not all(torch.isfinite(p).all() for p in model.parameters())


def test_raise_leaves_the_update_before_the_first_weight_is_written() -> None:
    model = Net()
    with pytest.raises(NonFiniteError):
        _run(model, _subtract, on_nan="raise")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_after_a_refused_update_finite_weights_can_be_loaded() -> None:
    model = Net()
    saved = copy.deepcopy(model.state_dict())
    with NaNDetector(model, verbose=False) as det:
        for x, y in batches():
            model.zero_grad()
            loss_of(model, x, y).backward()
            _subtract(model)
            if det.triggered:
                model.load_state_dict(saved)
                break
    assert all(torch.equal(v, saved[k]) for k, v in model.state_dict().items())


def _after_step(det: NaNDetector, model: nn.Module, extra: Callable[[nn.Module], None]) -> None:
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in batches():
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()
        extra(model)
        if det.triggered:
            break


@torch.no_grad()
def _clip(model: nn.Module) -> None:
    for p in model.parameters():
        p.clamp_(-0.2, 0.2)


def _clip_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.2, 0.2)


def _decay(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.999)


def _perturb(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.copy_(p.data + 0.001 * torch.randn_like(p))


@pytest.mark.parametrize("extra", [_clip, _clip_data, _decay, _perturb], ids=lambda f: f.__name__)
def test_writing_into_weights_after_the_step_does_not_disturb_the_replay_of_the_next(
    extra: Callable[[nn.Module], None],
) -> None:
    model = Net()
    with NaNDetector(model, verbose=False) as det:
        _after_step(det, model, extra)
    assert_born(det.event, Net, op="sqrt", weights="clean")


@pytest.mark.parametrize("extra", [_clip, _clip_data, _decay, _perturb], ids=lambda f: f.__name__)
def test_writing_into_weights_between_backward_and_step(extra: Callable[[nn.Module], None]) -> None:
    """The replay must use the weights that the step used, not those that stand there by then."""
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for x, y in batches():
            opt.zero_grad()
            loss_of(model, x, y).backward()
            extra(model)
            before = [p.detach().clone() for p in model.parameters()]
            opt.step()
            if det.triggered:
                break
    assert_born(det.event, Net, op="sqrt", weights="clean")
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


class Gate(nn.Module):
    """Its derivative is infinite at 0, and what it gives depends on its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((self.first(x) * (x > 0)).abs()).sum(-1, keepdim=True)  # <-- birth


def test_a_finite_loss_is_made_again_from_the_weights_of_the_step() -> None:
    """Here the comparison of losses would tell the difference: the loss is finite, the gradient is not."""
    model = Gate()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for x, y in batches():
            opt.zero_grad()
            loss_of(model, x, y).backward()
            _decay(model)
            opt.step()
            if det.triggered:
                break
    assert_born(det.event, Gate, phase="backward", op="sqrt", weights="clean")


def test_beyond_the_bound_the_earlier_weights_are_not_kept_and_the_event_says_so() -> None:
    model = Gate()
    model.first = nn.Linear(4, 2000)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False, max_hold_bytes=100) as det:
        for x, y in batches():
            x = torch.cat([x] * 1)
            opt.zero_grad()
            out = torch.sqrt((model.first(x)[:, :4] * (x > 0)).abs()).sum(-1, keepdim=True)
            ((out - y) ** 2).mean().backward()
            _decay(model)
            opt.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and event.reproduced == "no" and event.op is None
    assert any("max_hold_bytes=100" in note for note in event.notes)


@pytest.mark.parametrize("as_parameters", [True, False])
def test_an_average_of_the_weights_does_not_disturb_the_replay(as_parameters: bool) -> None:
    model = Net()
    average = copy.deepcopy(model)
    tensors = [p if as_parameters else p.detach().clone() for p in average.parameters()]
    with NaNDetector(model, verbose=False) as det:

        @torch.no_grad()
        def update(model: nn.Module) -> None:
            for a, p in zip(tensors, model.parameters(), strict=True):
                a.mul_(0.9).add_(p, alpha=0.1)

        _after_step(det, model, update)
    assert_born(det.event, Net, op="sqrt", weights="clean")
    assert all(torch.isfinite(a).all() for a in tensors)


def test_an_average_that_the_loss_uses_is_made_again_from_its_earlier_values() -> None:
    """A teacher, updated by hand after its use and before the optimizer's step."""
    model, teacher = Net(), Net()
    teacher.requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for x, _ in batches():
            opt.zero_grad()
            loss = ((model(x) - torch.nn.functional.linear(x, teacher.first.weight[:1])) ** 2).mean()
            loss.backward()
            with torch.no_grad():
                for a, p in zip(teacher.parameters(), model.parameters(), strict=True):
                    a.mul_(0.9).add_(p, alpha=0.1)
            opt.step()
            if det.triggered:
                break
    assert_born(det.event, Net, op="sqrt", weights="clean")


class Ascent:
    """Sharpness-aware: weights are moved by hand between two passes, and an optimizer takes the step."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.base = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, loss: Callable[[], Tensor], zero_between: bool) -> Tensor:
        self.base.zero_grad()
        loss().backward()
        with torch.no_grad():
            moves = [0.01 * p.grad for p in self.parameters if p.grad is not None]
            for p, move in zip(self.parameters, moves, strict=True):
                p.add_(move)
        if zero_between:
            self.base.zero_grad()
        second = loss()
        second.backward()
        with torch.no_grad():
            for p, move in zip(self.parameters, moves, strict=True):
                p.sub_(move)
        self.base.step()
        return second


@pytest.mark.parametrize("zero_between", [True, False])
@pytest.mark.parametrize("begun", ["before the watch", "under it"])
def test_weights_moved_between_two_passes_are_no_step_of_their_own(zero_between: bool, begun: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    ascent = Ascent(model)
    if begun == "before the watch":
        ascent.base.zero_grad()
        ascent.base.zero_grad = lambda: [setattr(p, "grad", None) for p in ascent.parameters]
    with NaNDetector(model, verbose=False) as det:
        for i in range(8):
            x = torch.randn(5, 4)
            ascent.step(lambda x=x, i=i: model(x).square().mean() * (math.nan if i == 5 else 1.0), zero_between)
            if det.triggered:
                break
    assert det.event is not None and det.event.step == i == 5
    assert sorted(set(det.history.steps.tolist()))[:5] == [0, 1, 2, 3, 4]
