"""What the flight recorder held, read to the host: rows, columns, arrays."""

from __future__ import annotations

import csv
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nan_detector._before import ABS_MAX_OF, GRAD_NORM, GRAD_NORM_OF, LEARNING_RATE, LOSS_SCALE, MAX_GRAD_NORM
from nan_detector._ring import Numbers

if TYPE_CHECKING:
    import os

#: Stands for a layer that took no part in a step, where a largest magnitude would.
ABSENT = -1.0

#: A row read to the host: its numbers, the names of its values, and these.
Row = tuple[Numbers, tuple[str, ...], list[float]]


@dataclass(frozen=True, eq=False)
class History:
    """What the flight recorder held, oldest row first.

    Attributes:
        columns: Names of the columns, "lr" and "loss_scale" last.
        steps: Step of each row, int64, shape (rows,).
        values: Per column, float64, shape (rows,); NaN also where a row has no such column.
        recorded: Per column, bool, shape (rows,): False where a row has no such column.
    """

    columns: tuple[str, ...]
    steps: np.ndarray[Any, Any]
    values: dict[str, np.ndarray[Any, Any]]
    recorded: dict[str, np.ndarray[Any, Any]]

    def __len__(self) -> int:
        return len(self.steps)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write one line a row, "step" first; what was not recorded is empty, non-finite values are nan, inf, -inf."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *self.columns])
            for i, step in enumerate(self.steps.tolist()):
                cells = [repr(float(self.values[c][i])) if self.recorded[c][i] else "" for c in self.columns]
                writer.writerow([step, *cells])


def history_of(found: Sequence[Row]) -> History:
    """Rows as arrays."""
    steps, columns = as_columns(found)
    return History(
        columns=tuple(columns),
        steps=np.asarray(steps, dtype=np.int64),
        values={c: np.asarray(filled(vs), dtype=np.float64) for c, vs in columns.items()},
        recorded={c: np.asarray([v is not None for v in vs], dtype=np.bool_) for c, vs in columns.items()},
    )


def names_with_totals(names: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """Names of a row as it is read, and how many gradient norms its totals are worked out from.

    A row with a norm for each gradient need not carry their total: working it out costs the step more than the reader.
    """
    norms = sum(n.startswith(GRAD_NORM_OF) for n in names)
    if not norms or GRAD_NORM in names:
        return names, 0
    return (GRAD_NORM, MAX_GRAD_NORM, *names), norms


def totals_of(norms: Sequence[float]) -> tuple[float, float]:
    """The norm of all gradients, and the largest of one."""
    total = math.hypot(*norms)
    # Nearly always all are finite: then none is NaN, and asking each of them would cost the reader most of its time.
    largest = max(norms, default=None) if math.isfinite(total) else largest_of(norms)
    return total, math.nan if largest is None else largest


def filled(values: Iterable[float | None]) -> list[float]:
    """NaN in the place of what was not recorded."""
    return [math.nan if v is None else v for v in values]


def largest_of(values: Sequence[float]) -> float | None:
    """The largest value; NaN where there is one, None where there is nothing."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=None)


def as_columns(
    found: Sequence[Row], only: Collection[str] | None = None
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Step of each row, and the values of every column; `only` these where there are such."""
    rows_of: dict[tuple[str, ...], list[int]] = {}
    for i, (_, row_names, _) in enumerate(found):
        rows_of.setdefault(row_names, []).append(i)
    columns: dict[str, list[float | None]] = {}
    for row_names, at in rows_of.items():
        # Column by column: nearly always there is but one set of them, and an event waits for this.
        rows = [found[i][2] for i in at]
        chosen: Iterable[tuple[str, Sequence[float]]]
        if only is None:
            chosen = zip(row_names, zip(*rows, strict=True), strict=True)
        else:
            chosen = [(n, [row[j] for row in rows]) for j, n in enumerate(row_names) if n in only]
        for name, values in chosen:
            known = [None if v == ABSENT else v for v in values] if name.startswith(ABS_MAX_OF) else values
            if len(at) == len(found):
                columns[name] = list(known)
                continue
            column = columns.setdefault(name, [None] * len(found))
            for i, value in zip(at, known, strict=True):
                if value is not None:
                    column[i] = value
    columns[LEARNING_RATE] = [n.lr for n, _, _ in found]
    columns[LOSS_SCALE] = [n.loss_scale for n, _, _ in found]
    return [n.step for n, _, _ in found], columns
