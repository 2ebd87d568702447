"""From a confirmed suspicion to an event: the replay, its lineage, the reason, in that order."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._again import Again
from nan_detector._before import GRAD_NORM, LEARNING_RATE, LOSS
from nan_detector._diagnosis import diagnose
from nan_detector._diagnosis.facts import is_derivative
from nan_detector._entries import Entry
from nan_detector._errors import ReplayRefused
from nan_detector._gate import Suspicion
from nan_detector._lineage import EMPTY
from nan_detector._moment import Moment
from nan_detector._naming import Names
from nan_detector._origin import birth_of, silent_births, trace_of, trace_of_line
from nan_detector._quiet import quiet
from nan_detector._records import Cause, LossTerm, NaNEvent, Phase, Reproduced, Severity, TensorStats
from nan_detector._repair import site_of
from nan_detector._replay import Step
from nan_detector._replayed import Replayed
from nan_detector._run_step import Call
from nan_detector._samples import sample_ids
from nan_detector._state import logger, process_rank, strict
from nan_detector._tape import Tape
from nan_detector._trace import UNDERFLOWED, Birth, BirthKind, GuiltyInput, Trace
from nan_detector._verdict import verdict

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


def new_event(step: int, suspicion: Suspicion, *, phase: Phase, micro_step: int = 0) -> NaNEvent:
    """The provisional event: what the gate saw, written down before anything else is done."""
    return NaNEvent(
        event_id=uuid.uuid4().hex,
        status="provisional",
        step=step,
        phase=phase,
        severity="error",
        micro_step=micro_step,
        symptom=suspicion.symptom(),
        loss=suspicion.loss,
        tensor_name=suspicion.gradients[0] if suspicion.gradients and not suspicion.losses else None,
        rank=process_rank(),
        time=time.time(),
    )


#: What a replay changes for the process (the stance of compiled code, `Module.__call__`) is put back in order.
_one_at_a_time = threading.RLock()


@contextlib.contextmanager
def one_at_a_time(budget_s: float) -> Iterator[None]:
    """Wait for the replays of other threads.

    Raises:
        ReplayRefused: They took longer than `budget_s` seconds.
    """
    if not _one_at_a_time.acquire(timeout=min(budget_s, threading.TIMEOUT_MAX)):
        raise ReplayRefused("another thread was replaying all the time (replay_budget_s)")
    try:
        yield
    finally:
        _one_at_a_time.release()


def relevant_entries(tape: Tape) -> list[Entry]:
    """The entries since the last gate, and those they depend on."""
    recent = [e for e in tape.entries if e.number >= tape.boundary and not e.judged]
    wanted = tape.needed(recent)
    return [e for e in tape.entries if e in wanted]


def investigate(
    tape: Tape,
    models: dict[str, torch.nn.Module],
    budget_s: float,
    *,
    silent: bool = False,
    unscaled: bool = False,
    call: Call | None = None,
    conclude: Callable[[Replayed, list[str]], Finding] | None = None,
    evidence: Any = None,
    names: Names | None = None,
    only: Entry | None = None,
) -> Finding:
    """Replay the step on `tape` and trace the harm to its birth. Never raises on the training's account.

    Args:
        tape: What was recorded of the step.
        models: The watched models.
        budget_s: Seconds that the replay may take.
        silent: Look for overflows that did no harm instead.
        call: Replay this call of a step function instead of what is on the tape.
        unscaled: Replay with every loss scale at 1: what is bad then is not the scaler's doing.
        only: Replay this call and what it depends on, instead of all since the last gate.
        conclude: What to make of the replay; None for the birth that the step's harm goes back to.
        evidence: Keeps what shows the guilty operation alone, for a capsule.
        names: Names of the models and of the batch, where they are known from elsewhere.
    """
    notes = [f"dropped: {d}" for d in tape.dropped]
    wanted = tape.needed([only]) if only is not None else frozenset()
    entries = relevant_entries(tape) if only is None else [e for e in tape.entries if e in wanted]
    if not entries and call is None:
        return Finding(notes=(*notes, "nothing of this step was recorded, so it cannot be replayed"))
    names = Names(models) if names is None else names
    if _weights_lost(entries, names):
        return Finding(
            notes=(
                *notes,
                "not replayed: when it was found, the weights had been overwritten with non-finite values by code that "
                "no gate sees (an update by hand, a compiled optimizer step)",
            )
        )
    if not _one_at_a_time.acquire(timeout=min(budget_s, threading.TIMEOUT_MAX)):
        return Finding(notes=(*notes, "not replayed: another thread was replaying all the time (replay_budget_s)"))
    try:
        try:
            again = Again(entries, list(tape.outside.values()), models, names, call, unscaled)
            step = again.step(time.perf_counter() + budget_s)
            if evidence is not None:
                evidence.start()
                step.tracer.evidence = evidence
            replayed = step.run()
        finally:
            if evidence is not None:
                evidence.finish()
            _one_at_a_time.release()
    except ReplayRefused as refusal:
        return Finding(notes=(*notes, f"not replayed: {refusal}"))
    except (torch.OutOfMemoryError, MemoryError) as error:
        return Finding(notes=(*notes, f"not replayed: out of memory ({type(error).__name__})"))
    except Exception as error:
        if strict():
            raise
        logger.exception("the replay failed; the event keeps what the gate saw")
        return Finding(notes=(*notes, f"the replay failed: {type(error).__name__}: {error}"))
    if silent:
        births = tuple(birth_of(g) for g in silent_births(replayed.tracer))
        return Finding(reproduced="yes", notes=tuple(notes), silent=births)
    if conclude is not None:
        return conclude(replayed, notes)
    finding = _with_samples(_conclude(replayed, notes), names, entries)
    if finding.reproduced == "yes":
        finding = replace(finding, loss_terms=_loss_terms(step, replayed, finding.micro_step))
    if evidence is not None and finding.trace is not None and finding.trace.birth is not None:
        evidence.blamed = finding.trace.birth.number
    birth = finding.trace.birth if finding.trace is not None else None
    if birth is not None:
        finding = replace(finding, bad_buffers=_poisoned_buffers(replayed, names, birth))
    again = replace(
        again,
        raised=type(replayed.raised) if replayed.raised is not None else None,
        changed=tuple(o.name or "a tensor" for o in replayed.changed),
        opaque=tuple(replayed.opaque),
        overwritten=_overwritten(replayed, birth),
        site=site_of(replayed.tracer, birth) if birth is not None else None,
    )
    return replace(finding, again=again)


def _loss_terms(step: Step, replayed: Replayed, micro_step: int) -> tuple[LossTerm, ...]:
    """The summands of the loss that the birth belongs to: the first bad one, else that of its backward."""
    losses = replayed.losses or [t for t in replayed.results_last if t.numel() == 1]
    bad = next((t for t in losses if _finite.checkable(t) and not _finite.is_finite(t)), None)
    if bad is None and not losses:
        return ()
    return step.sums.terms_of(losses[min(micro_step, len(losses) - 1)] if bad is None else bad)


def _overwritten(replayed: Replayed, birth: Birth | None) -> str:
    """The buffer that the birth was written into by a call of its own; "" where there is none."""
    if birth is None or birth.kind != BirthKind.OPERATION.value:
        return ""
    return next((n for n, line in replayed.written.items() if any(g.record.index == birth.number for g in line)), "")


def _poisoned_buffers(replayed: Replayed, names: Names, birth: Birth) -> tuple[str, ...]:
    """Buffers of the model that are not finite: the one that was blamed, and those that this step's births reached."""
    with quiet():
        bad = {name for name, b in names.buffers() if not _finite.is_finite(b)}
        reached = [
            name
            for name, copy in replayed.buffers.items()
            if name in bad
            and any(
                not g.intended and g.kind is not BirthKind.BUFFER
                for g in replayed.tracer.ancestry(copy) | replayed.written.get(name, EMPTY)
            )
        ]
    blamed = [birth.tensor_name] if birth.kind == BirthKind.BUFFER.value and birth.tensor_name in bad else []
    return tuple(dict.fromkeys([*blamed, *reached]))


