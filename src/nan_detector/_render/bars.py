"""Progress bars of tqdm, which stand in the last line of the terminal: put aside while something else is written."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO


@contextlib.contextmanager
def bars_aside(file: TextIO) -> Iterator[None]:
    """The bars that stand where `file` is shown are wiped away before the block, and drawn again after it."""
    with contextlib.ExitStack() as stack:
        tqdm = _tqdm()
        if tqdm is not None:
            with contextlib.suppress(Exception):  # another release of tqdm; the report comes first
                stack.enter_context(tqdm.external_write_mode(file=file))
        yield


def end_bars() -> None:
    """Leave the bars as they are and begin a new line: what drew them has ended."""
    tqdm = _tqdm()
    for bar in list(tqdm._instances) if tqdm is not None else ():
        with contextlib.suppress(Exception):
            bar.close()


def _tqdm() -> Any:
    """Tqdm's class, where the program uses it and a bar is open."""
    cls = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    return cls if getattr(cls, "_instances", None) else None
