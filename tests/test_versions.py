"""What is said about PyTorch versions is said the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def version(said: str) -> tuple[int, ...]:
    return tuple(int(part) for part in said.split("."))


def test_the_oldest_pytorch_is_the_one_that_was_tried() -> None:
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', text("pyproject.toml"))
    assert f"PyTorch {oldest} or newer" in text("README.md")
    assert f"PyTorch {oldest} or newer" in text("docs/versions.md")
    tried = re.findall(r"^\| ([\d.]+) \|", text("docs/versions.md").partition("What PyTorch itself")[0], re.MULTILINE)
    assert min(version(v) for v in tried)[: len(version(oldest))] == version(oldest)


def test_this_pytorch_is_one_that_is_asked_for() -> None:
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', text("pyproject.toml"))
    assert version(torch.__version__.split("+")[0].partition("a")[0])[:2] >= version(oldest)
