"""What mypy is told to overlook says why, so that nobody has to guess whether it still must be."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted(p for folder in ("src", "benchmarks", "examples") for p in (ROOT / folder).rglob("*.py"))

_IGNORE = re.compile(r"#\s*type:\s*ignore")
_WITH_REASON = re.compile(r"# type: ignore\[[a-z, -]+\]  # \S")


def without_reason(text: str) -> list[int]:
    """Lines with a comment that silences mypy and does not say what it silences, or why."""
    comments = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT)
    return [t.start[0] for t in comments if _IGNORE.match(t.string) and not _WITH_REASON.match(t.string)]


def test_every_ignored_type_error_has_its_reason() -> None:
    found = {str(p.relative_to(ROOT)): without_reason(p.read_text("utf-8")) for p in FILES}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("x = f()  # type: ignore", True),
        ("x = f()  # type: ignore[attr-defined]", True),
        ("x = f()  # type: ignore  # any reason", True),
        ("x = f()  # type: ignore[attr-defined]  # the stubs lack it", False),
        ("x = '# type: ignore'", False),
    ],
)
def test_a_reason_is_told_from_none(line: str, seen: bool) -> None:
    assert without_reason(line + "\n") == ([1] if seen else [])
