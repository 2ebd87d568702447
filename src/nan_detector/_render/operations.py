"""The operations around a birth as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from nan_detector._answers import OpSeen
from nan_detector._records import TensorStats
from nan_detector._source_text import clean
from nan_detector._summary import describe

#: Columns where the output is no terminal, whose width nobody knows.
_WIDE = 160


def print_operations(operations: Sequence[OpSeen], file: TextIO) -> None:
    """Write the table to `file`; the birth's row is marked by a sign, and by colour where there is one."""
    terminal = bool(getattr(file, "isatty", lambda: False)())
    console = Console(file=file, width=None if terminal else _WIDE, highlight=False)
    console.print(operations_table(operations))


def operations_table(operations: Sequence[OpSeen]) -> Table:
    """One row for each operation, in the order in which they ran."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "operation", "where", "inputs", "output"):
        table.add_column(name, overflow="fold")
    for op in operations:
        style = "bold red" if op.is_birth else ""
        place = f"{op.layer_name or op.phase}  {_short(op.where)}"
        inputs = "\n".join(_described(i) for i in op.inputs) or "-"
        cells = (">" if op.is_birth else "", op.op, place, inputs, _described(op.output))
        table.add_row(*(Text("\n".join(clean(line) for line in c.split("\n"))) for c in cells), style=style)
    return table


def _described(stats: TensorStats | None) -> str:
    return "-" if stats is None else describe(stats)


def _short(where: str) -> str:
    return "/".join(where.replace("\\", "/").split("/")[-2:])
