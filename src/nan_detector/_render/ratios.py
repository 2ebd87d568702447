"""A picture of a benchmark: what each way of watching costs, for each training."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping

from nan_detector._render.drawing import BLACK, COLORS, GREY, literal
from nan_detector._render.plots import _figure

_HEIGHT = 0.19  # inches per bar


def ratio_bars(
    groups: Mapping[str, Mapping[str, float]], path: str | os.PathLike[str], *, ours: Collection[str]
) -> None:
    """Draw ratios to the bare step: a group of bars per training, a bar per way of watching, on a log scale.

    Args:
        groups: Ratios by variant, by training; every training has the same variants.
        path: PNG file to write.
        ours: The variants that have colours; the others are grey.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
        ValueError: There is nothing to draw, or a ratio is not a number above 0.
    """
    if not groups or not all(math.isfinite(v) and v > 0 for g in groups.values() for v in g.values()):
        raise ValueError(f"groups={groups!r} must hold at least one training, each with ratios above 0.")
    variants = list(next(iter(groups.values())))
    if any(list(g) != variants for g in groups.values()):
        raise ValueError("groups must have the same variants, in the same order, for every training.")
    with _figure(path, height=1.0 + _HEIGHT * (len(variants) + 1.5) * len(groups)) as figure:
        axes = figure.add_subplot()
        mine = [name for name in variants if name in ours]
        others = [name for name in variants if name not in ours]
        colors = dict(zip(mine, COLORS, strict=False))
        colors |= {name: str(0.35 + 0.5 * i / len(others)) for i, name in enumerate(others)}
        for i, name in enumerate(variants):
            places = [g * (len(variants) + 1.5) + i for g in range(len(groups))]
            values = [max(v[name] - 1.0, 0.0) for v in groups.values()]
            axes.barh(places, values, left=1.0, height=0.85, color=colors[name], label=literal(name))
            for place, given in zip(places, groups.values(), strict=True):
                axes.annotate(
                    f"{given[name]:.2f}",
                    (max(given[name], 1.0), place),
                    (3, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=6,
                    color=BLACK if name in ours else GREY,
                )
        middle = (len(variants) - 1) / 2
        axes.set_yticks([g * (len(variants) + 1.5) + middle for g in range(len(groups))], list(map(literal, groups)))
        axes.set_ylim(len(groups) * (len(variants) + 1.5) - 1.5, -1.0)
        axes.set_xscale("log")
        most = max(v for g in groups.values() for v in g.values())
        axes.set_xlim(1.0, max(1.2, most * 1.15))
        ticks = [t for t in (1, 1.2, 1.5, 2, 3, 5, 10, 20, 50, 100) if t <= max(1.2, most * 1.15)]
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.minorticks_off()
        axes.set_title("Time of a full training step")
        axes.set_xlabel("times a bare step")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0, fontsize=7)
