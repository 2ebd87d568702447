"""What a replay may say: only what it has made again; and what it leaves to others (teachers, later backwards)."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from _steps import Tensor, assert_born, assert_nothing_shown, batches, loss_of, picture, train
from nan_detector import NaNDetector, is_replaying


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sqrt(x)  # <-- birth
        return self.last(torch.tanh(self.first(h)))


class Plain(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


# -- steps that are not the same twice ------------------------------------------------------------------------------


class External(Plain):
    """Its forward depends on something that a replay cannot put back."""

    def forward(self, x: Tensor) -> Tensor:
        good = super().forward(x.abs())
        if not is_replaying() and bool((x < 0).any()):
            return good / 0.0 * 0.0
        return good


def test_a_step_that_is_finite_the_second_time_shows_nothing() -> None:
    det, _, _ = train(External())
    assert_nothing_shown(det.event)
    assert det.event is not None and det.event.verdict == "not_reproducible"


class Clock(Plain):
    """A finite loss that depends on the time, and a gradient that does not exist."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x.abs()) * (1.0 + time.perf_counter() % 1)
        return out + torch.sqrt((self.last.bias * 0.0).abs()) * bool((x < 0).any())


def test_a_loss_that_depends_on_the_time_is_told_from_that_of_the_step() -> None:
    det, _, _ = train(Clock())
    assert_nothing_shown(det.event)
    assert any("another loss" in n for n in det.event.notes)


class Shrinks(Plain):
    """It forgets an input after use: a replay raises."""

    def __init__(self) -> None:
        super().__init__()
        self.memo: Any = {}

    def forward(self, x: Tensor) -> Tensor:
        if is_replaying():
            raise KeyError("gone")
        return super().forward(torch.log(x))


def test_a_replay_that_raises_where_the_step_did_not_shows_nothing() -> None:
    det, _, _ = train(Shrinks())
    assert_nothing_shown(det.event)
    assert any("KeyError" in n for n in det.event.notes)


class TakesIterator(Plain):
    def forward(self, x: Tensor, parts: Any = None) -> Tensor:
        return super().forward(torch.log(next(parts)))


def test_an_iterator_among_the_arguments_is_refused_by_name() -> None:
    det, _, _ = train(TakesIterator(), step=lambda m, x, y: (m(x, parts=iter([x, x])) - y).square().mean())
    assert_nothing_shown(det.event, "not_tried")
    assert any("'parts'" in n and "iterator" in n for n in det.event.notes)


class HoldsIterator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.noise = (torch.full((1,), 1.0 + i) for i in range(100))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.log(x * next(self.noise)))


def test_an_iterator_among_the_attributes_is_refused_by_name_and_not_used_up() -> None:
    model = HoldsIterator()
    noise = model.noise
    det, _, _ = train(model)
    assert_nothing_shown(det.event, "not_tried")
    assert any("'noise'" in n and "HoldsIterator" in n for n in det.event.notes)
    assert model.noise is noise and next(noise).item() == 6.0


def test_an_iterator_that_the_forward_does_not_use_is_no_reason_to_refuse() -> None:
    model = Net()
    model.later = iter([1, 2])
    det, _, _ = train(model)
    assert_born(det.event, Net, op="sqrt")


def test_without_replay_the_event_says_what_the_gate_saw() -> None:
    det, _, _ = train(Net(), replay="off")
    assert_nothing_shown(det.event, "not_tried")


def test_a_replay_beyond_its_budget_says_so() -> None:
    class Long(Net):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            for _ in range(300):
                out = out + 0.0
            return out

    det, _, _ = train(Long(), replay_budget_s=1e-6)
    assert_nothing_shown(det.event, "not_tried")
    assert any("replay_budget_s" in n for n in det.event.notes)


# -- what belongs to others -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
def test_a_teacher_in_the_loss_keeps_its_gradients(grad: bool) -> None:
    """An unwatched model, called with and without gradients; its `.grad` was filled by somebody else."""
    model, teacher = Net(), Plain()
    for p in teacher.parameters():
        p.grad = torch.ones_like(p)

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.set_grad_enabled(grad):
            target = teacher(x)
        return ((m(x) - target) ** 2).mean()

    det, before, after = train(
        model, step=step, around=lambda: picture(model, teacher), on_nan="skip", stop_on_first=False
    )
    assert_born(det.event, Net, op="sqrt", layer_name="root", weights="clean")
    assert before == after


