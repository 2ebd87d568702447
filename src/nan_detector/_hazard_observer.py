"""Looks on while a healthy step is replayed, and keeps the operations that came near an edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector._hazard_edges import Edge, edges_of, overflow
from nan_detector._hazard_facts import ALL, UNKNOWN, Fact, Range, error_of, range_of, rounded
from nan_detector._hazard_scale import is_plain, limits_of
from nan_detector._lineage import OpRecord, key_of
from nan_detector._opinfo import OpInfo

Tensor = torch.Tensor


@dataclass(slots=True)
class Near:
    """One operation near an edge."""

    record: OpRecord
    kind: str
    distance: float
    value: float
    count: int
    message: str
    far: bool = False  # of interest only where it is seen to move towards its edge


class Observer:
    """Is shown each operation of a replay that gave finite values, and keeps those near an edge.

    Args:
        scaled: The loss is multiplied by a loss scale, which by design drives half gradients towards their end.
    """

    def __init__(self, scaled: bool = False) -> None:
        self.scaled = scaled
        self.found: dict[tuple[Any, str], Near] = {}
        self._facts: dict[int, Fact] = {}

    def __call__(
        self,
        info: OpInfo,
        record: OpRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ins: list[Tensor],
        values: list[Tensor],
        outs: list[Tensor],
    ) -> None:
        """One operation.

        Args:
            info: Facts about it.
            record: Where it stands.
            args: Its arguments.
            kwargs: Its keyword arguments.
            ins: Its floating arguments.
            values: Their values before it ran.
            outs: Its floating results, all finite.
        """
        before = [self._facts.get(key_of(t), UNKNOWN) for t in ins]
        mine = {id(t): (v, f) for t, v, f in zip(ins, values, before, strict=True)}
        backward = record.phase == "backward" and not record.own_frame
        if not backward:
            for edge in edges_of(info.op, args, kwargs, mine):
                self._near(record, edge)
        of = record.forward.info.op if backward and record.forward is not None else info.op
        end = overflow(info, args, values, outs, of=of, backward=backward, scaled=self.scaled)
        if end is not None:
            self._near(record, end)
        self._remember(info, args, kwargs, before, values, mine, outs)

    def _remember(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: list[Fact],
        values: list[Tensor],
        mine: dict[int, tuple[Tensor, Fact]],
        outs: list[Tensor],
    ) -> None:
        """What is known of the results."""
        for i, out in enumerate(outs):
            self._facts.pop(key_of(out), None)
            if i or not is_plain(out) or (info.mutates and out.numel() * out.element_size() < _nbytes(out)):
                continue
            low, high = range_of(info.op, args, kwargs, _known(mine))
            fact = Fact(
                (rounded(low, out.dtype), rounded(high, out.dtype)),
                error_of(info.op, args, before, values, out, limits_of(out.dtype).eps),
            )
            if fact != UNKNOWN:
                self._facts[key_of(out)] = fact

    def _near(self, record: OpRecord, edge: Edge) -> None:
        """Keep the nearest of each kind at each place."""
        distance = max(0.0, edge.distance)
        where = record.mark or record.module or "?"
        known = self.found.get((where, edge.kind))
        if known is None or distance < known.distance:
            count = 0 if edge.far else edge.count()
            self.found[(where, edge.kind)] = Near(
                record, edge.kind, distance, edge.value, count, edge.message, edge.far
            )


def _known(mine: dict[int, tuple[Tensor, Fact]]) -> Callable[[Any], Range]:
    def known(value: Any) -> Range:
        if isinstance(value, (int, float)):
            return (float(value), float(value))
        found = mine.get(id(value))
        return ALL if found is None else found[1].range

    return known


def _nbytes(t: Tensor) -> int:
    return int(t.untyped_storage().nbytes())
