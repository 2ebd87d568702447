"""Tensor subclasses and lazy modules under a dispatch mode, before PyTorch 2.6.

There the result of a subclass's call cannot be turned into the subclass while any dispatch mode is on the stack:
"the raw Tensor object is already associated to a python object". With the modes off for that one conversion it can.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

_HOME: Any = sys.modules["torch._tensor"]
_FAILS = not hasattr(torch.compiler, "set_stance")  # which came with 2.6, as the remedy did

_lock = threading.Lock()
_originals: list[Any] = []  # one for each tracer on a stack


def convert_outside_modes() -> None:
    """Until `convert_as_before`, a subclass's results become it outside all dispatch modes."""
    if not _FAILS:
        return
    with _lock:
        original = _originals[0] if _originals else _HOME._convert
        _originals.append(original)
        if len(_originals) > 1:
            return

    def convert(result: Any, cls: Any) -> Any:
        if cls is torch.Tensor:
            return result
        with _disable_current_modes():
            return original(result, cls)

    _HOME._convert = convert


def convert_as_before() -> None:
    """Put PyTorch's own back, when the last tracer leaves."""
    with _lock:
        original = _originals.pop() if _originals else None
        if original is not None and not _originals:
            _HOME._convert = original
