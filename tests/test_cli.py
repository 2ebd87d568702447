"""The ``nan-detector`` command: what it understands, what it refuses and in which words, and what it loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from nan_detector import __version__
from nan_detector._cli import CommandError
from nan_detector._cli.app import COMMANDS, main

SRC = Path(__file__).parent.parent / "src"

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, *argv: str) -> str:
    """The one line in which a command line is refused."""
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and err.endswith("\n")
    return err.rstrip("\n")


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["run", "nowhere.py"],
            "nan-detector: SCRIPT='nowhere.py' is not there: give the path of a Python script, or -m and a module.",
        ),
        (
            ["run", "--watch", "everything", "train.py"],
            "nan-detector: --watch='everything' is not one of 'step', 'layers', 'ops'.",
        ),
        (
            ["run", "--on-nan", "panic", "train.py"],
            "nan-detector: --on-nan='panic' is not one of 'stop', 'raise', 'warn', 'skip', 'rollback'.",
        ),
        (["demo", "--seed", "-1"], "nan-detector: --seed='-1' must be a whole number from 0, such as 3."),
        (["demo", "--seed", "1.5"], "nan-detector: --seed='1.5' must be a whole number from 0, such as 3."),
        (["demo", "--seed", ""], "nan-detector: --seed='' must be a whole number from 0, such as 3."),
        (["demo", "--seed", "²"], "nan-detector: --seed='²' must be a whole number from 0, such as 3."),
        (["demo", "--seed", str(2**63)], f"nan-detector: --seed='{2**63}' must be a whole number from 0, such as 3."),
    ],
)
def test_a_value_that_cannot_be_used(argv: list[str], line: str, capsys: Capture):
    assert refused(capsys, *argv) == line


# These are typer's words, which differ between its releases: what has to be in them is tested, and our way out.
@pytest.mark.parametrize(
    ("argv", "named", "way_out"),
    [
        (["run"], "SCRIPT", "See: nan-detector run --help"),
        (["run", "--wach", "step", "train.py"], "--wach", "See: nan-detector run --help"),
        (["run", "--watch"], "--watch", "See: nan-detector run --help"),
        (["demo", "more"], "more", "See: nan-detector demo --help"),
        (["dmeo"], "dmeo", "See: nan-detector --help"),
        (["--nonsense"], "--nonsense", "See: nan-detector --help"),
    ],
)
def test_a_command_line_that_cannot_be_read(argv: list[str], named: str, way_out: str, capsys: Capture):
    line = refused(capsys, *argv)
    assert line.startswith("nan-detector: ") and named in line
    assert line.endswith((f". {way_out}", f"? {way_out}"))


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: Capture):
    (tmp_path / "file").write_text("")
    where = str(tmp_path / "file" / "below")
    line = refused(capsys, "demo", "--out", where)
    assert line == f"nan-detector: --out={where!r} cannot be made a folder (Not a directory): name another one."


@pytest.mark.parametrize(
    ("modules", "named"),
    [(["sklearn"], "scikit-learn"), (["sklearn", "matplotlib"], "scikit-learn and matplotlib")],
)
def test_the_demo_without_its_extra(
    modules: list[str], named: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)  # an import of it now fails
    line = refused(capsys, "demo", "--out", str(tmp_path / "out"))
    assert line == f'nan-detector: the demo needs {named}: pip install "nan-detector[demo]".'
    assert not (tmp_path / "out").exists()


def test_the_demo_with_the_detector_switched_off(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NAN_DETECTOR", "off")
    line = refused(capsys, "demo", "--out", str(tmp_path))
    assert line == ("nan-detector: NAN_DETECTOR=off turns the detector off, and the demo would show nothing: unset it.")


# -- what is understood -----------------------------------------------------------------------------------------------


def test_the_version(capsys: Capture):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"nan-detector {__version__}\n"


@pytest.mark.parametrize(
    "argv", [["--help"], ["-h"], *([c, "--help"] for c in COMMANDS), *([c, "-h"] for c in COMMANDS)]
)
def test_help_has_an_example(argv: list[str], capsys: Capture):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "For example:" in out and "\n    nan-detector " in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_list_of_commands_has_whole_sentences(capsys: Capture):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2]
    assert listed.count(".\n") == len(COMMANDS) and "..." not in listed


def test_no_command_shows_the_help_and_fails(capsys: Capture):
    assert main([]) == 2
    out = capsys.readouterr().out
    assert all(f"  {c} " in out for c in COMMANDS)


def test_the_arguments_of_the_process_are_the_default(capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["nan-detector", "--version"])
    assert main() == 0
    assert __version__ in capsys.readouterr().out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `run_script` is asked for; the script itself is not run."""
    got: list[dict[str, Any]] = []

    from nan_detector._watch_script import Watching

    def run_script(script: str, args: list[str], *, module: bool, options: Watching) -> int:
        got.append({"script": script, "args": args, "module": module, **asdict(options)})
        return 7

    fake = types.ModuleType("nan_detector._watch_script")
    fake.run_script = run_script
    fake.Watching = Watching
    monkeypatch.setitem(sys.modules, "nan_detector._watch_script", fake)
    return got


