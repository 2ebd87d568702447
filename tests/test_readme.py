"""What the documentation says is so: its code runs, its report is the demo's, its files and commands are there."""

from __future__ import annotations

import copy
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nan_detector
from _readme import README, ROOT, Block, blocks, demo_report, sample_block, with_report
from nan_detector._cli.app import COMMANDS, main

TEXT = README.read_text(encoding="utf-8")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")))
PYTHON = [b for b in blocks(TEXT) if b.language == "python"]
SHELL = [b for b in blocks(TEXT) if b.language in ("", "sh", "bash", "console")]

# -- the sample report ------------------------------------------------------------------------------------------------


def words(report: str) -> list[str]:
    """A report without what the machine's rounding decides: numbers, and which layers had been growing."""
    told = [line for line in report.splitlines() if not re.search(r"doubled every|grew .* per step", line)]
    # A place in the source is no matter of rounding, and neither is the source.
    number = re.compile(r"(?<![\w.:/])[-\d.][\d.]*(e[-+]?\d+)?\b")
    return [line if " |   " in line else number.sub("#", line) for line in told]


def test_the_sample_report_is_what_the_demo_prints():
    sample, report = sample_block(TEXT).code, demo_report()
    assert words(sample) == words(report), "run `make readme`"


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ("NaN born at step 94", "Inf born at step 94"),
        ("model.py:33", "model.py:34"),
        ("torch.sqrt ", "torch.log "),
        ("> 33 |", "> 34 |"),
        ("norm → head", "norm → neck"),
        ("square root of", "logarithm of"),
    ],
)
def test_another_report_is_told_from_it(then: str, now: str):
    sample = sample_block(TEXT).code
    assert then in sample
    assert words(sample.replace(then, now)) != words(sample)


def test_rounding_does_not_matter():
    sample = sample_block(TEXT).code
    other = sample.replace("at step 94", "at step 101").replace("-4.31e-06", "-0.0123").replace("2 of 32", "17 of 32")
    assert other != sample and words(other) == words(sample)


def test_writing_the_report_changes_nothing_else():
    other = with_report(TEXT, "something\n")
    assert sample_block(other).code == "something\n"
    assert with_report(other, sample_block(TEXT).code) == TEXT


# -- its code ---------------------------------------------------------------------------------------------------------


def setting() -> dict[str, Any]:
    """What a reader has before the first line: a model, data, a loss and an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    loader = [(torch.randn(5, 4), torch.randint(0, 3, (5,))) for _ in range(4)]
    x, y = loader[0]
    return {
        "model": model,
        "ema_model": copy.deepcopy(model),
        "loader": loader,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters()),
        "x": x,
        "y": y,
    }


def execute(block: Block, names: dict[str, Any]) -> None:
    # Blank lines in front, so that a traceback names the README's own line.
    exec(compile("\n" * (block.line - 1) + block.code, str(README), "exec"), names)


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: f"line{b.line}")
def test_code_runs_and_a_healthy_training_is_quiet(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    names = setting()
    before = [p.clone() for p in names["model"].parameters()]
    execute(block, names)
    assert capfd.readouterr() == ("", "")
    if "optimizer" in block.code:
        assert any(not torch.equal(a, b) for a, b in zip(before, names["model"].parameters(), strict=True))
    if "det" in names:
        assert names["det"].event is None and len(names["det"].history) == 4
    if "decide" in names:
        assert [p.name for p in (tmp_path / "runs" / "1").iterdir()] == ["events-rank0.jsonl"]


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: f"line{b.line}")
def test_code_finds_a_bad_batch(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = setting()
    names["loader"][2][0][3, 1] = torch.nan
    names["x"] = names["loader"][2][0]
    if "detect_nan" in block.code:
        with pytest.raises(nan_detector.NonFiniteError):
            execute(block, names)
        return
    execute(block, names)
    event = names["event"] if "event" in names else names["det"].event
    assert (event.step, event.phase, event.verdict, event.sample_index) == (2, "data", "data", (3,))
    assert event.weights == "clean" and all(p.isfinite().all() for p in names["model"].parameters())


def commands() -> list[str]:
    return [line for b in SHELL for line in b.code.splitlines() if line.strip()]


@pytest.mark.parametrize("line", commands())
def test_commands_are_there(line: str):
    program, *arguments = shlex.split(line)
    if program == "make":
        assert set(arguments) <= targets(), line
    else:
        assert program == "nan-detector" and arguments[0] in COMMANDS, line


@pytest.mark.parametrize("line", [line for line in commands() if line.startswith("nan-detector run")])
def test_command_lines_are_understood(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys; print(sys.argv[1:]); sys.exit(7)", encoding="utf-8")
    _, *arguments = shlex.split(line)
    assert main(arguments) == 7
    assert capfd.readouterr().out.split() == str(arguments[arguments.index("train.py") + 1 :]).split()


def targets() -> set[str]:
    return set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_targets_named_in_the_documents_are_there(document: str):
    named = set(re.findall(r"`make (\w+)", (ROOT / document).read_text(encoding="utf-8")))
    assert named <= targets()


# -- the examples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words_of_the_report"),
    [
        ("plain_loop", ("NaN born at step 12, in the forward pass", "0 (Standardise)", "plain_loop.py:", "x.std(")),
        ("detect_nan", ("Inf born in the backward pass", "torch.sqrt", "detect_nan.py:", "exactly 0")),
    ],
)
def test_examples_print_the_report(name: str, words_of_the_report: tuple[str, ...], capfd: pytest.CaptureFixture[str]):
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    printed = "".join(capfd.readouterr())
    assert all(w in printed for w in words_of_the_report), printed


def test_every_example_is_run():
    assert {p.stem for p in (ROOT / "examples").glob("*.py")} == {
        "plain_loop",
        "detect_nan",
        "alert_webhook",  # by its own test, with a server
    }


# -- what it points to ------------------------------------------------------------------------------------------------


def test_the_first_code_is_on_the_first_screen():
    assert blocks(TEXT)[0].line <= 8 and blocks(TEXT)[0].code == "make demo\n"
    assert sample_block(TEXT).line < 40


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{document} links to {target}"


def named_files(cell: str) -> list[str]:
    return [name for name in re.findall(r"`([^`]+)`", cell) if re.fullmatch(r"[\w./]+", name) and not name[0].isupper()]


def test_files_that_contributing_names_are_there():
    rows = [
        line for line in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ]
    checked = 0
    for name in (name for row in rows for name in named_files(row)):
        places = [ROOT / name, *(ROOT / "src" / "nan_detector" / n for n in (name, f"{name}.py"))]
        is_file = name.endswith((".py", ".md", "/")) or name.startswith("_")
        if is_file:
            checked += 1
            assert any(p.exists() for p in places), f"CONTRIBUTING.md names {name}, and it is not there"
    assert checked > 40


def test_names_of_the_package_in_the_readme_are_public():
    for name in re.findall(r"nan_detector\.([a-z]\w+)", TEXT):
        assert name in nan_detector.__all__
    event = nan_detector.NaNEvent(event_id="x", status="final", step=0, phase="loss", severity="error")
    table = TEXT[TEXT.index("## What an event carries") : TEXT.index("## Policies")]
    for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE):
        for field in re.findall(r"`(\w+)`", row):
            assert hasattr(event, field), field
    for name in re.findall(r"`det\.(\w+)", TEXT):
        assert hasattr(nan_detector.NaNDetector, name), name
