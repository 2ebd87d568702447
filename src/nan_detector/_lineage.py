"""Births of non-finite values and who descends from them, while a step runs under the tracer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nan_detector._call_site import Called
from nan_detector._opinfo import OpInfo
from nan_detector._records import TensorStats
from nan_detector._source import Mark
from nan_detector._trace import BirthKind, GuiltyInput

Tensor = torch.Tensor

#: Sources come before operations: a parameter that was bad before the step explains all that follows.
RANK = {BirthKind.PARAMETER: 0, BirthKind.BUFFER: 0, BirthKind.INPUT: 1, BirthKind.LABEL: 1}
#: Sites kept per birth.
MAX_PASSED = 256
#: Elements of a storage, and births in it, up to which it is followed which elements each birth is in.
MAX_FOLLOWED = 1 << 22
MAX_TOLD_APART = 16


@dataclass(slots=True, eq=False)
class OpRecord:
    """One operation as the tracer saw it. In the backward, `forward` is the operation whose derivative this is."""

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
    called: Called | None = None  # the function of the library that it ran in, and where that was called


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
    column: int | None = None
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
        # Where a storage holds several births: the elements of each, bool per element of the whole storage.
        self._where: dict[int, dict[Gen, Tensor]] = {}
        self._unit: dict[int, int] = {}  # bytes per element there

    def of(self, t: Tensor) -> Line:
        """Births that `t`'s memory descends from (whether `t`'s own elements are bad is another question)."""
        if not self._lines:
            return EMPTY
        key = key_of(t)
        line = self._lines.get(key, EMPTY)
        where = self._where.get(key)
        if where is None:
            return line
        part = frozenset(g for g in line if (m := self.elements(t, g)) is None or bool(m.any()))
        return part or line

    def elements(self, t: Tensor, gen: Gen) -> Tensor | None:
        """Elements of `t` that descend from `gen`; None where that was not followed: all that are bad."""
        key = key_of(t)
        mask = self._where.get(key, {}).get(gen)
        if mask is None or self._unit[key] != t.element_size() or t.layout is not torch.strided:
            return None
        return _window(mask, t)

    def mark(self, t: Tensor, line: Line, elements: dict[Gen, Tensor] | None = None) -> None:
        """`t` was written and holds descendants of `line`, each in its `elements` of `t` (all, where not given)."""
        key = key_of(t)
        if key == 0 or not line:
            return
        before = self._lines.get(key, EMPTY)
        both = before | line
        if key not in self._alive:
            self._alive[key] = memory_of(t)
        self._lines[key] = both if len(both) == 1 else self._place(key, t, before, line, elements)

    def _place(self, key: int, t: Tensor, before: Line, line: Line, elements: dict[Gen, Tensor] | None) -> Line:
        both = before | line
        unit = t.element_size()
        count = t.untyped_storage().nbytes() // unit if t.layout is torch.strided else 0
        followed = 0 < count <= MAX_FOLLOWED and len(both) <= MAX_TOLD_APART and self._unit.get(key, unit) == unit
        if followed:
            where = self._where.setdefault(key, {})
            self._unit[key] = unit
            try:
                for gen in before - where.keys():
                    where[gen] = torch.ones(count, dtype=torch.bool, device=t.device)
                for mask in where.values():
                    _window(mask, t).fill_(False)
                for gen in line:
                    if gen not in where:
                        where[gen] = torch.zeros(count, dtype=torch.bool, device=t.device)
                    _window(where[gen], t).copy_(elements[gen] if elements and gen in elements else _TRUE)
            except RuntimeError:  # memory that overlaps itself
                followed = False
        if not followed:
            self._where.pop(key, None)
            self._unit.pop(key, None)
            return both
        return self._tidied(key) or both

    def _tidied(self, key: int) -> Line:
        """Forget births without elements. What is left."""
        where = self._where[key]
        for gen in [g for g, mask in where.items() if not bool(mask.any())]:
            del where[gen]
        return frozenset(where)

    def overwritten(self, t: Tensor) -> None:
        """`t` was written with finite values: if it is all of its memory, nothing is left there."""
        key = key_of(t)
        if key not in self._lines:
            return
        left: Line = EMPTY
        size = t._values().numel() if t.layout is torch.sparse_coo else t.numel()
        if size * t.element_size() < memory_of(t).nbytes():
            if t.layout is not torch.strided or key not in self._where or self._unit[key] != t.element_size():
                return
            for mask in self._where[key].values():
                _window(mask, t).fill_(False)
            left = self._lines[key] = self._tidied(key)
        if not left:
            del self._lines[key]
            for table in (self._alive, self._where, self._unit):
                table.pop(key, None)

    def held(self) -> Iterator[tuple[Line, Any]]:
        """Births and the memory that holds descendants of them."""
        for key, line in self._lines.items():
            yield line, self._alive.get(key)

    def union(self, tensors: Iterable[Tensor]) -> Line:
        """All births that any of `tensors` descends from."""
        out: Line = EMPTY
        for t in tensors:
            out |= self.of(t)
        return out


_TRUE = torch.tensor(True)


def _window(mask: Tensor, t: Tensor) -> Tensor:
    """The part of a storage's mask that belongs to `t`."""
    return mask.as_strided(t.size(), t.stride(), t.storage_offset())


def key_of(t: Tensor) -> int:
    """The identity of `t`'s memory, 0 where it has none (meta-like and wrapper tensors)."""
    storage = memory_of(t)
    return 0 if storage is None else int(storage._cdata)


def memory_of(t: Tensor) -> Any:
    """The memory that holds `t`'s numbers (of a sparse tensor, its values); None where it has none."""
    try:
        return t.untyped_storage()
    except (RuntimeError, NotImplementedError):
        pass
    try:
        return (t._values() if t.layout is torch.sparse_coo else t.values()).untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
