"""What layers reached goes into the log at an event and at the end: bounded, once, and not in the steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector, StepRow, _peaks
from nan_detector._eventlog import read_log


def train(log: Path, steps: int, bad: tuple[int, ...] = (), **options: object) -> NaNDetector:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, **{"log_dir": log, "watch": "layers", "verbose": False, **options}) as det:
        for step in range(steps):
            x = torch.full((3, 4), math.nan) if step in bad else torch.randn(3, 4)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            assert options.get("on_nan") == "skip" or bool(det.triggered) is (step in bad)
    return det


def second_rows(log: Path) -> list[StepRow]:
    return [r for r in read_log(log) if isinstance(r, StepRow) and r.layers]


def first_rows(log: Path) -> list[StepRow]:
    return [r for r in read_log(log) if isinstance(r, StepRow) and not r.layers]


def test_the_end_of_a_run_has_its_layers(tmp_path: Path):
    train(tmp_path, 5)
    rows = second_rows(tmp_path)
    assert [r.step for r in rows] == [0, 1, 2, 3, 4]
    assert [p.layer_name for p in rows[0].layers] == ["root input", "0", "1", "2", "root"]
    assert {p.layer_name: p.limit for p in rows[0].layers} == {
        "root input": None,
        **dict.fromkeys(("0", "1", "2", "root"), torch.finfo(torch.float32).max),
    }
    assert all(0 < p.abs_max < 100 for r in rows for p in r.layers)
    for first, second in zip(first_rows(tmp_path), rows, strict=True):
        assert (first.step, first.lr) == (second.step, second.lr)
        assert second.loss == pytest.approx(first.loss) and second.grad_norm == pytest.approx(first.grad_norm)


def test_an_event_has_the_steps_before_it_and_none_comes_twice(tmp_path: Path):
    train(tmp_path, 6, bad=(2, 4), on_nan="skip", stop_on_first=False)
    kinds = [r.record + ("+" if isinstance(r, StepRow) and r.layers else "") for r in read_log(tmp_path)]
    after = kinds[kinds.index("event") :]
    first = after.index("step+")
    assert first >= 2 and set(after[:first]) == {"event"}, "the event is written first, whole"
    assert after[first : first + 2] == ["step+", "step+"]
    assert [r.step for r in second_rows(tmp_path)] == [0, 1, 2, 3, 4, 5]
    (bad,) = (r for r in second_rows(tmp_path) if r.step == 2)
    assert all(math.isnan(p.abs_max) for p in bad.layers)


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_peaks, "MOST_ROWS", 4)
    train(tmp_path / "rows", 9)
    assert [r.step for r in second_rows(tmp_path / "rows")] == [5, 6, 7, 8]
    monkeypatch.setattr(_peaks, "MOST_VALUES", 12)  # five a row
    train(tmp_path / "values", 9)
    assert [r.step for r in second_rows(tmp_path / "values")] == [7, 8]


def test_a_layer_that_took_no_part_is_left_out(tmp_path: Path):
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.rarely = nn.Linear(4, 4), nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.always(x)
            return self.rarely(x) if self.calls != 2 else x

    torch.manual_seed(0)
    model = Sometimes()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, watch="layers", log_dir=tmp_path):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
    assert [["rarely" in {p.layer_name for p in r.layers}] for r in second_rows(tmp_path)] == [[True], [False], [True]]


def test_where_layers_are_not_watched_there_are_no_second_rows(tmp_path: Path):
    train(tmp_path, 3, watch="step")
    assert len(first_rows(tmp_path)) == 3 and second_rows(tmp_path) == []


def test_nothing_is_read_for_a_log_that_is_not_there():
    det = train(Path("unused"), 3, log_dir=None)
    assert det.event is None and not Path("unused").exists()
