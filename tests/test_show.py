"""``nan-detector show``: a log in a terminal and as JSON, from whoever it may come, without torch."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

import _logs
from _logs import digest
from nan_detector._cli.app import main
from nan_detector._records import GradEvent, NaNEvent, StepRow, WarningRecord
from nan_detector._render.overview import IN_FULL, IN_LINES, Line, overview
from nan_detector._render.terminal import print_overview

GOLDEN = Path(__file__).parent / "golden"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def shown(capsys: Capture, *argv: str) -> str:
    assert main(["show", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_the_whole_text(tmp_path: Path, capsys: Capture):
    path = _logs.write(tmp_path)
    path.write_bytes(path.read_bytes() + b'{"schema_version":1,"rec')
    _logs.write(tmp_path, [replace(_logs.RUN, rank=1), StepRow(0, loss=0.5)], rank=1)
    assert shown(capsys, str(tmp_path)) == (GOLDEN / "show.txt").read_text(encoding="utf-8")


def test_a_healthy_run_and_a_single_file(tmp_path: Path, capsys: Capture):
    path = _logs.write(tmp_path, [_logs.RUN, *(_logs.step_row(s) for s in range(3))])
    assert shown(capsys, str(path)).splitlines() == [
        "no events in 1 run",
        "",
        " 2023-11-14 22:13 UTC  ·  nan-detector 0.1.0, torch 2.13.0, Python 3.11.7, Linux-6",
        " watched Transformer  ·  watch=layers on_nan=stop",
        " 3 steps, 0 to 2, loss 2 → 1.82",
    ]


def test_a_run_that_died_while_it_searched(tmp_path: Path, capsys: Capture):
    died = replace(_logs.EVENT, status="provisional", cause=None, op=None, call=None, location=None)
    said = shown(capsys, str(_logs.write(tmp_path, [_logs.RUN, died])))
    assert "NaN seen at step 87" in said and "search  not finished" in said


def test_nothing_of_a_stranger_steers_the_terminal(tmp_path: Path, capsys: Capture):
    evil = _logs.EVIL
    run = replace(_logs.RUN, platform=evil, torch_version=evil, models=(evil,), options={evil: evil})
    event = replace(
        _logs.EVENT,
        layer_name=evil,
        module_type=evil,
        call=evil,
        notes=(evil,),
        before=(evil,),
        weights=evil,
        action=evil,
        location=replace(_logs.NORM, file=evil, source_line=evil, cell=evil),
        cause=replace(_logs.EVENT.cause, title=evil, explanation=evil, fix=evil, evidence=(evil,)),
        trials=(replace(_logs.EVENT.trials[0], name=evil, detail=evil),),
    )
    lines = [run, event, WarningRecord(evil, 1, evil, evil), GradEvent(1, evil, evil, 1.0, 1.0)]
    said = shown(capsys, str(_logs.write(tmp_path, lines)))
    assert "owned" in said
    assert all(c.isprintable() for line in said.split("\n") for c in line)
    as_json = shown(capsys, str(tmp_path), "--json")
    assert as_json.isascii() and all(c.isprintable() for line in as_json.split("\n") for c in line)


def test_times_that_are_none(tmp_path: Path, capsys: Capture):
    said = shown(capsys, str(_logs.write(tmp_path, [replace(_logs.RUN, started=1e300)])))
    assert "at an unknown time" in said


def test_json_has_what_the_text_has(tmp_path: Path, capsys: Capture):
    path = _logs.write(tmp_path)
    data = json.loads(shown(capsys, "--json", str(path)))
    assert (data["schema_version"], data["files"], data["problems"]) == (1, [str(path)], [])
    (run,) = data["runs"]
    assert run["events"][0]["loss"] == "inf" and NaNEvent.from_dict(run["events"][0]) == _logs.EVENT
    assert run["run"] == _logs.RUN.to_dict()
    assert [(w["last"]["kind"], w["count"]) for w in run["warnings"]] == [("loss_spike", 1), ("layer_overflow", 2)]
    assert run["grads"][0]["largest"]["grad_norm"] == 5300.0
    assert (run["steps"]["count"], run["steps"]["last"]["loss"]) == (88, "nan")


def test_of_many_events_some_are_shown_whole(tmp_path: Path, capsys: Capture):
    events = [replace(_logs.EVENT, event_id=f"e{i}", step=i) for i in range(IN_FULL + IN_LINES + 5)]
    path = _logs.write(tmp_path, [_logs.RUN, *events])
    said = shown(capsys, str(path))
    assert said.count("   why  ") == IN_FULL
    assert said.count("   NaN born at step") == IN_LINES
    assert said.endswith("   and 5 more\n")
    assert shown(capsys, "--all", str(path)).count("   why  ") == len(events)


def test_long_lists_of_warnings_end(tmp_path: Path, capsys: Capture):
    warnings = [WarningRecord(f"kind{i}", i, "x" * 1000) for i in range(40)]
    said = shown(capsys, str(_logs.write(tmp_path, [_logs.RUN, *warnings])))
    assert said.splitlines()[-1] == "   and 10 more"
    assert max(map(len, said.splitlines())) <= 303


def test_colour_only_in_a_terminal_and_no_word_of_it():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, colored = io.StringIO(), Terminal()
    made = digest([_logs.RUN, *_logs.WARNINGS, StepRow(1, loss=2.0)])
    print_overview(made, plain)
    print_overview(made, colored)
    assert "\x1b" not in plain.getvalue() and "\x1b[1m2 runs" not in plain.getvalue()
    assert "\x1b[1m" in colored.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored.getvalue()) == plain.getvalue()


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture):
    path = str(_logs.write(tmp_path))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[1;31mNaN born" in shown(capsys, path)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown(capsys, path)


def test_standard_output_is_looked_up_at_the_call(capsys: Capture):
    print_overview(digest([_logs.RUN]))
    assert capsys.readouterr().out.startswith("no events in 1 run\n")


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("gone", None, "is not there: name the folder that --log or log_dir named, or a file in it."),
        ("empty.jsonl", b"", "is empty: name the folder that --log or log_dir named."),
        (
            "other.txt",
            b"hello\n",
            "holds no record of nan-detector (line 1: this is not a JSON object (Expecting value: line 1 column 1 "
            "(char 0))): name the folder that --log or log_dir named.",
        ),
        ("folder", b"/", "has no events-rank*.jsonl: name the folder that --log or log_dir named."),
    ],
)
def test_what_is_no_log_is_refused_in_a_line(
    name: str, content: bytes | None, line: str, tmp_path: Path, capsys: Capture
):
    path = tmp_path / name
    if content == b"/":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    for argv in (["show", str(path)], ["show", "--json", str(path)]):
        assert main(argv) == 2
        assert capsys.readouterr() == ("", f"nan-detector: LOG={str(path)!r} {line}\n")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the devices and pipes of Unix")
@pytest.mark.parametrize("command", ["show", "report", "replay"])
@pytest.mark.parametrize("kind", ["device", "pipe", "socket", "hole", "pipe in a folder"])
def test_what_has_no_end_is_refused_at_once(command: str, kind: str, capsys: Capture):
    """A pipe that nobody writes into, a device without an end, ten gigabytes of nothing: no command waits for them."""
    with tempfile.TemporaryDirectory() as short:  # the name of a socket may not be long
        path = Path("/dev/zero") if kind == "device" else Path(short) / "log"
        if kind == "hole":
            path.touch()
            os.truncate(path, 10 * 2**30)
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "pipe in a folder":
            path.mkdir()
            os.mkfifo(path / "events-rank0.jsonl")
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as held:
                held.bind(str(path))
        begun = time.perf_counter()
        argv = [command, str(path), *(["--model", "nowhere:none"] if command == "replay" else [])]
        assert main(argv) == 2
        assert time.perf_counter() - begun < 5
        said = capsys.readouterr().err
    if command == "replay":
        why = "is no capsule: it has no step.json." if kind == "pipe in a folder" else "is not a folder:"
        assert said.startswith(f"nan-detector: CAPSULE={str(path)!r} {why}") and "that an event has as its" in said
        return
    what = {
        "device": "is a device, not a file",
        "socket": "is a socket, not a file",
        "hole": "holds no record of nan-detector (line 1: the line has more than 16777216 bytes, and is no record for "
        "that. The file is read no further)",
    }.get(kind, "is a pipe, not a file")
    tail = "" if kind == "hole" else ", or a file in it"
    assert said == f"nan-detector: LOG={str(path)!r} {what}: name the folder that --log or log_dir named{tail}.\n"


def test_a_folder_of_logs_is_answered_with_the_newest(tmp_path: Path, capsys: Capture):
    for age, name in enumerate(("b", "c", "a")):
        file = tmp_path / name / "events-rank0.jsonl"
        file.parent.mkdir()
        file.write_bytes(b"")
        os.utime(file, (1000 - age, 1000 - age))
    assert main(["show", str(tmp_path)]) == 2
    line = f"has no events-rank*.jsonl: name a folder in it, such as {tmp_path / 'b'}."
    assert capsys.readouterr() == ("", f"nan-detector: LOG={str(tmp_path)!r} {line}\n")


def test_a_name_no_file_can_have(capsys: Capture):
    assert main(["show", "a" * 5000]) == 2
    assert "cannot be read (File name too long)" in capsys.readouterr().err


def run_show(path: Path, code: str = "", **options: object) -> subprocess.CompletedProcess[str]:
    script = f"import sys; sys.modules['torch'] = None; from nan_detector._cli.app import main; {code}sys.exit(main())"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, "-c", script, "show", str(path)],
        **{"capture_output": True, "text": True, "encoding": "utf-8", "env": env, "check": False, **options},
    )


def test_torch_is_not_needed(tmp_path: Path):
    done = run_show(_logs.write(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert "NaN born at step 87" in done.stdout


@pytest.mark.skipif(os.name == "nt", reason="pipes end differently there")
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path):
    events = [replace(_logs.EVENT, event_id=f"e{i}") for i in range(900)]
    path = _logs.write(tmp_path, [_logs.RUN, *events])
    read, write = os.pipe()
    os.close(read)
    try:
        done = run_show(path, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_overview_is_made_of_lines_and_events():
    parts = list(overview(digest(_logs.records())))
    assert next(p for p in parts if isinstance(p, NaNEvent)).event_id == "e1"
    assert all(p.text.isprintable() for p in parts if isinstance(p, Line))
