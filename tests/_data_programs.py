"""A plain training loop, marks in the source, and checks: for the tests of births from data, state and precision."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch

from nan_detector import NaNDetector
from nan_detector._records import NaNEvent

Tensor = torch.Tensor


def train(
    model: torch.nn.Module,
    batches: Iterable[Any],
    step: Callable[[torch.nn.Module, Any], Tensor],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    ids: Callable[[int], list[str]] | None = None,
    **options: Any,
) -> NaNDetector:
    """Run the loop of the README; `step` gives the loss of a batch. Stops when the detector says so."""
    opt = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False, **options) as det:
        for i, batch in enumerate(batches):
            det.set_batch(i, sample_ids=ids(i) if ids else None)
            opt.zero_grad()
            loss = step(model, batch)
            loss.backward()
            opt.step()
            if det.triggered:
                break
    return det


def line_of(mark: str) -> int:
    """Number of the line in the calling test file that ends with ``# <-- mark``."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return _line_in(frame.f_back, mark)


def _line_in(frame: FrameType, mark: str) -> int:
    found = [
        i
        for i, text in enumerate(linecache.getlines(frame.f_code.co_filename), 1)
        if text.rstrip().endswith(f"# <-- {mark}")
    ]
    assert len(found) == 1, f"the mark {mark!r} stands on {len(found)} lines"
    return found[0]


def born(det: NaNDetector, *, step: int, phase: str, mark: str | None = None, **fields: Any) -> NaNEvent:
    """The event, after comparing it with the truth. `mark` names the line of the calling file; None: no line at all."""
    event = det.event
    assert event is not None, "no event"
    assert (event.step, event.phase) == (step, phase), event
    if mark is None:
        assert event.location is None, event.location
    else:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        assert event.location is not None, event
        want = (frame.f_back.f_code.co_filename, _line_in(frame.f_back, mark))
        assert (event.location.file, event.location.line) == want, event
    for name, value in {"reproduced": "yes", "weights": "clean", "status": "final", **fields}.items():
        assert getattr(event, name) == value, f"{name}: {getattr(event, name)!r}, not {value!r}\n{event}"
    return event
