"""Pictures of a run: PNG files, drawn without a display and without touching the user's matplotlib settings."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nan_detector._render.drawing import (
    BLACK,
    COLORS,
    EDGE_MARKERS,
    FARTHEST,
    GREY,
    VERMILION,
    dots,
    edge_marks,
    gaps,
    literal,
    own_style,
    ranked_lines,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Path = str | os.PathLike[str]

_NONE = "#e3e3e3"
_LOG_FROM = 100.0  # ratio of the largest value to the median from which a linear axis shows nothing else
_MOST_ROWS, _MOST_COLUMNS = 40, 400  # of a map: what can be read, and what has a pixel
_NEAR = 1e-8  # part of a dtype's range below which nothing is near its end


def loss_curve(steps: Sequence[int], loss: Sequence[float], event_step: int | None, path: _Path) -> None:
    """Draw the loss over the steps, and a mark at `event_step`.

    Args:
        steps: Step of each value, shape (rows,).
        loss: Loss of each step, shape (rows,).
        event_step: Step of the event; None for a run without one.
        path: PNG file to write.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
        ValueError: `steps` and `loss` differ in length.
    """
    _same_length("loss", loss, steps)
    with _figure(path, height=3.2) as figure:
        axes = figure.add_subplot()
        finite = [v for v in loss if math.isfinite(v)]
        if finite and min(finite) > 0 and max(finite) > _LOG_FROM * statistics.median(finite):
            axes.set_yscale("log")
        if not finite:
            axes.set_yticks([])  # numbers there would be matplotlib's invention
        axes.plot(steps, gaps(loss), color=COLORS[0], **dots(loss, COLORS[0]))
        _finish(axes, "Loss", "loss", event_step, [(steps, loss, COLORS[0])])


def grad_norm_timeline(
    steps: Sequence[int],
    norms: Mapping[str, Sequence[float]],
    threshold: float | None,
    event_step: int | None,
    path: _Path,
) -> None:
    """Draw gradient norms over the steps on a log scale, with the warning threshold.

    Args:
        steps: Step of each value, shape (rows,).
        norms: Norms per name, each of shape (rows,). The largest ones have colours, the others are grey.
        threshold: Norm from which a warning is given; None, or an infinity, for none.
        event_step: Step of the event; None for a run without one.
        path: PNG file to write.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
        ValueError: A series differs from `steps` in length.
    """
    for name, values in norms.items():
        _same_length(f"norms[{name!r}]", values, steps)
    with _figure(path, height=3.8) as figure:
        axes = figure.add_subplot()
        # The least that is drawn: what lies further down would leave nothing to be seen of the rest.
        series, handles, labels = ranked_lines(axes, steps, norms, least=1 / FARTHEST)
        if threshold is not None and math.isfinite(threshold):
            handles.append(axes.axhline(threshold, color=BLACK, linewidth=1, linestyle=(0, (2, 2))))
            labels.append(f"warning from {threshold:g}")
        _finish(axes, "Gradient norms", "L2 norm", event_step, series, handles, labels)


def grad_norm_heatmap(
    steps: Sequence[int], norms: Mapping[str, Sequence[float | None]], event_step: int | None, path: _Path
) -> None:
    """Draw gradient norms as a map: one row per name, in the order given, steps to the right, colour by magnitude.

    Where there are more names than rows that can be read, neighbours share a row, which shows their largest norm.

    Args:
        steps: Step of each value, shape (rows,).
        norms: Norms per name, each of shape (rows,); None where there was no gradient.
        event_step: Step of the event; None for a run without one.
        path: PNG file to write.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
        ValueError: A series differs from `steps` in length.
    """
    for name, values in norms.items():
        _same_length(f"norms[{name!r}]", values, steps)
    rows, columns = _thinned(norms), _spans(steps)
    cells = [[_worst([values[i] for values in row for i in span]) for span in columns] for _, row in rows]
    with _figure(path, height=1.6 + 0.2 * max(4, len(rows))) as figure:
        from matplotlib.colors import LogNorm

        axes = figure.add_subplot()
        shown = [v for row in cells for v in row if v is not None and math.isfinite(v) and v > 0]
        low, high = (max(min(shown), max(shown) / 1e8), max(shown)) if shown else (1.0, 10.0)
        colors = _colormap()
        # Beyond the largest finite one is what is not finite; a norm of 0 is below every colour.
        grid = [[_placed(v, low, min(high, FARTHEST)) for v in row] for row in cells]
        edges = [*(steps[span[0]] for span in columns), steps[-1] + 1] if rows and steps else [0, 1]
        top = min(high, FARTHEST) if high > low else low * 10
        mesh = axes.pcolormesh(
            [e - 0.5 for e in edges],
            [i - 0.5 for i in range(max(1, len(rows)) + 1)],
            grid if rows and steps else [[math.nan]],
            cmap=colors,
            norm=LogNorm(low, top),
            rasterized=True,
        )
        axes.set_yticks(range(len(rows)), [literal(name) for name, _ in rows])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.tick_params(axis="y", length=0, labelsize=8)
        figure.colorbar(mesh, ax=axes, label="L2 norm", extend="both", pad=0.02)
        _key(axes, event_step, cells)


def headroom_timeline(
    steps: Sequence[int],
    abs_max: Mapping[str, Sequence[float | None]],
    limits: Mapping[str, float],
    event_step: int | None,
    path: _Path,
) -> None:
    """Draw how far the largest magnitudes of layers stay below the largest number of their dtype, on a log scale.

    Args:
        steps: Step of each value, shape (rows,).
        abs_max: Largest magnitude per layer, each of shape (rows,); None where it took no part in a step. The layers
            nearest the end of their range have colours.
        limits: Largest finite value of each layer's dtype; layers without one are left out.
        event_step: Step of the event; None for a run without one.
        path: PNG file to write.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
        ValueError: A series differs from `steps` in length.
    """
    for name, given in abs_max.items():
        _same_length(f"abs_max[{name!r}]", given, steps)
    # 0 has no place on a log axis: there is a gap.
    parts = {n: [0.0 if v is None else v / limits[n] for v in vs] for n, vs in abs_max.items() if n in limits}
    with _figure(path, height=3.8) as figure:
        axes = figure.add_subplot()
        series, handles, labels = ranked_lines(axes, steps, parts, least=0.0)
        handles.append(axes.axhline(1.0, color=BLACK, linewidth=1, linestyle=(0, (2, 2))))
        labels.append("end of the dtype's range")
        if max((v for part in parts.values() for v in gaps(part) if v == v), default=0.0) > _NEAR:
            axes.set_ylim(bottom=_NEAR)  # a float32 layer beside a half: 30 empty decades
        _finish(axes, "Headroom of layers", "largest magnitude / largest number", event_step, series, handles, labels)


def cost_bars(costs: Mapping[str, float], path: _Path) -> None:
    """Draw the time of a step per variant, with its ratio to the first one.

    Args:
        costs: Milliseconds per variant; the first is what the others are compared with.
        path: PNG file to write.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
        ValueError: There is no variant, or a cost is not a number above 0.
    """
    if not costs or not all(math.isfinite(v) and v > 0 for v in costs.values()):
        raise ValueError(f"costs={dict(costs)!r} must hold at least one variant, each with milliseconds above 0.")
    bare = next(iter(costs.values()))
    with _figure(path, height=1.1 + 0.42 * len(costs)) as figure:
        axes = figure.add_subplot()
        places = range(len(costs))
        colors = [GREY, *[COLORS[0]] * (len(costs) - 1)]
        axes.barh(places, list(costs.values()), height=0.62, color=colors)
        for place, value in zip(places, costs.values(), strict=True):
            ratio = f"   ×{value / bare:.2f}" if place else ""
            axes.annotate(f"{value:.3g} ms{ratio}", (value, place), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [literal(n) for n in costs])
        axes.invert_yaxis()
        axes.axvline(bare, color=BLACK, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set_xlim(0, max(costs.values()) * 1.28)
        axes.set_title("Time of a training step")
        axes.set_xlabel("milliseconds")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)


def _thinned(norms: Mapping[str, Sequence[float | None]]) -> list[tuple[str, list[Sequence[float | None]]]]:
    """Names, or runs of neighbours that share a row, and their series."""
    names = list(norms)
    size = math.ceil(len(names) / _MOST_ROWS) or 1
    rows = []
    for at in range(0, len(names), size):
        some = names[at : at + size]
        label = some[0] if len(some) == 1 else f"{some[0]} +{len(some) - 1}"
        rows.append((label, [norms[n] for n in some]))
    return rows


def _spans(steps: Sequence[int]) -> list[range]:
    """Positions of the values that share a column."""
    size = math.ceil(len(steps) / _MOST_COLUMNS) or 1
    return [range(at, min(at + size, len(steps))) for at in range(0, len(steps), size)]


def _worst(values: Sequence[float | None]) -> float | None:
    """The largest norm, infinite where one is not finite; None where there is none."""
    return max((v if math.isfinite(v) else math.inf for v in values if v is not None), default=None)


def _placed(value: float | None, low: float, high: float) -> float:
    if value is None:
        return math.nan
    return high * 10 if value > high else max(value, low / 10)


def _colormap() -> Any:
    from matplotlib import colormaps

    colors = colormaps["cividis"].copy()  # made to look the same to colour-blind readers
    colors.set_bad(_NONE)
    colors.set_under("white")
    colors.set_over(VERMILION)
    return colors


def _key(axes: Axes, event_step: int | None, cells: Sequence[Sequence[float | None]]) -> None:
    """The legend of a map, and what every picture has around it."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    flat = [v for row in cells for v in row]
    shown: list[Any] = []
    if event_step is not None:
        shown.append(axes.axvline(event_step, color=VERMILION, linewidth=1.4, label=f"event at step {event_step}"))
    if math.inf in flat:
        shown.append(Patch(facecolor=VERMILION, label="NaN or Inf"))
    if 0.0 in flat:
        shown.append(Patch(facecolor="white", edgecolor=GREY, label="0"))
    if None in flat:
        shown.append(Patch(facecolor=_NONE, label="no gradient"))
    axes.set_title("Gradient norms")
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if shown:
        axes.figure.legend(handles=shown, loc="outside lower right", ncols=len(shown))


