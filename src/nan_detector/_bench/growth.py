"""How the cost of `watch="step"` grows: with layers, with parameters, with the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nan_detector._bench.figures import Slope, Spread, differences, fitted, ratios, spread
from nan_detector._bench.results import BARE
from nan_detector._bench.timing import in_turns
from nan_detector._bench.variants import STEP, variant
from nan_detector._bench.workloads import Residual, Task, perceptron


@dataclass(frozen=True)
class Axis:
    """One thing that grows.

    Attributes:
        name: What grows.
        unit: What the slope is for one of, in words.
        scale: How many of it that is.
        sizes: Its sizes.
        make: Makes the training of a size.
    """

    name: str
    unit: str
    scale: float
    sizes: tuple[float, ...]
    make: Callable[[float], Task]


@dataclass(frozen=True)
class Growth:
    """What was found along one axis.

    Attributes:
        name: What grows.
        unit: What the slopes are for one of.
        sizes: The sizes.
        ratios: A watched step over a bare one, at each size.
        added_us: Microseconds that the watch added to a step, at each size.
        cost: Growth of `added_us` per unit.
        share: Growth of the ratio per unit: where it is flat, the watch costs the same part of a step at every size.
    """

    name: str
    unit: str
    sizes: tuple[float, ...]
    ratios: tuple[Spread, ...]
    added_us: tuple[Spread, ...]
    cost: Slope
    share: Slope


def _wide(parameters: float) -> Task:
    """Few tensors: with a width of w they have w² + 76 w parameters."""
    width = round((parameters + 38**2) ** 0.5 - 38)
    return Task(perceptron(width), torch.randn(8, 64), torch.randint(0, 10, (8,)))


AXES: tuple[Axis, ...] = (
    Axis(
        "layers (residual MLP of width 128, batch 64)",
        "100 layers",
        100,
        (25, 50, 100, 200),
        lambda depth: Task(Residual(int(depth)), torch.randn(64, 128), torch.randint(0, 10, (64,))),
    ),
    Axis("parameters (MLP of 6 tensors, batch 8)", "10 M parameters", 1e7, (1e6, 5e6, 2e7, 5e7), _wide),
    Axis(
        "batch (MLP 64-256-256-10)",
        "1000 samples",
        1000,
        (16, 64, 256, 1024),
        lambda batch: Task(perceptron(), torch.randn(int(batch), 64), torch.randint(0, 10, (int(batch),))),
    ),
)


def grown(
    axis: Axis, *, budget_s: float, sizes: Sequence[float] | None = None, rounds: int = 9, least: int = 2
) -> Growth:
    """Measure along `axis`.

    Args:
        axis: What grows.
        budget_s: Seconds for all sizes together.
        sizes: Other sizes than the axis's own.
        rounds: Most rounds at each size.
        least: Fewest.
    """
    sizes = axis.sizes if sizes is None else tuple(sizes)
    shares: list[Spread] = []
    added: list[Spread] = []
    xs: list[float] = []
    costs: list[float] = []
    parts: list[float] = []
    for size in sizes:
        task = axis.make(size)
        contestants = [variant(name).contestant(task, 4) for name in (BARE, STEP)]
        blocks = in_turns(contestants, rounds=rounds, budget_s=budget_s / len(sizes), least=least)
        seconds = {name: [None if b is None else b.mean_s for b in found] for name, found in blocks.items()}
        relative = ratios(seconds[STEP], seconds[BARE])
        absolute = [1e6 * d for d in differences(seconds[STEP], seconds[BARE])]
        shares.append(spread(relative))
        added.append(spread(absolute))
        xs += [size / axis.scale] * len(relative)
        costs += absolute
        parts += relative
    return Growth(axis.name, axis.unit, tuple(sizes), tuple(shares), tuple(added), fitted(xs, costs), fitted(xs, parts))
