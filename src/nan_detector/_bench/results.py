"""What a benchmark found, as plain frozen data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from nan_detector._bench.figures import Slope, Spread

BARE, BARE_AGAIN = "bare", "bare again"


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
    """

    workload: str
    title: str
    threads: int
    rows: tuple[Row, ...]
    limits: dict[str, float]

    def row(self, variant: str) -> Row | None:
        """The row of a variant."""
        return next((r for r in self.rows if r.variant == variant), None)

    def level(self, level: str) -> Row | None:
        """The row of ours at a watch level."""
        return next((r for r in self.rows if r.level == level), None)

    @property
    def apart(self) -> float:
        """By how much the second bare run was off: a difference below that means nothing."""
        again = self.row(BARE_AGAIN)
        return 0.0 if again is None else again.ratio.median - 1.0


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
    """

    machine: dict[str, str]
    cells: tuple[Cell, ...]
    trends: tuple[Trend, ...]
    missing: dict[str, str]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self)

    def broken(self) -> list[str]:
        """The targets that do not hold, in words."""
        found = []
        for cell in self.cells:
            for level, limit in cell.limits.items():
                row = cell.level(level)
                if row is not None and row.net > limit:
                    found.append(
                        f'{cell.workload}, {cell.threads} thread{"s" * (cell.threads > 1)}, watch="{level}": '
                        f"{row.net:.3f}, and {limit:.2f} is to hold"
                    )
        return found
