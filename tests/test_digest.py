"""A log as it is found: every good line counts, bad ones are named, and memory is bounded."""

from __future__ import annotations

import itertools
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import _logs
from _strategies import records_of
from nan_detector import _digest
from nan_detector._digest import digest_of, read_digest
from nan_detector._reading import FIRST_LINES, Problem, read_lines
from nan_detector._record import Record
from nan_detector._records import RECORDS, GradEvent, NaNEvent, RunRecord, StepRow, WarningRecord
from nan_detector._thinning import EVENTS, RECENT, SPREAD, Thinned


def test_a_run_in_short(tmp_path: Path):
    digest = read_digest(_logs.write(tmp_path))
    (run,) = digest.runs
    assert run.run == _logs.RUN and run.rank == 0
    assert run.events == (_logs.EVENT,), "the final line of an event counts"
    assert [(g.last.kind, g.first_step, g.last.step, g.count) for g in run.warnings] == [
        ("loss_spike", 81, 81, 1),
        ("layer_overflow", 84, 86, 2),
    ]
    assert [(g.largest.grad_norm, g.first_step, g.last_step, g.count) for g in run.grads] == [(5300.0, 84, 86, 2)]
    assert (run.step_count, run.steps[0].step, run.steps[-1].step) == (88, 0, 87)
    assert [row.step for row in run.peaks] == list(range(60, 87)), "second rows are no steps of their own"
    assert digest.problems == ()


def test_each_rank_and_each_run_is_one(tmp_path: Path):
    for rank in (0, 1, 10):
        run = replace(_logs.RUN, rank=rank)
        _logs.write(tmp_path, [run, replace(_logs.EVENT, rank=rank), run, StepRow(0, rank=rank)], rank)
    digest = read_digest(tmp_path)
    assert [(r.rank, len(r.events), r.step_count) for r in digest.runs] == [
        (0, 1, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 0, 1),
        (10, 1, 0),
        (10, 0, 1),
    ]
    assert digest.ranks == [0, 1, 10] and len(digest.events) == 3


def test_without_its_first_lines_a_log_has_the_rank_of_its_name(tmp_path: Path):
    (run,) = read_digest(_logs.write(tmp_path, [StepRow(5)], rank=3)).runs
    assert (run.rank, run.run, run.step_count) == (3, None, 1)


def test_an_event_that_was_never_finished_stays(tmp_path: Path):
    died = replace(_logs.EVENT, status="provisional", cause=None)
    (event,) = read_digest(_logs.write(tmp_path, [_logs.RUN, died])).events
    assert event.status == "provisional"


BAD = [
    (b"not json\n", "this is not a JSON object"),
    (b"[1]\n", "a JSON object was expected"),
    (b'{"record":"metric","schema_version":2}\n', "a newer nan-detector wrote it, so upgrade to read it"),
    (b'{"record":"event"}\n', "NaNEvent needs the key 'event_id'"),
    (b'{"record":"step","step":NaN}\n', "NaN is not JSON"),
    (b"\xff\xfe\x00\n", "this is not a JSON object"),
    (b"[" * 100_000 + b"\n", "this is not a JSON object"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[m for _, m in BAD[:-1]] + ["deep"])
def test_a_bad_line_is_named_and_left_out(line: bytes, message: str, tmp_path: Path):
    path = _logs.write(tmp_path, [_logs.RUN])
    path.write_bytes(path.read_bytes() + line + json.dumps(StepRow(1).to_dict()).encode() + b"\n")
    digest = read_digest(path)
    assert digest.runs[0].step_count == 1
    (problem,) = digest.problems
    assert (problem.file, problem.line) == (path, 2) and message in problem.message


def test_a_torn_last_line_is_said(tmp_path: Path):
    path = _logs.write(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    digest = read_digest(path)
    assert digest.runs[0].step_count == 87
    assert [p.message for p in digest.problems] == [
        "the last line was cut off: the run died while it wrote it, or still runs."
    ]


def test_a_newer_release_with_the_same_fields_is_read(tmp_path: Path):
    path = tmp_path / "events-rank0.jsonl"
    path.write_text(json.dumps({**_logs.EVENT.to_dict(), "schema_version": 9, "mood": "grim"}) + "\n")
    digest = read_digest(path)
    assert digest.events == [_logs.EVENT] and not digest.problems


def test_a_line_without_end_costs_no_memory(tmp_path: Path):
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"x" * 3500 + b"\n" + json.dumps(StepRow(1).to_dict()).encode() + b"\n" + b"y" * 5000)
    read: list[int] = []
    found = list(read_lines(path, read.append, longest=1000))
    assert [type(f) for f in found] == [Problem, StepRow, Problem]
    assert [f.line for f in found if isinstance(f, Problem)] == [1, 3]
    assert found[0].message == "the line has more than 1000 bytes, and is no record for that."


def test_a_row_that_only_looks_like_one_is_a_problem(tmp_path: Path):
    path = _logs.write(tmp_path, [_logs.RUN, StepRow(1)])
    with open(path, "ab") as file:
        file.write(b'{"schema_version":1,"record":"step","step":"two"}\n{"schema_version":1,"record":"step",}\n')
    digest = read_digest(path)
    assert [row.step for row in digest.runs[0].steps] == [1] and digest.runs[0].step_count == 1
    assert [p.line for p in digest.problems] == [3, 4]
    assert digest.problems[0].message == "step='two' is not a whole number."


def test_progress_adds_up_to_the_file(tmp_path: Path):
    path = _logs.write(tmp_path)
    read: list[int] = []
    read_digest(path, read.append)
    assert sum(read) == path.stat().st_size


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="another system's way of a file that cannot be read")
def test_a_rank_whose_file_cannot_be_read_does_not_hide_the_others(tmp_path: Path):
    _logs.write(tmp_path)
    (tmp_path / "events-rank1.jsonl").mkdir()
    digest = read_digest(tmp_path)
    assert len(digest.events) == 1
    assert [p.message for p in digest.problems] == ["the file cannot be read any further (is a folder, not a file)."]


