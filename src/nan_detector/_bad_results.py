"""An operation gave a non-finite result: what was carried into it, what was born in it, and of which elements."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

import torch

from nan_detector import _finite
from nan_detector._elements import spread
from nan_detector._lineage import MAX_FOLLOWED, MAX_TOLD_APART, RANK, Gen, Line, OpRecord
from nan_detector._op_values import (
    described,
    finite_fast,
    finite_number,
    guilty_input,
    has_nan,
    literal_values,
    mask_like,
    numbers_in,
)
from nan_detector._opinfo import OpInfo
from nan_detector._trace import BirthKind
from nan_detector._underflow import underflow

if TYPE_CHECKING:
    from nan_detector._tracer import OpTracer

Tensor = torch.Tensor

_current_node = torch._C._current_autograd_node

#: Poles: where these give an infinity, nothing overflowed.
_POLES = {
    "div",
    "reciprocal",
    "log",
    "log2",
    "log10",
    "log1p",
    "rsqrt",
    "atanh",
    "logit",
    "pow",
    "digamma",
    "lgamma",
    "tan",
}


def bad_result(
    tracer: OpTracer,
    func: Any,
    info: OpInfo,
    record: OpRecord,
    ins: list[Tensor],
    bad: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: list[Tensor],
    bad_before: dict[int, Line],
) -> None:
    values = before if info.mutates and before else ins
    shown = values if info.mutates else list(described((args, kwargs)))
    carried = bad_before if info.mutates else tracer.bad_inputs(info, ins)
    if not carried and not info.mutates:
        carried = _opaque_inputs(tracer, info, ins)
    line = tracer.lines(carried)
    scalars = [v for v in numbers_in((args, kwargs)) if not finite_number(v)]
    literal = literal_values(info, args, kwargs, scalars)
    out = bad[0]
    fresh: list[Gen] = []
    if not line and scalars and not info.literal:
        if not tracer.last_scalar and _made_nan_of_infinity(info, scalars, values, out):
            fresh.append(_birth(tracer, record, BirthKind.INTENDED_MET, False, info, shown, out, out.isnan()))
        else:
            line = tracer.last_scalar or _constant(tracer, record, scalars)
    if info.literal and literal is not None and math.isnan(literal) and not line:
        line = tracer.last_scalar  # a tensor made of a number that was read from another
    if info.literal and literal is not None and not line:
        # A literal NaN is never intended: where it reaches the loss, the call that chose it is to blame.
        fresh.append(_birth(tracer, record, BirthKind.CONSTANT, not math.isnan(literal), info, shown, out, None))
    elif info.literal and literal is not None and not (math.isnan(literal) and line <= tracer.last_scalar):
        line |= {_birth(tracer, record, BirthKind.CONSTANT, not math.isnan(literal), info, shown, out, None)}
    elif not line and not fresh:
        fresh.append(_birth(tracer, record, BirthKind.OPERATION, False, info, shown, out, None))
    elif line and all(g.intended for g in line):
        met = _intended_met(tracer, info, record, line, carried, values, out)
        if met is not None:
            fresh.append(met)
    if line and info.pointwise and carried and not (info.literal and literal is not None):
        also = _also_born(tracer, info, record, carried, values, out)
        if also is not None:
            fresh.append(also)
    if tracer.evidence is not None:
        for gen in fresh:
            tracer.evidence.born(gen, info, func, args, kwargs, ins, values, out)
    for gen in line:
        gen.pass_through(record)
    new = line | frozenset(fresh)
    where = None
    if len(new) > 1 and len(bad) == 1:
        where = _told_apart(tracer, func, info, ins, args, kwargs, values, carried, new, out)
        new = frozenset(g for g in new if where is None or g in where)
    for o in bad:
        tracer.lineage.mark(o, new, where)
    last = weakref.ref(bad[0])
    for gen in new:
        gen.last = last


def _told_apart(
    tracer: OpTracer,
    func: Any,
    info: OpInfo,
    ins: list[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    values: list[Tensor],
    carried: dict[int, Line],
    line: Line,
    out: Tensor,
) -> dict[Gen, Tensor] | None:
    """The bad elements of `out` that descend from each birth; births that are in none of them are left out."""
    if len(line) > MAX_TOLD_APART or out.numel() > MAX_FOLLOWED or out.layout is not torch.strided:
        return None
    bad = _finite.bad_mask(out)
    found: dict[Gen, Tensor] = {}
    rest = bad
    came = frozenset().union(*carried.values()) & line
    for gen in came:
        masks = {}
        for i in (i for i, births in carried.items() if gen in births):
            known = tracer.lineage.elements(ins[i], gen)
            masks[i] = _finite.bad_mask(values[i]) if known is None else _finite.bad_mask(values[i]) & known
        reached = spread(info, func, args, kwargs, ins, masks, out)
        found[gen] = bad if reached is None else bad & reached
        rest = rest & ~found[gen]
    unexplained = bool(rest.any())
    for gen in line - came:
        found[gen] = rest if unexplained else bad
    if unexplained and came == line:  # the rule for this operation was too narrow
        return None
    return {g: mask for g, mask in found.items() if bool(mask.any())} or None


def _intended_met(
    tracer: OpTracer,
    info: OpInfo,
    record: OpRecord,
    line: Line,
    carried: dict[int, Line],
    values: list[Tensor],
    out: Tensor,
) -> Gen | None:
    """Intended infinities alone came in: a birth if a NaN came out, unless the value itself is the mistake here."""
    if _finite.stats(out).nan_count == 0 or any(has_nan(values[i]) for i in carried):
        return None
    sources = [g for g in line if g.kind in (BirthKind.INPUT, BirthKind.LABEL)]
    plain = not info.mask_aware and all(g.output is not None and not mask_like(g.output) for g in sources)
    if sources and (info.contracts or plain):
        # -inf in a batch is a mask when it meets a softmax; in a matrix product, or among other numbers in
        # plain arithmetic, it is a bad feature or label.
        for g in sources:
            g.intended = False
        return None
    buffers = [g for g in line if g.kind is BirthKind.BUFFER]
    if buffers and len(buffers) == len(line) and not info.mask_aware and all(_is_no_mask(g) for g in buffers):
        for g in buffers:
            g.intended = False
        return None
    met = _birth(tracer, record, BirthKind.INTENDED_MET, False, info, values, out, out.isnan())
    if buffers and not met.note:
        met.note = f"the infinities come from the buffer {buffers[0].name}"
    return met


def _is_no_mask(gen: Gen) -> bool:
    """True for a vector of numbers of which some are infinite: a mask is a table, or holds nothing else than 0."""
    return gen.output is not None and len(gen.output.shape) <= 1 and not mask_like(gen.output)


def _also_born(
    tracer: OpTracer,
    info: OpInfo,
    record: OpRecord,
    carried: dict[int, Line],
    values: list[Tensor],
    out: Tensor,
) -> Gen | None:
    """In a pointwise operation: bad elements whose own operands are all finite are a birth of their own."""
    if out.numel() == 1:  # its only element has a bad operand: that of `carried`
        return None
    mask = _finite.bad_mask(out)
    try:
        for i in carried:
            mask = mask & ~_finite.bad_mask(values[i]).expand(mask.shape)
    except RuntimeError:  # shapes that do not broadcast: not element by element after all
        return None
    if not bool(mask.any()):
        return None
    return _birth(tracer, record, BirthKind.OPERATION, False, info, values, out, mask)


def _opaque_inputs(tracer: OpTracer, info: OpInfo, ins: list[Tensor]) -> dict[int, Line]:
    """Inputs that went bad without any operation writing them: code that the dispatcher does not see."""
    found: dict[int, Line] = {}
    for i, t in enumerate(ins):
        if not finite_fast(t):
            known = tracer.outside(t)
            kind = known[0] if known is not None else BirthKind.OPAQUE
            record = tracer.placed(info, _current_node())
            gen = Gen((RANK.get(kind, 2), tracer.operations), kind, False, record, name=known[1] if known else None)
            gen.output = _finite.stats(t)
            gen.guilty = gen.output.bad_count
            gen.first_bad, gen.rows = _finite.first_bad_index(t), _finite.bad_rows(t)
            gen.column = _finite.bad_column(t)
            tracer.born(gen)
            line: Line = frozenset((gen,))
            tracer.lineage.mark(t, line)
            found[i] = line
    return found


def _made_nan_of_infinity(info: OpInfo, scalars: list[Any], values: list[Tensor], out: Tensor) -> bool:
    """True where a product with an infinity that the code names made NaN: 0 times infinity, and no bad number."""
    infinite = all(isinstance(v, float) and math.isinf(v) for v in scalars)
    return infinite and info.op == "mul" and not any(has_nan(v) for v in values) and has_nan(out)


def _constant(tracer: OpTracer, record: OpRecord, scalars: list[Any]) -> Line:
    gen = Gen((2, tracer.operations), BirthKind.CONSTANT, False, record, note=f"the number {scalars[0]!r}")
    tracer.born(gen)
    return frozenset((gen,))


def _birth(
    tracer: OpTracer,
    record: OpRecord,
    kind: BirthKind,
    intended: bool,
    info: OpInfo,
    values: list[Tensor],
    out: Tensor,
    mask: Tensor | None,
) -> Gen:
    gen = Gen((2, tracer.operations), kind, intended, record)
    if not intended and len(tracer.births) < tracer.max_described:
        mask = _finite.bad_mask(out) if mask is None else mask
        gen.output = _finite.stats(out)
        gen.guilty = int(mask.sum())
        gen.first_bad = _finite.first_bad_index(out)
        gen.rows = _finite.bad_rows(out)
        if kind is BirthKind.CONSTANT and tracer.api_inputs is not None:
            # A constant that the library selects by itself (logdet): what matters is what the function was given.
            values = list(described(tracer.api_inputs))
        gen.inputs = tuple(guilty_input(i, t, mask, out, info, record) for i, t in enumerate(values))
        gen.overflow = gen.output.nan_count == 0 and (
            info.op not in _POLES or not any(g.whole.zero_count for g in gen.inputs)
        )
    if kind is BirthKind.OPERATION and any(g.whole.zero_count for g in gen.inputs):
        gen.note = underflow(info.op, values, tracer.nodes.by_sequence)
    if not intended:
        stats = gen.output if gen.output is not None else _finite.stats(out)
        gen.only_negative = stats.nan_count == 0 and stats.posinf_count == 0
    tracer.born(gen)
    return gen
