"""Pictures of a run: PNG files, drawn without a display and without touching the user's matplotlib settings.

Colours are those of Okabe and Ito (2008), which remain apart for colour-blind readers; lines also differ in style.
A value that is not finite is never dropped: NaN and +Inf are marked at the top edge, -Inf at the bottom one.
"""

from __future__ import annotations

import math
import os
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Path = str | os.PathLike[str]

_BLACK, _VERMILION, _GREY, _NONE = "#1a1a1a", "#d55e00", "#8c8c8c", "#e3e3e3"
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", _BLACK)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
_MOST_LINES = 6  # told apart in one picture; the others are drawn in grey behind
_LOG_FROM = 100.0  # ratio of the largest value to the median from which a linear axis shows nothing else
_FEW, _FARTHEST = 60, 1e100
_MOST_ROWS, _MOST_COLUMNS = 40, 400  # of a map: what can be read, and what has a pixel
_NEAR = 1e-8  # part of a dtype's range below which nothing is near its end
_LONGEST_NAME = 34
_EDGE_MARKERS = {"NaN": "X", "+Inf": "^", "-Inf": "v"}
_STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#595959",
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


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
        axes.plot(steps, _gaps(loss), color=_COLORS[0], **_dots(loss, _COLORS[0]))
        _finish(axes, "Loss", "loss", event_step, [(steps, loss, _COLORS[0])])


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
        series, handles, labels = _ranked_lines(axes, steps, norms, least=1 / _FARTHEST)
        if threshold is not None and math.isfinite(threshold):
            handles.append(axes.axhline(threshold, color=_BLACK, linewidth=1, linestyle=(0, (2, 2))))
            labels.append(f"warning from {threshold:g}")
        _finish(axes, "Gradient norms", "L2 norm", event_step, series, handles, labels)


def _ranked_lines(
    axes: Any, steps: Sequence[int], lines: Mapping[str, Sequence[float]], *, least: float
) -> tuple[list[tuple[Sequence[int], Sequence[float], str]], list[Any], list[str]]:
    """Draw lines on a log axis, the worst in colours and the others grey; their series, handles and labels."""
    axes.set_yscale("log")
    ordered = sorted(lines, key=lambda n: _badness(lines[n]), reverse=True)
    series, handles, labels = [], [], []
    for i, name in enumerate(ordered):
        shown = i < _MOST_LINES
        color = _COLORS[i] if shown else _GREY
        style: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.6, "zorder": 1.5}
        if shown:
            style = {"linestyle": _DASHES[i % len(_DASHES)]}
        # A 0 has no place on a log axis: the line stops there.
        values = [max(v, least) if v > 0 else math.nan for v in _gaps(lines[name])]
        (line,) = axes.plot(steps, values, color=color, **_dots(values, color), **style)
        series.append((steps, lines[name], color))
        if i <= _MOST_LINES:
            handles.append(line)
            labels.append(_literal(name) if shown else f"{len(ordered) - _MOST_LINES} others")
    return series, handles, labels


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
        grid = [[_placed(v, low, min(high, _FARTHEST)) for v in row] for row in cells]
        edges = [*(steps[span[0]] for span in columns), steps[-1] + 1] if rows and steps else [0, 1]
        top = min(high, _FARTHEST) if high > low else low * 10
        mesh = axes.pcolormesh(
            [e - 0.5 for e in edges],
            [i - 0.5 for i in range(max(1, len(rows)) + 1)],
            grid if rows and steps else [[math.nan]],
            cmap=colors,
            norm=LogNorm(low, top),
            rasterized=True,
        )
        axes.set_yticks(range(len(rows)), [_literal(name) for name, _ in rows])
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
        series, handles, labels = _ranked_lines(axes, steps, parts, least=0.0)
        handles.append(axes.axhline(1.0, color=_BLACK, linewidth=1, linestyle=(0, (2, 2))))
        labels.append("end of the dtype's range")
        if max((v for part in parts.values() for v in _gaps(part) if v == v), default=0.0) > _NEAR:
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
        colors = [_GREY, *[_COLORS[0]] * (len(costs) - 1)]
        axes.barh(places, list(costs.values()), height=0.62, color=colors)
        for place, value in zip(places, costs.values(), strict=True):
            ratio = f"   ×{value / bare:.2f}" if place else ""
            axes.annotate(f"{value:.3g} ms{ratio}", (value, place), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [_literal(n) for n in costs])
        axes.invert_yaxis()
        axes.axvline(bare, color=_BLACK, linewidth=0.9, linestyle=(0, (2, 2)))
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
    colors.set_over(_VERMILION)
    return colors


