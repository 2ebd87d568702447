"""A report for a terminal: the plain report's words, with colour, and wrapped to the width.

Without a terminal nothing is added: what goes to a file or a pipe is the plain report, character for character.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text

from nan_detector._digest import Digest
from nan_detector._records import NaNEvent
from nan_detector._render.bars import bars_aside
from nan_detector._render.overview import Line, overview
from nan_detector._source_text import clean
from nan_detector._summary import SOURCE, Row, prefixes, report, rows
from nan_detector._summary_title import title

_NARROWEST = 40  # below this, wrapped text would be a ladder of single words
_CONTINUATION = 4  # columns that a wrapped line of source stands further in than the line's own text

# The sixteen ANSI colours only: they follow the user's theme, light or dark.
_TITLE = {"error": "bold red", "silent": "bold yellow", "handled": "bold"}
_LABEL = "bold cyan"
_STYLES = {"fix": "green", "where": "bold"}
_CONTEXT, _GUILTY, _CALL = "dim", "bold", "bold red underline"
#: SGR codes of an overview's lines.
_LINES = {"heading": "1", "label": "1;36", "note": "2"}

#: Signs that a terminal without Unicode cannot show, and what stands for them there.
_PLAIN_SIGNS = str.maketrans({"→": "->", "·": "-", "…": "...", "×": "x", "²": "^2", "\ufffd": "?"})


def render(event: NaNEvent, *, width: int | None = None, color: bool | None = None) -> str:
    """The report of one event as a string without a newline at its end.

    Args:
        event: What is reported.
        width: Columns to wrap at; None for those of the terminal on standard error, or no wrapping where that is none.
        color: Whether to colour; None decides by NO_COLOR, FORCE_COLOR, TERM and whether standard error is a terminal.

    Returns:
        Text with ANSI colours if coloured. Neither coloured nor wrapped it is equal to `report(event)`.
    """
    return _render(event, sys.stderr, width, color)


def print_report(event: NaNEvent, file: TextIO | None = None, *, told_at: int | None = None) -> None:
    """Write the report to `file` (standard error), coloured and wrapped if that is a terminal.

    Of a story that was told at step `told_at` only what is new is written. Signs that the file's encoding lacks are
    replaced: a report never fails for its typography.
    """
    target = sys.stderr if file is None else file
    text = _render(event, target, None, None, told_at) + "\n"
    with bars_aside(target):
        target.write(_encodable(text, getattr(target, "encoding", None)))
        target.flush()


def print_overview(digest: Digest, file: TextIO | None = None, *, every_event: bool = False) -> None:
    """Write a whole log's overview to `file` (standard output), coloured and wrapped if that is a terminal.

    Args:
        digest: The log.
        file: Where to.
        every_event: Show each event's whole report, however many there are.
    """
    target = sys.stdout if file is None else file
    colored = _wants_color(target)
    for part in overview(digest, every_event=every_event):
        text = _render(part, target, None, None) if isinstance(part, NaNEvent) else _line(part, colored)
        target.write(_encodable(text + "\n", getattr(target, "encoding", None)))
    target.flush()


def _line(line: Line, colored: bool) -> str:
    style = _LINES.get(line.kind)
    return f"\x1b[{style}m{line.text}\x1b[0m" if colored and style else line.text


def _render(event: NaNEvent, file: TextIO, width: int | None, color: bool | None, told_at: int | None = None) -> str:
    colored = _wants_color(file) if color is None else color
    if width is None and _is_terminal(file):
        width = shutil.get_terminal_size().columns
    if width is None and not colored:
        return report(event, told_at=told_at)
    # A report in colour that goes to no terminal (CI logs) is not wrapped: nobody knows how wide it is shown.
    columns = max(width, _NARROWEST) if width is not None else 100_000
    out = io.StringIO()
    console = Console(
        file=out,
        width=columns,
        force_terminal=colored,
        color_system="standard" if colored else None,
        no_color=False,
        legacy_windows=False,
        highlight=False,
        soft_wrap=True,
    )
    for line in _lines(event, columns, console, told_at):
        console.print(line, end="\n", soft_wrap=True)
    return out.getvalue().rstrip("\n")


def _lines(event: NaNEvent, width: int, console: Console, told_at: int | None) -> list[Text]:
    header = Text(title(event), style=_TITLE.get(event.severity, "bold"))
    lines = [Text.assemble(" ", part) for part in header.wrap(console, width - 1, overflow="fold")]
    lines.append(Text())
    for row in rows(event, told_at=told_at):
        for prefix, line in zip(prefixes(row), row.lines, strict=True):
            lines += _wrapped(prefix, _styled(row, line, event.call), row.label, width, console)
    for text in lines:
        text.rstrip()
    return lines


def _wrapped(prefix: str, text: Text, label: str, width: int, console: Console) -> list[Text]:
    code_column = text.plain.find("|") + _CONTINUATION if label == SOURCE else 0
    parts = text.wrap(console, width - len(prefix) - code_column, overflow="fold", tab_size=4)
    rest = " " * (len(prefix) + code_column)
    return [Text.assemble((rest if i else prefix, "" if i else _LABEL), part) for i, part in enumerate(parts)]


def _styled(row: Row, line: str, call: str | None) -> Text:
    if row.label != SOURCE:
        return Text(line, style=_STYLES.get(row.label, ""))
    if not line.startswith(">"):
        return Text(line, style=_CONTEXT)
    text = Text(line, style=_GUILTY)
    text.stylize("bold red", 0, 1)
    wanted = clean(call) if call else ""
    start = line.find("|") + 1
    # Underlined only where it is certain: a call written twice on the line could be either of them.
    if wanted and line.count(wanted, start) == 1:
        at = line.index(wanted, start)
        text.stylize(_CALL, at, at + len(wanted))
    return text


def _is_terminal(file: TextIO) -> bool:
    try:
        return file.isatty()
    except (AttributeError, ValueError):  # a bare object in place of a file, or one that was closed
        return False


def _wants_color(file: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return _is_terminal(file) and os.environ.get("TERM") != "dumb"


def _encodable(text: str, encoding: str | None) -> str:
    try:
        text.encode(encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        name = encoding or "ascii"
        try:
            return text.translate(_PLAIN_SIGNS).encode(name, "replace").decode(name)
        except LookupError:
            return text.translate(_PLAIN_SIGNS).encode("ascii", "replace").decode("ascii")
    return text
