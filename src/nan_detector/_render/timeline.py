"""A run's steps as pictures for the page: loss, gradient norms, learning rate, loss scale, what layers reached."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nan_detector._before import number
from nan_detector._digest import RunDigest
from nan_detector._render.drawing import EDGE_MARKERS, FARTHEST, dots, edge_marks, gaps, literal, own_style
from nan_detector._render.palette import LIGHT
from nan_detector._render.svg import settings, to_svg
from nan_detector._source_text import clean

#: Lines told apart in one picture; further ones are grey.
MOST_LINES = 4
_MOST_GREY = 40
_COLORS = [LIGHT[f"line{i + 1}"] for i in range(MOST_LINES)]
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_LOG_FROM = 100.0
_NEAR = 1e6  # a range's end that lies further from every value than this is not drawn
_LEGEND_NAME = 24
_STYLE = {
    "font.size": 10.5,
    "axes.edgecolor": LIGHT["edge"],
    "axes.labelcolor": LIGHT["soft"],
    "xtick.color": LIGHT["soft"],
    "ytick.color": LIGHT["soft"],
    "text.color": LIGHT["ink"],
    "grid.color": LIGHT["grid"],
}


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture, and its words: a heading above it and a sentence for those who do not see it."""

    heading: str
    description: str
    svg: str


@dataclass(frozen=True, slots=True)
class _Plan:
    heading: str
    unit: str
    steps: Sequence[int]
    lines: Mapping[str, Sequence[float]]
    log: bool = False
    levels: Mapping[str, float] | None = None  # horizontal lines


def charts(run: RunDigest, name: str) -> list[Chart]:
    """The pictures that a run's rows are enough for.

    Args:
        run: The run.
        name: Short and unique in the page.

    Raises:
        ImportError: matplotlib is not installed.
    """
    events = list(dict.fromkeys(e.step for e in run.events))
    plans = [p for p in (_loss(run), _norms(run), _peaks(run), _rates(run), _scales(run)) if p is not None]
    return [_chart(plan, events, f"{name}-{i}") for i, plan in enumerate(plans)]


def _column(run: RunDigest, field: str) -> tuple[list[int], list[float]]:
    known = [(row.step, value) for row in run.steps if (value := getattr(row, field)) is not None]
    return [step for step, _ in known], [value for _, value in known]


def _loss(run: RunDigest) -> _Plan | None:
    steps, values = _column(run, "loss")
    finite = [v for v in values if math.isfinite(v)]
    log = bool(finite) and min(finite) > 0 and max(finite) > _LOG_FROM * statistics.median(finite)
    return _Plan("Loss", "loss", steps, {"loss": values}, log) if len(steps) > 1 else None


def _norms(run: RunDigest) -> _Plan | None:
    rows = [row for row in run.steps if row.grad_norm is not None]
    if len(rows) < 2:
        return None
    lines = {"all gradients": [row.grad_norm or 0.0 for row in rows]}
    lines["largest of one parameter"] = [math.nan if row.max_grad_norm is None else row.max_grad_norm for row in rows]
    threshold = run.grads[0].largest.threshold if run.grads else None
    levels = {f"warning from {number(threshold)}": threshold} if threshold and math.isfinite(threshold) else None
    return _Plan("Gradient norms", "L2 norm", [row.step for row in rows], lines, True, levels)


def _peaks(run: RunDigest) -> _Plan | None:
    if len(run.peaks) < 2:
        return None
    names = list(dict.fromkeys(peak.layer_name for row in run.peaks for peak in row.layers))
    found = [{peak.layer_name: peak for peak in row.layers} for row in run.peaks]
    limits = {p.layer_name: p.limit for row in run.peaks for p in row.layers if p.limit is not None}
    values = {n: [row[n].abs_max if n in row else 0.0 for row in found] for n in names}
    largest = max((v for vs in values.values() for v in vs if math.isfinite(v)), default=0.0)
    levels = {f"largest number: {number(v)}": v for v in sorted(set(limits.values())) if 0 < v <= _NEAR * largest}
    # Nearest the end of their own range first: a half at 6e4 is worse off than a float32 at 1e6.
    worst = sorted(names, key=lambda n: _badness(values[n], limits.get(n)), reverse=True)[: MOST_LINES + _MOST_GREY]
    heading = "Headroom: largest magnitudes of layers"
    return _Plan(heading, "largest magnitude", [r.step for r in run.peaks], {n: values[n] for n in worst}, True, levels)


