"""Reading the log that a command names, with a progress bar where that takes long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nan_detector._cli import CommandError
from nan_detector._eventlog import NoLog, log_files

if TYPE_CHECKING:
    from nan_detector._digest import Digest

#: Bytes from which reading takes long enough for a progress bar.
_LONG = 32 * 2**20


def read(log: Path) -> Digest:
    """The log, or the folder of logs, that the user named.

    Raises:
        CommandError: There is none, it cannot be read, or nothing in it is a record.
    """
    from nan_detector._digest import read_digest

    try:
        with _bar(sum(f.stat().st_size for f in log_files(log))) as advance:
            digest = read_digest(log, advance)
    except FileNotFoundError as error:
        if log.is_dir():
            newest = _newest_in(log)
            way_out = (
                "the folder that --log or log_dir named" if newest is None else f"a folder in it, such as {newest}"
            )
            raise CommandError(f"LOG={str(log)!r} has no events-rank*.jsonl: name {way_out}.") from error
        raise CommandError(
            f"LOG={str(log)!r} is not there: name the folder that --log or log_dir named, or a file in it."
        ) from None
    except NoLog as error:
        raise CommandError(
            f"LOG={str(log)!r} {error.strerror}: name the folder that --log or log_dir named, or a file in it."
        ) from None
    except (OSError, ValueError) as error:  # ValueError: a path that no file system takes
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"LOG={str(log)!r} cannot be read ({reason}): see to its permissions.") from None
    if not digest.runs:
        raise CommandError(f"LOG={str(log)!r} {_nothing(digest)}: name the folder that --log or log_dir named.")
    return digest


def _newest_in(folder: Path) -> Path | None:
    """The log in a folder of logs that was written last: nan-detector-runs is such a folder."""
    try:
        logs = [f for f in folder.glob("*/events-rank*.jsonl") if f.is_file()]
        return max(logs, key=lambda f: f.stat().st_mtime).parent if logs else None
    except OSError:  # a folder that may not be looked into
        return None


def _nothing(digest: Digest) -> str:
    if not digest.problems:
        return "is empty"
    return f"holds no record of nan-detector (line {digest.problems[0].line}: {digest.problems[0].message})".replace(
        ".)", ")"
    )


@contextmanager
def _bar(size: int) -> Iterator[Callable[[int], object] | None]:
    if size < _LONG:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=size)
        yield lambda count: progress.advance(task, count)
