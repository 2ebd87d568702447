"""Births of non-finite values and who descends from them, while a step runs under the tracer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from nan_detector._opinfo import OpInfo
from nan_detector._records import TensorStats
from nan_detector._source import Mark
from nan_detector._trace import BirthKind, GuiltyInput

Tensor = torch.Tensor

#: Sources come before operations: a parameter that was bad before the step explains all that follows.
RANK = {BirthKind.PARAMETER: 0, BirthKind.BUFFER: 0, BirthKind.INPUT: 1, BirthKind.LABEL: 1}
#: Sites kept per birth.
MAX_PASSED = 256


@dataclass(slots=True, eq=False)
class OpRecord:
    """One operation as the tracer saw it. `forward` is, in the backward pass, the operation whose derivative this is."""

    index: int
    info: OpInfo
    phase: str
    mark: Mark | None
    module: tuple[str | None, str] | None
    api: str | None
    inputs: list[Any] = field(default_factory=list)  # tensors, or weak references to them
    args: tuple[str, ...] = ()
    forward: OpRecord | None = None
    node: str | None = None
    own_frame: bool = False  # the mark is a user frame inside the backward (a custom Function, a recomputation)
    births: list[Gen] = field(default_factory=list)
    numel: int = 0  # elements of its first bad result


@dataclass(slots=True, eq=False)
class Gen:
    """One birth."""

    order: tuple[int, int]
    kind: BirthKind
    intended: bool
    record: OpRecord
    name: str | None = None
    inputs: tuple[GuiltyInput, ...] = ()
    output: TensorStats | None = None
    guilty: int = 0
    first_bad: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    passed: list[OpRecord] = field(default_factory=list)
    ended: list[OpRecord] = field(default_factory=list)  # operations in which it vanished
    note: str = ""
    last: Any = None  # weak reference to the tensor that carried it last
    only_negative: bool = False  # -inf alone
    overflow: bool = False  # finite operands, infinite result, no pole of the function involved

    def pass_through(self, record: OpRecord) -> None:
        """Note that `record` carried it on."""
        if len(self.passed) < MAX_PASSED:
            self.passed.append(record)


Line = frozenset[Gen]
EMPTY: Line = frozenset()


class Lineage:
    """Which memory holds descendants of which births. Keys are storages, so that views share."""

    def __init__(self) -> None:
        self._lines: dict[int, Line] = {}
        self._alive: dict[int, Any] = {}  # marked storages: the address of a dead one would be given out again

    def of(self, t: Tensor) -> Line:
        """Births that `t`'s memory descends from (whether `t`'s own elements are bad is another question)."""
        if not self._lines:
            return EMPTY
        return self._lines.get(key_of(t), EMPTY)

    def mark(self, t: Tensor, line: Line) -> None:
        """`t` holds descendants of `line`, in addition to what its memory held."""
        key = key_of(t)
        if key == 0 or not line:
            return
        self._lines[key] = self._lines.get(key, EMPTY) | line
        if key not in self._alive:
            self._alive[key] = t.untyped_storage()

    def overwritten(self, t: Tensor) -> None:
        """`t` was written with finite values: if it is all of its memory, nothing is left there."""
        key = key_of(t)
        if key in self._lines and t.numel() * t.element_size() >= t.untyped_storage().nbytes():
            del self._lines[key]
            self._alive.pop(key, None)

    def union(self, tensors: Iterable[Tensor]) -> Line:
        """All births that any of `tensors` descends from."""
        out: Line = EMPTY
        for t in tensors:
            out |= self.of(t)
        return out


def key_of(t: Tensor) -> int:
    """The identity of `t`'s memory, 0 where it has none (sparse, meta-like and wrapper tensors)."""
    try:
        return int(t.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0
