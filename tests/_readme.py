"""The README's code, and the sample report in it, which is what the demo's first part prints.

Run as a program (``make readme``) this writes the report into README.md anew.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nan_detector._demo import story
from nan_detector._demo.data import digits
from nan_detector._demo.training import train_digits
from nan_detector._render.terminal import print_report

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"

SEED = 0  # the demo's default
_MARKER = "<!-- sample report:"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a Markdown text."""

    language: str
    code: str
    line: int  # of its first line of code, from 1
    start: int  # of its code within the text
    end: int


def blocks(text: str) -> list[Block]:
    """Every fenced block, in order."""
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1, m.start(2), m.end(2)) for m in _FENCE.finditer(text)]


def sample_block(text: str) -> Block:
    """The block behind the marker."""
    marker = text.index(_MARKER)
    return next(b for b in blocks(text) if b.start > marker)


def demo_report() -> str:
    """What the demo prints when it is run from the project's folder: paths in it are relative."""
    images, labels = digits()
    with _in(ROOT), story._one_thread(), story._quiet_logger():
        event = train_digits(images, labels, seed=SEED, log_dir=None).event
        assert event is not None, "the demo's first training stayed finite"
        out = io.StringIO()
        print_report(event, file=out)
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def with_report(text: str, report: str) -> str:
    """The README `text` with `report` for its sample."""
    block = sample_block(text)
    return text[: block.start] + report + text[block.end :]


@contextmanager
def _in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    README.write_text(with_report(README.read_text(encoding="utf-8"), demo_report()), encoding="utf-8")
