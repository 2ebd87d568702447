"""What layers reached in the last steps, for the log: at an event and at the end, never in the steps themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nan_detector._before import ABS_MAX_OF, GRAD_NORM, LEARNING_RATE, LOSS, LOSS_SCALE, MAX_GRAD_NORM
from nan_detector._history import History
from nan_detector._quiet import quiet
from nan_detector._records import LayerPeak, StepRow
from nan_detector._run import Run

#: Rows written at a time, and values in them: about a megabyte of log at most.
MOST_ROWS, MOST_VALUES = 200, 10_000


class Peaks:
    """Rows of the flight recorder that have layers and are not in the log yet.

    Args:
        run: Whose recorder.
        limits: Gives the largest finite number of each layer's dtype.
    """

    def __init__(self, run: Run, limits: Callable[[], Mapping[str, float]]) -> None:
        self._run, self._limits = run, limits
        self._written = 0

    def rows(self) -> list[StepRow]:
        """The last of these rows, oldest first. One read to the host."""
        recorder = self._run.recorder
        with quiet(), self._run.lock:
            new = recorder.appended - self._written
            self._written = recorder.appended
            history = recorder.history() if new > 0 else None
        layers = [] if history is None else [c for c in history.columns if c.startswith(ABS_MAX_OF)]
        if history is None or not layers:
            return []
        most = min(new, MOST_ROWS, max(1, MOST_VALUES // len(layers)), len(history))
        limits = self._limits()
        rows = (_row(history, i, layers, limits) for i in range(len(history) - most, len(history)))
        return [row for row in rows if row.layers]


def _row(history: History, at: int, layers: list[str], limits: Mapping[str, float]) -> StepRow:
    peaks = []
    for column in layers:
        value = _at(history, column, at)
        if value is not None:
            name = column[len(ABS_MAX_OF) :]
            peaks.append(LayerPeak(name, value, limits.get(name)))
    return StepRow(
        int(history.steps[at]),
        loss=_at(history, LOSS, at),
        grad_norm=_at(history, GRAD_NORM, at),
        max_grad_norm=_at(history, MAX_GRAD_NORM, at),
        lr=_at(history, LEARNING_RATE, at),
        loss_scale=_at(history, LOSS_SCALE, at),
        layers=tuple(peaks),
    )


def _at(history: History, column: str, at: int) -> float | None:
    if column not in history.values or not history.recorded[column][at]:
        return None
    return float(history.values[column][at])
