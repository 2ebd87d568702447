"""A norm overflows while clipping: every gradient is 0, everything is finite, and the training stands still."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from nan_detector import NaNDetector, NonFiniteError

HUGE = 1e25
STEPS, BAD = 6, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def torchs(parameters: Iterable[Tensor]) -> None:
    clip_grad_norm_(parameters, 1.0)  # <-- the clip


def one_by_one(parameters: Iterable[Tensor]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)  # <-- the clip


def in_two_calls(parameters: Iterable[Tensor]) -> None:
    parameters = list(parameters)
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])  # <-- the clip
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, total)


def by_hand(parameters: Iterable[Tensor]) -> None:
    grads = [p.grad for p in parameters if p.grad is not None]
    total = torch.sqrt(sum((g**2).sum() for g in grads))  # <-- the clip
    for g in grads:
        g.mul_(1.0 / (total + 1e-6))


def by_hand_with_numbers(parameters: Iterable[Tensor]) -> None:
    parameters = list(parameters)
    total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in parameters if p.grad is not None))  # <-- the clip
    if total > 1.0:
        for p in parameters:
            if p.grad is not None:
                p.grad = p.grad * (1.0 / total)


def by_data(parameters: Iterable[Tensor]) -> None:
    grads = [p.grad.data for p in parameters if p.grad is not None]
    total = torch.cat([g.reshape(-1) for g in grads]).pow(2).sum().sqrt()  # <-- the clip
    for g in grads:
        g.div_(torch.clamp(total, min=1.0))


CLIPS: dict[str, Callable[[Iterable[Tensor]], None]] = {
    f.__name__: f for f in (torchs, one_by_one, in_two_calls, by_hand, by_hand_with_numbers, by_data)
}


def line(clip: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(clip)
    return first + next(i for i, text in enumerate(lines) if "# <-- the clip" in text)


def train(
    clip: Callable[[Iterable[Tensor]], None],
    *,
    scale: Callable[[int], float] = lambda i: HUGE if i == BAD else 1.0,
    make: Callable[[Any], Any] = lambda p: torch.optim.SGD(p, lr=0.1),
    run_step: bool = False,
    **options: Any,
) -> tuple[NaNDetector, nn.Module, list[dict[str, Tensor]]]:
    model = Net()
    optimizer = make(model.parameters())
    weights = []

    def step(x: Tensor, factor: float) -> None:
        optimizer.zero_grad()
        loss = (model(x).square().mean() + 1.0) * factor
        loss.backward()
        clip(model.parameters())
        optimizer.step()

    with NaNDetector(model, verbose=False, grad_norm_warn=math.inf, **options) as det:
        for i in range(STEPS):
            torch.manual_seed(i)
            x = torch.randn(5, 4)
            det.set_batch(i)
            if run_step:
                det.run_step(step, x, scale(i))
            else:
                step(x, scale(i))
            weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
            if det.triggered and det.all_events[-1].action == "stop":
                break
    return det, model, weights


@pytest.mark.parametrize("run_step", [False, True], ids=["loop", "run_step"])
@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
@pytest.mark.parametrize("name", list(CLIPS))
def test_the_line_of_the_clip_is_named(name: str, watch: str, run_step: bool) -> None:
    det, _, weights = train(CLIPS[name], watch=watch, run_step=run_step)
    event = det.event
    assert event is not None and len(weights) == BAD + 1
    assert (event.step, event.phase, event.severity, event.reproduced) == (BAD, "backward", "error", "yes")
    assert event.cause is not None and event.cause.code == "clip_norm_overflow", event
    assert event.location is not None and event.location.line == line(CLIPS[name])
    assert event.op is not None and event.weights == "clean" and event.action == "stop"
    assert event.symptom.startswith("every gradient is exactly 0")
    assert all(torch.equal(weights[-1][n], weights[-2][n]) for n in weights[0])


def test_the_report_is_this() -> None:
    det, _, _ = train(torchs)
    assert det.event is not None
    text = str(det.event)
    assert f"clip_grad_norm_  ·  {Path(__file__).name}" in text.replace("tests/", "") and "derivative" not in text
    assert "Every gradient is finite" in text and "overflows float32" in text, text


@pytest.mark.parametrize("on_nan", ["skip", "rollback", "warn", "raise"])
def test_policies_apply(on_nan: str) -> None:
    """Adam's moments decay in a step of zeros: a step that is dropped leaves them as they were."""

    def adam(parameters: Any) -> Any:
        return torch.optim.Adam(parameters, lr=0.01)

    if on_nan == "raise":
        with pytest.raises(NonFiniteError, match=f"step {BAD}"):
            train(torchs, make=adam, on_nan=on_nan)
        return
    det, _, weights = train(torchs, make=adam, on_nan=on_nan, snapshot_every=1)
    assert [e.step for e in det.all_events] == [BAD] and len(weights) == STEPS
    expected = {"skip": "clean", "rollback": "restored", "warn": "clean"}
    assert det.all_events[0].weights == expected[on_nan], "zeros damage nothing"
    back = 2 if on_nan == "rollback" else 1
    moved = any(not torch.equal(weights[BAD][n], weights[BAD - back][n]) for n in weights[0])
    assert moved == (on_nan == "warn"), "the momentum moves the weights, where the step is taken"


