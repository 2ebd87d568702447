"""Events as records: the provisional one, the one that a finding completes, and that of a silent overflow."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace

from nan_detector._before import GRAD_NORM, LEARNING_RATE, LOSS
from nan_detector._diagnosis import diagnose
from nan_detector._diagnosis.facts import is_derivative
from nan_detector._finding import Finding
from nan_detector._gate import Suspicion
from nan_detector._records import Cause, NaNEvent, Phase, Severity, TensorStats
from nan_detector._state import process_rank
from nan_detector._trace import UNDERFLOWED, Birth, GuiltyInput
from nan_detector._verdict import verdict

#: Columns of the flight recorder that a cause is found by.
HISTORY = (LOSS, GRAD_NORM, LEARNING_RATE)
_PHASES: dict[str, Phase] = {
    "data": "data", "forward": "forward", "loss": "loss",
    "backward": "backward", "optimizer": "optimizer", "state": "state",
}  # fmt: skip


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
