"""Learning rates that jump or go below 0."""

from __future__ import annotations

import math
from typing import NamedTuple

#: Times the last step's rate. Schedules climb in many small steps; the first steps of a linear warm-up double.
JUMP = 10.0
#: A rate that was used before, or that the schedule names as its own, is a restart: up to rounding, and the few per
#: cent by which a schedule's peak may differ from the last one's.
SAME = 1.05
#: Steps before the first jump is told: a warm-up from almost nothing multiplies its first rates by anything.
SETTLED = 10
#: Share of the largest rate used by which a rate may lie below 0: cosine schedules reach 0 with rounding errors.
ROUNDING = 1e-9
#: Times the least recent rate from where on a higher one is another regime, in which losses and gradients have to
#: settle anew: a warm restart, the start of a cycle.
REGIME = 2.0


class RateChange(NamedTuple):
    """What a new learning rate means.

    Attributes:
        jump: The rate that it jumped from; None where it did not.
        negative: True when it is below 0.
        regime: True when it is so much higher that what was ordinary before need not be so now.
    """

    jump: float | None = None
    negative: bool = False
    regime: bool = False


_ORDINARY = RateChange()


class Rates:
    """The learning rates of one optimizer."""

    __slots__ = ("_highest", "_last", "_low")

    def __init__(self) -> None:
        self._last: float | None = None
        self._highest = 0.0
        self._low = math.inf

    def feed(self, lr: float, ceiling: float | None, count: int) -> RateChange:
        """Take a rate that differs from the last one.

        Args:
            lr: The rate. One that is not finite is an event of its own and is passed over.
            ceiling: The largest rate that the schedule will use, where it says so; a rise up to it is no jump.
            count: Steps up to now, this one included.
        """
        if not math.isfinite(lr):
            return _ORDINARY
        last, known = self._last, max(self._highest, ceiling or 0.0)
        low, self._low = self._low, min(self._low, lr) if lr > 0.0 else self._low
        self._last, self._highest = lr, max(self._highest, lr)
        if lr < 0.0:
            return RateChange(negative=lr < -ROUNDING * known)
        regime = lr > REGIME * low
        if regime:
            self._low = lr
        # From 0 there is no ratio: the largest rate known stands in, and where there is none this is a warm-up.
        start = last if last is not None and last > 0.0 else known
        jumped = count > SETTLED and 0.0 < start * JUMP < lr and lr > SAME * known
        return RateChange(start if jumped else None, False, regime) if jumped or regime else _ORDINARY