def _key(axes: Axes, event_step: int | None, cells: Sequence[Sequence[float | None]]) -> None:
    """The legend of a map, and what every picture has around it."""
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    flat = [v for row in cells for v in row]
    shown: list[Any] = []
    if event_step is not None:
        shown.append(axes.axvline(event_step, color=_VERMILION, linewidth=1.4, label=f"event at step {event_step}"))
    if math.inf in flat:
        shown.append(Patch(facecolor=_VERMILION, label="NaN or Inf"))
    if 0.0 in flat:
        shown.append(Patch(facecolor="white", edgecolor=_GREY, label="0"))
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
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "nan-detector[report]"') from error
    # Never pyplot: it would choose a backend, and keep the figure, for the user's whole process.
    kept = ("backend", "interactive")  # reading a default backend would choose one
    defaults: dict[Any, Any] = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(kept)}
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Letters that the font lacks, an empty log axis: a run under `-W error` must not fail for how a picture looks.
        warnings.simplefilter("ignore")
        matplotlib.rcParams.update(defaults)
        matplotlib.rcParams.update(_STYLE)
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
        shown.append(axes.axvline(event_step, color=_VERMILION, linewidth=1.4, zorder=1.8))
        names.append(f"event at step {event_step}")
    for kind in _EDGE_MARKERS:
        # The worst series comes first in the legend and last on the paper, where it is not covered.
        marks = [_edge_marks(axes, steps, values, kind, color) for steps, values, color in reversed(series)][::-1]
        shown += [m for m in marks if m is not None][:1]
        names += [f"{kind}, off the scale"] * any(m is not None for m in marks)
    axes.set_title(heading)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    if shown:
        axes.legend(shown, names, loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0)


def _edge_marks(axes: Axes, steps: Sequence[int], values: Sequence[float], kind: str, color: str) -> Any:
    at = [s for s, v in zip(steps, values, strict=True) if _kind(v) == kind]
    if not at:
        return None
    edge = 0.0 if kind == "-Inf" else 1.0
    (marks,) = axes.plot(
        at,
        [edge] * len(at),
        linestyle="",
        marker=_EDGE_MARKERS[kind],
        markersize=7,
        markerfacecolor=color,
        markeredgecolor="white",
        markeredgewidth=0.6,
        clip_on=False,
        zorder=5,
        transform=axes.get_xaxis_transform(),  # x in steps, y in parts of the picture's height
    )
    return marks


def _kind(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "" if math.isfinite(value) else "+Inf" if value > 0 else "-Inf"


def _gaps(values: Sequence[float]) -> list[float]:
    """`values` with NaN where no line can be drawn, and within the range whose width matplotlib can still compute."""
    return [max(-_FARTHEST, min(_FARTHEST, v)) if math.isfinite(v) else math.nan for v in values]


def _dots(values: Sequence[float], color: str) -> dict[str, Any]:
    """Dots on values that no line reaches, and on all of them where there are few."""
    finite = [False, *map(math.isfinite, values), False]
    alone = [i for i in range(len(values)) if finite[i + 1] and not finite[i] and not finite[i + 2]]
    at = list(range(len(values))) if len(values) <= _FEW else alone
    return {"marker": "o", "markersize": 3, "markerfacecolor": color, "markevery": at} if at else {}


def _badness(values: Sequence[float]) -> tuple[int, float]:
    finite = [v for v in values if math.isfinite(v)]
    return len(values) - len(finite), max(finite, default=0.0)


def _literal(name: str) -> str:
    """`name` as matplotlib shows it unchanged: no formulas, not hidden for a leading underscore; cut at its front."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in name)
    text = text if len(text) <= _LONGEST_NAME else "…" + text[1 - _LONGEST_NAME :]
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _same_length(what: str, values: Sequence[float | None], steps: Sequence[int]) -> None:
    if len(values) != len(steps):
        raise ValueError(f"{what} has {len(values)} values for {len(steps)} steps; give one per step.")
