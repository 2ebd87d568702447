"""NAN_DETECTOR=off: the same program, unwatched."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import nan_detector
from _footprint import footprint, left_behind
from nan_detector import NaNDetector, detect_nan, train_with_nan_guard
from nan_detector._cli.app import main

NAN = float("nan")

SCRIPT = """
import torch
from torch import nn

body, head = nn.Linear(2, 2), nn.Linear(2, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    (head(body(torch.ones(3, 2))).mean() * float("nan")).backward()
    optimizer.step()
print("weights", "finite" if body.weight.isfinite().all() else "bad")
"""


@pytest.fixture(autouse=True, params=["off", "OFF", "0", "false"])
def off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NAN_DETECTOR", request.param)
    monkeypatch.chdir(tmp_path)


def test_the_whole_loop_runs_and_nothing_is_seen_or_written():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = footprint()
    with NaNDetector(model, watch="layers", on_nan="raise", log_dir="logs") as det:
        assert left_behind(before) == []
        for step in range(2):
            det.set_batch(step, sample_ids=["a"])
            optimizer.zero_grad()
            loss = det.run_step(lambda: model(torch.ones(1, 2)).sum() * NAN)
            loss.backward()
            assert det.check_grad_norms() is False
            optimizer.step()
            assert not det.triggered
    assert (det.event, det.all_events, det.grad_events, det.warnings) == (None, [], [], [])
    assert (len(det.history), det.overhead_ms) == (0, 0.0)
    assert not model.weight.isfinite().any(), "unwatched, the step is taken"
    assert os.listdir() == []


def test_the_guard_trains_on():
    model = nn.Linear(2, 1)
    loader = [(torch.full((3, 2), NAN), torch.ones(3, 1))] * 2
    losses, event = train_with_nan_guard(model, loader, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert (json.dumps(losses), event) == ("[NaN, NaN]", None)


def test_detect_nan_lets_everything_pass():
    x = torch.zeros(2, requires_grad=True)
    with detect_nan():
        (x / x).sum().backward()
    assert x.grad is not None and x.grad.isnan().all()
    assert not nan_detector.is_replaying()


def test_a_script_of_several_models_runs_as_without_us(capfd: pytest.CaptureFixture[str]):
    Path("train.py").write_text(SCRIPT, encoding="utf-8")
    assert main(["run", "--log", "logs", "train.py"]) == 0
    assert capfd.readouterr() == ("weights bad\n", "")
    assert os.listdir() == ["train.py"]
