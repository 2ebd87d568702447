"""The report in a terminal: the same words, coloured only where that is wanted, never wider than the window."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from nan_detector._records import Cause, Location, NaNEvent, Site, TensorStats
from nan_detector._render.terminal import print_report, render
from nan_detector._summary import report

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def event(**fields) -> NaNEvent:
    defaults = {
        "event_id": "e1",
        "status": "final",
        "step": 87,
        "phase": "forward",
        "severity": "error",
        "op": "sqrt",
        "call": "torch.sqrt",
        "layer_name": "encoder.norm2",
        "module_type": "CustomNorm",
        "location": Location(
            "norm.py", 41, "forward", "return (x - x.mean(-1, keepdim=True)) / torch.sqrt(var) * self.gain"
        ),
        "output": TensorStats((64, 1), "torch.float32", "cpu", nan_count=22),
        "cause": Cause(
            "sqrt_of_negative", "square root of a negative number", "", ("22 of 64 inputs are below 0",), "torch.var(x)"
        ),
        "spread": (Site("sqrt", "forward", "encoder.norm2"), Site("mm", "forward", "head"), Site("mean", "loss")),
        "reproduced": "yes",
        "action": "stop",
    }
    return NaNEvent(**{**defaults, **fields})


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def printed(file: io.StringIO) -> str:
    print_report(event(), file)
    return file.getvalue()


def test_a_file_or_a_pipe_gets_the_plain_report():
    assert printed(io.StringIO()) == report(event()) + "\n"
    assert render(event(), color=False) == report(event())


def test_standard_error_is_looked_up_at_the_call(capsys: pytest.CaptureFixture[str]):
    print_report(event())
    assert capsys.readouterr() == ("", report(event()) + "\n")


def test_a_terminal_gets_colour_and_its_own_width():
    said = printed(Terminal())
    assert ANSI.search(said)
    assert max(len(text) for text in ANSI.sub("", said).splitlines()) <= 80
    assert "\x1b[1;31mNaN born at step 87" in said


@pytest.mark.parametrize(
    ("name", "value", "colored"),
    [("NO_COLOR", "1", False), ("NO_COLOR", "", True), ("TERM", "dumb", False)],
)
def test_the_environment_decides_about_colour(monkeypatch: pytest.MonkeyPatch, name: str, value: str, colored: bool):
    monkeypatch.setenv(name, value)
    assert bool(ANSI.search(printed(Terminal()))) is colored


def test_colour_can_be_forced_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    said = printed(io.StringIO())
    assert ANSI.search(said)
    assert ANSI.sub("", said) == report(event()) + "\n"


def test_no_color_wins_over_force_color(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    assert printed(io.StringIO()) == report(event()) + "\n"


@pytest.mark.parametrize("severity", ["error", "silent", "handled"])
def test_colour_changes_no_word(severity: str):
    made = event(severity=severity)
    assert ANSI.sub("", render(made, color=True)) == report(made)


def test_the_guilty_call_is_marked_where_it_stands_once():
    once = render(event(), color=True)
    assert re.search(r"\x1b\[[0-9;]*4[0-9;]*mtorch\.sqrt\x1b", once)
    twice = event(location=Location("norm.py", 3, "forward", "return torch.sqrt(a) + torch.sqrt(b)"))
    assert not re.search(r"\x1b\[[0-9;]*4[0-9;]*mtorch\.sqrt\x1b", render(twice, color=True))


def test_markup_in_a_name_stays_text():
    made = event(layer_name="[red]x[/red]", call="a[i] / [link=x]")
    assert ANSI.sub("", render(made, color=True)) == report(made)


def test_wrapped_text_stays_in_its_column():
    lines = render(event(), width=50, color=False).splitlines()
    body = [text for text in lines if text and not text.startswith(" NaN")]
    assert all(text[:3] == "   " for text in body)
    labels = [text[3:10].strip() for text in body if text[3:9].strip() and text[3] != " "]
    assert labels == ["where", "why", "fix", "spread", "state"]
    code = next(i for i, text in enumerate(lines) if "> 41" in text)
    assert lines[code + 1].startswith(" " * 18) and not lines[code + 1][18].isspace()


@given(
    text=st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=80),
    width=st.integers(min_value=1, max_value=160),
    color=st.booleans(),
)
def test_no_line_is_wider_than_asked_and_no_word_is_lost(text: str, width: int, color: bool):
    made = event(notes=(text,), layer_name=text or None)
    said = ANSI.sub("", render(made, width=width, color=color))
    assert max(cell_len(part) for part in said.splitlines()) <= max(width, 40)
    assert "".join(said.split()) == "".join(report(made).split())


@pytest.mark.parametrize(
    ("encoding", "arrow"), [("ascii", "->"), ("cp1252", "->"), ("utf-8", "→"), ("no-such-codec", "->")]
)
def test_a_poor_encoding_costs_signs_and_never_the_report(encoding: str, arrow: str):
    class Stream(io.StringIO):
        pass

    Stream.encoding = encoding
    made = event(module_type="层", notes=("²×·…",))
    file = Stream()
    print_report(made, file)
    assert f"head {arrow} loss" in file.getvalue()
    if encoding not in ("utf-8", "no-such-codec"):
        file.getvalue().encode(encoding)


def test_a_closed_terminal_is_no_terminal():
    class Closed(io.StringIO):
        def isatty(self) -> bool:
            raise ValueError("I/O operation on closed file")

    assert printed(Closed()) == report(event()) + "\n"


def test_rendering_loads_no_torch():
    code = (
        "import sys; import nan_detector._render.terminal, nan_detector._render.plots; "
        "print(*({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
