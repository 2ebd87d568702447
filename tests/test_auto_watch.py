"""The search for what trains in a script: a failure of ours there must not become the script's."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector
from nan_detector._auto import AutoWatch


def broken(model: nn.Module) -> NaNDetector:
    raise LookupError("a bug of ours")


def steps(count: int) -> nn.Module:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
    return model


def test_a_bug_of_ours_is_logged_once_and_the_script_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("NAN_DETECTOR_STRICT")
    with caplog.at_level(logging.ERROR, "nan_detector"), AutoWatch(broken) as auto:
        model = steps(3)
    assert auto.detector is None and model.weight.isfinite().all()
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None


def test_in_tests_it_is_raised():
    with AutoWatch(broken), pytest.raises(LookupError):
        steps(1)


def test_the_keywords_of_the_call_under_way_reach_the_replay():
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(super().forward(x) * 0 + by)

    model = Scaled(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with AutoWatch(lambda m: NaNDetector(m, verbose=False)) as auto:
        model(torch.ones(2, 3), by=torch.tensor(-1.0)).mean().backward()
        optimizer.step()
        assert auto.detector is not None and auto.detector.event is not None
        event = auto.detector.event
    assert (event.step, event.op, event.reproduced) == (0, "sqrt", "yes")
