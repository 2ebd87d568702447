"""The events and warnings of one detector: written down first, told afterwards."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

from nan_detector._config import Config
from nan_detector._eventlog import EventLog
from nan_detector._record import Record
from nan_detector._records import GradEvent, NaNEvent, StepRow, WarningRecord
from nan_detector._state import log_beside_stderr, logger, process_rank, strict
from nan_detector._summary_title import headline, story

#: Warnings of one kind that are logged in full; later ones are only kept.
MAX_LOGGED_WARNINGS = 20
#: Times larger that a norm must be than the largest one told, to be told as well.
GROWTH = 10.0


class _NormLines:
    """Which steps with large gradients get a line of their own: what is above the threshold mostly stays there."""

    def __init__(self) -> None:
        self._told = 0.0  # the largest norm that a line has told
        self._steps: list[int] = []  # how many steps, the first and the last
        self._untold = False
        self._largest: GradEvent | None = None

    def line(self, records: Sequence[GradEvent], message: str) -> str | None:
        """The line for a step; None where it is only counted."""
        most = max(records, key=lambda r: r.grad_norm)
        count, first, _ = self._steps or (0, most.batch_idx, 0)
        self._steps = [count + 1, first, most.batch_idx]
        if self._largest is None or most.grad_norm > self._largest.grad_norm:
            self._largest = most
        if most.grad_norm < GROWTH * self._told:
            self._untold = True
            return None
        self._told = most.grad_norm
        return f"{message} (told again from {GROWTH * most.grad_norm:.3g} on)"

    def summary(self) -> str | None:
        """What became of it in all; None where each step was told."""
        most = self._largest
        if most is None or not self._untold:
            return None
        count, first, last = self._steps
        name = f"{most.layer_name}.{most.param_name}".lstrip(".")
        return (
            f"gradient norms were above grad_norm_warn={most.threshold:g} in {count} steps, first in step {first} and "
            f"last in step {last}; the largest was {most.grad_norm:.3g}, of {name} in step {most.batch_idx}"
        )


class Book:
    """Keeps events (bounded), writes the log, and calls whoever wants to know."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.RLock()
        self._stories: dict[Hashable, int] = {}  # what was reported, with the step of its first event
        self.events: list[NaNEvent] = []
        self.grad_events: list[GradEvent] = []
        self.warnings: list[WarningRecord] = []
        self.dropped = 0
        self.log = EventLog(config.log_dir, rank=process_rank()) if config.log_dir is not None else None
        self._counts: dict[str, int] = {}
        self._norms = _NormLines()
        #: Gives the rows of the flight recorder that the log lacks, where there are such.
        self.rows_for_log: Callable[[], Iterable[StepRow]] | None = None

    def write(self, record: Record, sync: bool = False) -> None:
        """Put a line into the log, where there is one."""
        if self.log is not None:
            self.log.write(record, sync=sync)

    def provisional(self, event: NaNEvent) -> None:
        """Write an event down before anything else is done about it."""
        with self._lock:
            self.write(event, sync=True)
            if len(self.events) < self._config.max_events:
                self.events.append(event)
            else:
                self.dropped += 1

    def located(self, event: NaNEvent) -> None:
        """Write down what is known already, while the search goes on: the event stays provisional.

        It outlives the process. The disk is waited for with the first line of the event and with its last: that the
        machine itself fails in the seconds between them would cost the place, and waiting costs every event a step.
        """
        self._replace(dataclasses.replace(event, status="provisional"), sync=False)

    def _replace(self, event: NaNEvent, *, sync: bool) -> None:
        with self._lock:
            self.write(event, sync=sync)
            for i, known in enumerate(self.events):
                if known.event_id == event.event_id:
                    self.events[i] = event

    def final(self, event: NaNEvent) -> None:
        """Replace the provisional event by what was found, and tell."""
        self._replace(event, sync=True)
        self._write_rows()
        try:
            self._show(event)
        except Exception:
            # A closed stderr, or a bug in the report: the step must be refused all the same.
            if strict():
                raise
            logger.exception("the event could not be shown")
        self._tell(self._config.on_event, event, "on_event")

    def _write_rows(self) -> None:
        if self.log is None or not self.log.active or self.rows_for_log is None:
            return
        try:
            for row in self.rows_for_log():
                self.write(row)
        except Exception:
            # A device that fails when the recorder is read: the event is in the log all the same.
            if strict():
                raise
            logger.exception("the layers' history could not be written to the log")

    def _show(self, event: NaNEvent) -> None:
        level = logging.ERROR if event.severity == "error" else logging.WARNING
        if not self._config.verbose or event.severity == "handled":
            logger.log(level, "%s", headline(event))
            return
        from nan_detector._render.terminal import print_report

        log_beside_stderr(level, headline(event))  # the report, which goes there, begins with the headline
        told_at = self._stories.setdefault(story(event), event.step)
        print_report(event, file=sys.stderr, told_at=told_at if told_at != event.step else None)

    def warn(self, record: WarningRecord, message: str) -> None:
        """Keep, write and log a warning."""
        with self._lock:
            if len(self.warnings) < self._config.max_events:
                self.warnings.append(record)
            self.write(record)
        self._log(record.kind, message)
        self._tell(self._config.on_warning, record, "on_warning")

    def warn_each(self, records: Sequence[GradEvent], message: str) -> None:
        """Keep and write a step's warnings of large gradients, and log the first and those of a new magnitude."""
        with self._lock:
            for record in records:
                if len(self.grad_events) < self._config.max_events:
                    self.grad_events.append(record)
                self.write(record)
            line = self._norms.line(records, message)
        if line is not None:
            self._log("grad_norm", line)

    def _log(self, kind: str, message: str) -> None:
        with self._lock:
            self._counts[kind] = count = self._counts.get(kind, 0) + 1
        if count <= MAX_LOGGED_WARNINGS:
            # Where nobody has set up logging, Python prints the bare message: among a script's own, whose is it?
            sender = "" if logger.hasHandlers() else f"{logger.name}: "
            more = " (further ones of this kind are not logged)" if count == MAX_LOGGED_WARNINGS else ""
            logger.warning("%s%s%s", sender, message, more)

    def close(self) -> None:
        """Flush and close the log, and sum up what was not told one by one."""
        norms, self._norms = self._norms, _NormLines()
        if (summary := norms.summary()) is not None:
            self._log("grad_norm_summary", summary)
        self._write_rows()
        self.rows_for_log = None
        if self.log is not None:
            self.log.close()

    def _tell(self, callback: Callable[..., object] | None, record: Record, name: str) -> None:
        if callback is None:
            return
        try:
            callback(record)
        except Exception:
            # The user's callback is not the training: it must not end the run either.
            logger.exception("%s raised; training goes on", name)
