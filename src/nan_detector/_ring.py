"""A ring of the flight recorder: rows with the same columns, on their device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Numbers(NamedTuple):
    """The part of a row that is known to Python. A tuple: making a frozen dataclass costs as much as the copy."""

    order: int
    step: int
    lr: float | None
    loss_scale: float | None


#: What the class's own constructor does, without a function in Python around it.
new_numbers = tuple.__new__


class Table:
    """A ring of rows that have the same columns, device and dtype."""

    __slots__ = ("capacity", "device", "dtype", "names", "next", "numbers", "ring", "rows", "width")

    def __init__(self, names: tuple[str, ...], device: torch.device, dtype: torch.dtype, capacity: int) -> None:
        self.names, self.device, self.dtype, self.width = names, device, dtype, len(names)
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        # A ring made inside the user's inference_mode could never be written outside it.
        with torch.inference_mode(False), torch.no_grad():
            self.ring = torch.zeros(capacity, self.width, device=self.device, dtype=self.dtype)
            # Views made once: indexing the ring would double the cost of an append.
            self.rows = [self.ring[i] for i in range(capacity)]
        self.capacity = capacity
        self.numbers: list[Numbers | None] = [None] * capacity
        self.next = 0

    @property
    def newest(self) -> int:
        """Order of the row written last; -1 where there is none."""
        last = self.numbers[self.next - 1]
        return -1 if last is None else last.order

    def held(self, since: int) -> tuple[list[Numbers], Tensor]:
        """Rows whose order is at least `since`, oldest first: their numbers, and their values on the device."""
        ordered = self.numbers[self.next :] + self.numbers[: self.next]
        kept = [n for n in ordered if n is not None and n.order >= since]
        ring = self.ring if self.next == 0 else torch.cat([self.ring[self.next :], self.ring[: self.next]])
        return kept, ring[self.capacity - len(kept) :]

    def resize(self, capacity: int) -> None:
        """Keep the newest rows in a ring of another size."""
        if capacity == self.capacity:
            return
        with torch.inference_mode(False), torch.no_grad():
            kept, values = self.held(0)
            kept, values = kept[-capacity:], values[-capacity:]
            self._allocate(capacity)
            self.ring[: len(kept)].copy_(values)
        self.numbers[: len(kept)] = kept
        self.next = len(kept) % capacity
