"""Small training loops under the watch, and what must be said of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector import NaNDetector
from nan_detector._records import NaNEvent

MARK = "# <-- birth"


@dataclass
class Run:
    """What a watched loop gave: events, and whether every weight stayed finite."""

    events: list[NaNEvent]
    finite: bool
    warnings: list[Any]

    @property
    def event(self) -> NaNEvent:
        """The first event, which must be there."""
        assert self.events, "nothing was found"
        return self.events[0]


def marked_line(where: Any, mark: str = MARK) -> tuple[str, int]:
    """File and number of the one line within `where`, a function or class, that ends with `mark`."""
    lines, first = inspect.getsourcelines(where)
    numbers = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(mark)]
    assert len(numbers) == 1, f"{where} has {len(numbers)} lines marked {mark!r}"
    return inspect.getsourcefile(where) or "", numbers[0]


def train(
    model: Any,
    batches: Iterable[Any],
    loss_of: Callable[..., torch.Tensor],
    *,
    optimizer: Any = None,
    **options: Any,
) -> Run:
    """Train `model` with ``loss_of(model, batch)`` in the plain loop, watched, until something is found."""
    modules = (
        [model] if isinstance(model, torch.nn.Module) else list(model.values() if isinstance(model, dict) else model)
    )
    parameters = [p for m in modules for p in m.parameters()]
    optimizer = optimizer or torch.optim.SGD(parameters, lr=1e-3)
    with NaNDetector(model, verbose=False, **options) as det:
        for i, batch in enumerate(batches):
            det.set_batch(i)
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            if det.triggered:
                break
    return Run(det.all_events, all(bool(torch.isfinite(p).all()) for p in parameters), det.warnings)


def assert_born(
    run: Run,
    where: Any,
    *,
    step: int,
    phase: str,
    layer: str | None,
    op: str | set[str],
    mark: str = MARK,
) -> NaNEvent:
    """The first event of `run` names this birthplace, and the weights are unharmed. Returns the event."""
    event = run.event
    file, line = marked_line(where, mark)
    said = (event.step, event.phase, event.layer_name, event.location and (event.location.file, event.location.line))
    assert said == (step, phase, layer, (file, line)), f"{said} op {event.op} call {event.call} notes {event.notes}"
    assert event.op in ({op} if isinstance(op, str) else op), event.op
    assert event.reproduced == "yes", event.notes
    assert event.weights == "clean"
    assert event.severity == "error"
    assert run.finite
    return event


def assert_quiet(run: Run) -> None:
    """Nothing was found, and every weight stayed finite."""
    assert not run.events, [str(e) for e in run.events]
    assert run.finite
