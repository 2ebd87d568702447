"""What goes bad in the last steps, where neither loss nor gradients show it, is told when the watch ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector, NonFiniteError
from test_scrub_events import STRAY, Words, since, spoil_moment, spoil_row, train

#: So few steps follow that no rotating slice comes to it again.
LATE = STRAY + 2


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
@pytest.mark.parametrize("told", [True, False])
def test_a_weight(watch: str, told: bool) -> None:
    det = train(spoil_row, steps=LATE, watch=watch) if not told else numbered(spoil_row)
    event = det.event
    assert event is not None and len(det.all_events) == 1
    assert (event.phase, event.tensor_name, event.layer_name) == ("state", "table.weight", "table")
    assert event.step == (LATE - 1 if not told else 1000 + LATE - 1)
    first = 1000 if told else 0
    assert first + STRAY - 33 <= since(event.weights) <= first + STRAY
    assert det.triggered and det.skipped_steps == 0


def numbered(harm: Any) -> NaNDetector:
    torch.manual_seed(0)
    model = Words()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    with NaNDetector(model, verbose=False) as det:
        for i in range(LATE):
            det.set_batch(1000 + i)
            opt.zero_grad()
            model(torch.randint(0, 40, (16,))).square().mean().backward()
            opt.step()
            if i == STRAY:
                with torch.no_grad():
                    harm(model, opt)
    return det


def test_optimizer_state() -> None:
    det = train(spoil_moment, steps=LATE)
    event = det.event
    assert event is not None and len(det.all_events) == 1
    assert (event.phase, event.tensor_name) == ("optimizer", "optimizer.state[head.bias]['exp_avg_sq']")
    assert event.step == LATE - 1 and det.skipped_steps == 0


def test_a_buffer_is_a_warning() -> None:
    def harm(model: Words, opt: Any) -> None:
        model.table_of_codes[1] = float("nan")

    det = train(harm, steps=LATE)
    assert det.event is None
    assert [(w.kind, w.layer_name, w.step) for w in det.warnings] == [("state", None, LATE - 1)]
    assert "table_of_codes" in det.warnings[0].message


def test_raise_is_raised_when_the_block_ends() -> None:
    with pytest.raises(NonFiniteError, match=r"table\.weight"):
        train(spoil_row, steps=LATE, on_nan="raise")


@pytest.mark.parametrize("on_nan", ["skip", "warn", "rollback"])
def test_other_policies_tell_it_and_skip_nothing(on_nan: str) -> None:
    det = train(spoil_row, steps=LATE, on_nan=on_nan)
    assert [e.tensor_name for e in det.all_events] == ["table.weight"] and det.skipped_steps == 0


# --------------------------------------------------------------------------------------------------------- near misses


def nothing(model: Words, opt: Any) -> None:
    return None


@pytest.mark.parametrize("steps", [0, 1, 5, 31, 33, STRAY])
def test_an_ordinary_run_ends_quietly(steps: int) -> None:
    det = train(nothing, steps=steps)
    assert det.event is None and det.warnings == []


def test_what_was_told_is_not_told_again() -> None:
    det = train(spoil_row, on_nan="skip")
    assert len(det.all_events) == 1


def test_an_exception_of_the_training_is_not_talked_over() -> None:
    class Stop(Exception):
        pass

    def harm(model: Words, opt: Any) -> None:
        spoil_row(model, opt)
        raise Stop

    with pytest.raises(Stop):
        train(harm, steps=LATE)


def test_a_model_that_was_not_trained_is_not_judged() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with NaNDetector(model, verbose=False) as det:
        pass
    assert det.event is None


def test_masks_of_minus_infinity_are_meant() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 3)
            self.register_buffer("mask", torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -float("inf")))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.body(x) + self.mask).softmax(-1)

    model = Masked()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        for _ in range(3):
            opt.zero_grad()
            model(torch.randn(3, 3)).square().sum().backward()
            opt.step()
    assert det.event is None and det.warnings == []
