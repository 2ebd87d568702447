"""In a notebook: a location says cell and line, and an event shows itself in HTML."""

from __future__ import annotations

import html.parser
import linecache
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import torch
from hypothesis import given

import _logs
from _strategies import records_of
from nan_detector import Location, NaNDetector, NaNEvent, detect_nan
from nan_detector._errors import NonFiniteError
from nan_detector._notebook import cell_of, is_cell
from nan_detector._render.notebook import ANSWER, fragment
from nan_detector._summary import report, rows
from nan_detector._summary_source import place
from nan_detector._summary_title import title

CELL = """import torch

class Norm(torch.nn.Module):
    def forward(self, x):
        return x / torch.sqrt(x.sum(-1, keepdim=True) - 100)

model = torch.nn.Sequential(torch.nn.Linear(4, 4), Norm())
"""


class Shell:
    """What IPython says of the names it compiled cells under; it is not a dependency, and answers just so."""

    def __init__(self, cells: dict[str, int]) -> None:
        self.cells = cells
        self.compile = self

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        return ("Cell", f"In[{self.cells[name]}]") if name in self.cells else None


@pytest.fixture(params=["/tmp/ipykernel_4711/1606668505.py", "<ipython-input-3-67c0256eac3f>"])
def cell(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """The names of a cell that has run, compiled as ipykernel and as older releases of IPython do it."""
    name = request.param
    shell = Shell({name: 3} if name.endswith(".py") else {})
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    names: dict[str, object] = {}
    exec(compile(CELL, name, "exec"), names)
    yield names
    del linecache.cache[name]


def test_the_birthplace_is_a_cell_and_a_line(cell: dict[str, object]):
    torch.manual_seed(0)
    model = cell["model"]
    assert isinstance(model, torch.nn.Module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        model(torch.randn(3, 4)).mean().backward()
        optimizer.step()
        event = det.event
    assert event is not None and event.location is not None
    assert (event.location.cell, event.location.line, event.call) == ("In[3]", 5, "torch.sqrt")
    assert "torch.sqrt  ·  cell In[3], line 5\n" in str(event)
    assert "> 5 |       return x / torch.sqrt(x.sum(-1, keepdim=True) - 100)" in str(event)
    assert "cell In[3], line 5" in event._repr_html_()


def test_detect_nan_says_so_too(cell: dict[str, object]):
    model = cell["model"]
    assert isinstance(model, torch.nn.Module)
    with pytest.raises(NonFiniteError, match=r"cell In\[3\], line 5"), detect_nan():
        model(torch.randn(3, 4)).mean().backward()


@pytest.mark.parametrize(
    "get_ipython",
    [
        lambda: None,  # imported, and no shell runs
        lambda: Shell({}),
        lambda: types.SimpleNamespace(compile=None),
        lambda: types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=lambda name: "cell 3")),
        lambda: types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=lambda name: ("Cell", 3))),
        lambda: 1 / 0,
    ],
)
def test_where_ipython_does_not_know_there_is_no_cell(get_ipython: object, monkeypatch: pytest.MonkeyPatch):
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = get_ipython
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert cell_of("/tmp/ipykernel_1/2.py") is None


def test_outside_of_notebooks_there_are_no_cells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert cell_of(__file__) is None and not is_cell(__file__)
    assert cell_of("/tmp/ipykernel_1/2.py") is None and is_cell("/tmp/ipykernel_1/2.py")
    assert is_cell("C:\\Temp\\ipykernel_1\\2.py") and not is_cell("/home/me/ipykernel_1.py")


def test_a_cell_whose_number_is_lost_is_still_called_one():
    assert place(Location("/tmp/ipykernel_1/2.py", 7, "f", "x")) == "a notebook's cell, line 7"
    assert place(Location("<ipython-input-9-ab>", 7, "f", "x", "In[9]")) == "cell In[9], line 7"
    assert place(Location("net.py", 7, "f", "x")) == "net.py:7"


# -- the event's own HTML ---------------------------------------------------------------------------------------------

ALLOWED = {"div", "strong", "pre", "b", "br", "details", "summary"}


class Reader(html.parser.HTMLParser):
    """The tags and the text of a fragment; fails on whatever is not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.open = "", []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED and all(name == "style" for name, _ in attrs), (tag, attrs)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def read(fragment: str) -> str:
    reader = Reader()
    reader.feed(fragment)
    reader.close()
    assert reader.open == []
    return reader.text


def test_the_short_answer_comes_first_and_the_rest_is_folded():
    made = _logs.EVENT._repr_html_()
    answer, _, more = made.partition("<details>")
    for row in rows(_logs.EVENT):
        for line in row.lines:
            assert escape(line) in (answer if row.label in ANSWER else more), row.label
    assert title(_logs.EVENT) in answer
    assert "<b>&gt; 41 |   return (x" in answer


@pytest.mark.parametrize("file", [_logs.EVIL, "<ipython-input-3-<b>"])
def test_strings_of_a_stranger_are_text(file: str):
    evil = _logs.EVIL
    event = replace(
        _logs.EVENT,
        call=evil,
        layer_name=evil,
        notes=(evil,),
        location=Location(file, 1, evil, evil, evil),
        weights=evil,
    )
    made = fragment(event)
    assert "<script" not in made and "<img" not in made and "</script" not in made
    assert all(c.isprintable() or c == "\n" for c in made)
    assert "onerror=alert(1)" in read(made)


@given(records_of(NaNEvent))
def test_any_event_is_well_formed(event: NaNEvent):
    said = read(fragment(event))
    assert title(event) in said.replace("\n", "") or not title(event).strip()


def test_it_says_what_the_text_says_and_nothing_else():
    said = " ".join(read(_logs.EVENT._repr_html_()).split())
    for word in report(_logs.EVENT).split():
        assert word in said


def test_a_nan_loss_and_no_location_are_no_trouble(tmp_path: Path):
    event = NaNEvent(event_id="a", status="provisional", step=0, phase="loss", severity="error", loss=math.nan)
    assert "not finished" in read(event._repr_html_())
