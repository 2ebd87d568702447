"""What a replay (or a live trace) found, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nan_detector._again import Again
from nan_detector._origin import trace_of, trace_of_line
from nan_detector._quiet import quiet
from nan_detector._records import LossTerm, Reproduced
from nan_detector._replayed import Replayed
from nan_detector._trace import Birth, BirthKind, Trace

#: What is said of a step that a replay found nothing wrong with.
FINITE_AGAIN = "the same step again is finite"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a replay (or a live trace) found."""

    trace: Trace | None = None
    reproduced: Reproduced = "not_tried"
    notes: tuple[str, ...] = ()
    micro_step: int = 0
    silent: tuple[Birth, ...] = ()
    sample_id: tuple[str, ...] = ()
    loss_terms: tuple[LossTerm, ...] = ()
    bad_buffers: tuple[str, ...] = ()
    again: Again | None = field(default=None, compare=False, repr=False)  # to run the step for trials


def _before_the_unseen(replayed: Replayed) -> list[str]:
    """What the model's own outputs show, where the way from them to the loss is not known."""
    if not replayed.outputs:
        return []
    with quiet():
        line = frozenset(g for t in replayed.outputs for g in replayed.tracer.ancestry(t))
    birth = trace_of_line(replayed.tracer, line).birth if line else None
    if birth is None:
        return ["what the model gave is finite"]
    where = birth.location
    return [
        f"what the model gave was already not finite in the replay: {birth.op} made it"
        + (f" at {where.file}:{where.line}" if where is not None else "")
    ]


def _with_weight(trace: Trace, replayed: Replayed) -> Trace:
    """`trace`, whose birth is one of the state where the loop's own code wrote it into a parameter."""
    birth = trace.birth
    if birth is None or birth.phase not in ("loss", "state") or birth.tensor_name is not None:
        return trace
    for name, line in replayed.weights.items():
        if any(g.record.index == birth.number for g in line):
            layer = name.rpartition(".")[0] or "root"
            return replace(trace, birth=replace(birth, phase="state", tensor_name=name, layer_name=layer))
    return trace


def concluded(replayed: Replayed, notes: list[str]) -> Finding:
    """The birth that a replay goes back to, with `notes` and what else is said of it."""
    trace = _with_weight(trace_of(replayed), replayed)
    notes += replayed.notes
    if replayed.raised is not None:
        notes.append(
            f"the step raised {type(replayed.raised).__name__}: "
            f"{next(iter(str(replayed.raised).splitlines()), '')[:200]}"
        )
    micro = replayed.micro_step_of(trace.birth.number) if trace.birth is not None else 0
    if replayed.same is False:
        changed = [o.name or "a tensor" for o in replayed.changed]
        notes.append(
            "the replay gave another loss than the step itself"
            + (f" ({', '.join(changed[:3])} was changed in place since)" if changed else "")
        )
        if trace.birth is not None:
            where = trace.birth.location
            notes.append(
                f"in the replay, not in the step itself, {trace.birth.op} made it"
                + (f" at {where.file}:{where.line}" if where is not None else "")
            )
        return Finding(None, "no", tuple(notes), micro)
    unseen = trace.birth is not None and trace.birth.kind == BirthKind.OPAQUE.value
    if trace.birth is None or (unseen and trace.birth.tensor_name in replayed.opaque):
        if replayed.opaque:
            notes.append(
                f"{replayed.opaque[0]} was made by code that the recorder does not see (a compiled function, a "
                "torch.func transform, an extension): run the step through det.run_step to have it replayed whole"
            )
            notes += _before_the_unseen(replayed)
        else:
            notes.append(FINITE_AGAIN)
        return Finding(None, "no", tuple(notes), micro)
    return Finding(trace, "yes", tuple(notes), micro)