def _rates(run: RunDigest) -> _Plan | None:
    steps, values = _column(run, "lr")
    return _Plan("Learning rate", "rate", steps, {"learning rate": values}) if len(set(values)) > 1 else None


def _scales(run: RunDigest) -> _Plan | None:
    steps, values = _column(run, "loss_scale")
    return _Plan("Loss scale", "scale", steps, {"loss scale": values}, True) if len(set(values)) > 1 else None


def _badness(values: Sequence[float], limit: float | None) -> tuple[int, float]:
    finite = [v for v in values if math.isfinite(v)]
    return len(values) - len(finite), max(finite, default=0.0) / (limit or math.inf)


def _chart(plan: _Plan, events: Sequence[int], name: str) -> Chart:
    description = _described(plan, events)
    with own_style({**_STYLE, **settings()}):
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(4.7, 3.2), layout="constrained", facecolor="none")
        axes = figure.add_subplot(facecolor="none")
        shown, names = _lines(axes, plan)
        for label, level in (plan.levels or {}).items():
            shown.append(axes.axhline(level, color=LIGHT["line6"], linewidth=1, linestyle=(0, (2, 2))))
            names.append(label)
        marked = [axes.axvline(step, color=LIGHT["event"], linewidth=1.4, zorder=1.8) for step in events[:20]]
        if marked:
            shown.append(marked[0])
            names.append(f"event at step {events[0]}" if len(events) == 1 else f"{len(events)} events")
        for kind in EDGE_MARKERS:
            drawn = [
                edge_marks(axes, plan.steps, values, kind, _COLORS[min(i, MOST_LINES - 1)])
                for i, values in enumerate(plan.lines.values())
            ]
            shown += [m for m in drawn if m is not None][:1]
            names += [f"{kind}, off the scale"] * any(m is not None for m in drawn)
        axes.set_xlabel("step")
        axes.set_ylabel(plan.unit)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.margins(x=0.02)
        figure.legend(shown, names, loc="outside lower left", ncols=2, fontsize=10, columnspacing=1.2, handlelength=2.2)
        return Chart(plan.heading, description, to_svg(figure, name, plan.heading, description))


def _lines(axes: Any, plan: _Plan) -> tuple[list[Any], list[str]]:
    shown, names = [], []
    if plan.log:
        axes.set_yscale("log")
    for i, (name, given) in enumerate(plan.lines.items()):
        values = gaps(given)
        if plan.log:  # 0 has no place there: the line has a gap
            values = [max(v, 1 / FARTHEST) if v > 0 else math.nan for v in values]
        told = i < MOST_LINES
        color = _COLORS[i] if told else LIGHT["others"]
        style: dict[str, Any] = {"linestyle": _DASHES[i]} if told else {"linewidth": 0.7, "zorder": 1.5}
        (line,) = axes.plot(plan.steps, values, color=color, **dots(values, color), **style)
        if i <= MOST_LINES:
            label = name if len(name) <= _LEGEND_NAME else "…" + name[1 - _LEGEND_NAME :]
            shown.append(line)
            names.append(literal(label) if told else f"{len(plan.lines) - MOST_LINES} others")
    if all(not math.isfinite(v) for values in plan.lines.values() for v in values):
        axes.set_yticks([])  # numbers there would be matplotlib's invention
    return shown, names


def _described(plan: _Plan, events: Sequence[int]) -> str:
    """What a picture shows, in words, for those who do not see it."""
    parts = [f"Steps {plan.steps[0]} to {plan.steps[-1]}."]
    for name, values in list(plan.lines.items())[:MOST_LINES]:
        finite = [v for v in values if math.isfinite(v)]
        if finite:
            said = f"from {number(finite[0])} to {number(finite[-1])}, at most {number(max(finite))}"
        else:
            said = "never finite"
        bad = [s for s, v in zip(plan.steps, values, strict=True) if not math.isfinite(v)]
        also = f"; not finite at step {bad[0]}" + (f" and {len(bad) - 1} more" if len(bad) > 1 else "") if bad else ""
        parts.append(clean(f"{name}: {said}{also}."))
    parts += [f"{label[0].upper()}{label[1:]}." for label in plan.levels or ()]
    if events:
        parts.append(f"Events at step{'s' if len(events) > 1 else ''} {', '.join(map(str, events[:8]))}.")
    return " ".join(parts)
