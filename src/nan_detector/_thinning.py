"""The rows of a long run in bounded memory: every n-th one, and all of those that matter."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Row = TypeVar("Row")

#: Rows kept of a whole run, at least half as many where there were more.
SPREAD = 2000
#: Rows that are all there: the last ones, and those before each of the first events.
RECENT, EVENTS = 200, 20


class Thinned(Generic[Row]):
    """Rows in order, thinned out as they come: from `SPREAD` on every second is dropped, again and again.

    Attributes:
        count: How many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._spread: list[tuple[int, Row]] = []
        self._stride = 1
        self._recent: deque[tuple[int, Row]] = deque(maxlen=RECENT)
        self._kept: dict[int, Row] = {}
        self._events = 0

    def add(self, row: Row) -> None:
        """The next row of the log."""
        at = self.count
        self.count += 1
        self._recent.append((at, row))
        if at % self._stride == 0:
            self._spread.append((at, row))
            if len(self._spread) >= SPREAD:
                self._stride *= 2
                self._spread = [(i, r) for i, r in self._spread if i % self._stride == 0]

    def keep_recent(self) -> None:
        """An event: the rows before it stay."""
        if self._events < EVENTS:
            self._events += 1
            self._kept.update(self._recent)

    def rows(self) -> Iterator[Row]:
        """What is kept, in order."""
        kept = {**dict(self._spread), **self._kept, **dict(self._recent)}
        yield from (kept[i] for i in sorted(kept))
