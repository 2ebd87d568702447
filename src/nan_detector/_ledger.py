"""How many steps were taken and how many dropped, and when there are too many of these to go on."""

from __future__ import annotations

from collections import deque

#: Steps that a share in `max_skips` is of.
WINDOW = 100


class Ledger:
    """The account of one watched run. A step is one optimizer step, or one update of a loop that has no optimizer.

    Attributes:
        last_good_step: Step of the last gate that found everything finite.
        skipped_steps: Steps that were not taken because they were bad; several optimizers refused at one step count
            once.
        scaler_skips: Steps that a GradScaler did not take.
    """

    def __init__(self) -> None:
        self.last_good_step: int | None = None
        self.skipped_steps = 0
        self.scaler_skips = 0
        #: By optimizer: how many of its steps in a row were dropped, and the position of the last.
        self.rows: dict[int, tuple[int, int]] = {}
        self._dropped: deque[int] = deque(maxlen=WINDOW)
        self._last_step: int | None = None
        self._in_last_step: set[int] = set()

    def dropped(self, step: int, position: int, optimizer: int = 0) -> None:
        """A step was refused.

        Args:
            step: Its number, as reported.
            position: How many steps the run had before, whatever their numbers.
            optimizer: Identity of its optimizer; 0 where there is none.
        """
        count, last = self.rows.get(optimizer, (0, -1))
        if last == position:
            return
        # Without an optimizer nobody says that a step was taken: it was, where the positions are not neighbours.
        follows = optimizer or last == position - 1
        self.rows[optimizer] = (count + 1 if follows else 1, position)
        if not self._dropped or self._dropped[-1] != position:
            self._dropped.append(position)
        if step != self._last_step or optimizer in self._in_last_step:
            self.skipped_steps += 1
            self._in_last_step.clear()
        self._last_step = step
        self._in_last_step.add(optimizer)

    def stepped(self, position: int, optimizer: int) -> None:
        """The step at `position` is over: unless it was refused, its optimizer's row of dropped steps has ended."""
        row = self.rows.get(optimizer)
        if row is not None and row[1] != position:
            del self.rows[optimizer]

    def excess(self, limit: int | float | None, position: int, optimizer: int = 0) -> str:
        """What is too much after the drop at `position`, in words; "" where the run may go on.

        Args:
            limit: `max_skips`: a number in a row, a share of the last `WINDOW` steps, or None for no limit.
            position: See `dropped`.
            optimizer: See `dropped`.
        """
        if limit is None:
            return ""
        if isinstance(limit, int):
            count = self.rows.get(optimizer, (0, 0))[0]
            return f"{_steps(count)} in a row {_were(count)} dropped" if count > limit else ""
        count = sum(1 for at in self._dropped if at > position - WINDOW)
        return f"{_steps(count)} of the last {WINDOW} {_were(count)} dropped" if count > limit * WINDOW else ""


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
