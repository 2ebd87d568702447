"""Events of the phase "optimizer": what was wrong with the step itself."""

from __future__ import annotations

import math
from dataclasses import replace

from nan_detector._aftermath import BadState
from nan_detector._diagnosis import diagnose
from nan_detector._hyper import HyperProblem
from nan_detector._records import NaNEvent, TensorStats
from nan_detector._trace import Birth, BirthKind, Trace


def hyper_event(
    event: NaNEvent, problem: HyperProblem | BadState, before: tuple[str, ...], rates: tuple[float, ...] = ()
) -> NaNEvent:
    """The final event for a hyperparameter, or for state, that would have damaged every weight it touches.

    Args:
        event: The provisional event.
        problem: What is wrong.
        before: What had been changing, as sentences.
        rates: The learning rates of the steps before, oldest first.
    """
    if isinstance(problem, BadState):
        return _state_event(event, problem, before)
    # A complex number stands for one that does not exist among the real ones.
    real = math.nan if isinstance(problem.value, complex) else float(problem.value)
    birth = Birth(
        number=0,
        kind=BirthKind.CONSTANT.value,
        op=problem.name,
        output=_number(real),
        aten="",
        phase="optimizer",
        tensor_name=f"param_groups[{problem.group}][{problem.name!r}]",
        note=problem.message,
    )
    history = (*(r for r in rates if math.isfinite(r)), real) if problem.name == "lr" else ()
    cause, _ = diagnose(Trace(birth=birth, reached=("parameter",), learning_rates=history))
    return replace(
        event,
        status="final",
        phase="optimizer",
        op=problem.name,
        tensor_name=birth.tensor_name,
        output=birth.output,
        cause=cause,
        verdict="optimizer",
        before=before,
        reproduced="yes",
        notes=(*event.notes, problem.message),
    )


def _number(value: float) -> TensorStats | None:
    """A number of Python's as what an event knows of a result; None for a finite one."""
    if math.isfinite(value):
        return None
    return TensorStats(
        (),
        "float",
        "cpu",
        nan_count=int(math.isnan(value)),
        posinf_count=int(value == math.inf),
        neginf_count=int(value == -math.inf),
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