def test_a_file_that_begins_with_a_thousand_other_lines_is_no_log(tmp_path: Path):
    path = tmp_path / "events-rank0.jsonl"
    row = json.dumps(StepRow(1).to_dict()) + "\n"
    path.write_text("no record\n" * (FIRST_LINES + 5) + row)
    digest = read_digest(path)
    assert not digest.runs and len(digest.problems) == 100 and digest.problems_left_out == FIRST_LINES - 99
    [*_, last] = read_lines(path)
    assert isinstance(last, Problem) and last.line == FIRST_LINES
    assert last.message == f"none of the first {FIRST_LINES} lines is a record. The file is read no further."
    path.write_text(row + "no record\n" * (FIRST_LINES + 5) + row)  # what began as a log is read to its end
    assert read_digest(path).runs[0].step_count == 2


def test_the_end_of_a_line_is_not_looked_for_for_ever(tmp_path: Path):
    path = tmp_path / "long.jsonl"
    row = json.dumps(StepRow(1).to_dict()).encode() + b"\n"
    path.write_bytes(row + b"x" * 100_000 + b"\n" + row)
    found = list(read_lines(path, longest=1000))
    assert [type(f) for f in found] == [StepRow, Problem]
    assert isinstance(found[1], Problem) and found[1].message == (
        "the line has more than 1000 bytes, and is no record for that. The file is read no further."
    )


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("MOST_EVENTS", "MOST_GROUPS", "MOST_PROBLEMS"):
        monkeypatch.setattr(_digest, name, 3)
    lines: list[Record] = []
    for i in range(5):
        first = replace(_logs.EVENT, event_id=f"e{i}", status="provisional")
        lines += [
            first,
            replace(first, status="final"),
            WarningRecord(f"w{i}", i, ""),
            GradEvent(i, "l", f"p{i}", 1, 1),
        ]
    path = _logs.write(tmp_path, lines)
    path.write_bytes(path.read_bytes() + b"?\n" * 5)
    digest = read_digest(path)
    (run,) = digest.runs
    assert [e.event_id for e in run.events] == ["e0", "e1", "e2"] and run.events_left_out == 2
    assert {e.status for e in run.events} == {"final"}
    assert (len(run.warnings), len(run.grads), len(digest.problems), digest.problems_left_out) == (3, 3, 3, 2)


@pytest.mark.parametrize(("norms", "largest"), [((5.0, 9.0, 7.0), 9.0), ((5.0, math.inf, 7.0), math.inf)])
def test_of_gradients_the_largest_is_told(norms: tuple[float, ...], largest: float):
    (run,) = digest_of([GradEvent(i, "l", "p", n, 1.0) for i, n in enumerate(norms)])
    assert run.grads[0].largest.grad_norm == largest


def test_nan_is_the_largest_gradient():
    (run,) = digest_of([GradEvent(i, "l", "p", n, 1.0) for i, n in enumerate((5.0, math.nan, 7.0))])
    assert math.isnan(run.grads[0].largest.grad_norm)


@given(st.lists(st.one_of([records_of(kind) for kind in RECORDS.values()]), max_size=20))
def test_any_records_make_a_digest(lines: list[Record]):
    runs = digest_of(lines)
    assert sum(r.run is not None for r in runs) == sum(isinstance(x, RunRecord) for x in lines)
    assert sum(len(r.events) for r in runs) <= sum(isinstance(x, NaNEvent) for x in lines)
    assert sum(r.step_count + len(r.peaks) for r in runs) == sum(isinstance(x, StepRow) for x in lines)
    assert sum(g.count for r in runs for g in r.warnings) == sum(isinstance(x, WarningRecord) for x in lines)


# -- thinning ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 3 * SPREAD), st.sets(st.integers(0, 3 * SPREAD), max_size=4))
def test_rows_are_thinned_and_what_matters_stays(count: int, events: set[int]):
    thinned = Thinned()
    for step in range(count):
        thinned.add(StepRow(step))
        if step in events:
            thinned.keep_recent()
    steps = [row.step for row in thinned.rows()]
    assert thinned.count == count and steps == sorted(set(steps))
    assert len(steps) <= SPREAD + RECENT * (1 + len(events))
    wanted = set(range(max(0, count - RECENT), count))
    for event in events & set(range(count)):
        wanted |= set(range(max(0, event - RECENT + 1), event + 1))
    assert wanted <= set(steps)
    gaps = [b - a for a, b in itertools.pairwise(steps)]
    assert max(gaps, default=1) <= max(1, 2 * count // SPREAD), "no stretch of the run is missing"
    assert count == 0 or steps[0] == 0


def test_a_run_that_fails_at_every_step_keeps_memory_bounded():
    thinned = Thinned()
    for step in range(10 * RECENT + EVENTS):
        thinned.add(StepRow(step))
        thinned.keep_recent()
    assert len(list(thinned.rows())) < SPREAD + 2 * RECENT + EVENTS
