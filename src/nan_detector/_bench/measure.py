"""The benchmark: every variant on every workload, and how the cost grows."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from nan_detector._bench import growth
from nan_detector._bench.answer import answer_of
from nan_detector._bench.figures import Spread, ratios, spread
from nan_detector._bench.memory import memory_of
from nan_detector._bench.results import Cell, Report, Row, Trend
from nan_detector._bench.timing import in_turns, threads
from nan_detector._bench.variants import BARE, BARE_AGAIN, LAYERS, STEP, VARIANTS, Variant
from nan_detector._bench.workloads import Workload, made, named

_Tell = Callable[[str], object]


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long.

    Attributes:
        workloads: Names.
        threads: Numbers of threads, each of which is a cell of its own.
        cell_s: Seconds for the timing of one cell with one thread; with more of them it is half.
        growth_s: Seconds for each axis of growth; 0 leaves growth out.
        growth_sizes: Sizes of the axes, in their order; None for their own.
        rounds: Most rounds of a cell.
        least: Fewest rounds.
        memory: Whether the memory of all variants is measured, or of the bare run and of ours alone.
        answers: Watch levels whose time to the answer is measured.
        repeats: How often each of these is.
        device: Where.
    """

    workloads: tuple[str, ...]
    threads: tuple[int, ...] = (1,)
    cell_s: float = 20.0
    growth_s: float = 20.0
    growth_sizes: tuple[tuple[float, ...], ...] | None = None
    rounds: int = 60
    least: int = 3
    memory: bool = True
    answers: tuple[str, ...] = ("step", "layers", "ops")
    repeats: int = 3
    device: str = "cpu"


FULL = Plan(("W1", "W2", "W3-25", "W3-50", "W3-100", "W3-200", "W4", "W5"), threads=(1, 2), cell_s=14.0, growth_s=12.0)
#: What a table of ratios needs.
BRIEF = replace(FULL, threads=(1,), cell_s=8.0, growth_s=0.0, least=2, memory=False, answers=("step",), repeats=1)
#: The levels that one leaves on.
_ALWAYS_ON = (STEP, LAYERS)
#: Under a minute.
QUICK = Plan(
    ("W1", "W3-25", "W2"),
    cell_s=5.0,
    growth_s=2.0,
    growth_sizes=((10, 25, 50), (1e6, 2e6, 4e6), (16, 64, 256)),
    least=2,
    memory=False,
    answers=("step",),
    repeats=1,
)


def run(plan: Plan, tell: _Tell = lambda text: None) -> Report:
    """Measure.

    Args:
        plan: What, and for how long.
        tell: Called with what is being done.
    """
    began = time.perf_counter()
    variants = [v for v in VARIANTS if v.missing is None]
    cells: list[Cell] = []
    for name in plan.workloads:
        workload = named(name)
        for count in plan.threads:
            tell(f"{workload.name}, {count} thread{'s' * (count > 1)}")
            with threads(count):
                cells.append(_cell(workload, variants, plan, count))
    trends = []
    if plan.growth_s:
        for i, axis in enumerate(growth.AXES):
            tell(f"growth with {axis.name}")
            with threads(1):
                sizes = None if plan.growth_sizes is None else plan.growth_sizes[i]
                found = growth.grown(axis, budget_s=plan.growth_s, sizes=sizes)
            trends.append(
                Trend(found.name, found.unit, found.sizes, found.ratios, found.added_us, found.cost, found.share)
            )
    missing = {v.name: v.missing for v in VARIANTS if v.missing is not None}
    return Report(machine(plan.device), tuple(cells), tuple(trends), missing, time.perf_counter() - began)


def _cell(workload: Workload, variants: Sequence[Variant], plan: Plan, count: int) -> Cell:
    task = made(workload, plan.device)
    for _ in range(3):  # an optimizer's first step makes its state
        task.step()
    blocks = in_turns(
        [v.contestant(task, workload.steps) for v in variants],
        rounds=plan.rounds,
        budget_s=plan.cell_s if count == 1 else plan.cell_s / 2,
        least=plan.least,
    )
    steps = {name: [None if b is None else b.mean_s for b in found] for name, found in blocks.items()}
    forwards = {name: [None if b is None else b.forward_s for b in found] for name, found in blocks.items()}
    step_ratios = {name: spread(ratios(found, steps[BARE])) for name, found in steps.items()}
    forward_ratios = {name: spread(ratios(found, forwards[BARE])) for name, found in forwards.items()}
    off = step_ratios[BARE_AGAIN].median - 1.0
    forward_off = forward_ratios[BARE_AGAIN].median - 1.0
    rows = [
        Row(
            v.name,
            v.level,
            _milliseconds(steps[v.name]),
            _milliseconds(forwards[v.name]),
            step_ratios[v.name],
            forward_ratios[v.name],
            step_ratios[v.name].median - (off if v.name != BARE else 0.0),
            forward_ratios[v.name].median - (forward_off if v.name != BARE else 0.0),
        )
        for v in variants
    ]
    if count == 1:  # neither depends on it
        rows = [_with_answer(_with_memory(r, v, workload, plan), v, rows[0], workload, plan) for r, v in _pairs(rows)]
    return Cell(workload.name, workload.title, count, tuple(rows), workload.limits)


def _pairs(rows: Sequence[Row]) -> list[tuple[Row, Variant]]:
    by_name = {v.name: v for v in VARIANTS}
    return [(row, by_name[row.variant]) for row in rows]


def _with_memory(row: Row, variant: Variant, workload: Workload, plan: Plan) -> Row:
    if not plan.memory and variant.name not in (BARE, *_ALWAYS_ON):
        return row
    # A task of its own for each: what a variant leaves behind must not be counted for the next one.
    found = memory_of(variant.watch, made(workload, plan.device), warm=1 if variant.slow else 4)
    return replace(row, peak_bytes=found.peak, steady_bytes=found.steady)


def _with_answer(row: Row, variant: Variant, bare: Row, workload: Workload, plan: Plan) -> Row:
    if variant.level is None or variant.level not in plan.answers:
        return row
    found = answer_of(variant.level, lambda: made(workload, plan.device), plan.repeats)
    unit = bare.step_ms.median / 1e3
    return replace(row, answer_steps=found.located_s / unit, trials_steps=found.trials_s / unit)


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
