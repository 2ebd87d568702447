"""The event log: one JSON object a line, one file per rank, for other programs and for a laptop without torch.

The writer never disturbs the training: a full disk or a folder that cannot be written is one warning, and then the
log stands down. The reader treats a log as untrusted input.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from nan_detector._record import SCHEMA_VERSION, Record
from nan_detector._records import NaNEvent, StepRow, record_from_dict
from nan_detector._schema import mismatch

_LOGGER = logging.getLogger("nan_detector")

#: Rows of the flight recorder kept back at most, in number and in seconds: a system call a step is not worth a row.
ROWS_KEPT_BACK = 100
SECONDS_KEPT_BACK = 5.0

_FILE_NAME = re.compile(r"events-rank(\d+)\.jsonl")

#: File systems that cannot be asked for durability (some network mounts, pipes) answer fsync with these.
_NO_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


class EventLog:
    """Append-only writer of ``events-rank{rank}.jsonl`` in `log_dir`, which is created with its parents.

    Never raises on the training's account: where the file cannot be opened or written, one warning is logged and
    every later call does nothing. Calls may come from several threads.

    Attributes:
        path: The file that is written.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, rank: int = 0) -> None:
        self.path = Path(log_dir) / f"events-rank{rank}.jsonl"
        # Re-entrant, because a signal handler that closes the log may interrupt this very thread inside `write`.
        self._lock = threading.RLock()
        self._rows: list[bytes] = []
        self._oldest_row = 0.0
        self._file: BinaryIO | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.is_fifo():  # opening it would wait for somebody to read it
                raise OSError(errno.EINVAL, "There is a pipe of that name")
            _mend_end(self.path)
            # Unbuffered: a forked worker would otherwise inherit half a line and write it a second time.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115  # closed by `close`
        except (OSError, ValueError) as error:  # ValueError: a path that no file system takes
            self._stand_down(error)

    @property
    def active(self) -> bool:
        """False once the log is closed, or has stood down because it could not be written."""
        return self._file is not None

    def write(self, record: Record, *, sync: bool = False) -> None:
        """Append `record`. Step rows may be kept back for a moment; every other line is in the file on return.

        Args:
            record: A record with a line of its own (an event, a gradient event, a warning, a step row, a run).
            sync: Also wait until it is on the disk, so that it outlives the machine; for events.
        """
        if self._file is None:
            return
        line = json.dumps(record.to_dict(), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
        with self._lock:
            if not self._rows:
                self._oldest_row = time.monotonic()
            self._rows.append(line)
            if isinstance(record, StepRow) and not sync and not self._is_time():
                return
            self._drain(sync)

    def flush(self) -> None:
        """Write the rows kept back."""
        with self._lock:
            self._drain(sync=False)

    def close(self) -> None:
        """Write the rows kept back and close the file; a second call does nothing."""
        with self._lock:
            self._drain(sync=True)
            file, self._file = self._file, None
            if file is not None:
                try:
                    file.close()
                except OSError as error:  # a network mount may report a full disk only now
                    self._stand_down(error)

    def abandon(self) -> None:
        """In a forked child: write nothing more. The rows kept back are those of the parent, which writes them."""
        self._lock = threading.RLock()  # the parent may have held it on another thread
        self._rows = []
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _is_time(self) -> bool:
        return len(self._rows) >= ROWS_KEPT_BACK or time.monotonic() - self._oldest_row >= SECONDS_KEPT_BACK

    def _drain(self, sync: bool) -> None:
        rows, self._rows = self._rows, []
        if self._file is None:
            return
        try:
            left = memoryview(b"".join(rows))
            while left:  # an unbuffered file may take less than it was given, and says no only at the next call
                left = left[self._file.write(left) :]
            if sync:
                _fsync(self._file)
        except OSError as error:
            self._stand_down(error)

    def _stand_down(self, error: Exception) -> None:
        file, self._file = self._file, None
        self._rows.clear()
        _LOGGER.warning(
            "The event log %s cannot be written (%s). Training goes on and nothing more is logged to it; "
            "make room there, or give another log_dir to the next run.",
            self.path,
            getattr(error, "strerror", None) or error,
        )
        if file is not None:
            with contextlib.suppress(OSError):  # the warning above has said it
                file.close()


def read_log(path: str | os.PathLike[str]) -> list[Record]:
    """The records of a log: of one file, or of every rank's file in a folder, rank by rank.

    A last line that was cut off (the run was killed while writing it) is left out. Only plain JSON is read, and
    every value is checked against its field's type: a log may come from anywhere.

    Raises:
        FileNotFoundError: There is no such file, or no log in the folder.
        ValueError: A line is not a record; the message names the file, the line and what is wrong with it.
    """
    return [record for file in log_files(path) for record in _read_file(file)]


def log_files(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a log: `path` itself, or every rank's file in that folder, rank by rank.

    Raises:
        FileNotFoundError: There is no log in the folder. A file is not looked at.
    """
    path = Path(path)
    if not path.is_dir():
        return [path]
    files = sorted((int(m[1]), p) for p in path.iterdir() if (m := _FILE_NAME.fullmatch(p.name)))
    if not files:
        raise FileNotFoundError(
            errno.ENOENT, "There is no events-rank*.jsonl in this folder; name the one given as log_dir", str(path)
        )
    return [file for _, file in files]


def events(records: Iterable[Record]) -> list[NaNEvent]:
    """The events among `records`, one for each `event_id`, in order of their first line.

    A run writes an event twice, as "provisional" before the replay and as "final" after it: the final one counts.
    """
    by_id: dict[str, NaNEvent] = {}
    for record in records:
        if not isinstance(record, NaNEvent):
            continue
        known = by_id.get(record.event_id)
        if known is None or known.status != "final" or record.status == "final":
            by_id[record.event_id] = record  # a key that is there already keeps its place
    return list(by_id.values())


class NoLog(OSError):
    """What stands there is no file, and reading it might never end; `strerror` says what it is."""


#: What is no file, by its type.
_OTHERS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_log(path: Path) -> BinaryIO:
    """Open a log for reading.

    Raises:
        NoLog: It is no file: a pipe that nobody writes into is not even opened, and a device like /dev/zero has no end.
        OSError: It cannot be opened.
    """
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        raise NoLog(errno.EINVAL, f"is {_OTHERS.get(kind, 'something else')}, not a file", str(path))
    return open(path, "rb")


def _read_file(path: Path) -> list[Record]:
    records = []
    with open_log(path) as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    records.append(parse_line(line))
            except _NotJson as error:
                if is_torn(line):
                    break
                raise ValueError(f"{path}, line {number}: {error}") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    return records


class _NotJson(ValueError):
    """The line as a whole is not JSON: torn, or not ours."""


def is_torn(line: bytes) -> bool:
    """Whether this is the piece of a line that was being written when the run, or the machine, died.

    Some file systems then leave zeros where the data did not arrive.
    """
    return not line.endswith(b"\n") and line.rstrip(b"\0")[:1] in (b"", b"{")


def parse_line(line: bytes) -> Record:
    """The record of one line.

    Raises:
        ValueError: It is none; the message says what is wrong with it.
    """
    try:
        data = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise _NotJson(f"this is not a JSON object ({error}).") from None
    if not isinstance(data, dict):
        raise ValueError(f"a JSON object was expected, and this is {_shown(data)}.")
    try:
        record = record_from_dict(data)
        wrong = mismatch(record)
    except (TypeError, AttributeError, RecursionError):
        wrong = "a value does not have the shape that its field needs"
    except ValueError as error:
        wrong = str(error).rstrip(".")
    if wrong is None:
        return record
    raise ValueError(f"{wrong}{_newer(data.get('schema_version'))}.")


def _newer(version: object) -> str:
    if isinstance(version, int) and version > SCHEMA_VERSION:
        return (
            f"; the line has schema_version {version} and this release reads up to {SCHEMA_VERSION}: "
            "a newer nan-detector wrote it, so upgrade to read it"
        )
    return ""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON: non-finite numbers are strings here")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fsync(file: BinaryIO) -> None:
    try:
        os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _mend_end(path: Path) -> None:
    """Make the file end with a whole line: what a killed run left unfinished would spoil the next run's first line."""
    try:
        file = open(path, "r+b")  # noqa: SIM115  # a `with` below
    except FileNotFoundError:
        return
    with file:
        size = file.seek(0, os.SEEK_END)
        start = _start_of_last_line(file, size)
        if start == size:
            return
        file.seek(start)
        tail = file.read()
        try:
            json.loads(tail)
        except (ValueError, RecursionError):
            file.truncate(start)  # a piece of a line, which no reader can use
        else:
            file.write(b"\n")


def _start_of_last_line(file: BinaryIO, size: int, block: int = 1 << 16) -> int:
    end = size
    while end > 0:
        begin = max(0, end - block)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0
