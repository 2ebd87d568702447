"""Who is told of an event, how often, and that a callback of the user's never ends the training."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nan_detector import NaNDetector, NaNEvent, NonFiniteError, WarningRecord


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt(x * self.scale)


def train(det: NaNDetector, model: nn.Module, bad: range | tuple[int, ...], *, n: int = 6, read: bool = False) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(n):
        det.set_batch(step)
        optimizer.zero_grad()
        model(torch.full((4, 3), -1.0 if step in bad else 1.0)).mean().backward()
        optimizer.step()
        if read:
            assert det.triggered == any(b <= step for b in bad)
    return optimizer


def broken(record: NaNEvent | WarningRecord) -> None:
    raise KeyError("a bug of the user's")


def test_on_event_gets_each_final_event_and_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    model, told = Root(), []

    def on_event(event: NaNEvent) -> None:
        told.append(event)
        broken(event)

    with NaNDetector(model, on_nan="skip", stop_on_first=False, on_event=on_event, verbose=False) as det:
        train(det, model, (1, 3))
    assert told == det.all_events and [e.step for e in told] == [1, 3]
    assert {e.status for e in told} == {"final"}
    assert model.scale.isfinite().all()
    assert sum("on_event raised" in r.getMessage() for r in caplog.records) == 2


def test_on_warning_may_raise(caplog: pytest.LogCaptureFixture) -> None:
    """Evaluation with a bad output is a warning, never a stop."""
    model = Root()
    with NaNDetector(model, on_warning=broken, verbose=False) as det, caplog.at_level(logging.WARNING, "nan_detector"):
        train(det, model, ())
        with torch.no_grad():
            model(-torch.ones(4, 3))
        train(det, model, ())
    assert det.event is None and not det.triggered
    for record in det.warnings:
        assert record.message
    raised = sum("on_warning raised" in r.getMessage() for r in caplog.records)
    assert raised == len(det.warnings)


def test_events_are_kept_up_to_a_bound_and_every_bad_step_is_refused() -> None:
    model = Root()
    with NaNDetector(model, stop_on_first=False, max_events=3, verbose=False) as det:
        train(det, model, range(2, 12), n=12)
    assert [e.step for e in det.all_events] == [2, 3, 4]
    assert model.scale.isfinite().all()


def test_stop_that_is_read_refuses_every_later_bad_step_too() -> None:
    model = Root()
    with NaNDetector(model, verbose=False) as det:
        optimizer = train(det, model, range(2, 5), n=8, read=True)
    assert [e.step for e in det.all_events] == [2]
    assert model.scale.isfinite().all()
    # Steps 0, 1, 5, 6 and 7 were taken.
    assert optimizer.state[model.scale]["step"].item() == 5


@pytest.mark.parametrize("look", ["triggered", "event", "all_events"])
def test_whoever_looks_has_noticed(look: str) -> None:
    model = Root()
    with NaNDetector(model, verbose=False) as det:
        train(det, model, (0,), n=1)
        getattr(det, look)
        train(det, model, (), n=2)


def test_an_overlooked_stop_is_raised_with_its_event() -> None:
    model = Root()
    with NaNDetector(model, verbose=False) as det:
        train(det, model, (0,), n=1)
        with torch.no_grad():
            model(torch.ones(4, 3))  # an evaluation is no training step
        with pytest.raises(NonFiniteError, match="NaN born at step 0") as caught:
            model(torch.ones(4, 3))
    assert caught.value.event == det.event


def test_raise_keeps_the_weights_and_the_optimizer_usable() -> None:
    model = Root()
    with NaNDetector(model, on_nan="raise", verbose=False) as det:
        with pytest.raises(NonFiniteError) as caught:
            train(det, model, (2,))
        assert caught.value.event is not None and caught.value.event.step == 2
        assert model.scale.isfinite().all()
        train(det, model, ())  # whoever catches it may go on
    assert [e.step for e in det.all_events] == [2]


# ------------------------------------------------------------------------------------------------- told once on stderr


@contextlib.contextmanager
def only(*handlers: logging.Handler) -> Iterator[None]:
    """Logging as a script has it, without what the test runner adds."""
    root = logging.getLogger()
    before = root.handlers[:]
    root.handlers[:] = handlers
    try:
        yield
    finally:
        root.handlers[:] = before


@pytest.mark.parametrize("configured", ["not at all", "to stderr", "to a file", "to both"])
@pytest.mark.parametrize("verbose", [True, False])
def test_an_event_is_told_once_on_stderr(
    configured: str, verbose: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, path = Root(), tmp_path / "log.txt"
    handlers: list[logging.Handler] = []
    if configured in ("to stderr", "to both"):
        handlers.append(logging.StreamHandler())
    if configured in ("to a file", "to both"):
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    with only(*handlers), NaNDetector(model, on_nan="skip", verbose=verbose) as det:
        train(det, model, (2,))
    for handler in handlers:
        handler.close()
    said = capsys.readouterr().err
    stderr_logs = configured != "to a file"
    assert said.count("born at step 2") == (1 if verbose or stderr_logs else 0)
    assert ("   where   " in said) == verbose
    if path.exists():
        assert path.read_text(encoding="utf-8").count("born at step 2") == 1


def test_levels_and_filters_of_the_logger_hold_beside_the_report(caplog: pytest.LogCaptureFixture) -> None:
    model, log = Root(), logging.getLogger("nan_detector")
    refuse = lambda record: False  # noqa: E731  # a filter may be any callable
    log.addFilter(refuse)
    try:
        with NaNDetector(model, on_nan="skip") as det:
            train(det, model, (2,))
    finally:
        log.removeFilter(refuse)
    assert det.event is not None and not caplog.records
