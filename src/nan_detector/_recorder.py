"""The flight recorder: the last steps' loss, norms and rates, in a ring that stays on the device.

A row costs one small copy on the device and no read to the host; the ring is read when somebody asks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from nan_detector._before import GRAD_NORM, GRAD_NORM_OF, LEARNING_RATE, LOSS, LOSS_SCALE, MAX_GRAD_NORM
from nan_detector._history import History, Row, as_columns, filled, history_of, largest_of, names_with_totals, totals_of
from nan_detector._records import StepRow
from nan_detector._ring import Numbers, Table, new_numbers

#: Sets of columns kept at the same time: an optimizer per network, or a parameter that was frozen on the way.
MOST_TABLES = 4
_RESERVED = (LEARNING_RATE, LOSS_SCALE)


class Recorder:
    """The last steps of a run.

    Sets of columns that alternate (two optimizers) or replace each other (a layer is frozen) each have a ring of
    their own; the bounds hold over all of them together. Keeping other threads' reads, and the user's torch-function
    and dispatch modes, out of `append` is the caller's duty.

    Args:
        history: Rows kept at most.
        max_bytes: Device memory of the rings at most; one row per set of columns is always kept.
        rank: Put into the rows.

    Raises:
        ValueError: `history` or `max_bytes` is below 1.
    """

    def __init__(self, history: int, max_bytes: int = 2 * 2**20, *, rank: int = 0) -> None:
        if history < 1 or max_bytes < 1:
            raise ValueError(f"history={history!r} and max_bytes={max_bytes!r} must both be at least 1.")
        self._history, self._max_bytes, self._rank = history, max_bytes, rank
        self._names: tuple[str, ...] = ()
        self.table: Table | None = None  # the one that is written
        self._tables: list[Table] = []
        self._count = 0

    def __len__(self) -> int:
        since = self._count - self._history
        return sum(n is not None and n.order >= since for t in self._tables for n in t.numbers)

    @property
    def appended(self) -> int:
        """How many rows there have been."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Device memory of the rings, in bytes."""
        return sum(t.ring.numel() * t.ring.element_size() for t in self._tables)

    def set_columns(self, names: Sequence[str]) -> None:
        """Name the entries of the vectors that `append` gets from now on. Costs nothing when they stay the same.

        Raises:
            ValueError: A name is there twice, or is one that `append` fills by itself ("lr", "loss_scale").
        """
        if names is self._names:
            return
        wanted = tuple(names)
        if wanted == self._names:
            return
        if len({*wanted, *_RESERVED}) < len(wanted) + len(_RESERVED):
            twice = sorted({n for n in wanted if n in _RESERVED or wanted.count(n) > 1})
            raise ValueError(f"names={twice!r}: each column needs its own name, and 'lr' and 'loss_scale' are taken.")
        self._names, self.table = wanted, None

    def append(self, step: int, values: Tensor, lr: float | None, loss_scale: float | None = None) -> None:
        """Record one step. Reads nothing to the host: about 1.4 µs for 10 columns on a CPU.

        Args:
            step: The step's number.
            values: One value per column: floating, shape (columns,), any device. Kept as float32, or as float64 where
                it is that.
            lr: Learning rate; None where there is none.
            loss_scale: Loss scale of mixed precision; None where there is none.

        Raises:
            ValueError: `values` has another length than the columns.
        """
        table = self.table
        if table is None or values.device != table.device:
            table = self._open(values)
        if values.numel() != table.width:
            raise ValueError(
                f"values has {values.numel()} entries for {table.width} columns; call set_columns() with one name each."
            )
        table.rows[table.next].copy_(values.detach() if values.requires_grad else values)
        self.keep(step, lr, loss_scale)

    def next_row(self, names: tuple[str, ...], like: Tensor) -> Tensor | None:
        """The row that is written next, for whoever can measure right into it. It counts once `keep` is called.

        Args:
            names: Its columns; best the same object in each step.
            like: A tensor on its device, of a dtype that is kept as float32.

        Returns:
            float32, shape (columns,); None where numbers like these are not kept as float32.
        """
        table = self.table
        if names is not self._names or table is None or table.device != like.device:
            self.set_columns(names)
            table = self._open(like)
        if table.dtype is not torch.float32:
            return None
        table.numbers[table.next] = None  # the row that is written over is gone, even if this one is never kept
        return table.rows[table.next]

    def turn_to(self, table: Table) -> bool:
        """Write into `table` from now on, as with its columns' names. False where it has been given up."""
        if not any(t is table for t in self._tables):
            return False
        self._names, self.table = table.names, table
        return True

    def keep(self, step: int, lr: float | None, loss_scale: float | None = None) -> None:
        """What was measured into `next_row` is the row of this step."""
        table = self.table
        if table is None:
            return
        at, count = table.next, self._count
        table.numbers[at] = new_numbers(Numbers, (count, step, lr, loss_scale))
        self._count = count + 1
        at += 1
        if at < table.capacity:
            table.next = at
        else:
            table.next = 0
            if len(self._tables) > 1:
                self._forget_stale()

    def rows(self, last: int | None = None) -> list[StepRow]:
        """The rows kept, oldest first, or the `last` ones; one read to the host."""
        return [self._step_row(numbers, names, values) for numbers, names, values in self._read(last)]

    def column(self, name: str) -> list[float]:
        """One column, oldest first; NaN where a row has none. One read to the host.

        Raises:
            KeyError: No row has such a column.
        """
        columns = self.columns()[1]
        if name not in columns:
            raise KeyError(f"name={name!r} is not a recorded column; there are: {', '.join(columns) or 'none yet'}.")
        return columns[name]

    def columns(
        self, last: int | None = None, only: Collection[str] | None = None
    ) -> tuple[list[int], dict[str, list[float]]]:
        """Steps, and the values of every column: what `before_sentences` takes. One read to the host.

        Args:
            last: The newest rows, that many.
            only: These columns, where there are such, beside learning rate and loss scale.
        """
        steps, columns = as_columns(self._read(last), only)
        return steps, {name: filled(values) for name, values in columns.items()}

    def history(self) -> History:
        """Everything kept, as arrays. One read to the host."""
        return history_of(self._read())

    def _step_row(self, numbers: Numbers, names: tuple[str, ...], values: Sequence[float]) -> StepRow:
        row = dict(zip(names, values, strict=True))
        largest = row.get(MAX_GRAD_NORM, largest_of([v for n, v in row.items() if n.startswith(GRAD_NORM_OF)]))
        return StepRow(
            step=numbers.step,
            loss=row.get(LOSS),
            grad_norm=row.get(GRAD_NORM),
            max_grad_norm=largest,
            lr=numbers.lr,
            loss_scale=numbers.loss_scale,
            rank=self._rank,
        )

    def _open(self, values: Tensor) -> Table:
        if not self._names:
            raise ValueError("append() does not know what values holds: call set_columns() with one name per entry.")
        # float32 would turn a double's 1e300 into an infinity that never was; halves lose nothing in it.
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        for table in self._tables:
            if (table.names, table.device, table.dtype) == (self._names, values.device, dtype):
                self.table = table
                return table
        self._tables = sorted(self._tables, key=lambda t: t.newest)[-(MOST_TABLES - 1) :]
        self._forget_stale(opening=True)
        capacity = self._capacity(len(self._names), dtype, len(self._tables) + 1)
        table = Table(self._names, values.device, dtype, capacity)
        self._tables.append(table)
        self.table = table
        return table

    def _forget_stale(self, *, opening: bool = False) -> None:
        """Drop rings that hold no row of the last `history` ones, and share the memory out among the others."""
        self._tables = [t for t in self._tables if t is self.table or t.newest >= self._count - self._history]
        for table in self._tables:
            table.resize(self._capacity(table.width, table.dtype, len(self._tables) + opening))

    def _capacity(self, width: int, dtype: torch.dtype, sharers: int) -> int:
        return max(1, min(self._history, self._max_bytes // sharers // (max(1, width) * dtype.itemsize)))

    def _read(self, last: int | None = None) -> list[Row]:
        since = self._count - self._history
        # Those that are not wanted need not be read: an event waits for it.
        if last is not None and len(self._tables) == 1:
            since = max(since, self._count - last)  # its rows are numbered one by one
        elif last is not None:
            orders = sorted(n.order for t in self._tables for n in t.numbers if n is not None and n.order >= since)
            since = orders[-last] if 0 < last < len(orders) else since
        held = [(table, *table.held(since)) for table in self._tables]
        by_device: dict[torch.device, list[Tensor]] = {}
        for table, _, values in held:
            by_device.setdefault(table.device, []).append(values.reshape(-1))
        with torch.no_grad():
            hosts = {device: iter(torch.cat(parts).tolist()) for device, parts in by_device.items()}
        found: list[Row] = []
        for table, kept, _ in held:
            host = hosts[table.device]
            names, totals = names_with_totals(table.names)
            for numbers in kept:
                row: list[float] = list(itertools.islice(host, table.width))
                found.append((numbers, names, [*totals_of(row[-totals:]), *row] if totals else row))
        found.sort(key=lambda row: row[0].order)
        return found if last is None else found[max(0, len(found) - last) :]
