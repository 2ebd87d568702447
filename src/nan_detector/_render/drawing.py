"""What the pictures share: lines, marks for values that are not finite, and a style that leaves the user's alone.

Colours are those of Okabe and Ito (2008), which remain apart for colour-blind readers; lines also differ in style.
A value that is not finite is never dropped: NaN and +Inf are marked at the top edge, -Inf at the bottom one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

BLACK, VERMILION, GREY = "#1a1a1a", "#d55e00", "#8c8c8c"
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", BLACK)
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
FARTHEST = 1e100  # what matplotlib can still compute the width of
_MOST_LINES = 6  # told apart in one picture; the others are drawn in grey behind
_FEW = 60
_LONGEST_NAME = 34
EDGE_MARKERS = {"NaN": "X", "+Inf": "^", "-Inf": "v"}
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


@contextmanager
def own_style(more: Mapping[Any, Any] | None = None) -> Iterator[None]:
    """Draw in our style, whatever the user's settings, and leave these as they are.

    Args:
        more: Further settings of matplotlib.

    Raises:
        ImportError: matplotlib is not installed; the message says how to get it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('Plots need matplotlib: pip install "nan-detector[report]"') from error
    kept = ("backend", "interactive")  # reading a default backend would choose one
    defaults: dict[Any, Any] = {k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith(kept)}
    with matplotlib.rc_context(), warnings.catch_warnings():
        # Letters that the font lacks, an empty log axis: a run under `-W error` must not fail for how a picture looks.
        warnings.simplefilter("ignore")
        matplotlib.rcParams.update(defaults)
        matplotlib.rcParams.update(_STYLE)
        matplotlib.rcParams.update(dict(more or {}))
        yield


def ranked_lines(
    axes: Any, steps: Sequence[int], lines: Mapping[str, Sequence[float]], *, least: float
) -> tuple[list[tuple[Sequence[int], Sequence[float], str]], list[Any], list[str]]:
    """Draw lines on a log axis, the worst in colours and the others grey; their series, handles and labels."""
    axes.set_yscale("log")
    ordered = sorted(lines, key=lambda n: _badness(lines[n]), reverse=True)
    series, handles, labels = [], [], []
    for i, name in enumerate(ordered):
        shown = i < _MOST_LINES
        color = COLORS[i] if shown else GREY
        style: dict[str, Any] = {"linewidth": 0.7, "alpha": 0.6, "zorder": 1.5}
        if shown:
            style = {"linestyle": DASHES[i % len(DASHES)]}
        # A 0 has no place on a log axis: the line stops there.
        values = [max(v, least) if v > 0 else math.nan for v in gaps(lines[name])]
        (line,) = axes.plot(steps, values, color=color, **dots(values, color), **style)
        series.append((steps, lines[name], color))
        if i <= _MOST_LINES:
            handles.append(line)
            labels.append(literal(name) if shown else f"{len(ordered) - _MOST_LINES} others")
    return series, handles, labels


def edge_marks(axes: Any, steps: Sequence[int], values: Sequence[float], kind: str, color: str) -> Any:
    at = [s for s, v in zip(steps, values, strict=True) if _kind(v) == kind]
    if not at:
        return None
    edge = 0.0 if kind == "-Inf" else 1.0
    (marks,) = axes.plot(
        at,
        [edge] * len(at),
        linestyle="",
        marker=EDGE_MARKERS[kind],
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


def gaps(values: Sequence[float]) -> list[float]:
    """`values` with NaN where no line can be drawn, and within the range whose width matplotlib can still compute."""
    return [max(-FARTHEST, min(FARTHEST, v)) if math.isfinite(v) else math.nan for v in values]


def dots(values: Sequence[float], color: str) -> dict[str, Any]:
    """Dots on values that no line reaches, and on all of them where there are few."""
    finite = [False, *map(math.isfinite, values), False]
    alone = [i for i in range(len(values)) if finite[i + 1] and not finite[i] and not finite[i + 2]]
    at = list(range(len(values))) if len(values) <= _FEW else alone
    return {"marker": "o", "markersize": 3, "markerfacecolor": color, "markevery": at} if at else {}


def _badness(values: Sequence[float]) -> tuple[int, float]:
    finite = [v for v in values if math.isfinite(v)]
    return len(values) - len(finite), max(finite, default=0.0)


def literal(name: str) -> str:
    """`name` as matplotlib shows it unchanged: no formulas, not hidden for a leading underscore; cut at its front."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in name)
    text = text if len(text) <= _LONGEST_NAME else "…" + text[1 - _LONGEST_NAME :]
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
