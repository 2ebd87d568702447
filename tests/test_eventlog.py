"""The event log on real files, full disks and killed processes: it never raises into a training, and reads safely."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _strategies import records_of, same
from nan_detector._eventlog import ROWS_KEPT_BACK, SECONDS_KEPT_BACK, EventLog, events, read_log
from nan_detector._record import Record
from nan_detector._records import RECORDS, GradEvent, NaNEvent, RunRecord, StepRow, WarningRecord

EVENT = NaNEvent(event_id="r0-87", status="provisional", step=87, phase="forward", severity="error", loss=float("nan"))
FINAL = replace(EVENT, status="final", op="sqrt")
RUN = RunRecord(started=1.0, package_version="0", torch_version="2", python_version="3", platform="x")


def row(step: int) -> StepRow:
    return StepRow(step=step, loss=0.5, grad_norm=float("inf"))


def lines(log: EventLog) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.path.read_text(encoding="ascii").splitlines()]


def run_script(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")},
    )


# Writing


def test_the_folder_and_its_parents_are_made_and_the_file_is_named_by_rank(tmp_path: Path):
    with EventLog(tmp_path / "a" / "b", rank=3) as log:
        log.write(RUN)
    assert log.path == tmp_path / "a" / "b" / "events-rank3.jsonl"
    assert read_log(log.path) == [RUN]


def test_every_line_is_strict_json_with_schema_version_and_record(tmp_path: Path):
    with EventLog(tmp_path) as log:
        for record in (RUN, row(0), WarningRecord("kind", 1, "message"), GradEvent(1, "fc", "w", 2.0, 1.0), EVENT):
            log.write(record)
    written = lines(log)
    assert [line["record"] for line in written] == ["run", "step", "warning", "grad", "event"]
    assert {line["schema_version"] for line in written} == {1}
    assert written[-1]["loss"] == "nan"


@given(records=st.lists(st.one_of([records_of(kind) for kind in RECORDS.values()]), max_size=8))
@settings(max_examples=50)
def test_what_is_written_is_read_back_in_order(tmp_path_factory: pytest.TempPathFactory, records: list[Record]):
    with EventLog(tmp_path_factory.mktemp("log")) as log:
        for record in records:
            log.write(record)
    assert same(read_log(log.path.parent), records)


def test_a_line_other_than_a_step_row_is_in_the_file_at_once(tmp_path: Path):
    with EventLog(tmp_path) as log:
        log.write(RUN)
        assert len(lines(log)) == 1


def test_step_rows_are_kept_back_until_there_are_enough(tmp_path: Path):
    with EventLog(tmp_path) as log:
        for step in range(ROWS_KEPT_BACK - 1):
            log.write(row(step))
        assert lines(log) == []
        log.write(row(ROWS_KEPT_BACK - 1))
        assert [line["step"] for line in lines(log)] == list(range(ROWS_KEPT_BACK))


@pytest.mark.parametrize("push", [lambda log: log.write(EVENT, sync=True), EventLog.flush, EventLog.close])
def test_step_rows_kept_back_come_before_what_pushes_them_out(tmp_path: Path, push):
    with EventLog(tmp_path) as log:
        log.write(row(1))
        log.write(row(2))
        push(log)
        assert [line["step"] for line in lines(log)] == [1, 2, 87][: len(lines(log))]
        assert len(lines(log)) >= 2


def test_an_old_step_row_takes_the_next_one_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A step may take a minute: someone who follows the file should not wait for a hundred of them."""
    with EventLog(tmp_path) as log:
        log.write(row(1))
        log._oldest_row -= SECONDS_KEPT_BACK
        log.write(row(2))
        assert [line["step"] for line in lines(log)] == [1, 2]
        log.write(row(3))
        assert len(lines(log)) == 2


def test_a_second_run_appends(tmp_path: Path):
    for step in (1, 2):
        with EventLog(tmp_path) as log:
            log.write(row(step))
    assert read_log(tmp_path) == [row(1), row(2)]


def test_after_close_nothing_is_written_and_nothing_raised(tmp_path: Path):
    log = EventLog(tmp_path)
    assert log.active
    log.close()
    log.close()
    log.write(EVENT, sync=True)
    log.flush()
    assert not log.active
    assert read_log(tmp_path) == []


