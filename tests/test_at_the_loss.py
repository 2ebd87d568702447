"""The place of a bad loss is written down while the replay goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nan_detector import NaNDetector, NaNEvent, is_replaying
from nan_detector._at_the_loss import AtTheLoss
from nan_detector._book import Book
from nan_detector._eventlog import read_log


class Shown:
    """Events, kept where a replay does not put back what it finds: in a queue, not in a list."""

    def __init__(self) -> None:
        self._events: SimpleQueue[NaNEvent] = SimpleQueue()
        self.put = self._events.put

    def all(self) -> list[NaNEvent]:
        return [self._events.get_nowait() for _ in range(self._events.qsize())]


class Watched(nn.Module):
    """Has a hook on its output that shows what is known when the backward of a replay comes by."""

    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner
        self.on_backward: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        out = self.inner(h)
        out.register_hook(lambda grad: self.on_backward() if is_replaying() else None)
        return out


def root(h: Tensor) -> Tensor:
    return torch.sqrt(-h.abs() - 1)


def watched(inner: Callable[[Tensor], Tensor] = root, **options: Any) -> tuple[NaNDetector, Watched, Shown]:
    torch.manual_seed(0)
    model, seen = Watched(inner), Shown()
    det = NaNDetector(model, verbose=False, **options)
    model.on_backward = lambda: seen.put(det.all_events[0])
    return det, model, seen


def train(det: NaNDetector, model: nn.Module, *, batches: int = 1, steps: int = 1) -> NaNEvent | None:
    """The last batch of each step is bad; of the others the loss is that of the parameters alone."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with det:
        for _ in range(steps):
            for i in range(batches):
                out = model(torch.ones(2, 4))
                loss = out.mean() if i == batches - 1 else model.get_parameter("linear.weight").mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return det.event


def test_the_place_is_known_before_the_backward_is_made_again() -> None:
    det, model, seen = watched()
    event = train(det, model)
    assert event is not None and (event.op, event.reproduced, event.status) == ("sqrt", "yes", "final")
    early = seen.all()[0]
    assert early.status == "provisional" and early.event_id == event.event_id
    assert early.location == event.location is not None
    assert (early.op, early.cause, early.inputs) == (event.op, event.cause, event.inputs)


def test_it_is_in_the_log_by_then(tmp_path: Path) -> None:
    det, model, seen = watched(log_dir=tmp_path)

    def read() -> None:
        (file,) = tmp_path.glob("*.jsonl")
        seen.put([r for r in read_log(file) if isinstance(r, NaNEvent)][-1])

    model.on_backward = read
    train(det, model)
    line = seen.all()[0]
    assert line.op == "sqrt" and line.location is not None and line.status == "provisional"


def test_in_a_step_function_too() -> None:
    det, model, seen = watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    with det:
        det.run_step(step, torch.ones(2, 4))
    assert det.event is not None and det.event.op == "sqrt"
    assert seen.all()[0].location == det.event.location is not None


def test_the_micro_step_is_right() -> None:
    det, model, seen = watched()
    event = train(det, model, batches=3)
    assert event is not None and event.micro_step == seen.all()[0].micro_step == 2


def test_of_another_loss_than_the_steps_own_nothing_is_told() -> None:
    det, model, seen = watched(lambda h: torch.log(0 * h.abs() - (1 if is_replaying() else 0)))
    event = train(det, model)
    assert event is not None and event.reproduced == "no"
    shown = seen.all()
    assert shown and all(e.location is None for e in shown)


def test_a_parameter_that_was_bad_before_is_told_when_all_is_known() -> None:
    det, model, seen = watched(lambda h: h)
    with torch.no_grad():
        model.linear.weight[0, 0] = torch.nan
    event = train(det, model)
    assert event is not None and event.tensor_name == "linear.weight"
    assert seen.all()[0].tensor_name is None


def test_finite_losses_are_passed_over() -> None:
    det, model, seen = watched(lambda h: torch.sqrt(0 * h.abs()))
    event = train(det, model)
    assert event is not None and event.phase == "backward"
    assert seen.all()[0].location is None  # what the trials' replays show comes later


def test_a_story_that_is_not_tried_any_more_is_written_down_once(monkeypatch: pytest.MonkeyPatch) -> None:
    located: list[str] = []
    monkeypatch.setattr(Book, "located", lambda book, event: located.append(event.event_id))
    det, model, _ = watched(on_nan="skip", stop_on_first=False, max_skips=None)
    train(det, model, steps=5)
    events = [e.event_id for e in det.all_events]
    assert len(events) == 5
    assert located == [e for e in events[:3] for _ in range(2)]


def test_a_bug_in_it_costs_nothing_else(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    left, write = ["a bug"], Book.located

    def fails(book: Book, event: NaNEvent) -> None:
        if left:
            raise RuntimeError(left.pop())
        write(book, event)

    det, model, seen = watched()
    monkeypatch.setenv("NAN_DETECTOR_STRICT", "0")
    monkeypatch.setattr(Book, "located", fails)
    event = train(det, model)
    assert event is not None and (event.op, event.status, event.reproduced) == ("sqrt", "final", "yes")
    assert seen.all()[0].location is None
    assert "the place of the bad loss could not be written down early" in caplog.text


def test_the_replay_sees_nothing_of_it() -> None:
    """What is read for the early event is no operation of the step: its numbers are those of a replay without it."""
    numbers = []
    for told in (True, False):
        det, model, _ = watched()
        with pytest.MonkeyPatch.context() as patched:
            if not told:
                patched.setattr(AtTheLoss, "__call__", lambda *args: None)
            event = train(det, model)
        assert event is not None
        numbers.append((event.spread, event.location, event.output, event.loss_terms, event.notes, event.verdict))
    assert numbers[0] == numbers[1]