@contextmanager
def _figure(path: _Path, height: float) -> Iterator[Figure]:
    """An empty figure in our style, saved to `path` when the block ends without an error."""
    # Never pyplot: it would choose a backend, and keep the figure, for the user's whole process.
    with own_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.6, height), dpi=150, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, format="png")


def _finish(
    axes: Axes,
    heading: str,
    unit: str,
    event_step: int | None,
    series: Sequence[tuple[Sequence[int], Sequence[float], str]],
    handles: Sequence[Any] = (),
    labels: Sequence[str] = (),
) -> None:
    from matplotlib.ticker import MaxNLocator

    shown, names = list(handles), list(labels)
    if event_step is not None:
        shown.append(axes.axvline(event_step, color=VERMILION, linewidth=1.4, zorder=1.8))
        names.append(f"event at step {event_step}")
    for kind in EDGE_MARKERS:
        # The worst series comes first in the legend and last on the paper, where it is not covered.
        marks = [edge_marks(axes, steps, values, kind, color) for steps, values, color in reversed(series)][::-1]
        shown += [m for m in marks if m is not None][:1]
        names += [f"{kind}, off the scale"] * any(m is not None for m in marks)
    axes.set_title(heading)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    if shown:
        axes.legend(shown, names, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def _same_length(what: str, values: Sequence[float | None], steps: Sequence[int]) -> None:
    if len(values) != len(steps):
        raise ValueError(f"{what} has {len(values)} values for {len(steps)} steps; give one per step.")
