"""A log as it is found: every line that can be read, and what is wrong with the others.

`_eventlog.read_log` refuses a log with a bad line; a person who wants to know what happened last night is better
served by all the good ones. Memory stays bounded, however long a line or a log is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from nan_detector._eventlog import is_torn, open_log, parse_line
from nan_detector._record import SCHEMA_VERSION, Record

#: Bytes of a line from which it cannot be ours: the longest event has a hundredth of it.
LONGEST_LINE = 16 * 2**20
#: Times as many bytes of one line after which its end is no longer looked for: the file may be one large hole.
SKIPPED = 8
#: Lines of which one must be a record, or the file is no log, however much is left of it.
FIRST_LINES = 1000
#: How the writer begins a step's row, and what is only in those that have layers.
_STEP = f'{{"schema_version":{SCHEMA_VERSION},"record":"step",'.encode()
_LAYERS = b'"layers":[{'


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that could not be read.

    Attributes:
        file: The log's file.
        line: The line's number, from 1.
        message: What is wrong with it, in a sentence. May hold parts of the line: as untrusted as the log.
    """

    file: Path
    line: int
    message: str


@dataclass(frozen=True, slots=True)
class Unread:
    """A step's row that has not been looked into: of a million of them few are shown."""

    file: Path
    line: int
    raw: bytes

    def read(self) -> Record | Problem:
        """The row, or what is wrong with it."""
        return _read(self.file, self.line, self.raw) or Problem(self.file, self.line, "the line is empty.")


def read_lines(
    path: Path, on_bytes: Callable[[int], object] | None = None, longest: int = LONGEST_LINE
) -> Iterator[Record | Unread | Problem]:
    """The records of one file in order, and a `Problem` in place of each line that is none.

    Args:
        path: The file.
        on_bytes: Called with the length of each line, once it has been read; for a progress bar.
        longest: Bytes of a line above which it is not looked at.

    Returns:
        Rows of steps, in the form in which the log's writer puts them, as `Unread`: their first rows, without layers.

    Raises:
        NoLog: It is a pipe, a device or the like.
        OSError: The file cannot be read.
    """
    with open_log(path) as file:
        number, good = 0, False
        while line := file.readline(longest + 1):
            number += 1
            found: Record | Unread | Problem | None
            if len(line) > longest:
                found = Problem(path, number, f"the line has more than {longest} bytes, and is no record for that.")
                if not _skip_line(file, longest):
                    yield replace(found, message=f"{found.message} {_NO_FURTHER}")
                    return
            elif line.startswith(_STEP) and line.endswith(b"}\n") and _LAYERS not in line:
                found = Unread(path, number, line)
            else:
                found = _read(path, number, line)
            if on_bytes is not None:
                on_bytes(len(line))
            if found is not None:
                yield found
            good = good or not (found is None or isinstance(found, Problem))
            if number >= FIRST_LINES and not good:
                yield Problem(path, number, f"none of the first {FIRST_LINES} lines is a record. {_NO_FURTHER}")
                return


_NO_FURTHER = "The file is read no further."


def _read(path: Path, number: int, line: bytes) -> Record | Problem | None:
    if not line.strip():
        return None
    try:
        return parse_line(line)
    except ValueError as error:
        if is_torn(line):
            return Problem(path, number, "the last line was cut off: the run died while it wrote it, or still runs.")
        return Problem(path, number, str(error))


def _skip_line(file: BinaryIO, longest: int) -> bool:
    """Go to the end of a line. False where it is not worth while."""
    for _ in range(SKIPPED):
        rest = file.readline(longest)
        if not rest or rest.endswith(b"\n"):
            return True
    return False
