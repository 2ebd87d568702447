"""The loss scale of mixed precision: one that keeps falling, that sits at its floor, that costs too many steps.

A dynamic loss scale is meant to overflow: it starts too high, halves until it fits, and tries a higher one every 2,000
steps. So the first steps are not judged, and neither is a fall that is followed by a rise.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

#: Steps after which the search for a scale that fits is over: from 65536 down to 1 takes 16 skipped steps.
WARM_UP = 200
#: Steps within which falls add up: a tenth of the 2,000 steps after which a scaler tries a higher scale, so a run
#: whose scale is balanced has at most one or two falls in it.
WINDOW = 200
#: Halvings within the window. Gradients that grew 64-fold are not the noise of batches.
HALVINGS = 6.0
#: At a scale of 1 the gradients overflow half precision as they are, and smaller ones lose what scaling is for; other
#: libraries' scalers end the run there.
FLOOR = 1.0
#: Steps over which skipped ones are counted, and the share of them that is too much: every second skip of a balanced
#: scaler is followed by 2,000 steps without one, and even one that tries again every 10 steps skips one in 11.
SKIP_WINDOW, SKIP_SHARE = 100, 0.2


class ScaleState(NamedTuple):
    """What is wrong with the loss scale after a step.

    Attributes:
        fell_from: The scale before the falls of the last steps, where they are too many; else None.
        steps: Steps since then.
        floor: True when the scale came down to its floor.
        skipped: Skipped steps of the last `SKIP_WINDOW`, where they are too many; else 0.
    """

    fell_from: float | None = None
    steps: int = 0
    floor: bool = False
    skipped: int = 0


SOUND = ScaleState()


class LossScale:
    """The loss scale of one GradScaler, step by step."""

    __slots__ = ("_count", "_falls", "_last", "_skips", "_skips_held")

    def __init__(self) -> None:
        self._count = 0
        self._last: float | None = None
        self._falls: deque[tuple[int, float]] = deque()  # step count and scale before, of each fall in the window
        self._skips: deque[bool] = deque(maxlen=SKIP_WINDOW)
        self._skips_held = 0

    def feed(self, scale: float, skipped: bool) -> ScaleState:
        """Take one step's scale, and whether the scaler skipped it."""
        self._count = count = self._count + 1
        skips = self._skips
        if skipped or self._skips_held:
            self._skips_held += skipped - (skips[0] if len(skips) == SKIP_WINDOW else False)
        skips.append(skipped)
        last, self._last = self._last, scale
        if scale == last and not skipped:
            return SOUND
        return self._changed(count, last, scale, skipped)

    def _changed(self, count: int, last: float | None, scale: float, skipped: bool) -> ScaleState:
        falls = self._falls
        fell = last is not None and 0.0 <= scale < last < math.inf
        if last is not None and scale > last:
            falls.clear()
        while falls and falls[0][0] <= count - WINDOW:
            falls.popleft()
        if count <= WARM_UP:
            # The search that starts at 65536 may come down to 1, but not below.
            return ScaleState(floor=True) if fell and scale < FLOOR else SOUND
        if fell and last is not None:
            falls.append((count, last))
        fell_from, steps = None, 0
        if fell and falls and (scale == 0.0 or math.log2(falls[0][1] / scale) >= HALVINGS):
            fell_from, steps = falls[0][1], count - falls[0][0] + 1
        too_many = skipped and self._skips_held > SKIP_SHARE * SKIP_WINDOW
        return ScaleState(fell_from, steps, fell and scale <= FLOOR, self._skips_held if too_many else 0)
