"""An event as a notebook shows it: the short answer in HTML, and the rest folded away.

A fragment in somebody else's page, which may be dark or light: it has no colours of its own but for a line at its
side, no style sheet and no script. Every string of the event is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from nan_detector._records import NaNEvent
from nan_detector._summary import SOURCE, Row, rows
from nan_detector._summary_title import title

#: Rows of a report that are the short answer.
ANSWER = ("where", SOURCE, "sample", "seen", "search", "why", "fix", "state")

_FRAME = "border-left:4px solid #c0392b;padding:0.2em 0 0.2em 1em;max-width:60em;overflow-wrap:anywhere"
_GRID = "display:grid;grid-template-columns:max-content minmax(0,1fr);gap:0.3em 1em;margin:0.6em 0"
_PRE = "margin:0;padding:0;background:none;font-size:inherit;white-space:pre-wrap"


def fragment(event: NaNEvent) -> str:
    """The event as a piece of HTML."""
    said = rows(event)
    more = [row for row in said if row.label not in ANSWER]
    folded = f"<details><summary>more</summary>{_grid(more)}</details>" if more else ""
    answer = _grid(row for row in said if row.label in ANSWER)
    return f'<div style="{_FRAME}"><strong>{escape(title(event))}</strong>{answer}{folded}</div>'


def _grid(said: Iterable[Row]) -> str:
    return f'<div style="{_GRID}">{"".join(map(_row, said))}</div>'


def _row(row: Row) -> str:
    label = "" if row.label == SOURCE else row.label
    if row.label == SOURCE:
        text = "\n".join(f"<b>{escape(x)}</b>" if x.startswith(">") else escape(x) for x in row.lines)
        body = f'<pre style="{_PRE}">{text}</pre>'
    else:
        body = "<br>".join(map(escape, row.lines))
    return f"<div>{escape(label)}</div><div>{body}</div>"
