"""Events of the phase "optimizer": what was wrong with the step itself."""

from __future__ import annotations

from dataclasses import replace

from nan_detector._aftermath import BadState
from nan_detector._diagnosis import diagnose
from nan_detector._hyper import HyperProblem
from nan_detector._records import NaNEvent
from nan_detector._trace import Birth, BirthKind, Trace


def hyper_event(event: NaNEvent, problem: HyperProblem | BadState, before: tuple[str, ...]) -> NaNEvent:
    """The final event for a hyperparameter, or for state, that would have damaged every weight it touches."""
    if isinstance(problem, BadState):
        return _state_event(event, problem, before)
    birth = Birth(
        number=0,
        kind=BirthKind.CONSTANT.value,
        op=problem.name,
        aten="",
        phase="optimizer",
        tensor_name=f"param_groups[{problem.group}][{problem.name!r}]",
        note=problem.message,
    )
    cause, _ = diagnose(Trace(birth=birth, reached=("parameter",)))
    return replace(
        event,
        status="final",
        phase="optimizer",
        op=problem.name,
        tensor_name=birth.tensor_name,
        cause=cause,
        verdict="optimizer",
        before=before,
        reproduced="yes",
        notes=(*event.notes, problem.message),
    )


def _state_event(event: NaNEvent, problem: BadState, before: tuple[str, ...]) -> NaNEvent:
    birth = problem.birth
    cause, _ = diagnose(Trace(birth=birth, reached=("parameter",)))
    return replace(
        event,
        status="final",
        phase="state" if birth.phase == "state" else "optimizer",
        op=birth.op or None,
        call=birth.call,
        layer_name=birth.layer_name,
        module_type=birth.module_type,
        location=birth.location,
        tensor_name=birth.tensor_name,
        output=birth.output,
        cause=cause,
        verdict="state" if birth.phase == "state" else "optimizer",
        before=before,
        reproduced="yes",
        notes=(*event.notes, *problem.notes),
    )
