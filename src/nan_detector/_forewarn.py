"""What the gate tells the early warnings of one optimizer: numbers it has read anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nan_detector._before import GRAD_NORM_OF, number
from nan_detector._early import EarlyWarnings
from nan_detector._early_layers import DEAD_AFTER, zero_streaks
from nan_detector._gate import Reading
from nan_detector._hyper import HyperProblem, eps_underflow
from nan_detector._quiet import hidden, quiet
from nan_detector._run import Run

_NOTHING: Mapping[str, Any] = MappingProxyType({})
#: Steps that wait to be looked at.
BLOCK = 16
#: A schedule that ends at 0 may end this far below it, as part of the rate it began with.
ROUNDING = 1e-9


class Forewarning:
    """Early warnings of one optimizer, or of a loop that updates the weights itself."""

    __slots__ = ("_count", "_early", "_high_loss", "_high_norm", "_lr", "_settled", "_told", "_waiting")

    def __init__(self) -> None:
        self._early = EarlyWarnings()
        self._count = 0
        self._lr: float | None = None
        self._told: set[tuple[str, int]] = set()
        self._settled: set[str] = set()  # parameters without any gradient that were told of
        self._waiting: list[tuple[int, float, float]] = []  # step, loss and gradient norm that are not yet looked at
        self._high_loss = self._high_norm = -math.inf  # what is above them is looked at at once

    def met(self, run: Run, optimizer: Any) -> None:
        """The optimizer is about to take its first step."""
        with hidden():
            problems = eps_underflow(optimizer)
        for problem in problems:
            run.warn("eps_underflow", f"step {run.step}: {problem.message}")

    def negative(self, run: Run, optimizer: Any, problem: HyperProblem) -> None:
        """A learning rate is below 0; that of the first group is watched with its changes."""
        group = optimizer.param_groups[problem.group]
        rate, begun = problem.value, group.get("initial_lr", 0.0)
        if problem.group == 0 and type(group.get("lr")) in (float, int):
            return
        known = abs(begun) if isinstance(begun, (int, float)) else 0.0
        if isinstance(rate, complex) or rate >= -ROUNDING * known or ("lr", problem.group) in self._told:
            return
        self._told.add(("lr", problem.group))
        message = (
            f"step {run.step}: the learning rate of parameter group {problem.group} is {number(rate)}, below 0: "
            "each step goes uphill"
        )
        run.warn("lr_negative", message, value=rate)

    @property
    def asks_for_norms(self) -> bool:
        """True when the step that is measured next is looked at for parameters without a gradient."""
        return not (self._count + 1) % DEAD_AFTER

    def feed(
        self,
        run: Run,
        optimizer: Any,
        reading: Reading,
        names: list[str],
        lr: float | None,
        scale: float | None = None,
        skipped: bool = False,
        layers: Mapping[str, float] = _NOTHING,
        limits: Mapping[str, float] = _NOTHING,
    ) -> None:
        """One step was measured; it is finite, or a GradScaler skips it.

        Args:
            run: The run.
            optimizer: The optimizer; None for a loop without one.
            reading: What was measured.
            names: Names of the gradients.
            lr: Learning rate of the first group.
            scale: Loss scale.
            skipped: The GradScaler does not take this step.
            layers: Largest magnitude of each layer's output.
            limits: Largest finite value of each layer's dtype.
        """
        if self._waiting:
            self.catch_up(run)
        self._count = count = self._count + 1
        ceiling = None
        if lr != self._lr:
            self._lr = lr
            ceiling = _ceiling(optimizer)
        streaks = self._streaks(run, reading, names) if not count % DEAD_AFTER else _NOTHING
        found = self._early.feed(
            run.step, reading.loss, reading.total, lr, scale, skipped, layers, limits, streaks, ceiling
        )
        for record in found:
            run.book.warn(record, record.message)
        self._high_loss, self._high_norm = self._early.unremarkable

    def note(self, run: Run, step: int, lr: float | None, loss: float, total: float) -> bool:
        """`feed` for a step without a loss scale, put off for up to `BLOCK` steps where nothing stands out.

        Many at once cost a third of one by one: the code is warm then.

        Returns:
            False where the step must be given to `feed` at once; then nothing has been done.
        """
        count = self._count + 1
        if lr != self._lr or not count % DEAD_AFTER:
            return False
        self._count = count
        waiting = self._waiting
        waiting.append((step, loss, total))
        if not 0.0 < loss < self._high_loss or total > self._high_norm or len(waiting) >= BLOCK:
            self.catch_up(run)
        return True

    def note_layers(self, run: Run, step: int, layers: Mapping[str, float], limits: Mapping[str, float]) -> None:
        """The layers of a step that was noted: they are looked at at once."""
        for record in self._early.feed_layers(step, layers, limits):
            run.book.warn(record, record.message)

    def catch_up(self, run: Run) -> None:
        """Look at what waits."""
        waiting, self._waiting = self._waiting, []
        for step, loss, total in waiting:
            for record in self._early.feed(step, loss, total, self._lr):
                run.book.warn(record, record.message)
        self._high_loss, self._high_norm = self._early.unremarkable

    def _streaks(self, run: Run, reading: Reading, names: list[str]) -> Mapping[str, int]:
        """Steps in a row without a gradient; the flight recorder is read only where there is none in this step."""
        each = reading.each
        if each is None:
            with quiet():
                each = reading.norms.tolist()
        zero = [n for n, norm in zip(names, each, strict=True) if norm == 0.0]
        fresh = [n for n in zero if n not in self._settled]
        if not fresh:
            return _NOTHING
        with quiet(), run.lock:
            history = run.recorder.history()
        # Rows of other optimizers, which lie in between, have no such column.
        columns = {
            c: history.values[c][history.recorded[c]].tolist()
            for c in (f"{GRAD_NORM_OF}{n}" for n in fresh)
            if c in history.values
        }
        streaks = zero_streaks(columns)
        self._settled.update(n for n, steps in streaks.items() if steps >= DEAD_AFTER)
        return streaks


def _ceiling(optimizer: Any) -> float | None:
    """The largest rate that the schedule says it will use."""
    if optimizer is None:
        return None
    group = optimizer.param_groups[0]
    known = [v for v in (group.get("initial_lr"), group.get("max_lr")) if isinstance(v, (int, float))]
    return max(known, default=None)