def test_a_birth_in_a_teacher() -> None:
    model, teacher = Plain(), Net()
    det, _, _ = train(model, step=lambda m, x, y: ((m(x) - teacher(x)) ** 2).mean())
    assert_born(det.event, Net, op="sqrt", layer_name=None)


def test_a_later_backward_of_the_users_still_works() -> None:
    """The forward writes into a tensor that a graph of the user's needs; the event comes between the two backwards."""
    cache = torch.zeros(3, 4)
    scale = torch.ones(3, 4, requires_grad=True)

    class Caches(Plain):
        def forward(self, x: Tensor) -> Tensor:
            if is_replaying():
                cache.add_(1.0)
            return super().forward(torch.log(x))

    model = Caches()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
        for x, y in batches():
            opt.zero_grad()
            other = (scale * cache).sum()  # autograd keeps `cache`
            loss_of(model, x, y).backward()
            opt.step()
            other.backward()
    assert det.event is not None and det.event.op == "log"
    assert torch.equal(cache, torch.zeros(3, 4))


def test_retained_graphs_and_a_second_backward_after_the_event() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
        for x, y in batches():
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward(retain_graph=True)
            opt.step() if det.triggered else None
            with torch.no_grad():
                state = copy.deepcopy(model.state_dict())
            loss.backward()
            opt.step()
    assert_born(det.event, Net, op="sqrt")
    assert all(torch.isfinite(v).all() for v in state.values())


def test_hooks_on_parameters_run_in_the_replay_on_its_own_gradients() -> None:
    model = Net()
    seen: list[int] = []
    model.first.weight.register_hook(lambda g: g * 2.0)
    model.last.weight.register_hook(lambda g: seen.append(1))
    counts = {"forward": 0}

    def count(module: Any, args: Any, out: Any) -> None:
        counts["forward"] += 1

    model.register_forward_hook(count)
    det, before, after = train(model, around=lambda: picture(model, counts, seen), on_nan="skip", stop_on_first=False)
    assert_born(det.event, Net, op="sqrt")
    assert before == after and counts == {"forward": 5}


# -- what a step may be made of -------------------------------------------------------------------------------------


def test_random_calls_in_the_loss_are_made_again() -> None:
    generator = torch.Generator().manual_seed(5)

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        a = torch.rand(3, 1)
        b = torch.rand(3, 1, generator=generator)
        keep = torch.bernoulli(torch.full((3, 1), 0.5)) + torch.randint(1, 3, (3, 1))
        return ((m(x) * a - y * b).square() * keep).mean() + torch.sqrt(m.last.bias.abs() * 0.0).sum() * (x < 0).any()

    det, before, after = train(
        Plain(), step=step, around=lambda: picture(generator), on_nan="skip", stop_on_first=False
    )
    event = det.event
    assert event is not None and event.reproduced == "yes" and (event.phase, event.op) == ("backward", "sqrt")
    assert before == after


def test_a_loader_between_the_steps() -> None:
    xs, ys = zip(*batches(), strict=True)
    loader = DataLoader(TensorDataset(torch.cat(xs), torch.cat(ys)), batch_size=3)
    det, _, _ = train(Net(), loader)
    assert_born(det.event, Net, step=4, op="sqrt")


def test_a_default_device_that_is_set() -> None:
    with torch.device("cpu"):
        det, _, _ = train(Net())
    assert_born(det.event, Net, op="sqrt", weights="clean")


def test_a_functional_call_of_the_users() -> None:
    model = Net()

    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scaled = {n: p * 0.5 for n, p in m.named_parameters()}
        return (torch.func.functional_call(m, scaled, (x,)) - y).square().mean()

    det, _, _ = train(model, step=step)
    assert_born(det.event, Net, op="sqrt", weights="clean")


def test_an_input_written_in_place_by_the_loop_after_the_forward() -> None:
    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(m, x, y)
        x.abs_()
        y.zero_()
        return loss

    class Keeps(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())

    det, _, _ = train(Keeps(), step=step)
    assert_born(det.event, Net, op="sqrt", weights="clean")


def test_an_input_written_behind_torchs_back_is_not_blamed_wrongly() -> None:
    def step(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(m, x, y)
        x.numpy()[:] = 1.0
        return loss

    det, _, _ = train(Net(), step=step)
    assert det.event is not None
    assert det.event.reproduced == "no" and det.event.location is None and det.event.op is None
