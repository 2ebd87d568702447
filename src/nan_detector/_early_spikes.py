"""Spikes of the loss and of the gradient norm, by a control chart whose centre moves with the run.

Method. The centre is an exponentially weighted moving average (Roberts 1959; Lucas and Saccucci 1990) of the logarithm,
and what is judged is how far one value lies from it, in standard deviations of an equally weighted variance: a
moving-centreline chart (Montgomery and Mastrangelo 1991), made for values that drift and are correlated, as these are.
Mean and variance are updated as by West (1979), with a constant weight once there are enough values. The logarithm,
because losses and norms are positive and spread by factors: their noise is nearer to log-normal than to normal. A loss
that is sometimes below 0 is charted as it is.

Robustness. A deviation counts at most `CLIP` standard deviations in both updates (winsorised; the variance corrected
for what a normal distribution loses by it, as in Huber's Proposal 2), so that one spike neither lifts the centre nor
blinds the chart to the next.

Honesty. A score alone would alarm on every run with heavy tails, so a spike must also stand clear of the largest
value of recent steps. `tests/test_early.py` measures the rate of false alarms on simulated and on real trainings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Steps before the first warning: the first steps of a training fall fast and show no level yet.
WARM_UP = 100
#: Weight of a new value: the average looks back 50 steps, long enough for a variance, short enough to follow a decay.
WEIGHT = 0.02
#: Standard deviations that a deviation may count in the updates: beyond it lies one normal value in 160.
CLIP = 2.5
#: What a standard normal variance keeps of its 1 under that clip: E[min(z², CLIP²)].
KEPT = 0.9776
#: Standard deviations of a spike. A normal value never lies beyond 7, but batches are not normal: of simulated ordinary
#: runs with 1 % of harder batches, 6 gave 0.2 false alarms in 100,000 steps, 7 none.
SCORE = 7.0
#: Standard deviations by which a spike must lie above the recent maximum.
MARGIN = 3.0
#: The recent maximum falls by this factor a step: it halves in 350 steps, longer than the average looks back, because
#: what returns once in an epoch (a hard batch) is not news.
FORGET = 0.998
#: Steps after which a value counts for the recent maximum, at the latest after twice as many: a loss that grows by half
#: in each step would otherwise raise the maximum just ahead of itself, and be told never.
LAG = 20
#: Times the recent maximum that a spike must reach as well. Gradient norms jump further than losses do where all is
#: well.
CLEAR_LOSS, CLEAR_NORM = 2.0, 3.0
#: The same for a loss of either sign, in deviations from the average: there is no ratio to go by, and heavy tails.
CLEAR_SIGNED = 10.0
#: Least standard deviation of a logarithm (5 %): a chart of values that hardly vary must not see noise as spikes.
LEAST_DEVIATION = 0.05


@dataclass(frozen=True, slots=True)
class Spike:
    """One value far above its recent level.

    Attributes:
        value: The value.
        level: The moving average that it is compared with (of a positive value the geometric one).
        score: Distance from it in standard deviations (of a positive value, of its logarithm).
        signed: True where values below 0 have been seen, so that the value itself is charted.
    """

    value: float
    level: float
    score: float
    signed: bool = False


class Chart:
    """A control chart of one number that comes once a step; about 0.6 µs a value.

    Args:
        clear: Times the recent maximum that a spike must reach.
    """

    __slots__ = ("_block", "_clear", "_count", "_held", "_mean", "_signed", "_top", "_variance")

    def __init__(self, clear: float) -> None:
        self._clear = math.log(clear)
        self._signed = False
        self.restart()

    def restart(self) -> None:
        """Forget the level: what comes next is another regime."""
        self._count = 0
        self._mean = self._variance = 0.0
        # The greatest value (of a signed chart, deviation) of the last steps, of those before, and of all before those.
        self._block = self._held = self._top = -math.inf

    @property
    def unremarkable(self) -> float:
        """A value between 0 and this is no spike, whatever the values of the next few steps before it."""
        if self._signed:
            return -math.inf
        if self._count <= WARM_UP - LAG:
            return math.inf
        # The level may fall meanwhile, and this is well below the score that makes a spike.
        return math.exp(self._mean + CLIP * max(math.sqrt(self._variance), LEAST_DEVIATION))

    def feed(self, value: float) -> Spike | None:
        """Take the next value. One that is not finite is passed over, and so is an exact 0, which has no logarithm."""
        if self._signed:
            return self._feed_signed(value)
        if not 0.0 < value < math.inf:
            if -math.inf < value < 0.0:
                self._signed = True
                self.restart()
            return None
        y = math.log(value)
        self._count = count = self._count + 1
        if y > self._block:
            self._block = y
        if count % LAG == 0:
            self._shift(self._top + LAG * _FORGET)
        off = y - self._mean
        if count <= WARM_UP:
            self._average(off, max(WEIGHT, 1.0 / count))
            return None
        deviation = math.sqrt(self._variance)
        if deviation < LEAST_DEVIATION:
            deviation = LEAST_DEVIATION
        edge = CLIP * deviation
        if -edge < off < edge:
            # As `_average` does, written out: this is the way of nearly every step.
            step = WEIGHT * off
            self._mean += step
            self._variance = (1.0 - WEIGHT) * (self._variance + off * step / KEPT)
            return None
        level = self._mean
        self._average(edge if off > 0.0 else -edge, WEIGHT)
        if off < SCORE * deviation or y < self._top + max(self._clear, MARGIN * deviation):
            return None
        return Spike(value, math.exp(level), off / deviation)

    def _average(self, off: float, weight: float) -> None:
        step = weight * off
        self._mean += step
        self._variance = (1.0 - weight) * (self._variance + off * step / (KEPT if self._count > WARM_UP else 1.0))

    def _shift(self, top: float) -> None:
        self._top = max(top, self._held)
        self._held, self._block = self._block, -math.inf

    def _feed_signed(self, value: float) -> Spike | None:
        if not -math.inf < value < math.inf:
            return None
        self._count = count = self._count + 1
        off = value - self._mean
        size = abs(off)
        if count > WARM_UP // 2:  # the first averages are of too few values for a deviation from them to mean anything
            self._block = max(self._block, size)
            if count % LAG == 0:
                self._shift(self._top * FORGET**LAG)
        if count <= WARM_UP:
            self._average(off, max(WEIGHT, 1.0 / count))
            return None
        deviation = math.sqrt(self._variance)
        level = self._mean
        self._average(math.copysign(min(size, CLIP * deviation), off), WEIGHT)
        if size < SCORE * deviation or size < CLEAR_SIGNED * self._top or self._top <= 0.0:
            return None
        return Spike(value, level, size / deviation, signed=True)


_FORGET = math.log(FORGET)
