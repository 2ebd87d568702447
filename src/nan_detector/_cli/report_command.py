"""Make a page of a log: one HTML file that loads nothing from anywhere.

LOG is the folder that --log or log_dir named, or a file in it. The page has the answer first: where, why, the fix;
then what was tried, how it spread, the values, and the run's timeline in pictures. Torch is not needed. Without -o it
is written beside the log. The exit status is 0 when it was written, and 2 when the log cannot be read or the page
cannot be written. Needs jinja2 and matplotlib: pip install "nan-detector[report]".

For example:

  nan-detector report runs/1

  nan-detector report runs/1 -o last-night.html
"""

from __future__ import annotations

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from nan_detector._cli import Action, CommandError
from nan_detector._cli.logs import read

_NEEDED = ("jinja2", "matplotlib")
_STANDARD_OUTPUT = "-"


def command(
    log: Annotated[Path, typer.Argument(metavar="LOG", help="Folder of an event log, or one of its files.")],
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="The page; - for standard output. LOG/report.html otherwise."),
    ] = None,
) -> Action:
    """Read the options of ``nan-detector report``."""

    def act() -> int:
        if missing := [name for name in _NEEDED if not _is_there(name)]:
            raise CommandError(f'a report needs {" and ".join(missing)}: pip install "nan-detector[report]"')
        digest = read(log)
        path = (log / "report.html" if log.is_dir() else log.with_suffix(".html")) if out is None else Path(out)
        if out != _STANDARD_OUTPUT and any(_same(path, file) for file in digest.files):
            raise CommandError(f"-o {str(path)!r} is the log itself: name another file for the page.")
        from nan_detector._render.page import page

        text = page(digest, str(log)).encode("utf-8", "replace")
        if out == _STANDARD_OUTPUT:
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
            return 0
        _write(path, text)
        sys.stderr.write(f"wrote {path}\n")
        return 0

    return act


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a stand-in module without a spec
        return name in sys.modules


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False


def _write(path: Path, text: bytes) -> None:
    """Write it whole or not at all: a page that is open in a browser, or sent by mail, is never half of one."""
    if path.exists() and not path.is_file():  # a pipe, a device: what takes its place would be another thing
        try:
            path.write_bytes(text)
        except OSError as error:
            raise _unwritable(path, error) from None
        return
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".report-", suffix=".html")
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with open(handle, "wb") as file:
            file.write(text)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except OSError as error:
        os.unlink(name)
        raise _unwritable(path, error) from None


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _unwritable(path: Path, error: OSError) -> CommandError:
    return CommandError(f"-o {str(path)!r} cannot be written ({error.strerror}): name another file with -o.")
