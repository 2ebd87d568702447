"""What trials have to work with: the step, its batch, and the time that they may take."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from nan_detector._again import Again, Outcome
from nan_detector._change import Change
from nan_detector._records import NaNEvent
from nan_detector._trace import Birth
from nan_detector._trial_facts import Batch, Measuring
from nan_detector._trial_plan import Facts
from nan_detector._trial_samples import Rows

#: Trials may take this many times what one bare run of the step takes.
MAX_RUNS = 20
#: Or this many seconds, where a step takes so little that nobody would notice.
UNNOTICED_S = 1.0


class Spent(Exception):
    """The budget does not allow another run."""


@dataclass(kw_only=True)
class Budget:
    """The time that trials may take together, from when this is made.

    Attributes:
        budget_s: Seconds for all trials together, at most.
        unit: Seconds of one bare run; 0 until there was one.
    """

    budget_s: float
    unit: float = 0.0

    def __post_init__(self) -> None:
        self.begun = time.perf_counter()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        budget = min(self.budget_s, max(MAX_RUNS * self.unit, UNNOTICED_S)) if self.unit else self.budget_s
        return self.begun + budget - time.perf_counter()

    @property
    def deadline(self) -> float:
        """The `time.perf_counter()` at which a run gives up."""
        return self.begun + self.budget_s

    def ask(self) -> None:
        """Ask for the time of one run.

        Raises:
            Spent: There is none.
        """
        if self.left < self.unit or self.left <= 0:
            raise Spent


@dataclass
class Lab(Budget):
    """What a trial has to work with.

    Attributes:
        again: The step.
        event: The located event.
        birth: The birth that it names; None where nothing was found.
        facts: What is known of the step.
        batch: Its batch.
        first: What came of the first bare run.
        rows: The samples that were found guilty.
        runs: How often the step was run.
    """

    again: Again
    event: NaNEvent
    birth: Birth | None
    facts: Facts
    batch: Batch
    first: Outcome | None = None
    rows: Rows = ()
    runs: int = 0

    def run(self, change: Change, *, checksum: bool = False) -> Outcome:
        """The step with `change`.

        Raises:
            Spent: There is no time for it.
        """
        self.ask()
        outcome = self.again.run(change, self.deadline, checksum=checksum)
        self.runs += 1
        self.first = self.first or outcome
        if type(change) in (Change, Measuring):
            # The slower one: on a busy machine a single time is a matter of luck.
            self.unit = max(self.unit, outcome.seconds)
        return outcome


def why_spent(lab: Lab) -> str:
    """What is said of a trial for which nothing was left."""
    runs = f"{lab.runs} run{'s' if lab.runs != 1 else ''} of the step"
    return f"the budget of {MAX_RUNS} bare steps was spent on {runs}"


def patience_of_others() -> float:
    """Seconds for which other ranks can be kept waiting: a quarter of what they wait at all."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_initialized():
        return float("inf")
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds()) / 4
    except Exception:  # a backend that does not tell: what is usual
        return float(dist.constants.default_pg_timeout.total_seconds()) / 4
