"""A loop that sees a bad loss and drops it by itself: no event, and a warning that says where the loss went bad."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nan_detector import NaNDetector, WarningRecord
from nan_detector import _looks as module_of_looks

BAD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.drop = nn.Linear(4, 8), nn.Linear(8, 1), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.body(x)))
        return self.head(h) * torch.sqrt(x.mean() + 1.0)  # <-- the birth


def line() -> int:
    lines, first = inspect.getsourcelines(Net)
    return first + next(i for i, text in enumerate(lines) if "# <-- the birth" in text)


def by_item(loss: Tensor) -> bool:
    return not math.isfinite(loss.item())


def by_isnan(loss: Tensor) -> bool:
    return bool(torch.isnan(loss))


def by_isfinite(loss: Tensor) -> bool:
    return not torch.isfinite(loss).all()


SIGHTS: list[Callable[[Tensor], bool]] = [by_item, by_isnan, by_isfinite]


def batches(bad: tuple[int, ...], n: int = 6) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(0)
    made = [(torch.rand(5, 4, generator=g), torch.rand(5, 1, generator=g)) for _ in range(n)]
    for i in bad:
        made[i][0].sub_(10.0)
    return made


def in_a_function(sees: Callable[[Tensor], bool], bad: tuple[int, ...], n: int = 6, **options: Any) -> Any:
    """The loss is gone when the next batch comes."""
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        if sees(loss):
            return
        loss.backward()
        opt.step()

    with NaNDetector(model, verbose=False, **options) as det:
        for x, y in batches(bad, n):
            step(x, y)
    return det, model


def in_the_loop(sees: Callable[[Tensor], bool], bad: tuple[int, ...], n: int = 6, **options: Any) -> Any:
    """The loss lives on until the next one is there, and every step is named."""
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with NaNDetector(model, verbose=False, **options) as det:
        for i, (x, y) in enumerate(batches(bad, n)):
            det.set_batch(i)
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            if sees(loss):
                continue
            loss.backward()
            opt.step()
    return det, model


def accumulating(sees: Callable[[Tensor], bool], bad: tuple[int, ...], n: int = 6, **options: Any) -> Any:
    """Two micro-batches a step; the bad one is left out of its sum."""
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    good = batches((), n)
    with NaNDetector(model, verbose=False, **options) as det:
        for i, pair in enumerate(batches(bad, n)):
            for x, y in (good[i], pair):
                loss = F.mse_loss(model(x), y)
                if not sees(loss):
                    loss.backward()
            opt.step()
            opt.zero_grad()
    return det, model


def handled(det: NaNDetector) -> list[WarningRecord]:
    return [w for w in det.warnings if w.kind == "handled"]


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
@pytest.mark.parametrize("sees", SIGHTS)
@pytest.mark.parametrize("loop", [in_a_function, in_the_loop, accumulating])
def test_the_birthplace_is_told(loop: Any, sees: Callable[[Tensor], bool], watch: str) -> None:
    det, model = loop(sees, (BAD,), watch=watch)
    assert not det.triggered and [e for e in det.all_events if e.severity == "error"] == []
    [warning] = handled(det)
    assert warning.location is not None and warning.location.line == line()
    assert "torch.sqrt" in warning.message and "square root of a negative number" in warning.message
    assert warning.message.startswith(f"step {warning.step}: the loop saw that a loss was not finite at ")
    assert "and did not train on it; it was born in " in warning.message
    if loop is in_the_loop:
        assert warning.step == BAD
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("loop", [in_a_function, in_the_loop, accumulating])
def test_at_the_last_batch_and_in_the_first(loop: Any) -> None:
    for bad in (0, 5):
        [warning] = handled(loop(by_item, (bad,))[0])
        assert warning.location is not None and warning.location.line == line()


@pytest.mark.parametrize("loop", [in_a_function, in_the_loop, accumulating])
def test_the_training_is_bit_for_bit_the_same(loop: Any) -> None:
    """Looking for the birthplace runs dropout again; no random stream may move."""
    ends = []
    for replay in ("auto", "off"):
        torch.manual_seed(3)
        ends.append([p.detach().clone() for p in loop(by_isnan, (1, 3), replay=replay)[1].parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_without_a_replay_it_is_told_where_the_loop_looked() -> None:
    [warning] = handled(in_the_loop(by_item, (BAD,), replay="off")[0])
    lines, first = inspect.getsourcelines(by_item)
    assert warning.location is not None and warning.location.line == first + len(lines) - 1
    assert warning.message.endswith("and did not train on it")


def test_what_the_batch_brought_is_said() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = batches(())
    data[BAD][0][1, 2] = float("nan")
    with NaNDetector(model, verbose=False) as det:
        for x, y in data:
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            if by_isnan(loss):
                continue
            loss.backward()
            opt.step()
    [warning] = handled(det)
    assert warning.message.endswith(", and did not train on it; the batch brought it, in x")


def test_many_dropped_batches_do_not_cost_a_replay_each(monkeypatch: pytest.MonkeyPatch) -> None:
    replays = []
    bare = module_of_looks.investigate

    def counted(*args: Any, **kwargs: Any) -> Any:
        replays.append(1)
        return bare(*args, **kwargs)

    monkeypatch.setattr(module_of_looks, "investigate", counted)
    det, _ = in_the_loop(by_item, tuple(range(1, 40, 2)), n=40)
    assert len(handled(det)) == 20 and len(replays) == 5, "1st, 2nd, 4th, 8th, 16th"


@pytest.mark.parametrize("loop", [in_a_function, in_the_loop, accumulating])
def test_a_look_at_good_losses_costs_nothing(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is to be looked for")

    monkeypatch.setattr(module_of_looks, "investigate", never)
    det, _ = loop(by_item, ())
    assert det.event is None and det.warnings == []
