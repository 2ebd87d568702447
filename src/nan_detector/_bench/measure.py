"""The benchmark: every variant on every workload, and how the cost grows."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from nan_detector._bench import growth
from nan_detector._bench.answer import Answer, answer_of, quiet_logger
from nan_detector._bench.figures import Spread, excess, ratios, spread
from nan_detector._bench.memory import memory_of
from nan_detector._bench.results import BARE, BARE_AGAIN, READ, Cell, Report, Row, Trend
from nan_detector._bench.timing import Blocks, in_turns, threads
from nan_detector._bench.variants import LAYERS, STEP, VARIANTS, Variant
from nan_detector._bench.workloads import Workload, made, named

_Tell = Callable[[str], object]
_Done = Callable[[Report], object]


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long.

    Attributes:
        workloads: Names.
        threads: Numbers of threads, each of which is a cell of its own.
        cell_s: Seconds for the timing of one cell with the first number of threads; with the others it is half.
        growth_s: Seconds for each axis of growth; 0 leaves growth out.
        growth_sizes: Sizes of the axes, in their order; None for their own.
        rounds: Most rounds of a cell.
        least: Fewest rounds.
        memory_s: Seconds after which no further variant's memory is measured; the bare run's and ours are at any rate.
        answers: Watch levels whose time to the answer is measured, the one that matters most first.
        answer_s: Seconds after which no further level's is.
        repeats: How often each of these is at most.
        device: Where.
    """

    workloads: tuple[str, ...]
    threads: tuple[int, ...] = (1,)
    cell_s: float = 20.0
    growth_s: float = 20.0
    growth_sizes: tuple[tuple[float, ...], ...] | None = None
    rounds: int = 60
    least: int = 3
    memory_s: float = 5.0
    answers: tuple[str, ...] = ("step", "layers", "ops")
    answer_s: float = 6.0
    repeats: int = 3
    device: str = "cpu"


FULL = Plan(("W1", "W2", "W3-25", "W3-50", "W3-100", "W3-200", "W4", "W5"), threads=(1, 2), cell_s=12.0, growth_s=9.0)
#: What a table of ratios needs.
BRIEF = replace(FULL, threads=(1,), cell_s=8.0, growth_s=0.0, least=2, memory_s=0.0, answers=("step",), repeats=1)
#: The levels that one leaves on.
_ALWAYS_ON = (STEP, LAYERS)
#: Under a minute.
QUICK = Plan(
    ("W1", "W3-25", "W2"),
    cell_s=5.0,
    growth_s=2.0,
    growth_sizes=((10, 25, 50), (1e6, 2e6, 4e6), (16, 64, 256)),
    least=2,
    memory_s=0.0,
    answers=("step",),
    repeats=1,
)


def run(plan: Plan, tell: _Tell = lambda text: None, done: _Done = lambda report: None) -> Report:
    """Measure.

    Args:
        plan: What, and for how long.
        tell: Called with what is being done.
        done: Called after each part with the report so far, which names what is still to come: it may be the last.
    """
    began = time.perf_counter()
    missing = {v.name: v.missing for v in VARIANTS if v.missing is not None}
    parts = list(_parts(plan))
    report = Report(machine(plan.device), (), (), missing, 0.0, tuple(title for title, _ in parts))
    for title, part in parts:
        tell(title)
        with quiet_logger():
            found = part()
        cells, trends = report.cells, report.trends
        if isinstance(found, Cell):
            cells = (*cells, found)
        else:
            trends = (*trends, found)
        seconds = time.perf_counter() - began
        report = replace(report, cells=cells, trends=trends, seconds=seconds, unfinished=report.unfinished[1:])
        done(report)
    return report


def _parts(plan: Plan) -> Iterator[tuple[str, Callable[[], Cell | Trend]]]:
    """What is measured, in this order: first what the README has, in case that the rest is not waited for."""
    variants = [v for v in VARIANTS if v.missing is None]
    first, *further = plan.threads
    yield from (_cell_part(name, variants, plan, first) for name in plan.workloads)
    if plan.growth_s:
        sizes = plan.growth_sizes or tuple(axis.sizes for axis in growth.AXES)
        for axis, its in zip(growth.AXES, sizes, strict=True):
            yield f"growth with {axis.name}", partial(_trend, axis, its, plan)
    yield from (_cell_part(name, variants, plan, count) for count in further for name in plan.workloads)