def test_threads_do_not_mix_their_lines(tmp_path: Path):
    def work(rank: int) -> None:
        for step in range(200):
            log.write(replace(row(step), rank=rank) if step % 3 else replace(EVENT, step=step, rank=rank))

    with EventLog(tmp_path) as log:
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = read_log(tmp_path)
    for rank in range(8):
        assert [r.step for r in records if r.rank == rank] == list(range(200))


def test_an_event_outlives_the_kill_of_its_process(tmp_path: Path):
    done = run_script(
        """
        import os, signal, sys
        from nan_detector._eventlog import EventLog
        from nan_detector._records import NaNEvent, StepRow
        log = EventLog(sys.argv[1])
        log.write(StepRow(step=1))
        log.write(NaNEvent(event_id="e", status="final", step=2, phase="loss", severity="error"), sync=True)
        log.write(StepRow(step=3))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [r.step for r in read_log(tmp_path)] == [1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_worker_does_not_write_the_rows_kept_back_again(tmp_path: Path):
    done = run_script(
        """
        import os, sys
        from nan_detector._eventlog import EventLog
        from nan_detector._records import StepRow
        log = EventLog(sys.argv[1])
        log.write(StepRow(step=1))
        if os.fork() == 0:
            sys.exit(0)  # like a worker that ends: its interpreter closes what it has open
        os.wait()
        log.close()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert read_log(tmp_path) == [StepRow(step=1)]


# Where it cannot be written


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "nan_detector" and r.levelno >= logging.WARNING]


def use(log: EventLog) -> None:
    for step in range(3 * ROWS_KEPT_BACK):
        log.write(row(step))
    log.write(EVENT, sync=True)
    log.flush()
    log.close()


@pytest.mark.parametrize("parts", [("file",), ("file", "below"), ("nul\0byte",), ("x" * 300,)])
def test_a_folder_that_cannot_be_is_one_warning(
    tmp_path: Path, parts: tuple[str, ...], caplog: pytest.LogCaptureFixture
):
    (tmp_path / "file").write_text("in the way")
    log = EventLog(tmp_path.joinpath(*parts))
    assert not log.active
    use(log)
    (message,) = warnings_of(caplog)
    assert message.startswith(f"The event log {log.path} cannot be written (")
    assert message.endswith("make room there, or give another log_dir to the next run.")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs the pipes of Unix")
def test_a_pipe_in_the_place_of_the_file_is_one_warning_and_nobody_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    os.mkfifo(tmp_path / "events-rank0.jsonl")
    log = EventLog(tmp_path)
    use(log)
    assert warnings_of(caplog) == [
        f"The event log {log.path} cannot be written (There is a pipe of that name). Training goes on and nothing "
        "more is logged to it; make room there, or give another log_dir to the next run."
    ]
    with pytest.raises(OSError, match="is a pipe, not a file"):
        read_log(tmp_path)


def test_a_folder_in_the_place_of_the_file_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "events-rank0.jsonl").mkdir()
    use(EventLog(tmp_path))
    assert len(warnings_of(caplog)) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("first", [EVENT, row(0)])
def test_a_full_disk_is_one_warning(tmp_path: Path, first: Record, caplog: pytest.LogCaptureFixture):
    (tmp_path / "events-rank0.jsonl").symlink_to("/dev/full")
    log = EventLog(tmp_path)
    assert log.active
    log.write(first, sync=True)
    assert not log.active
    use(log)
    (message,) = warnings_of(caplog)
    assert "(No space left on device)" in message


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="this system has no /dev/null")
def test_a_file_system_that_cannot_sync_is_written_all_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "events-rank0.jsonl").symlink_to("/dev/null")
    with EventLog(tmp_path) as log:
        log.write(EVENT, sync=True)
        assert log.active
    assert warnings_of(caplog) == []


