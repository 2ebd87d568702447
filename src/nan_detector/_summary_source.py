"""The source of a bad value in a report: its file and line, and the lines around it."""

from __future__ import annotations

import linecache
import os
from collections.abc import Sequence

from nan_detector._notebook import is_cell
from nan_detector._records import Location
from nan_detector._source import source_context
from nan_detector._source_text import clean

_LARGEST_SOURCE_FILE = 4 * 2**20
_MOST_CONTINUATIONS = 3


def place(location: Location) -> str:
    """File and line, or cell and line: `models/norm.py:41`, `cell In[3], line 7`."""
    if location.cell is not None:
        return clean(f"cell {location.cell}, line {location.line}")
    if is_cell(location.file):  # of a notebook elsewhere: a path that leads nowhere would only mislead
        return f"a notebook's cell, line {location.line}"
    return clean(f"{_short_path(location.file)}:{location.line}")


def _short_path(file: str) -> str:
    try:
        here = os.getcwd()
        inside = os.path.relpath(file, here)
    except (OSError, ValueError):  # the folder is gone; the file is on another drive or has a name no path can have
        return file
    at_root = os.path.dirname(here) == here
    outside = at_root or not os.path.isabs(file) or inside.startswith(os.pardir)
    return file if outside else inside.replace(os.sep, "/")


def source_lines(location: Location) -> list[str]:
    """The guilty line, marked, and those around it."""
    numbered = _numbered_source(location)
    gutter = max((len(str(number)) for number, _ in numbered), default=0)
    return [f"{'>' if n == location.line else ' '} {n:>{gutter}} |   {text}" for n, text in numbered]


def _numbered_source(location: Location) -> list[tuple[int, str]]:
    """The guilty line, the line above it, and those below that belong to an open bracket."""
    below = source_context(location, before=0, after=_MOST_CONTINUATIONS) if _may_read(location.file) else []
    if not below:  # the file is elsewhere or was edited since: what the record itself says is still right
        return [(location.line, location.source_line)] if location.source_line.strip() else []
    texts = [text for _, text in below]
    after = 0
    while after < len(texts) - 1 and _open_brackets(texts[: after + 1]) > 0:
        after += 1
    context = source_context(location, before=1, after=after)
    return context if context[0][1].strip() else context[1:]


def _may_read(file: str) -> bool:
    """True where reading `file` is quick and stays on this machine: the name may come from somebody else's log."""
    if file in linecache.cache:
        return True
    if file.startswith(("\\\\", "//")):  # a network share: Windows would send it the user's credentials
        return False
    try:
        return os.path.isfile(file) and os.path.getsize(file) <= _LARGEST_SOURCE_FILE
    except (OSError, ValueError):
        return False


def _open_brackets(lines: Sequence[str]) -> int:
    text = "".join(lines)
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))
