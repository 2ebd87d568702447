"""Which birth the harm of a step goes back to: from a finished replay to a `Trace`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nan_detector._births import birth_of, call_of, layer_of, location_text, module_type_of, place_of, sites
from nan_detector._lineage import EMPTY, Gen, Line
from nan_detector._quiet import quiet
from nan_detector._replayed import Replayed
from nan_detector._trace import THROUGH_LOG_SOFTMAX, Birth, BirthKind, Trace
from nan_detector._tracer import OpTracer, Tensor

#: Further births named in a trace.
MAX_OTHERS = 4

_REPLACES = frozenset("nan_to_num where masked_fill index masked_select masked_scatter nansum index_put".split())
_WEIGHS = frozenset(
    "softmax log_softmax logsumexp safe_softmax masked_softmax logcumsumexp logaddexp scaled_dot_product_attention "
    "scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention "
    "scaled_dot_product_flash_attention".split()
)

_LOG_SUMS = ("logsumexp", "logaddexp", "logcumsumexp")


def trace_of(replayed: Replayed) -> Trace:
    """The lineage of the step: the birth to blame first, then the others that reached the loss or a gradient."""
    tracer = replayed.tracer
    reached: dict[str, Line] = {
        "loss": _union(tracer, replayed.losses),
        "gradient": _union(tracer, replayed.gradients.values()),
    }
    if replayed.raised is not None or not replayed.losses:
        outputs = frozenset(g for g in _union(tracer, replayed.outputs) if not g.intended and not _replaced(g))
        reached["output"] = outputs | _at_the_end(tracer, replayed)
    harm = _made_by_writes(frozenset().union(*reached.values()), replayed.written)
    return _trace(tracer, harm, tuple(name for name, line in reached.items() if line))


def _made_by_writes(harm: Line, written: Mapping[str, Line]) -> Line:
    """`harm`, with what made a buffer bad within the step in place of the buffer.

    A replay finds a buffer as the step has left it. Where a call of the step, outside the model's forward, made the bad
    values that were written into it, that is the origin, and what the buffer harmed is the way it went on.
    """
    out = set(harm)
    for buffer in harm:
        made = [
            g
            for g in written.get(buffer.name or "", ())
            if g.kind is BirthKind.OPERATION and not g.intended and g.record.index < buffer.record.index
        ]
        if buffer.kind is BirthKind.BUFFER and made:
            out.remove(buffer)
            out.update(made)
            min(made, key=lambda g: g.order).passed.extend([buffer.record, *buffer.passed])
    return frozenset(out)


def _replaced(gen: Gen) -> bool:
    """True where the code put something else in the place of the bad values."""
    return any(r.info.op in _REPLACES for r in gen.ended)


def trace_of_line(tracer: OpTracer, harm: Line) -> Trace:
    """The trace of a known harm, for operations followed as they ran."""
    return _trace(tracer, harm, ("loss",))


def _trace(tracer: OpTracer, harm: Line, reached: tuple[str, ...]) -> Trace:
    # Of several that one operation met first (a weight and its bias), the one with the most bad values, or the
    # larger one, speaks for all.
    place = {id(g): i for i, g in enumerate(tracer.births)}
    guilty = sorted(
        (g for g in harm if not g.intended),
        key=lambda g: (g.order, -g.guilty, -g.output.numel if g.output is not None else 0, place.get(id(g), 0)),
    )
    if not guilty:
        return Trace(birth=_intended_reached(harm), reached=reached)
    first = _forward_story(tracer, guilty[0])
    others = tuple(birth_of(g) for g in guilty if g is not first)[:MAX_OTHERS]
    return Trace(birth=birth_of(first), others=others, spread=sites(first), reached=reached)


def silent_births(tracer: OpTracer, harmed: Line = EMPTY) -> list[Gen]:
    """Overflows that arithmetic absorbed: nobody masked them, and the loss does not show them."""
    return [g for g in tracer.births if g not in harmed and is_silent(g)]


def is_silent(gen: Gen) -> bool:
    """True for an overflow that ended in arithmetic (1/inf, tanh(inf), clamp), not in a mask, an index or a softmax."""
    if gen.intended or gen.kind is not BirthKind.OPERATION or not gen.overflow or gen.record.phase == "backward":
        return False
    ends = gen.ended
    if not ends or any(e.info.selects for e in ends):
        return False
    return any(e.info.absorbs and not (e.info.mask_aware and gen.only_negative) for e in ends)


def _union(tracer: OpTracer, tensors: Iterable[Tensor]) -> Line:
    out: Line = EMPTY
    with quiet():
        for t in tensors:
            out |= tracer.ancestry(t)
    return out


def _at_the_end(tracer: OpTracer, replayed: Replayed) -> Line:
    """What the last values of a step that raised, or that made no loss, descend from."""
    out: Line = EMPTY
    last = list(replayed.results_last)
    if tracer.last is not None and replayed.raised is not None:
        last += [t for t in tracer.last.inputs if isinstance(t, Tensor)]
    with quiet():
        for t in last:
            line = tracer.ancestry(t)
            if t.numel() == 1 or not all(g.intended for g in line):  # a mask is no reason to raise; a loss of inf is
                out |= line
    return out


def _forward_story(tracer: OpTracer, gen: Gen) -> Gen:
    """The origin of a birth in the backward whose forward operation had made a bad value already, which was dropped."""
    forward = gen.record.forward
    if gen.record.phase != "backward" or forward is None or gen.record.own_frame:
        return gen
    dropped = [g for g in forward.births if not g.intended]
    if not dropped:
        return gen
    dropped[0].passed.extend([gen.record, *gen.passed])
    return dropped[0]


def _intended_reached(harm: Line) -> Birth | None:
    """Only intended infinities got there: blame the first call that made one number of them."""
    if not harm:
        return None
    brought = [g for g in harm if g.kind in (BirthKind.INPUT, BirthKind.LABEL) and not _weighed(g)]
    if brought:  # -inf that met no softmax was no mask: the batch holds a bad number
        return birth_of(min(brought, key=lambda g: g.order))
    records = sorted({r for g in harm for r in g.passed}, key=lambda r: r.index)
    if not records:
        gen = min(harm, key=lambda g: g.order)
        return birth_of(gen)
    reduced = next((r for r in records if r.numel == 1), records[0])
    # A logsumexp gives -inf only where all it was given is masked: that row is the mistake, not the mean over rows.
    record = next((r for r in reversed(records) if r.index <= reduced.index and r.info.op in _LOG_SUMS), reduced)
    first = next(r for r in records if r.mark == record.mark)
    op = (
        record.forward.info.op
        if record.forward is not None and not record.own_frame
        else (record.api or record.info.op)
    )
    return Birth(
        number=first.index,
        kind=BirthKind.INTENDED_REACHED.value,
        op=op,
        aten=record.info.aten,
        phase=record.phase,
        call=call_of(record),
        layer_name=layer_of(record),
        module_type=module_type_of(record),
        location=place_of(record),
        inputs=(),
        args=record.args,
        in_library=True,
        note=f"only values that were meant to be infinite reached it{_written(harm)}",
    )


def _written(harm: Line) -> str:
    """Where the infinities were written, and whether a log_softmax took them for masked classes."""
    first = min(harm, key=lambda g: g.order)
    place = place_of(first.record)
    said = f", written at {location_text(first.record)}" if place is not None else ""
    return said + (f" {THROUGH_LOG_SOFTMAX}" if any(r.info.op == "log_softmax" for r in first.passed) else "")


def _weighed(gen: Gen) -> bool:
    """True for -inf that went into a softmax or its kin, where it means weight 0."""
    return any(r.info.op in _WEIGHS for r in gen.passed) or any(r.info.op in _WEIGHS for r in gen.ended)