def _weights_lost(entries: list[Entry], names: Names) -> bool:
    """True when the step's weights were damaged after it used them: what a replay found now would be another story."""
    if unmoved(entries) is not False:
        return False
    return weights_state(names.parameters(), ()) != "clean"


def unmoved(entries: Iterable[Entry]) -> bool | None:
    """True when nothing has written into the weights since the model was called; None where it was not."""
    last = {id(e.owner): e.extra for e in entries if e.kind == "root" and isinstance(e.extra, Moment)}
    if not last:
        return None
    with quiet():
        return all(p._version == version for moment in last.values() for p, version in moment.versions)


def _with_samples(finding: Finding, names: Names, entries: list[Entry]) -> Finding:
    """`finding` with the names of its samples, where the batch carries them."""
    birth = finding.trace.birth if finding.trace is not None else None
    if birth is None or not birth.sample_index or birth.output is None or not birth.output.shape:
        return finding
    ids = sample_ids(names, entries, birth.sample_index, birth.output.shape[0], birth.tensor_name or "")
    return replace(finding, sample_id=ids)


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


def _conclude(replayed: Replayed, notes: list[str]) -> Finding:
    trace = trace_of(replayed)
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


#: Columns of the flight recorder that a cause is found by.
HISTORY = (LOSS, GRAD_NORM, LEARNING_RATE)

