"""A log in short: its runs, each with its events, its warnings summed up, and its steps thinned out.

A log may have a row for each of a million steps and as many warnings; what is kept of it here is bounded, and is what
`nan-detector show` and `nan-detector report` speak about.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from nan_detector._eventlog import log_files
from nan_detector._reading import Problem, Unread, read_lines
from nan_detector._record import Record
from nan_detector._records import GradEvent, NaNEvent, RunRecord, StepRow, WarningRecord
from nan_detector._thinning import Thinned

#: What is kept of one run at most, the first ones each; the others are counted.
MOST_EVENTS, MOST_GROUPS, MOST_PROBLEMS = 1000, 500, 100
#: Rows with layers that are kept, the last ones.
MOST_PEAKS = 400

_RANK = re.compile(r"rank(\d+)")


@dataclass(frozen=True, slots=True)
class WarningGroup:
    """Warnings of one kind about one layer: the last one, how many there were, and since when."""

    last: WarningRecord
    first_step: int
    count: int


@dataclass(frozen=True, slots=True)
class GradGroup:
    """Gradient warnings about one parameter: the one with the largest norm, how many there were, and when."""

    largest: GradEvent
    first_step: int
    last_step: int
    count: int


@dataclass(frozen=True, slots=True)
class RunDigest:
    """One run of one process.

    Attributes:
        rank: The process.
        run: What was watched, with what; None where the log does not say.
        events: The events kept, one for each `event_id`, final where there is a final one.
        events_left_out: How many more there were.
        warnings, grads: Warnings summed up, in order of their first one.
        steps: Rows of the flight recorder, thinned out; the last ones and those before an event are all there.
        step_count: How many rows the log had.
        peaks: Rows with the layers' largest magnitudes, the last ones.
    """

    rank: int
    run: RunRecord | None
    events: tuple[NaNEvent, ...]
    events_left_out: int
    warnings: tuple[WarningGroup, ...]
    grads: tuple[GradGroup, ...]
    steps: tuple[StepRow, ...]
    step_count: int
    peaks: tuple[StepRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Digest:
    """A log in short.

    Attributes:
        files: What was read.
        runs: The runs in it, file by file.
        problems: Lines that could not be read, the first ones.
        problems_left_out: How many more there were.
    """

    files: tuple[Path, ...]
    runs: tuple[RunDigest, ...]
    problems: tuple[Problem, ...] = ()
    problems_left_out: int = 0

    @property
    def events(self) -> list[NaNEvent]:
        """The events kept, of all runs."""
        return [e for run in self.runs for e in run.events]

    @property
    def ranks(self) -> list[int]:
        """The processes that wrote it."""
        return sorted({run.rank for run in self.runs})


def read_digest(path: str | os.PathLike[str], on_bytes: Callable[[int], object] | None = None) -> Digest:
    """Read a log, a file or a folder with one for each rank.

    Args:
        path: The log.
        on_bytes: Called with how many bytes more have been read.

    Raises:
        FileNotFoundError: There is no such file, or no log in the folder.
        OSError: It cannot be read.
    """
    files = log_files(path)
    runs: list[RunDigest] = []
    problems: list[Problem] = []
    left_out = 0
    for file in files:
        named = _RANK.search(file.name)
        folded: list[_Folded] = []
        try:
            for line in read_lines(file, on_bytes):
                if not isinstance(line, Problem):
                    _fold(folded, line, int(named[1]) if named else 0)
                elif len(problems) < MOST_PROBLEMS:
                    problems.append(line)
                else:
                    left_out += 1
        except OSError as error:
            if len(files) == 1:
                raise
            # The other ranks' files are worth reading all the same.
            problems.append(Problem(file, 0, f"the file cannot be read any further ({error.strerror})."))
        runs += [f.done() for f in folded]
        problems += [p for f in folded for p in f.problems]
    left_out += max(0, len(problems) - MOST_PROBLEMS)
    return Digest(tuple(files), tuple(runs), tuple(problems[:MOST_PROBLEMS]), left_out)


def digest_of(records: Iterable[Record], rank: int = 0) -> list[RunDigest]:
    """The runs that `records`, the lines of one file, tell of."""
    folded: list[_Folded] = []
    for record in records:
        _fold(folded, record, rank)
    return [f.done() for f in folded]


def _fold(runs: list[_Folded], record: Record | Unread, rank: int) -> None:
    if isinstance(record, RunRecord):
        runs.append(_Folded(record.rank or rank))
    elif not runs:  # the log's beginning is missing
        runs.append(_Folded(rank))
    runs[-1].add(record)


class _Folded:
    """One run, line by line."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.problems: list[Problem] = []
        self._run: RunRecord | None = None
        self._events: dict[str, NaNEvent] = {}
        self._left_out: set[str] = set()
        self._warnings: dict[tuple[str, str | None], WarningGroup] = {}
        self._grads: dict[tuple[str, str], GradGroup] = {}
        self._steps: Thinned[StepRow | Unread] = Thinned()
        self._peaks: deque[StepRow] = deque(maxlen=MOST_PEAKS)

    def add(self, record: Record | Unread) -> None:
        if isinstance(record, Unread):
            self._steps.add(record)
        elif isinstance(record, StepRow):
            # A row with layers is a step's second one.
            (self._peaks.append if record.layers else self._steps.add)(record)
        elif isinstance(record, NaNEvent):
            self._add_event(record)
        elif isinstance(record, WarningRecord):
            self._add_warning(record)
        elif isinstance(record, GradEvent):
            self._add_grad(record)
        elif isinstance(record, RunRecord):
            self._run = record

    def done(self) -> RunDigest:
        read = [(row.read() if isinstance(row, Unread) else row) for row in self._steps.rows()]
        self.problems = [row for row in read if isinstance(row, Problem)]
        steps = tuple(row for row in read if isinstance(row, StepRow))
        return RunDigest(
            self._rank,
            self._run,
            tuple(self._events.values()),
            len(self._left_out),
            tuple(self._warnings.values()),
            tuple(self._grads.values()),
            steps,
            self._steps.count - len(self.problems),
            tuple(self._peaks),
        )

    def _add_event(self, event: NaNEvent) -> None:
        known = self._events.get(event.event_id)
        if known is None and len(self._events) >= MOST_EVENTS:
            self._left_out.add(event.event_id)
        elif known is None or known.status != "final" or event.status == "final":
            self._events[event.event_id] = event
        if known is None:
            self._steps.keep_recent()

    def _add_warning(self, warning: WarningRecord) -> None:
        key = (warning.kind, warning.layer_name)
        known = self._warnings.get(key)
        if known is not None:
            self._warnings[key] = replace(known, last=warning, count=known.count + 1)
        elif len(self._warnings) < MOST_GROUPS:
            self._warnings[key] = WarningGroup(warning, warning.step, 1)

    def _add_grad(self, grad: GradEvent) -> None:
        key = (grad.layer_name, grad.param_name)
        known = self._grads.get(key)
        if known is not None:
            largest = known.largest if _beyond(known.largest.grad_norm, grad.grad_norm) else grad
            self._grads[key] = GradGroup(largest, known.first_step, grad.batch_idx, known.count + 1)
        elif len(self._grads) < MOST_GROUPS:
            self._grads[key] = GradGroup(grad, grad.batch_idx, grad.batch_idx, 1)


def _beyond(norm: float, other: float) -> bool:
    """Whether `norm` is the worse one; NaN is worse than any number."""
    return norm != norm or norm >= other
