"""Where a report goes: files, and the terminal."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nan_detector._bench.results import Report
from nan_detector._bench.tables import HEAD, heading, machine_line, markdown, reading_lines, rows_of, trend_lines
from nan_detector._render.ratios import ratio_bars

#: What a folder holds afterwards.
FILES = ("bench.json", "bench.md", "bench.png")
#: Columns that fit a wide terminal, and one of 80 columns.
_SHOWN = ("variant", "step ms", "ratio", "quartiles", "less A/A", "forward", "peak", "answer", "trials")
_NARROW = ("variant", "step ms", "ratio", "less A/A", "answer")
_WIDE_FROM = 140


def write(report: Report, folder: Path) -> list[Path]:
    """Write the report as JSON and Markdown, and as a picture where matplotlib is installed.

    Returns:
        The files that were written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(report.to_dict(), indent=1, allow_nan=False), encoding="utf-8")
    (folder / "bench.md").write_text(markdown(report), encoding="utf-8")
    written = [folder / "bench.json", folder / "bench.md"]
    try:
        draw(report, folder / "bench.png")
    except ImportError:
        return written
    return [*written, folder / "bench.png"]


def draw(report: Report, path: Path) -> None:
    """The bars of full steps with one thread."""
    cells = [c for c in report.cells if c.threads == min(c.threads for c in report.cells)]
    groups: dict[str, dict[str, float]] = {}
    ours = 0
    for cell in cells:
        rows = [r for r in cell.rows[1:] if not r.variant.startswith("bare")]
        rows.sort(key=lambda r: r.level is None)
        ours = sum(r.level is not None for r in rows)
        groups[cell.workload] = {r.variant.partition(": ")[0]: max(r.net, 1e-3) for r in rows}
    ratio_bars(groups, path, ours=ours)


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
    if report.trends:
        console.print(Text('Growth of the cost of watch="step"'))
        for text in trend_lines(report.trends):
            console.print(Text(text))
        console.print()
    for name, why in report.missing.items():
        console.print(Text(f"Not measured: {name} ({why})."))
    for text in reading_lines(report):
        console.print(Text(text))
    console.print(Text(machine_line(report)))
