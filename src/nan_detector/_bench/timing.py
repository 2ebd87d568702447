"""The clock: contestants take turns in short blocks, so that a machine that slows down slows all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

#: Times its budget, after which no further round begins, however few there were: the machine is busy, and the rest of
#: a benchmark is worth more than a third round.
_PATIENCE = 4

#: Takes one training step; gives the moment (`time.perf_counter`) at which its forward ended.
Step = Callable[[], float]


@dataclass(frozen=True)
class Contestant:
    """What takes a turn.

    Attributes:
        name: Its name.
        open: Switches on what is to be measured, for one block, and gives the step that is then taken.
        steps: Steps of a block that are counted.
        warm: Steps before them that are not: caches are cold, and whoever has just attached looks more closely.
        every: It takes part in every so many rounds: what is slow would else use up the time.
        settle: Waits until the device has done all that it was told; the time is the block's last step's.
    """

    name: str
    open: Callable[[], AbstractContextManager[Step]]
    steps: int
    warm: int = 6
    every: int = 1
    settle: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class Block:
    """One turn.

    Attributes:
        steps: Seconds of each step.
        forwards: Seconds of the forward in each step.
    """

    steps: tuple[float, ...]
    forwards: tuple[float, ...]

    @property
    def mean_s(self) -> float:
        """Seconds of a step. A mean: what comes once in 16 steps is a part of the cost, and no median shows it."""
        return statistics.fmean(self.steps)

    @property
    def forward_s(self) -> float:
        """Seconds of a forward, likewise."""
        return statistics.fmean(self.forwards)


#: Blocks by contestant, one per round; None where it sat out.
Blocks = Mapping[str, Sequence[Block | None]]


def in_turns(
    contestants: Sequence[Contestant],
    *,
    rounds: int,
    budget_s: float,
    least: int = 1,
    on_round: Callable[[int, int], object] = lambda done, of: None,
) -> Blocks:
    """Let the contestants take turns.

    Args:
        contestants: Who takes part.
        rounds: Most rounds; each gives every contestant one block, or none where it sits out.
        budget_s: Seconds after which no further round begins.
        least: Rounds that there are even if they take longer, unless that is several times as long.
        on_round: Called after each round with the rounds done and their most.
    """
    found: dict[str, list[Block | None]] = {c.name: [] for c in contestants}
    order = list(contestants)
    began = time.perf_counter()
    with _steady():
        for done in range(1, rounds + 1):
            for c in order:
                found[c.name].append(_block(c) if (done - 1) % c.every == 0 else None)
            # Whoever comes after the slowest one finds other caches: everyone gets every place.
            order = order[1:] + order[:1]
            on_round(done, rounds)
            if time.perf_counter() - began > budget_s * (1 if done >= least else _PATIENCE):
                break
    return found


def _block(contestant: Contestant) -> Block:
    steps, forwards = [], []
    with contestant.open() as step:
        for _ in range(contestant.warm):
            step()
        contestant.settle()
        for _ in range(contestant.steps):
            start = time.perf_counter()
            forward = step()
            steps.append(time.perf_counter() - start)
            forwards.append(forward - start)
        start = time.perf_counter()
        contestant.settle()
        steps[-1] += time.perf_counter() - start
    return Block(tuple(steps), tuple(forwards))


@contextmanager
def _steady() -> Iterator[None]:
    """The collector goes on, as in a training, but not through what was there before: that took 0.1 s at any time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads within an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
