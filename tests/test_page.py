"""The HTML report: what it says, that nothing of a stranger's log gets through, and its contrast."""

from __future__ import annotations

import html.parser
import itertools
import math
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

pytest.importorskip("matplotlib", reason='the page is drawn with matplotlib: pip install "nan-detector[report]"')
pytest.importorskip("jinja2", reason='the page is made with jinja2: pip install "nan-detector[report]"')

import _logs
from _logs import digest, evil_log
from _strategies import records_of
from nan_detector._cli.app import main
from nan_detector._digest import digest_of
from nan_detector._record import Record
from nan_detector._records import LayerPeak, LossTerm, NaNEvent, RunRecord, Site, StepRow
from nan_detector._render.page import page, policy, style_sheet
from nan_detector._render.page_view import IN_FULL, IN_LINES
from nan_detector._render.palette import DARK, GROUNDS, LIGHT, LINES, TEXTS, contrast
from nan_detector._render.timeline import charts
from nan_detector._render.tree import MOST_LEVELS, MOST_SITES, tree
from nan_detector._summary import rows
from nan_detector._summary_title import title

Capture = pytest.CaptureFixture[str]
NAN = math.nan
VOID = {"meta", "br"}


class Reader(html.parser.HTMLParser):
    """A page's elements and its text. Fails where they are not nested, or are no ones of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())

    def headings(self) -> list[int]:
        return [int(tag[1]) for tag, _ in self.tags if re.fullmatch(r"h[1-6]", tag)]


def read(made: str) -> Reader:
    reader = Reader()
    reader.feed(made)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def whole() -> str:
    terms = (LossTerm("recon", 0.69, True, 1.0, _logs.NORM), LossTerm("kl", NAN, False, 0.1))
    lines = [replace(x, loss_terms=terms) if isinstance(x, NaNEvent) else x for x in _logs.records()]
    return page(digest(lines), "runs/1")


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_answer_comes_first(whole: str):
    text = read(whole).text
    order = [
        "NaN born at step 87, in the forward pass",
        "encoder.norm2 (CustomNorm) · torch.sqrt · models/norm.py:41",
        "> 41 | return (x - x.mean(-1, keepdim=True)) / torch.sqrt(var) * self.gain",
        "square root of a negative number: 22 of 64 inputs are below 0",
        "torch.var(x, -1, correction=0) tried on this step: loss 0.734, all finite",
        "weights are clean: the step was not taken, and training stops here.",
        "What was tried",
        "in float64 Is it the precision? finite loss 0.734",
        "How it spread",
        "norm2 born here 1 sqrt, forward 2 div, forward",
        "The values",
        "input 0 float32 64×1 cpu -10 2.5 0.31 0.001 22",
        "The loss, term by term",
        "kl 0.1 NaN not finite",
        "Timeline",
        "Warnings",
        "steps 84 to 86 (2 times) layer_overflow: encoder.norm2: will overflow in about 1 step",
        "Gradients beyond the threshold",
        "Environment",
        "torch 2.13.0",
    ]
    places = [text.find(words) for words in order]
    assert -1 not in places, order[places.index(-1)]
    # The title is in the page's head as well.
    assert places[1:] == sorted(places[1:])


def test_every_row_of_the_report_is_there(whole: str):
    text = read(whole).text
    for row in rows(_logs.EVENT):
        if row.label not in ("tried", "spread"):
            assert all(" ".join(line.split()) in text for line in row.lines), row.label


def test_it_is_nested_well_and_headings_leave_no_level_out(whole: str):
    reader = read(whole)
    levels = reader.headings()
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    tags = {tag for tag, _ in reader.tags}
    assert {"header", "main", "article", "section", "footer", "details", "summary", "figure", "figcaption"} <= tags
    assert dict(reader.tags)["html"] == {"lang": "en"}


def test_tables_have_captions_and_named_rows_and_columns(whole: str):
    reader = read(whole)
    count = [tag for tag, _ in reader.tags].count
    assert count("table") == count("caption") == count("thead") == 5
    scopes = [a["scope"] for tag, a in reader.tags if tag == "th"]
    assert set(scopes) == {"row", "col"}
    scroll = [a for _, a in reader.tags if a.get("class") == "scroll"]
    assert len(scroll) == 5 and all(a["tabindex"] == "0" and a["aria-label"] for a in scroll), "the keyboard scrolls"


def test_pictures_are_named_and_described(whole: str):
    reader = read(whole)
    pictures = [a for tag, a in reader.tags if tag == "svg"]
    ids = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(pictures) == 4 and len(ids) == len(set(ids)), "no id is there twice"
    for picture in pictures:
        assert picture["role"] == "img"
        assert set((picture["aria-labelledby"] or "").split()) <= set(ids)
        assert "width" not in picture and picture["viewbox"], "it has the width of the page"
    assert "Steps 0 to 87. loss: from 2 to 4.3, at most 4.3; not finite at step 87. Events at step 87." in reader.text
    references = re.findall(r'(?:url\(#|href="#)([^)"]+)', whole)
    assert references and set(references) <= set(ids)


def test_nothing_is_loaded_and_nothing_runs(whole: str):
    reader = read(whole)
    assert not {"script", "img", "link", "iframe", "object", "embed", "form", "base"} & {t for t, _ in reader.tags}
    for _, attributes in reader.tags:
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes)
        for name in ("href", "src", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#")
    assert "url(" not in style_sheet() and "@import" not in style_sheet()
    assert not re.search(r"https?://", whole)


def test_the_policy_allows_this_style_sheet_only(whole: str):
    style = re.search(r"<style>(.*?)</style>", whole, re.DOTALL)
    assert style is not None
    allowed = policy(style[1])
    assert f'content="{allowed.replace(chr(39), "&#39;")}"' in whole
    assert allowed.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in allowed
    assert whole.index("Content-Security-Policy") < whole.index("<style>")


def test_the_same_log_makes_the_same_page(whole: str):
    terms = (LossTerm("recon", 0.69, True, 1.0, _logs.NORM), LossTerm("kl", NAN, False, 0.1))
    lines = [replace(x, loss_terms=terms) if isinstance(x, NaNEvent) else x for x in _logs.records()]
    assert page(digest(lines), "runs/1") == whole


# -- strangers --------------------------------------------------------------------------------------------------------


def test_strings_of_a_stranger_are_text():
    made = page(evil_log(), _logs.EVIL)
    test_nothing_is_loaded_and_nothing_runs(made)
    assert "<img" not in made and "</script" not in made
    assert all(c.isprintable() or c == "\n" for c in made), "no control character, and nothing that turns text around"
    reader = read(made)
    assert reader.text.count("<img src=x onerror=alert(1)>") > 20
    assert max(map(len, reader.pieces)) <= 2100


@settings(max_examples=15)
@given(records_of(NaNEvent), records_of(RunRecord))
def test_any_event_makes_a_page(event: NaNEvent, run: RunRecord):
    made = page(digest([run, event]), "log")
    assert " ".join(title(event).split()) in read(made).text


# -- many, few, none --------------------------------------------------------------------------------------------------


def test_several_events_and_ranks_are_on_one_page():
    runs: list[list[Record]] = [
        [replace(_logs.RUN, rank=r), replace(_logs.EVENT, event_id=f"e{r}", rank=r)] for r in (0, 1)
    ]
    reader = read(page(digest(*runs), "log"))
    links = [a["href"] for tag, a in reader.tags if tag == "a"]
    assert links == ["#event-1", "#event-2"]
    assert {"event-1", "event-2", "run-1", "run-2"} <= {a["id"] for _, a in reader.tags if "id" in a}
    assert "at step 87, on rank 1, in the forward pass" in reader.text and "Run 2, rank 1" in reader.text


def test_of_many_events_some_have_a_part_and_others_a_line():
    events: list[Record] = [replace(_logs.EVENT, event_id=f"e{i}") for i in range(IN_FULL + IN_LINES + 7)]
    reader = read(page(digest([_logs.RUN, *events]), "log"))
    assert [tag for tag, _ in reader.tags].count("article") == IN_FULL
    assert "Further events" in reader.text and "and 7 more" in reader.text


def test_a_run_without_events_says_so():
    text = read(page(digest([_logs.RUN, StepRow(0, loss=1.0)]), "log")).text
    assert "No events Nothing was found that is not finite." in text
    assert "Timeline" not in text, "one step is no line"


def test_a_run_that_died_while_it_searched():
    died = replace(_logs.EVENT, status="provisional", cause=None, spread=(), trials=(), inputs=(), output=None)
    text = read(page(digest([died]), "log")).text
    assert "search not finished" in text and "the log does not say what ran" in text
    assert "What was tried" not in text and "How it spread" not in text


# -- the pictures -----------------------------------------------------------------------------------------------------


def chart_headings(lines: list[Record]) -> list[str]:
    return [c.heading for run in digest_of(lines) for c in charts(run, "c")]


def test_there_is_a_picture_of_what_there_is():
    scaled: list[Record] = [StepRow(s, loss_scale=2.0**s) for s in range(3)]
    assert chart_headings(scaled) == ["Loss scale"]
    assert chart_headings([StepRow(0, loss=1.0), StepRow(1, loss=2.0)]) == ["Loss"]
    assert chart_headings([StepRow(0), StepRow(1)]) == []


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, 0.0, -1.0, 1e300, 1e-300])
def test_any_numbers_can_be_drawn(value: float):
    lines: list[Record] = [StepRow(s, value, value, value, lr=s + value, loss_scale=s, layers=()) for s in range(3)]
    lines += [StepRow(s, layers=(LayerPeak("a", value, 65504.0), LayerPeak("b", 1.0))) for s in range(3)]
    (run,) = digest_of(lines)
    made = charts(run, "c")
    assert [c.heading for c in made][:3] == ["Loss", "Gradient norms", "Headroom: largest magnitudes of layers"]
    if not math.isfinite(value):
        assert "loss: never finite; not finite at step 0 and 2 more." in made[0].description


def test_the_end_of_a_range_is_drawn_where_it_is_near():
    near: list[Record] = [StepRow(s, layers=(LayerPeak("a", 100.0, 65504.0),)) for s in range(2)]
    far: list[Record] = [StepRow(s, layers=(LayerPeak("a", 100.0, 3.4e38),)) for s in range(2)]
    said = [charts(run, "c")[0].description for lines in (near, far) for run in digest_of(lines)]
    assert ["Largest number: 65504." in d for d in said] == [True, False]


def test_more_lines_than_can_be_told_apart_are_grey():
    layers = tuple(LayerPeak(f"layer{i}", 1.0 + i, 65504.0) for i in range(9))
    (run,) = digest_of([StepRow(s, layers=layers) for s in range(3)])
    (chart,) = charts(run, "c")
    assert "5 others" in chart.svg and "stroke-others" in chart.svg
    assert "layer8: " in chart.description and "layer0: " not in chart.description


# -- the way through the modules --------------------------------------------------------------------------------------


def test_the_tree_is_that_of_the_modules():
    top = tree(_logs.EVENT)
    assert [n.name for n in top] == ["encoder", "head", "outside any module (loss)"]
    encoder = top[0]
    assert [(n.name, n.born, [k for k, _ in n.stops]) for n in encoder.children] == [
        ("norm2", True, [1, 2]),
        ("layer3", False, [3]),
    ]


def test_a_way_of_one_place_is_none():
    assert tree(replace(_logs.EVENT, spread=())) == []


def test_deep_and_long_ways_are_bounded():
    deep = ".".join("m" * 5000)
    event = replace(_logs.EVENT, spread=tuple(Site("add", "forward", deep) for _ in range(500)))
    nodes, depth, stops = tree(event), 0, 0
    while nodes:
        depth += 1
        stops += sum(len(n.stops) for n in nodes)
        nodes = nodes[-1].children
    assert depth <= MOST_LEVELS and stops <= MOST_SITES
    assert read(page(digest([event]), "log"))


# -- colours ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colors", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(colors: dict[str, str]):
    for ground, text in itertools.product(GROUNDS, TEXTS):
        assert contrast(colors[text], colors[ground]) >= 7, (text, ground)
    for ground, line in itertools.product(("ground", "card"), LINES):
        assert contrast(colors[line], colors[ground]) >= 3, (line, ground)


def test_contrast_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)
    assert contrast("#ff0000", "#ff0000") == 1


def test_both_schemes_have_the_same_colours():
    assert LIGHT.keys() == DARK.keys() == {*GROUNDS, *TEXTS, *LINES, "grid"}
    assert len({LIGHT[n] for n in (*LINES, "grid")}) == len(LINES) + 1, "a picture's colour names one class"


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_page_is_written_beside_the_log(tmp_path: Path, capsys: Capture):
    file = _logs.write(tmp_path)
    for log, out in ((tmp_path, tmp_path / "report.html"), (file, tmp_path / "events-rank0.html")):
        assert main(["report", str(log)]) == 0
        assert capsys.readouterr() == ("", f"wrote {out}\n")
        assert title(_logs.EVENT) in read(out.read_text(encoding="utf-8")).text
        assert stat.S_IMODE(out.stat().st_mode) & 0o600 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events-rank0.html", "events-rank0.jsonl", "report.html"]


def test_it_goes_where_it_is_sent(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]):
    log, out = str(_logs.write(tmp_path)), tmp_path / "x.html"
    out.write_text("before")
    assert main(["report", log, "-o", str(out)]) == 0
    capsysbinary.readouterr()
    assert main(["report", "-o", "-", log]) == 0
    assert capsysbinary.readouterr() == (out.read_bytes(), b"")


def refused(capsys: Capture, *argv: str) -> str:
    assert main(["report", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err.removeprefix("nan-detector: ").rstrip("\n")


def test_a_pipe_is_written_into_and_stays_one(tmp_path: Path):
    log, pipe = _logs.write(tmp_path), tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert main(["report", str(log), "-o", str(pipe)]) == 0
    reader.join(30)
    assert pipe.is_fifo() and got and got[0].rstrip().endswith(b"</html>")


def test_what_cannot_be_done_is_said_in_a_line(tmp_path: Path, capsys: Capture):
    log = _logs.write(tmp_path)
    before = log.read_bytes()
    line = refused(capsys, str(tmp_path), "-o", str(log))
    assert line == f"-o {str(log)!r} is the log itself: name another file for the page."
    nowhere = str(tmp_path / "no" / "x.html")
    line = refused(capsys, str(log), "-o", nowhere)
    assert line == f"-o {nowhere!r} cannot be written (No such file or directory): name another file with -o."
    line = refused(capsys, str(log), "-o", str(tmp_path))
    assert line == f"-o {str(tmp_path)!r} cannot be written (Is a directory): name another file with -o."
    assert "is not there" in refused(capsys, str(tmp_path / "gone"))
    assert log.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [log.name], "and nothing is left"


@pytest.mark.parametrize(
    ("modules", "named"), [(["jinja2"], "jinja2"), (["jinja2", "matplotlib"], "jinja2 and matplotlib")]
)
def test_without_its_extra(
    modules: list[str], named: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # an import of it now fails
    line = refused(capsys, str(_logs.write(tmp_path)))
    assert line == f'a report needs {named}: pip install "nan-detector[report]".'


def test_torch_is_not_needed(tmp_path: Path):
    _logs.write(tmp_path)
    code = "import sys; sys.modules['torch'] = None; from nan_detector._cli.app import main; sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "report", str(tmp_path)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "") and done.stderr.startswith("wrote ")


@pytest.fixture(autouse=True)
def own_settings_stay() -> Iterator[None]:
    import matplotlib

    before = dict(matplotlib.rcParams)
    yield
    assert dict(matplotlib.rcParams) == before
