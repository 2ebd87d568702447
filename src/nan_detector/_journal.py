"""What stood in memory that a trace must leave as it was: kept before it is written, and put back."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch

from nan_detector._lineage import key_of
from nan_detector._op_values import is_dense, set_version, written_by
from nan_detector._opinfo import OpInfo

Tensor = torch.Tensor


class Journal:
    """The writes of a trace into memory that is not its own.

    Args:
        own: Memory that operations of the trace have made, by its key; it grows while the trace runs.
    """

    def __init__(self, own: Set[int]) -> None:
        self.own = own
        self.protected: Callable[[int], bool] = lambda key: False  # whether memory is to be put back, by its key
        # By the key of the memory: the whole of it, what it held, and its tensors with their versions.
        self.kept: dict[int, tuple[Tensor, Tensor, list[tuple[Tensor, int]]]] = {}

    def about_to_run(self, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep what stands in memory that the operation is about to write."""
        for t in written_by(info, args, kwargs):
            key = key_of(t)
            if key and key not in self.own and self.protected(key) and is_dense(t):
                if key not in self.kept:
                    whole = torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage())
                    self.kept[key] = (whole, whole.clone(), [])
                versions = self.kept[key][2]
                if not t.is_inference() and not any(t is known for known, _ in versions):
                    versions.append((t, t._version))

    def undo(self) -> None:
        """Give the memory its earlier contents back, and its tensors their version.

        A backward of the user's that is still to come must not take them for changed.
        """
        for whole, copy, versions in self.kept.values():
            whole.copy_(copy)
            for t, version in reversed(versions):
                set_version(t, version)
        self.kept.clear()
