"""`det.cost()`: time per step and bytes held, each checked against what was put there."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nan_detector import Cost, NaNDetector, NotAttachedError

BATCH, WIDTH = 16, 32


def training(model: nn.Module, optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = iter([(torch.randn(BATCH, WIDTH), torch.randn(BATCH, 4)) for _ in range(60)])  # before the watch

    def step() -> tuple[Tensor, Tensor]:
        x, y = next(loader)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()  # mse_loss gives one number in the memory of many
        optimizer.step()
        return x, y

    return step


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))


def test_steps_and_times_are_those_of_the_watch() -> None:
    model = net()
    step = training(model)
    with NaNDetector(model, verbose=False) as det:
        assert det.cost().steps == 0 and det.cost().mean_ms == det.cost().max_ms == 0.0
        for i in range(7):
            det.set_batch(100 + i)
            step()
        cost = det.cost()
        assert cost.steps == 7
        assert 0.0 < cost.median_ms <= cost.max_ms and 0.0 < cost.mean_ms <= cost.max_ms
        assert cost.mean_ms == pytest.approx(det.overhead_ms)
    after = det.cost()
    assert (after.steps, after.mean_ms) == (7, cost.mean_ms)
    with det:
        assert det.cost().steps == 0


def test_what_is_held_is_the_last_steps_batch_and_the_recorder() -> None:
    model = net()
    step = training(model)
    with NaNDetector(model, verbose=False, history=10) as det:
        for _ in range(6):
            x, y = step()
        cost = det.cost()
        # The generator's state is kept so that the step can be run again; the parameters are the model's own.
        assert cost.moment_bytes == x.nbytes + torch.get_rng_state().nbytes
        # The labels; a loss of one element beside them.
        assert y.nbytes <= cost.tape_bytes <= y.nbytes + 8
        assert cost.recorder_bytes == 10 * 4 * 5  # rows of float32: the loss, and the norms of four gradients
        assert (cost.snapshot_bytes, cost.shadow_bytes) == (0, 0)
        assert cost.held_bytes == cost.moment_bytes + cost.tape_bytes + cost.recorder_bytes
    after = det.cost()
    assert (after.held_bytes, after.recorder_bytes) == (cost.recorder_bytes, cost.recorder_bytes)


@pytest.mark.parametrize(("rows", "size"), [(1000, 2 * 2**20), (52, 1056)])
def test_the_recorder_keeps_to_its_bytes(rows: int, size: int) -> None:
    model = net()
    step = training(model)
    with NaNDetector(model, verbose=False, history_bytes=size) as det:
        for _ in range(60):
            step()
        assert det.cost().recorder_bytes <= size
        assert len(det.history) == min(60, rows)


def test_layers_have_places_of_their_own() -> None:
    model = net()
    step = training(model)
    with NaNDetector(model, watch="layers", verbose=False, history=10) as det:
        for _ in range(3):
            step()
        rows = 10 * 4 * (5 + 5)  # also three layers, the root and its input
        assert det.cost().recorder_bytes >= rows + 2 * 4 * 5


def test_copies_of_the_state_are_counted() -> None:
    model = net()
    weights = sum(p.nbytes for p in model.parameters())
    with NaNDetector(model, protect="full", on_nan="rollback", verbose=False) as det:
        step = training(model)
        for _ in range(3):
            step()
        cost = det.cost()
    assert cost.shadow_bytes >= 3 * weights  # with Adam's two moments
    assert cost.snapshot_bytes >= weights
    assert det.cost().snapshot_bytes == det.cost().shadow_bytes == 0


def test_buffers_that_are_copied_count_as_the_models_calls() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4)
            self.register_buffer("seen", torch.zeros(1000))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.mean().detach()
            return self.linear(x) + self.seen.mean()

    model = Counting()
    step = training(model)
    with NaNDetector(model, verbose=False) as det:
        for _ in range(6):
            step()
        assert det.cost().moment_bytes >= 4000 + BATCH * WIDTH * 4


def test_it_goes_through_json() -> None:
    cost = Cost(steps=3, mean_ms=0.25, median_ms=0.2, max_ms=1.5, recorder_bytes=1200, tape_bytes=34)
    line = json.loads(json.dumps(cost.to_dict(), allow_nan=False))
    assert line["held_bytes"] == 1234 and line["steps"] == 3
    assert Cost.from_dict(line) == cost
    assert str(cost) == ("3 steps, 0.250 ms each (median 0.200, most 1.500); held: recorder 1,200 B, tape 34 B")
    with pytest.raises(dataclasses.FrozenInstanceError):
        cost.steps = 4
    assert str(Cost(0, 0.0, 0.0, 0.0)).endswith("held: nothing")


def test_before_the_first_watch_there_is_nothing_to_tell() -> None:
    with pytest.raises(NotAttachedError, match=r"^cost needs a watch to tell of: use `with NaNDetector\(model\)"):
        NaNDetector(net()).cost()


def test_switched_off_it_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NAN_DETECTOR", "off")
    model = net()
    step = training(model)
    with NaNDetector(model) as det:
        step()
    assert det.cost() == Cost(0, 0.0, 0.0, 0.0)


def test_asking_changes_nothing_of_the_training() -> None:
    def run(ask: bool) -> list[Tensor]:
        model = net()
        torch.manual_seed(1)
        step = training(model)
        with NaNDetector(model, verbose=False) as det:
            for _ in range(4):
                step()
                if ask:
                    det.cost()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))