def test_each_such_step_is_told() -> None:
    det, _, _ = train(torchs, scale=lambda i: HUGE if i >= 2 else 1.0, on_nan="skip")
    assert [e.step for e in det.all_events] == [2, 3, 4, 5] and det.skipped_steps == 4


def test_a_clip_after_each_of_several_backward_passes() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False, grad_norm_warn=math.inf) as det:
        for i in range(3):
            det.set_batch(i)
            optimizer.zero_grad()
            for _ in range(2):
                ((model(torch.ones(5, 4)).square().mean() + 1.0) * (HUGE if i == 2 else 1.0)).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert det.event is not None and det.event.step == 2
    assert det.event.cause is not None and det.event.cause.code == "clip_norm_overflow"


def test_half_precision_overflows_far_below_its_range() -> None:
    """A norm over float16 gradients of 300 each is beyond 65504 for 50,000 of them."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False, grad_norm_warn=math.inf) as det:
        for i in range(3):
            det.set_batch(i)
            optimizer.zero_grad()
            x = torch.full((1, 256), 300.0 if i == 2 else 1.0).half()
            (model(x) * 1.0).sum().backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert det.event is not None and det.event.step == 2
    assert det.event.cause is not None and det.event.cause.code == "clip_norm_overflow"
    assert "float16" in str(det.event)


def test_without_a_replay_nothing_is_claimed() -> None:
    det, _, _ = train(torchs, replay="off")
    assert det.event is None


# --------------------------------------------------------------------------------------------------------- near misses


def freezes(parameters: Iterable[Tensor]) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(0.0)


def measures(parameters: Iterable[Tensor]) -> None:
    torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def guarded(parameters: Iterable[Tensor]) -> None:
    parameters = list(parameters)
    total = torch.nn.utils.get_total_norm([p.grad.double() for p in parameters if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, total)


@pytest.mark.parametrize("clip", [freezes, measures, guarded])
def test_what_erases_nothing_by_an_overflow_is_quiet(clip: Callable[[Iterable[Tensor]], None]) -> None:
    det, _, weights = train(clip, make=lambda p: torch.optim.SGD(p, lr=1e-27))
    assert det.event is None and len(weights) == STEPS


@pytest.mark.parametrize("clip", [torchs, by_hand])
def test_a_dead_network_that_is_clipped_is_quiet_and_soon_left_alone(
    clip: Callable[[Iterable[Tensor]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from nan_detector import _search

    replays = []
    bare = _search.investigate

    def counted(*args: Any, **kwargs: Any) -> Any:
        replays.append(1)
        return bare(*args, **kwargs)

    monkeypatch.setattr(_search, "investigate", counted)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        for _ in range(40):
            optimizer.zero_grad()
            (model(torch.ones(5, 4)) * 0.0).sum().backward()
            clip(model.parameters())
            optimizer.step()
    assert det.event is None and 1 <= len(replays) <= 6


def test_a_zero_step_long_ago_hides_nothing() -> None:
    """Steps whose gradients are rightly 0, and much later one whose gradients were erased."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False, grad_norm_warn=math.inf) as det:
        for i in range(30):
            det.set_batch(i)
            optimizer.zero_grad()
            factor = 0.0 if i in (2, 3) else HUGE if i == 25 else 1.0
            ((model(torch.ones(5, 4)).square().mean() + 1.0) * factor).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.step == 25
