"""The programs in `docs/causes/`, and the page `docs/causes.md` that shows them.

Run as a program (``make docs``) this writes the page anew.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from nan_detector._causes import CAUSES, as_markdown

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "docs" / "causes"
PAGE = ROOT / "docs" / "causes.md"

#: Causes that no plain loop can be made to have, and why.
WITHOUT_PROGRAM = {
    "clip_spreads_nan": "in a watched step the gradient that was bad before the clip is found and named instead. This "
    "code is left for a step of which nothing but the clipping could be followed.",
    "compiler": "it takes a fault of the compiler, and every fault that is known gets mended.",
    "not_reproducible": "a program that fails each time is reproducible.",
}


def program(code: str, which: str) -> Path:
    """The file of one program; `which` is "failing" or "fixed"."""
    return PROGRAMS / code / f"{which}.py"


def page_text() -> str:
    """The text of `docs/causes.md`."""
    return as_markdown({code: _shown(code) for code in CAUSES})


def _shown(code: str) -> str:
    if code in WITHOUT_PROGRAM:
        return f"*No program:* {WITHOUT_PROGRAM[code]}"
    failing, fixed = (program(code, which).read_text(encoding="utf-8") for which in ("failing", "fixed"))
    changes = list(difflib.unified_diff(failing.splitlines(), fixed.splitlines(), lineterm="", n=0))
    changed = [line for line in changes[2:] if not line.startswith("@@")]
    return "\n".join(
        [
            f"[`failing.py`](causes/{code}/failing.py):",
            "",
            "```python",
            failing.rstrip(),
            "```",
            "",
            f"[`fixed.py`](causes/{code}/fixed.py) differs in this:",
            "",
            "```diff",
            *changed,
            "```",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(page_text(), encoding="utf-8")
