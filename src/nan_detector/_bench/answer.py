"""How long the answer takes: from a bad step's `optimizer.step()` to the located event, and to the trials' end."""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nan_detector._bench.workloads import Task
from nan_detector._detector import NaNDetector
from nan_detector._records import NaNEvent

_HEALTHY = 5


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the moment in which the step was about to be taken.

    Attributes:
        located_s: Until the event with its place was written to the disk.
        trials_s: From there to the final event.
        location: Whether the place was the right line.
    """

    located_s: float
    trials_s: float
    location: bool


def answer_of(level: str, make: Callable[[], Task], repeats: int = 3, budget_s: float = 6.0) -> Answer:
    """The median of several runs that go bad; each is a training of its own.

    Args:
        level: The watch level.
        make: Makes the training.
        repeats: Most runs.
        budget_s: Seconds after which no further one begins.
    """
    found: list[Answer] = []
    deadline = time.perf_counter() + budget_s
    with quiet_logger():
        while not found or (len(found) < repeats and time.perf_counter() < deadline):
            found.append(_one(level, make()))
    return Answer(
        statistics.median(a.located_s for a in found),
        statistics.median(a.trials_s for a in found),
        all(a.location for a in found),
    )


@contextmanager
def quiet_logger() -> Iterator[None]:
    """In here the detector's log goes nowhere: what it says of trainings that are only measured is no news."""
    logger, handler = logging.getLogger("nan_detector"), logging.NullHandler()
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _one(level: str, task: Task) -> Answer:
    with (
        tempfile.TemporaryDirectory() as folder,
        NaNDetector(task.model, watch=level, verbose=False, log_dir=folder) as det,
    ):
        for _ in range(_HEALTHY):
            task.step()
        written = _stamped(det)
        began = task.bad_step()
        event = det.event
    if event is None:
        raise RuntimeError(f"the bad step was not seen at watch={level!r}, and there is no answer to time.")
    located = next((moment for moment, e in written if e.location is not None), written[-1][0])
    right = event.op == "log" and event.location is not None
    return Answer(located - began, written[-1][0] - located, right)


def _stamped(det: NaNDetector) -> list[tuple[float, NaNEvent]]:
    """Moments at which the detector has written an event down, from now on."""
    book: Any = det._book
    written: list[tuple[float, NaNEvent]] = []
    for name in ("located", "final"):
        write = getattr(book, name)

        def stamped(event: NaNEvent, write: Callable[[NaNEvent], None] = write) -> None:
            write(event)
            written.append((time.perf_counter(), event))

        setattr(book, name, stamped)
    return written