def test_a_disk_that_fills_up_within_a_line_leaves_a_log_that_can_be_read_and_goes_on(tmp_path: Path):
    pytest.importorskip("resource", reason="this system has no limits on file size")
    limit = 3000
    done = run_script(
        """
        import resource, sys
        from nan_detector._eventlog import EventLog
        from nan_detector._records import WarningRecord
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
        log = EventLog(sys.argv[1])
        for step in range(100):
            log.write(WarningRecord("kind", step, "a message"))
        assert not log.active
        """,
        tmp_path,
        limit,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written (File too large)") == 1
    file = tmp_path / "events-rank0.jsonl"
    assert file.stat().st_size == limit
    assert not file.read_bytes().endswith(b"\n")
    whole = read_log(tmp_path)
    assert len(whole) == file.read_bytes().count(b"\n") > 10
    with EventLog(tmp_path) as log:
        log.write(EVENT)
    assert same(read_log(tmp_path), [*whole, EVENT])


# Opening a log that another run left


@pytest.mark.parametrize("cut", [1, 2, 20, 200])
def test_a_torn_line_does_not_spoil_the_next_run(tmp_path: Path, cut: int):
    with EventLog(tmp_path) as log:
        log.write(RUN)
        log.write(EVENT)
    text = log.path.read_bytes()
    log.path.write_bytes(text[:-cut])
    with EventLog(tmp_path) as log:
        log.write(FINAL)
    # A cut of one byte takes the line's end only: the event is whole and stays.
    assert same(read_log(tmp_path), [RUN, EVENT, FINAL] if cut == 1 else [RUN, FINAL])


def test_a_torn_line_longer_than_a_block_is_cut_off_whole(tmp_path: Path):
    file = tmp_path / "events-rank0.jsonl"
    with EventLog(tmp_path) as log:
        log.write(RUN)
    with file.open("ab") as out:
        out.write(b'{"schema_version":1,"message":"' + b"x" * 200_000)
    EventLog(tmp_path).close()
    assert read_log(tmp_path) == [RUN]
    assert file.read_bytes().count(b"x" * 1000) == 0


@pytest.mark.parametrize("content", [b"", b"\0" * 50, b'{"schema'])
def test_a_log_of_nothing_but_a_torn_line_is_begun_anew(tmp_path: Path, content: bytes):
    (tmp_path / "events-rank0.jsonl").write_bytes(content)
    assert read_log(tmp_path) == []
    with EventLog(tmp_path) as log:
        log.write(RUN)
    assert log.path.read_bytes().startswith(b'{"schema_version":1,"record":"run"')


# Reading


def line_of(record: Record, /, **changed: object) -> str:
    return json.dumps({**record.to_dict(), **changed})


def refusal(tmp_path: Path, *text: str) -> str:
    file = tmp_path / "events-rank0.jsonl"
    file.write_text("\n".join(text) + "\n", encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        read_log(file)
    message = str(caught.value)
    assert message.startswith(f"{file}, line {len(text)}: ")
    return message.removeprefix(f"{file}, line {len(text)}: ")


def test_a_folder_is_read_rank_by_rank(tmp_path: Path):
    for rank in (10, 2, 0):
        with EventLog(tmp_path, rank=rank) as log:
            log.write(replace(RUN, rank=rank))
    (tmp_path / "notes.txt").write_text("not a log")
    assert [r.rank for r in read_log(tmp_path)] == [0, 2, 10]


def test_a_folder_without_a_log_says_what_to_name(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="name the one given as log_dir"):
        read_log(tmp_path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="missing"):
        read_log(tmp_path / "missing.jsonl")


def test_empty_lines_are_passed_over(tmp_path: Path):
    (tmp_path / "log.jsonl").write_text(f"\n{line_of(RUN)}\n\n{line_of(EVENT)}\n\n")
    assert same(read_log(tmp_path / "log.jsonl"), [RUN, EVENT])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"schema_version": 1, "rec', "this is not a JSON object ("),
        ("training started", "this is not a JSON object ("),
        ("[1, 2]", "a JSON object was expected, and this is [1, 2]."),
        ("[" * 100_000, "this is not a JSON object ("),
        (f'"{"x" * 100}"', f"a JSON object was expected, and this is '{'x' * 56}...."),
        (line_of(EVENT, record="metric"), "record='metric' is not one of 'event', 'grad', 'warning', 'step', 'run'."),
        (line_of(EVENT).replace('"nan"', "NaN"), "this is not a JSON object (NaN is not JSON: "),
        (line_of(EVENT).replace('"step"', '"stop"'), "NaNEvent needs the key 'step', which this record does not have."),
        (line_of(EVENT, step="87"), "step='87' is not a whole number."),
        (line_of(EVENT, step=True), "step=True is not a whole number."),
        (line_of(EVENT, step=87.0), "step=87.0 is not a whole number."),
        (line_of(EVENT, loss="huge"), "loss='huge' is not a number or null."),
        (line_of(EVENT, op=["sqrt"]), "op=('sqrt',) is not a string or null."),
        (line_of(EVENT, notes="one"), "notes='one' is not a list, each a string."),
        (line_of(EVENT, notes=[1]), "notes=(1,) is not a list, each a string."),
        (line_of(EVENT, phase=3), "phase=3 is not a string."),
        (line_of(EVENT, cause=7), "a value does not have the shape that its field needs."),
        (line_of(EVENT, inputs=[None]), "a value does not have the shape that its field needs."),
        (line_of(EVENT, cause={"title": "x"}), "Cause needs the key 'code', which this record does not have."),
        (
            line_of(EVENT, cause={"code": 1, "title": "", "explanation": ""}),
            "cause.code=1 is not a string.",
        ),
        (
            line_of(EVENT, inputs=[{"shape": [2, "x"], "dtype": "torch.float32", "device": "cpu"}]),
            "inputs.shape=(2, 'x') is not a list, each a whole number.",
        ),
        (line_of(RUN, options=[1]), "options=(1,) is not an object."),
        (
            line_of(EVENT, schema_version=2, record="metric"),
            "record='metric' is not one of 'event', 'grad', 'warning', 'step', 'run'; the line has schema_version 2 "
            "and this release reads up to 1: a newer nan-detector wrote it, so upgrade to read it.",
        ),
    ],
)
def test_a_bad_line_is_refused_with_file_line_and_reason(tmp_path: Path, bad: str, message: str):
    assert refusal(tmp_path, line_of(RUN), bad).startswith(message)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "log.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    with pytest.raises(ValueError, match="line 1: this is not a JSON object"):
        read_log(tmp_path / "log.jsonl")


def test_a_last_line_that_is_no_piece_of_a_log_is_refused(tmp_path: Path):
    """A wrong file must not look like an empty log."""
    (tmp_path / "log.jsonl").write_text("hello")
    with pytest.raises(ValueError, match="line 1: this is not a JSON object"):
        read_log(tmp_path / "log.jsonl")


@given(cut=st.integers(min_value=0, max_value=2000))
@settings(max_examples=40)
def test_a_log_may_be_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: int):
    with EventLog(tmp_path_factory.mktemp("log")) as log:
        for record in (RUN, EVENT, FINAL):
            log.write(record)
    text = log.path.read_bytes()[:cut]
    log.path.write_bytes(text)
    records = read_log(log.path)
    assert same(records, [RUN, EVENT, FINAL][: len(records)])
    assert len(records) - text.count(b"\n") in (0, 1)


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists), st.data())
def test_any_json_in_a_field_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: object, data: st.DataObject
):
    """Untrusted input ends in a record of the right types or in a ValueError, never in another exception."""
    record = data.draw(st.sampled_from([EVENT, RUN, row(1), GradEvent(1, "fc", "w", 2.0, 1.0)]))
    line = record.to_dict()
    line[data.draw(st.sampled_from(sorted(line)))] = value
    file = tmp_path_factory.mktemp("log") / "log.jsonl"
    file.write_text(json.dumps(line) + "\n")
    try:
        (read,) = read_log(file)
    except ValueError as error:
        assert str(error).startswith(f"{file}, line 1: ")
    else:
        assert type(read) in RECORDS.values()
        str(read.to_dict())


def test_words_of_a_later_release_are_read(tmp_path: Path):
    (tmp_path / "log.jsonl").write_text(line_of(EVENT, phase="sampling", new_key={"a": 1}) + "\n")
    (record,) = read_log(tmp_path / "log.jsonl")
    assert same(record, replace(EVENT, phase="sampling"))


# Events


def test_a_final_event_takes_the_place_of_its_provisional_one():
    other = replace(EVENT, event_id="r0-99", step=99)
    assert events([RUN, EVENT, row(1), other, FINAL]) == [FINAL, other]


def test_a_later_line_wins_but_a_final_one_is_never_taken_back():
    provisional = replace(EVENT, op="div")
    assert events([EVENT, provisional]) == [provisional]
    assert events([FINAL, provisional]) == [FINAL]
    later = replace(FINAL, op="exp")
    assert events([FINAL, later]) == [later]


def test_there_may_be_no_events():
    assert events([RUN, row(1)]) == []
