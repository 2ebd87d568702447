"""The pictures: written, readable, complete, and without a trace in the user's matplotlib."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402
from matplotlib.image import imread  # noqa: E402

from nan_detector._render.plots import (  # noqa: E402
    cost_bars,
    grad_norm_heatmap,
    grad_norm_timeline,
    headroom_timeline,
    loss_curve,
)

STEPS = list(range(90))
LOSS = [2.0 * math.exp(-i / 30) for i in range(87)] + [math.inf, math.nan, -math.inf]
NORMS = {"a.weight": [1.0] * 80 + [3.0**i for i in range(8)] + [math.nan] * 2, "b.weight": [0.5] * 90}
BLUE, VERMILION = (0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)


def pixels(path: Path, color: tuple[int, int, int]) -> list[tuple[int, int]]:
    """Places (row, column) that have exactly this colour."""
    image = (imread(path)[:, :, :3] * 255).round().astype(int)
    rows, columns = (image == color).all(axis=2).nonzero()
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved, to look into."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **kwargs: Any) -> None:
        figures.append(self)
        save(self, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def legend(figure: Figure) -> list[str]:
    found = figure.axes[0].get_legend()
    return [] if found is None else [text.get_text() for text in found.get_texts()]


def marks(figure: Figure, marker: str) -> list[tuple[float, float]]:
    lines = [line for line in figure.axes[0].lines if line.get_marker() == marker]
    return [(float(x), float(y)) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def test_a_picture_is_a_png_of_a_readable_size(tmp_path: Path):
    loss_curve(STEPS, LOSS, 87, tmp_path / "loss.png")
    grad_norm_timeline(STEPS, NORMS, 100.0, 87, str(tmp_path / "norms.png"))
    cost_bars({"bare": 10.0, "watched": 10.2}, tmp_path / "cost.png")
    for name in ("loss", "norms", "cost"):
        data = (tmp_path / f"{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        height, width = imread(tmp_path / f"{name}.png").shape[:2]
        assert width >= 1000
        assert height >= 200


def test_the_line_and_the_event_are_seen(tmp_path: Path):
    loss_curve(STEPS, LOSS, 87, tmp_path / "with.png")
    loss_curve(STEPS, LOSS, None, tmp_path / "without.png")
    assert len(pixels(tmp_path / "with.png", BLUE)) > 500
    assert len(pixels(tmp_path / "with.png", VERMILION)) > 200
    assert pixels(tmp_path / "without.png", VERMILION) == []


def test_values_that_are_not_finite_stand_at_the_edges(tmp_path: Path, drawn: list[Figure]):
    loss_curve(STEPS, LOSS, None, tmp_path / "loss.png")
    assert marks(drawn[0], "^") == [(87.0, 1.0)]
    assert marks(drawn[0], "X") == [(88.0, 1.0)]
    assert marks(drawn[0], "v") == [(89.0, 0.0)]
    assert legend(drawn[0]) == ["NaN, off the scale", "+Inf, off the scale", "-Inf, off the scale"]


def test_marks_at_the_edge_are_not_cut_off(tmp_path: Path):
    loss_curve([0, 1, 2], [math.nan] * 3, None, tmp_path / "nan.png")
    seen = pixels(tmp_path / "nan.png", BLUE)
    height = imread(tmp_path / "nan.png").shape[0]
    assert len(seen) > 100
    assert min(row for row, _ in seen) < height / 8


def test_a_value_between_two_gaps_is_a_dot(tmp_path: Path, drawn: list[Figure]):
    loss = [float(i) if i % 2 else math.nan for i in range(200)]
    loss_curve(list(range(200)), loss, None, tmp_path / "dots.png")
    (line,) = (each for each in drawn[0].axes[0].lines if each.get_marker() == "o")
    assert line.get_markevery() == list(range(1, 200, 2))


def test_the_loss_has_a_log_axis_only_where_a_linear_one_would_hide_it(tmp_path: Path, drawn: list[Figure]):
    loss_curve(STEPS, LOSS, None, tmp_path / "a.png")
    loss_curve(STEPS, [*LOSS[:89], 1e9], None, tmp_path / "b.png")
    loss_curve(STEPS, [*LOSS[:88], -1.0, 1e9], None, tmp_path / "c.png")
    assert [figure.axes[0].get_yscale() for figure in drawn] == ["linear", "log", "linear"]


def test_the_worst_norms_are_named_and_the_others_counted(tmp_path: Path, drawn: list[Figure]):
    norms = {f"layer{i}.weight": [float(i + 1)] * 90 for i in range(10)} | NORMS
    grad_norm_timeline(STEPS, norms, 100.0, 87, tmp_path / "norms.png")
    assert legend(drawn[0]) == [
        "a.weight",
        "layer9.weight",
        "layer8.weight",
        "layer7.weight",
        "layer6.weight",
        "layer5.weight",
        "6 others",
        "warning from 100",
        "event at step 87",
        "NaN, off the scale",
    ]
    assert drawn[0].axes[0].get_yscale() == "log"


@pytest.mark.parametrize("threshold", [None, math.inf])
def test_a_threshold_that_is_off_is_not_drawn(tmp_path: Path, drawn: list[Figure], threshold: float | None):
    grad_norm_timeline(STEPS, {"b": NORMS["b.weight"]}, threshold, None, tmp_path / "norms.png")
    assert legend(drawn[0]) == ["b"]


def test_names_are_shown_as_they_are(tmp_path: Path, drawn: list[Figure]):
    names = ["_private.weight", "a$b_$c", "层.weight", "x" * 50 + ".weight", "bell\x07"]
    grad_norm_timeline([0, 1], {n: [1.0, 2.0] for n in names}, None, None, tmp_path / "norms.png")
    shown = legend(drawn[0])
    assert shown[0] == " _private.weight"
    assert shown[1] == r"a\$b_\$c"
    assert shown[2] == "层.weight"
    assert len(shown[3]) == 34
    assert (shown[3][0], shown[3][-7:]) == ("…", ".weight")
    assert shown[4] == "bell\N{REPLACEMENT CHARACTER}"


def test_bars_say_time_and_ratio(tmp_path: Path, drawn: list[Figure]):
    cost_bars({"bare": 10.0, 'watch="step"': 10.2, "anomaly mode": 21.0}, tmp_path / "cost.png")
    axes = drawn[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["10 ms", "10.2 ms   ×1.02", "21 ms   ×2.10"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["bare", 'watch="step"', "anomaly mode"]
    assert [bar.get_width() for bar in axes.patches] == [10.0, 10.2, 21.0]


@pytest.mark.parametrize("costs", [{}, {"bare": 0.0}, {"bare": 1.0, "x": math.nan}])
def test_costs_without_a_meaning_are_refused(tmp_path: Path, costs: dict[str, float]):
    with pytest.raises(ValueError, match="must hold at least one variant"):
        cost_bars(costs, tmp_path / "cost.png")
    assert not (tmp_path / "cost.png").exists()


def test_lengths_that_differ_are_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match="loss has 1 values for 2 steps"):
        loss_curve([0, 1], [1.0], None, tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"norms\['w'\] has 1 values for 2 steps"):
        grad_norm_timeline([0, 1], {"w": [1.0]}, None, None, tmp_path / "x.png")


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.floats(width=32), max_size=8), event=st.none() | st.integers(0, 9))
def test_no_values_make_a_picture_fail(tmp_path: Path, values: list[float], event: int | None):
    path = tmp_path / "any.png"
    loss_curve(range(len(values)), values, event, path)
    grad_norm_timeline(range(len(values)), {"w": values}, 100.0, event, path)


@pytest.mark.parametrize("values", [[], [0.0, 0.0], [math.nan], [-1.0, 5e-324, 1.7e308], [math.inf, 1.0]])
def test_odd_values_are_drawn_without_a_warning(tmp_path: Path, values: list[float]):
    loss_curve(range(len(values)), values, 1, tmp_path / "loss.png")
    grad_norm_timeline(range(len(values)), {"w": values}, 100.0, 1, tmp_path / "norms.png")


def draw_all(folder: Path) -> None:
    loss_curve(STEPS, LOSS, 87, folder / "loss.png")
    grad_norm_timeline(STEPS, NORMS, 100.0, 87, folder / "norms.png")
    cost_bars({"bare": 10.0, "watched": 10.2}, folder / "cost.png")


def test_the_users_settings_neither_change_nor_matter(tmp_path: Path):
    draw_all(tmp_path)
    plain = (tmp_path / "loss.png").read_bytes()
    with matplotlib.rc_context(
        {"text.usetex": True, "lines.linewidth": 40, "savefig.dpi": 20, "axes.facecolor": "red"}
    ):
        before = dict(matplotlib.rcParams)
        draw_all(tmp_path)
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "loss.png").read_bytes() == plain


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=env, check=False
    )


def test_drawing_chooses_no_backend(tmp_path: Path):
    code = (
        "import sys; from nan_detector._render.plots import loss_curve; loss_curve([0], [1.0], 0, sys.argv[1]); "
        "print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    done = run(code, str(tmp_path / "loss.png"))
    assert (done.stdout.strip(), done.stderr) == ("False False", "")


CALLS: list[Callable[[Path], None]] = [
    lambda path: loss_curve([0], [1.0], None, path),
    lambda path: grad_norm_timeline([0], {"w": [1.0]}, None, None, path),
    lambda path: cost_bars({"bare": 1.0}, path),
]


@pytest.mark.parametrize("call", CALLS)
def test_without_matplotlib_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], None]
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what an import of it then finds is "not installed"
    with pytest.raises(ImportError, match=r'pip install "nan-detector\[report\]"'):
        call(tmp_path / "x.png")


# -- the map of gradient norms, and the headroom -----------------------------------------------------------------------


def rows_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].get_yticklabels()]


def test_the_map_shows_what_is_not_finite_and_what_is_not_there(tmp_path: Path, drawn: list[Figure]) -> None:
    norms: dict[str, list[float | None]] = {
        "a.weight": [10.0**-i for i in range(5)] + [math.nan],
        "b.weight": [1.0, None, None, 0.0, 1.0, math.inf],
    }
    grad_norm_heatmap(list(range(6)), norms, 5, tmp_path / "map.png")
    assert rows_of(drawn[0]) == ["a.weight", "b.weight"]
    said = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert said == ["event at step 5", "NaN or Inf", "0", "no gradient"]
    cells = drawn[0].axes[0].collections[0].get_array()
    assert cells.mask.sum() == 2 and (cells > 1.0).sum() == 2, "two without a gradient, two beyond the scale"
    assert pixels(tmp_path / "map.png", VERMILION) and pixels(tmp_path / "map.png", (0xE3, 0xE3, 0xE3))


def test_many_layers_are_thinned_and_the_worst_of_each_is_shown(tmp_path: Path, drawn: list[Figure]) -> None:
    norms: dict[str, list[float | None]] = {f"blocks.{i}.weight": [1.0] * 1000 for i in range(300)}
    norms["blocks.137.weight"][777] = math.nan
    grad_norm_heatmap(list(range(1000)), norms, None, tmp_path / "map.png")
    assert len(rows_of(drawn[0])) <= 40 and rows_of(drawn[0])[0] == "blocks.0.weight +7"
    cells = drawn[0].axes[0].collections[0].get_array()
    assert cells.shape[1] <= 400 and (cells > 1.0).sum() == 1


def test_headroom(tmp_path: Path, drawn: list[Figure]) -> None:
    steps = list(range(50))
    abs_max: dict[str, list[float | None]] = {
        "half": [min(1.3**i, math.inf if i > 42 else 1e9) for i in steps],
        "single": [1.0] * 50,
        "sometimes": [2.0 if i % 2 else None for i in steps],
        "unknown": [1.0] * 50,
    }
    abs_max["half"][-1] = math.inf
    limits = {"half": 65504.0, "single": 3.4e38, "sometimes": 65504.0}
    headroom_timeline(steps, abs_max, limits, 49, tmp_path / "headroom.png")
    assert legend(drawn[0])[:4] == ["half", "sometimes", "single", "end of the dtype's range"]
    assert marks(drawn[0], "^") == [(49.0, 1.0)] and marks(drawn[0], "X") == []
    assert drawn[0].axes[0].get_ylim()[0] == pytest.approx(1e-8)


@pytest.mark.parametrize("steps", [[], [3]])
def test_little_or_nothing(steps: list[int], tmp_path: Path) -> None:
    for norms in ({}, {"a": [1.0] * len(steps)}, {"a": [math.nan] * len(steps)}):
        grad_norm_heatmap(steps, norms, None, tmp_path / "map.png")
        headroom_timeline(steps, norms, dict.fromkeys(norms, 1.0), None, tmp_path / "headroom.png")
    with pytest.raises(ValueError, match="give one per step"):
        grad_norm_heatmap(steps, {"a": [1.0, 2.0]}, None, tmp_path / "map.png")
    with pytest.raises(ValueError, match="give one per step"):
        headroom_timeline(steps, {"a": [1.0, 2.0]}, {}, None, tmp_path / "headroom.png")
