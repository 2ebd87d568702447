"""A tensor that no operation of the trace made brings non-finite values: a birth of its own kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nan_detector import _finite
from nan_detector._lineage import RANK, Gen, Line, OpRecord
from nan_detector._op_values import mask_like
from nan_detector._opinfo import OpInfo
from nan_detector._trace import BirthKind

if TYPE_CHECKING:
    from nan_detector._tracer import OpTracer

Tensor = torch.Tensor


def brought_in(tracer: OpTracer, info: OpInfo, t: Tensor) -> Line:
    """The birth of what tensor `t` from outside brings into an operation; `t` is marked with it."""
    known = tracer.outside(t)
    kind, name = known if known is not None else (BirthKind.OPAQUE, None)
    stats = _finite.stats(t)
    only_negative = stats.nan_count == 0 and stats.posinf_count == 0
    if known is None and t.numel() == 1 and tracer.barrier is not None:
        kind = BirthKind.CONSTANT
    intended = (
        only_negative
        and kind in (BirthKind.BUFFER, BirthKind.INPUT, BirthKind.LABEL, BirthKind.CONSTANT, BirthKind.OPAQUE)
    ) or (kind is BirthKind.CONSTANT and stats.nan_count == 0)
    if kind is BirthKind.OPAQUE and intended and not mask_like(stats):
        intended = False
    record = tracer.placed(info, torch._C._current_autograd_node())
    if kind is BirthKind.GRADIENT:
        # Handed to the backward that is running: its call is the place, not a derivative.
        record = OpRecord(tracer.operations, info, "backward", tracer.mark, None, "backward")
    gen = Gen(
        (RANK.get(kind, 2), tracer.operations),
        kind,
        intended,
        record,
        name=name,
        output=stats,
        only_negative=only_negative,
    )
    gen.guilty = stats.bad_count
    gen.first_bad = _finite.first_bad_index(t)
    gen.rows, gen.column = _finite.bad_rows(t), _finite.bad_column(t)
    tracer.born(gen)
    line: Line = frozenset((gen,))
    tracer.lineage.mark(t, line)
    return line
