"""The programs of docs/causes.md are run: the failing one has exactly that cause, the fixed one has no event."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from _causes_page import PROGRAMS, WITHOUT_PROGRAM, program
from nan_detector import NaNDetector
from nan_detector._causes import CAUSES

WITH_PROGRAM = [code for code in CAUSES if code not in WITHOUT_PROGRAM]
#: Lines of a program beyond its imports: longer ones are not minimal.
MOST_LINES = 24


@pytest.fixture(autouse=True)
def deterministic_setting() -> Iterator[None]:
    """A program may ask for deterministic algorithms, which fill fresh memory."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


def run(code: str, which: str) -> NaNDetector:
    """The detector of a program, after it has run."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch and numpy say of a program that fails is not ours
        names: dict[str, Any] = runpy.run_path(str(program(code, which)))
    det = names["det"]
    assert isinstance(det, NaNDetector)
    return det


@pytest.mark.parametrize("code", WITH_PROGRAM)
def test_the_failing_program_has_this_cause(code: str):
    det = run(code, "failing")
    assert det.triggered
    assert det.event is not None and det.event.cause is not None, str(det.event)
    assert det.event.cause.code == code, str(det.event)
    assert det.event.reproduced == "yes"
    if det.event.location is not None:
        assert det.event.location.file == str(program(code, "failing"))


@pytest.mark.parametrize("code", WITH_PROGRAM)
def test_the_fixed_program_has_no_event(code: str):
    det = run(code, "fixed")
    assert det.all_events == [], str(det.event)


def test_there_is_a_pair_for_every_cause_or_a_reason():
    assert {p.name for p in PROGRAMS.iterdir() if p.is_dir()} == set(WITH_PROGRAM)
    assert set(WITHOUT_PROGRAM) <= set(CAUSES)
    assert {p.name for p in PROGRAMS.glob("*/*.py")} == {"failing.py", "fixed.py"}


@pytest.mark.parametrize("code", WITH_PROGRAM)
def test_a_program_is_short_and_the_fix_is_small(code: str):
    failing, fixed = (program(code, which).read_text(encoding="utf-8").splitlines() for which in ("failing", "fixed"))
    assert len([line for line in failing if line.strip() and "import" not in line]) <= MOST_LINES
    changed = [line for line in fixed if line not in failing]
    assert len(changed) <= 5, changed