def _cell_part(
    name: str, variants: Sequence[Variant], plan: Plan, count: int
) -> tuple[str, Callable[[], Cell | Trend]]:
    return f"{name}, {count} thread{'s' * (count > 1)}", partial(_cell, named(name), variants, plan, count)


def _trend(axis: growth.Axis, sizes: Sequence[float], plan: Plan) -> Trend:
    with threads(1):
        found = growth.grown(axis, budget_s=plan.growth_s, sizes=sizes)
    return Trend(found.name, found.unit, found.sizes, found.ratios, found.added_us, found.cost, found.share)


def _cell(workload: Workload, variants: Sequence[Variant], plan: Plan, count: int) -> Cell:
    began, ran = time.perf_counter(), time.process_time()
    with threads(count):
        blocks = _timed(workload, variants, plan, count)
        processor = (time.process_time() - ran) / (time.perf_counter() - began)
        rows = _rows(blocks, variants)
        if count == plan.threads[0]:  # neither depends on it
            rows = _with_answers(_with_memory(rows, variants, workload, plan), workload, plan)
    seconds = time.perf_counter() - began
    return Cell(workload.name, workload.title, count, tuple(rows), workload.limits, seconds, min(1.0, processor))


def _timed(workload: Workload, variants: Sequence[Variant], plan: Plan, count: int) -> Blocks:
    """The clock's findings. What was trained for it is gone afterwards: it would be in all figures of memory."""
    task = made(workload, plan.device)
    for _ in range(3):  # an optimizer's first step makes its state
        task.step()
    return in_turns(
        [v.contestant(task, workload.steps) for v in variants],
        rounds=plan.rounds,
        budget_s=plan.cell_s if count == plan.threads[0] else plan.cell_s / 2,
        least=plan.least,
    )


def _rows(blocks: Blocks, variants: Sequence[Variant]) -> list[Row]:
    steps = {name: [None if b is None else b.mean_s for b in found] for name, found in blocks.items()}
    forwards = {name: [None if b is None else b.forward_s for b in found] for name, found in blocks.items()}
    step_ratios = {name: spread(ratios(found, steps[BARE])) for name, found in steps.items()}
    forward_ratios = {name: spread(ratios(found, forwards[BARE])) for name, found in forwards.items()}
    off = step_ratios[BARE_AGAIN].median - 1.0
    forward_off = forward_ratios[BARE_AGAIN].median - 1.0
    return [
        Row(
            v.name,
            v.level,
            _milliseconds(steps[v.name]),
            _milliseconds(forwards[v.name]),
            step_ratios[v.name],
            forward_ratios[v.name],
            step_ratios[v.name].median - (off if v.name != BARE else 0.0),
            forward_ratios[v.name].median - (forward_off if v.name != BARE else 0.0),
            None
            if v.name in (BARE, BARE_AGAIN, READ)
            else spread(excess(steps[v.name], steps[READ], steps[BARE])).median,
        )
        for v in variants
    ]


def _with_memory(rows: Sequence[Row], variants: Sequence[Variant], workload: Workload, plan: Plan) -> list[Row]:
    deadline = time.perf_counter() + plan.memory_s
    found = []
    for row, v in zip(rows, variants, strict=True):
        if v.name in (BARE, *_ALWAYS_ON) or (v.name != BARE_AGAIN and time.perf_counter() < deadline):
            # A task of its own for each: what a variant leaves behind must not be counted for the next one.
            memory = memory_of(v.watch, made(workload, plan.device), warm=1 if v.slow else 4)
            row = replace(row, peak_bytes=memory.peak, steady_bytes=memory.steady)
        found.append(row)
    return found


def _with_answers(rows: Sequence[Row], workload: Workload, plan: Plan) -> list[Row]:
    unit = rows[0].step_ms.median / 1e3
    deadline = time.perf_counter() + plan.answer_s
    found: dict[str, Answer] = {}
    for level in plan.answers:
        left = deadline - time.perf_counter()
        if not found or left > 0.0:
            share = left / (len(plan.answers) - len(found))
            found[level] = answer_of(level, lambda: made(workload, plan.device), plan.repeats, share)
    return [
        row
        if (answer := found.get(row.level or "")) is None
        else replace(row, answer_steps=answer.located_s / unit, trials_steps=answer.trials_s / unit)
        for row in rows
    ]


def _milliseconds(seconds: Sequence[float | None]) -> Spread:
    return spread([1e3 * s for s in seconds if s is not None])


def machine(device: str) -> dict[str, str]:
    """What figures are worth nothing without."""
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": str(os.cpu_count()),
        "device": device,
    }
    if device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name(device)
    return found
