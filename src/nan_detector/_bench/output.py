"""Where a report goes: files, and the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nan_detector._bench.results import READ, Report
from nan_detector._bench.tables import (
    HEAD,
    TARGETS_HEAD,
    heading,
    machine_line,
    markdown,
    reading_lines,
    rows_of,
    target_rows,
    trend_lines,
    unfinished_line,
)
from nan_detector._render.ratios import ratio_bars

#: What a folder holds afterwards.
FILES = ("bench.json", "bench.md", "bench.png")
#: Columns that fit a wide terminal, and one of 80 columns.
_SHOWN = (
    "variant", "step ms", "ratio", "quartiles", "less A/A", "above one read", "forward", "peak", "answer", "trials",
)  # fmt: skip
_NARROW = ("variant", "step ms", "ratio", "less A/A", "above one read", "answer")
_WIDE_FROM = 140


def write(report: Report, folder: Path) -> list[Path]:
    """Write the report as JSON and Markdown, and as a picture where matplotlib is installed.

    Returns:
        The files that were written.
    """
    written = write_text(report, folder)
    try:
        draw(report, folder / "bench.png")
    except ImportError:
        return written
    return [*written, folder / "bench.png"]


def write_text(report: Report, folder: Path) -> list[Path]:
    """Write it as JSON and Markdown: what takes no time, for a report that is not finished yet.

    Each file is replaced as a whole, so that there is one at any moment.

    Returns:
        The files that were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "bench.json": json.dumps(report.to_dict(), indent=1, allow_nan=False),
        "bench.md": markdown(report),
    }
    for name, text in texts.items():
        draft = folder / f"{name}.part"
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, folder / name)
    return [folder / name for name in texts]


def draw(report: Report, path: Path) -> None:
    """The bars of full steps with one thread."""
    cells = [c for c in report.cells if c.threads == min(c.threads for c in report.cells)]
    groups: dict[str, dict[str, float]] = {}
    ours: list[str] = []
    for cell in cells:
        rows = [r for r in cell.rows[1:] if not r.variant.startswith("bare")]
        rows.sort(key=lambda r: (r.variant != READ, r.level is None))
        ours = [_short(r.variant) for r in rows if r.level is not None]
        groups[cell.workload] = {_short(r.variant): max(r.net, 1e-3) for r in rows}
    ratio_bars(groups, path, ours=ours)


def _short(variant: str) -> str:
    return variant.partition(": ")[0]


def show(report: Report, console: Console) -> None:
    """Print the report."""
    columns = _SHOWN if console.width >= _WIDE_FROM else _NARROW
    shown = [HEAD.index(name) for name in columns]
    for cell in report.cells:
        table = Table(title=Text(heading(cell)), title_justify="left")
        for name in columns:
            first = name == "variant"
            table.add_column(name, justify="left" if first else "right", no_wrap=not first, overflow="fold")
        for line in rows_of(cell):
            table.add_row(*(Text(line[i]) for i in shown))
        console.print(table)
        console.print()
    if report.targets():
        table = Table(title=Text("Targets"), title_justify="left")
        for i, name in enumerate(TARGETS_HEAD):
            table.add_column(name, justify="right" if 0 < i < len(TARGETS_HEAD) - 1 else "left", overflow="fold")
        for line in target_rows(report):
            table.add_row(*map(Text, line))
        console.print(table)
        console.print()
    if report.trends:
        console.print(Text('Growth of the cost of watch="step"'))
        for text in trend_lines(report.trends):
            console.print(Text(text))
        console.print()
    for name, why in report.missing.items():
        console.print(Text(f"Not measured: {name} ({why})."))
    if report.unfinished:
        console.print(Text(unfinished_line(report)))
    for text in reading_lines(report):
        console.print(Text(text))
    console.print(Text(machine_line(report)))