def test_run_hands_over_what_it_was_told(calls: list[dict[str, Any]], tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("")
    assert main(["run", str(script)]) == 7
    assert calls == [
        {
            "script": str(script),
            "args": [],
            "module": False,
            "watch": "step",
            "on_nan": "stop",
            "log_dir": None,
            "capsule": False,
        }
    ]


def test_run_takes_options_before_the_script_and_leaves_those_behind_it(calls: list[dict[str, Any]]):
    own = ["--epochs", "3", "--watch", "never", "-m", "--log=x", "--help", "--", "--version", "", "-h"]
    assert (
        main(["run", "--watch", "layers", "--on-nan=skip", "--log", "runs/1", "--capsule", "-m", "pkg.train", *own])
        == 7
    )
    assert calls == [
        {
            "script": "pkg.train",
            "args": own,
            "module": True,
            "watch": "layers",
            "on_nan": "skip",
            "log_dir": "runs/1",
            "capsule": True,
        }
    ]


def test_run_takes_a_double_dash_before_the_script(calls: list[dict[str, Any]], tmp_path: Path):
    script = tmp_path / "-odd.py"
    script.write_text("")
    assert main(["run", "--", str(script), "--x"]) == 7
    assert (calls[0]["script"], calls[0]["args"]) == (str(script), ["--x"])


def test_the_script_runs_outside_of_the_parser(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    """Its errors are its own: they pass unchanged, and neither typer's frames nor its excepthook stand around it."""
    import typer

    def fail(*args: Any, **options: Any) -> int:
        raise typer.BadParameter("the script's own")

    monkeypatch.setattr(sys.modules["nan_detector._watch_script"], "run_script", fail)
    hook = sys.excepthook
    with pytest.raises(typer.BadParameter, match="the script's own") as caught:
        main(["run", "-m", "pkg"])
    assert sys.excepthook is hook
    assert not [entry for entry in caught.traceback if "typer" in Path(entry.path).parts]


def test_the_demo_gets_its_folder_and_its_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from nan_detector._demo import story

    told: list[tuple[Path, int]] = []
    monkeypatch.setattr(story, "tell", lambda out, *, seed: told.append((out, seed)))
    assert main(["demo", "--out", str(tmp_path / "a" / "b"), "--seed", "3"]) == 0
    assert told == [(tmp_path / "a" / "b", 3)]
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    assert told[1] == (Path("nan-detector-demo"), 0)


def test_the_demo_can_be_interrupted(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch):
    from nan_detector._demo import story

    def interrupt(out: Path, *, seed: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(story, "tell", interrupt)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "nan-detector: interrupted.\n"


def test_a_command_error_has_a_status():
    assert CommandError("x").status == 2
    assert (str(CommandError("x", 130)), CommandError("x", 130).status) == ("x", 130)


# -- what it loads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["demo", "--help"], ["run", "--help"], ["run", "no.py"]])
def test_nothing_heavy_is_loaded_before_it_is_needed(argv: list[str]):
    code = f"""
import json, sys
from nan_detector._cli.app import main
main({argv!r})
heavy = ("torch", "numpy", "rich", "matplotlib", "sklearn", "jinja2", "safetensors")
print(json.dumps(sorted(m for m in sys.modules if m.partition(".")[0] in heavy)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_python_dash_m_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "nan_detector", "demo", "--seed", "x"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr == "nan-detector: --seed='x' must be a whole number from 0, such as 3.\n"


# -- a real script ----------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch

assert __name__ == "__main__"
print(sys.argv[1:])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    out = model(torch.ones(3, 4))
    loss = torch.log(out - 50).mean() if step == int(sys.argv[2]) else out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("to the end")
"""


def run_script(tmp_path: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "train.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, "-m", "nan_detector", "run", *argv],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_script_that_goes_nan_is_stopped_and_explained(tmp_path: Path):
    done = run_script(tmp_path, "--log", "log", "train.py", "--bad-step", "3")
    assert done.returncode == 3
    assert done.stdout == "['--bad-step', '3']\n"
    assert "NaN born at step 3, in the loss" in done.stderr and "train.py:12" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "log" / "events-rank0.jsonl").is_file()


def test_a_script_that_stays_finite_runs_as_ever(tmp_path: Path):
    done = run_script(tmp_path, "--log", "log", "train.py", "--bad-step", "-1")
    assert (done.returncode, done.stdout) == (0, "['--bad-step', '-1']\nto the end\n")
    assert done.stderr == ""


def test_a_bad_step_is_skipped_when_asked(tmp_path: Path):
    done = run_script(tmp_path, "--on-nan", "skip", "--log", "log", "train.py", "--bad-step", "3")
    assert done.returncode == 0 and done.stdout.endswith("to the end\n")
    assert "NaN born at step 3" in done.stderr
