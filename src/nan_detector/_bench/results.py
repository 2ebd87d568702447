"""What a benchmark found, as plain frozen data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from nan_detector._bench.figures import Slope, Spread

BARE, BARE_AGAIN = "bare", "bare again"
#: What the reading of all gradients costs by itself: the floor of whoever looks at each of them.
READ = "one read: a norm per gradient, all fetched at once"


@dataclass(frozen=True)
class Row:
    """One variant on one workload.

    Attributes:
        variant: Its name.
        level: Of ours: the watch level.
        step_ms: Milliseconds of a full step, over the rounds.
        forward_ms: Of the forward alone, the loss included.
        ratio: A full step over the bare one of the same round.
        forward_ratio: Likewise of the forward.
        net: The median ratio, less by how much the second bare run was off.
        forward_net: Likewise of the forward.
        above_read: By how much a full step is above the one that only reads each gradient once, as a part of the bare
            one; the median over rounds. None for those two.
        peak_bytes: Most bytes of tensors within a step; None where that was not measured.
        steady_bytes: Bytes of tensors between two steps.
        answer_steps: Of ours: time to the located event, in bare steps.
        trials_steps: From there to the end of the trials.
    """

    variant: str
    level: str | None
    step_ms: Spread
    forward_ms: Spread
    ratio: Spread
    forward_ratio: Spread
    net: float
    forward_net: float
    above_read: float | None = None
    peak_bytes: int | None = None
    steady_bytes: int | None = None
    answer_steps: float | None = None
    trials_steps: float | None = None


@dataclass(frozen=True)
class Cell:
    """One workload with one number of threads.

    Attributes:
        workload: Short name.
        title: What it is.
        threads: Threads within an operation.
        rows: The variants, bare first.
        limits: The largest ratios that are to hold, by watch level.
        seconds: How long it took to measure.
        processor: For what part of the time of measuring steps this process had a processor: below 1, others had it.
    """

    workload: str
    title: str
    threads: int
    rows: tuple[Row, ...]
    limits: dict[str, float]
    seconds: float = 0.0
    processor: float = 1.0

    def row(self, variant: str) -> Row | None:
        """The row of a variant."""
        return next((r for r in self.rows if r.variant == variant), None)

    def level(self, level: str) -> Row | None:
        """The row of ours at a watch level."""
        return next((r for r in self.rows if r.level == level), None)

    @property
    def floor(self) -> Row | None:
        """The row of what only reads each gradient once."""
        return self.row(READ)

    @property
    def apart(self) -> float:
        """By how much the second bare run was off: a difference below that means nothing."""
        again = self.row(BARE_AGAIN)
        return 0.0 if again is None else again.ratio.median - 1.0

    @property
    def noise(self) -> float:
        """What a ratio is uncertain by: as much as the second bare run was off, or as it varied from round to round."""
        again = self.row(BARE_AGAIN)
        return 0.0 if again is None else max(abs(self.apart), (again.ratio.high - again.ratio.low) / 2)


@dataclass(frozen=True)
class Target:
    """A ratio that is to hold, and what became of it.

    Attributes:
        workload: Short name.
        threads: Threads within an operation.
        level: The watch level.
        limit: The largest ratio that is to hold.
        found: The ratio, less by how much the second bare run was off.
        read: Likewise of what only reads each gradient once: the floor.
        above_read: By how much a watched step is above that one, as a part of the bare one.
        noise: What a ratio is uncertain by: what two bare runs differed by.
    """

    workload: str
    threads: int
    level: str
    limit: float
    found: float
    read: float | None
    above_read: float | None
    noise: float

    @property
    def holds(self) -> bool:
        """Whether it does."""
        return self.found <= self.limit

    @property
    def verdict(self) -> str:
        """Whether it does, and what that is worth."""
        said = "holds" if self.holds else "does not hold"
        if abs(self.found - self.limit) < self.noise:
            said += ", within the noise"
        if self.read is not None and self.read - self.noise > self.limit:
            said += "; one read is above it by itself"
        return said


@dataclass(frozen=True)
class Trend:
    """How the cost grows with something; see `nan_detector._bench.growth.Growth`."""

    name: str
    unit: str
    sizes: tuple[float, ...]
    ratios: tuple[Spread, ...]
    added_us: tuple[Spread, ...]
    cost: Slope
    share: Slope


@dataclass(frozen=True)
class Report:
    """All of one run.

    Attributes:
        machine: What it ran on.
        cells: Workloads.
        trends: Growth.
        missing: Why a variant was not measured, by its name.
        seconds: How long it took.
        unfinished: What was still to be measured when it ended.
    """

    machine: dict[str, str]
    cells: tuple[Cell, ...]
    trends: tuple[Trend, ...]
    missing: dict[str, str]
    seconds: float
    unfinished: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        targets = [{**dataclasses.asdict(t), "verdict": t.verdict} for t in self.targets()]
        return {**dataclasses.asdict(self), "targets": targets}

    def targets(self) -> list[Target]:
        """What is to hold, of what was measured."""
        return [
            Target(
                cell.workload,
                cell.threads,
                level,
                limit,
                row.net,
                None if cell.floor is None else cell.floor.net,
                row.above_read,
                cell.noise,
            )
            for cell in self.cells
            for level, limit in cell.limits.items()
            if (row := cell.level(level)) is not None
        ]