_PHASES: dict[str, Phase] = {
    "data": "data", "forward": "forward", "loss": "loss",
    "backward": "backward", "optimizer": "optimizer", "state": "state",
}  # fmt: skip


def complete(
    event: NaNEvent, finding: Finding, history: dict[str, tuple[float, ...]], before: tuple[str, ...]
) -> NaNEvent:
    """The final event: the provisional one with the finding, its cause and what had been growing."""
    trace = finding.trace
    if trace is None or trace.birth is None:
        return replace(
            event,
            status="final",
            reproduced=finding.reproduced,
            notes=(*event.notes, *finding.notes),
            before=before,
            verdict=verdict(None, None, (), finding.reproduced),
        )
    trace = replace(
        trace,
        losses=history.get(LOSS, ()),
        grad_norms=history.get(GRAD_NORM, ()),
        learning_rates=history.get(LEARNING_RATE, ()),
    )
    birth: Birth = trace.birth  # type: ignore[assignment]  # checked above; replace() keeps it
    cause, runners_up = diagnose(trace)
    notes = list(finding.notes)
    # What grows overflows, and its gradients grow with it: no other story.
    grown = cause is not None and cause.code in ("learning_rate_too_high", "gradients_accumulated")
    runners_up = tuple(c for c in runners_up if not grown or c.code not in ("gradient_explosion", "overflow"))
    if runners_up:
        notes.append("could also be: " + "; or ".join(c.title for c in runners_up))
    return replace(
        event,
        status="final",
        phase=_PHASES.get(birth.phase, event.phase),
        op=birth.op,
        call=birth.call,
        derivative=is_derivative(birth) if birth.phase == "backward" else None,
        layer_name=birth.layer_name,
        module_type=birth.module_type,
        location=birth.location,
        tensor_name=birth.tensor_name,
        inputs=_input_stats(birth.inputs, birth),
        output=birth.output,
        cause=cause,
        verdict=verdict(birth, cause, (), finding.reproduced),
        spread=trace.spread,
        before=before,
        reproduced=finding.reproduced,
        micro_step=finding.micro_step,
        sample_index=birth.sample_index,
        sample_id=finding.sample_id,
        loss_terms=finding.loss_terms,
        first_use=birth.first_use,
        bad_buffers=finding.bad_buffers,
        notes=(*event.notes, *notes, *_shown(birth.note)),
    )


def _shown(note: str) -> tuple[str, ...]:
    """What a birth's note says for a person: what underflowed is told with the cause."""
    told, _, rest = note.partition("; ")
    said = rest if told.startswith(UNDERFLOWED) else note
    return (said,) if said else ()


def _input_stats(inputs: tuple[GuiltyInput, ...], birth: Birth) -> tuple[TensorStats, ...]:
    if birth.derivative_of is not None and birth.forward_inputs:
        return birth.forward_inputs
    return tuple(i.whole for i in inputs)


def silent_event(step: int, birth: Birth, cause: Cause | None) -> NaNEvent:
    """An overflow that arithmetic absorbed: an event that never triggers anything."""
    severity: Severity = "silent"
    return NaNEvent(
        event_id=uuid.uuid4().hex,
        status="final",
        step=step,
        phase=_PHASES.get(birth.phase, "forward"),
        severity=severity,
        op=birth.op,
        call=birth.call,
        layer_name=birth.layer_name,
        module_type=birth.module_type,
        location=birth.location,
        inputs=_input_stats(birth.inputs, birth),
        output=birth.output,
        cause=cause,
        verdict=verdict(birth, cause, (), "yes"),
        symptom="an infinity was absorbed on its way: the loss does not show it",
        reproduced="yes",
        rank=process_rank(),
        time=time.time(),
    )


def weights_state(parameters: Any, buffers: Any) -> str:
    """'clean', or which parameter or buffer holds non-finite values."""
    with quiet():
        for name, t in [*parameters, *buffers]:
            if not _finite.is_finite(t):
                return name  # type: ignore[no-any-return]  # pairs of str and Tensor
    return "clean"
