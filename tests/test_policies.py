"""What happens to a bad step, by the policy that the user chose."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nan_detector import NaNDetector, NaNEvent, NonFiniteError

BAD = (2, 4)


class Root(nn.Module):
    """A layer whose square root has no value for the batches of `BAD`."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * self.scale)


class Run:
    """A training of six steps, two of them bad."""

    def __init__(self, on_nan: Any, *, stop_on_first: bool = True, verbose: bool = False) -> None:
        self.model = Root()
        self.raised: list[int] = []
        self.triggered: list[int] = []
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.det = NaNDetector(self.model, on_nan=on_nan, stop_on_first=stop_on_first, verbose=verbose)
        with self.det as det:
            for step in range(6):
                det.set_batch(step)
                optimizer.zero_grad()
                self.model(torch.full((4, 3), -1.0 if step in BAD else 1.0)).mean().backward()
                try:
                    optimizer.step()
                except NonFiniteError:
                    self.raised.append(step)
                if det.triggered:
                    self.triggered.append(step)

    @property
    def steps(self) -> list[int]:
        return [e.step for e in self.det.all_events]

    @property
    def finite(self) -> bool:
        return bool(self.model.scale.isfinite().all())


@pytest.mark.parametrize("on_nan", ["stop", "skip", None])
def test_a_bad_step_is_not_taken_and_told(on_nan: Any):
    run = Run(on_nan)
    told = [2, 4] if on_nan == "skip" else [2]
    assert (run.steps, run.triggered, run.raised, run.finite) == (told, [2, 3, 4, 5], [], True)
    assert run.det.event is not None and run.det.event.action == (on_nan or "stop")
    assert run.det.event.weights == "clean"


@pytest.mark.parametrize("on_nan", ["stop", "skip", None])
def test_without_stop_on_first_every_bad_step_is_told(on_nan: Any):
    run = Run(on_nan, stop_on_first=False)
    assert (run.steps, run.raised, run.finite) == ([2, 4], [], True)
    assert {e.action for e in run.det.all_events} == {on_nan or "skip"}


def test_the_same_story_is_told_whole_once(capsys: pytest.CaptureFixture[str]):
    Run("skip", verbose=True)
    first, second = capsys.readouterr().err.split(" NaN born at step ")[1:]
    assert first.startswith("2,") and "\n   fix " in first and "as at step" not in first
    assert second.startswith("4,") and "\n   fix " not in second
    assert "\n   why     as at step 2: square root of a negative number.\n" in second
    assert "\n   state   weights are clean: the step was skipped, and training goes on." in second


@pytest.mark.parametrize("stop_on_first", [True, False])
def test_raise_raises_at_each_bad_step_and_once(stop_on_first: bool):
    run = Run("raise", stop_on_first=stop_on_first)
    assert (run.steps, run.raised, run.finite) == ([2, 4], [2, 4], True)


def test_the_last_step_is_not_raised_again_when_the_block_ends():
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, on_nan="raise", verbose=False) as det:
        model(-torch.ones(4, 3)).mean().backward()
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step()
    assert det.all_events == [caught.value.event]


def test_warn_takes_the_step_and_says_what_became_of_the_weights():
    run = Run("warn")
    assert (run.steps, run.raised, run.finite) == ([2], [], False)
    assert run.det.event is not None and run.det.event.weights == "damaged since step 2"


@pytest.mark.parametrize("stop_on_first", [True, False])
def test_a_callable_is_asked_for_each_event(stop_on_first: bool):
    asked: list[NaNEvent] = []

    def decide(event: NaNEvent) -> str:
        asked.append(event)
        return "skip"

    run = Run(decide, stop_on_first=stop_on_first)
    assert [e.step for e in asked] == run.steps == [2, 4]
    assert run.finite
    assert all(e.status == "final" and e.op == "sqrt" for e in asked), "it is asked when the answer is known"


def no_policy(event: NaNEvent) -> str:
    return "carry on"


def fails(event: NaNEvent) -> str:
    raise KeyError("a bug of the user's")


@pytest.mark.parametrize("on_nan", [no_policy, fails])
def test_a_callable_without_an_answer_leaves_the_weights_protected(
    on_nan: Callable[[NaNEvent], str], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.ERROR, "nan_detector"):
        run = Run(on_nan)
    assert run.finite and run.det.event is not None
    assert (run.det.event.action, run.det.event.status) == ("stop", "final")
    assert any("on_nan gave no policy" in r.message for r in caplog.records)


def test_stop_cannot_be_overlooked():
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        model(-torch.ones(4, 3)).mean().backward()
        optimizer.step()
        with pytest.raises(NonFiniteError, match="Training went on although the step was stopped"):
            model(torch.ones(4, 3))
        assert det.triggered
        model(torch.ones(4, 3))  # somebody has noticed
