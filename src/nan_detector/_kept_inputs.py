"""Inputs of operations, kept as long as there is room: what a bad result, or a bad derivative, is described from."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._lineage import key_of
from nan_detector._op_values import written_by
from nan_detector._opinfo import OpInfo

Tensor = torch.Tensor

#: Inputs of forward operations kept for the description of a bad derivative, in bytes.
KEEP_INPUT_BYTES = 64 * 2**20
#: Largest tensor, in elements, that is copied before an operation overwrites it.
MAX_COPIED = 1 << 20


class KeptInputs:
    """What one trace has kept."""

    def __init__(self) -> None:
        # Of a live trace: bytes that may be kept beside what the program itself keeps.
        self.room: Callable[[], int] | None = None
        self._bytes = 0

    def keep(self, ins: list[Tensor]) -> list[Any]:
        """`ins`; in the place of those for which there is no room, weak references."""
        kept: list[Any] = []
        # The rest of the room is for what is about to be overwritten.
        most = KEEP_INPUT_BYTES if self.room is None else self.room() * 3 // 4
        for t in ins:
            size = t.numel() * t.element_size() if t.layout is torch.strided else 0
            if self._bytes + size <= most:
                self._bytes += size
                kept.append(t)
            else:
                kept.append(weakref.ref(t))
        return kept

    def before(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], ins: list[Tensor]) -> list[Tensor]:
        """The inputs as they are, also when the operation has written; those that are too large for it themselves."""
        written = {key_of(t) for t in written_by(info, args, kwargs)}
        room = math.inf if self.room is None else self.room() - self._bytes
        before = []
        for t in ins:
            size = t.numel() * t.element_size()
            if t.numel() <= MAX_COPIED and size <= room and key_of(t) in written:
                room -= size
                t = t.detach().clone()
            before.append(t)
        return before
