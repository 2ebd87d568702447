"""Trials of an optimizer's step: taken again on a copy with one thing changed. Are weights and state finite then?

Nothing of the user's is stepped, read from or written: see `_retake`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from nan_detector._again import Outcome, first_line
from nan_detector._change import Follower
from nan_detector._damage import Harm, harms
from nan_detector._errors import ReplayRefused
from nan_detector._hit import one_at_a_time
from nan_detector._quiet import quiet
from nan_detector._records import NaNEvent, Trial
from nan_detector._retake import Retake, Twin, stepping, twin_of_step
from nan_detector._state import logger, strict
from nan_detector._step_changes import (
    FIXES,
    StepChange,
    clipped,
    mended,
    nothing,
    unfused,
    widened,
    with_first_options,
    with_larger_eps,
    with_rate,
)
from nan_detector._trial_lab import MAX_RUNS, Budget, Spent
from nan_detector._trial_plan import (
    AGAIN,
    CLIPPED,
    EPS,
    FIX,
    FLOAT32,
    OPTION,
    RATE,
    STATE,
    UNFUSED,
    Planned,
    StepFacts,
    plan_of_step,
)
from nan_detector._trial_samples import Untold

_HALVES = (torch.float16, torch.bfloat16)
#: Operations that an epsilon guards.
_GUARDED = ("div", "addcdiv", "reciprocal", "rsqrt", "sqrt", "pow", "log")
_RAISED = "the step raised"
_FINITE = "weights and state are finite"


@dataclass
class StepLab(Budget):
    """What a trial of an optimizer's step has to work with.

    Attributes:
        retake: How the step is taken again.
        names: Names of parameters by identity.
        event: The event so far.
        facts: What is known of the step.
    """

    retake: Retake
    names: Mapping[int, str]
    event: NaNEvent
    facts: StepFacts

    def take(self, change: StepChange) -> tuple[str, Outcome]:
        """The step with `change`: what that did, and what came of it.

        Raises:
            Spent: There is no time for it.
            Untold: The change is none here.
        """
        self.ask()
        said, outcome = taken(self.retake, change, self.names, self.deadline)
        self.unit = self.unit or outcome.seconds
        return said, outcome


def taken(retake: Retake, change: StepChange, names: Mapping[int, str], deadline: float) -> tuple[str, Outcome]:
    """Take the step on a copy with `change`, and look at weights and state.

    Args:
        retake: How it is taken.
        change: What is done to the copy before.
        names: Names of parameters by identity.
        deadline: The `time.perf_counter()` at which it gives up.

    Raises:
        Untold: The change is none here.
    """
    begun = time.perf_counter()
    said: list[str] = []
    harm: Harm | None = None
    error = ""
    try:
        twin = _copied(retake, lambda optimizer: said.append(change(optimizer)))
        known = {id(p): names[real] for real, p in twin.parameters.items() if real in names}
        with stepping(retake, twin, Follower(deadline=deadline)) as step:
            error = _raised_by(step)
            with quiet():
                harm = next(harms(twin.optimizer, known), None) or next(harms(twin.optimizer, known, state=True), None)
    except ReplayRefused as refusal:
        error = str(refusal)
    except (torch.OutOfMemoryError, MemoryError):
        error = "out of memory"
    bad = harm.name if harm is not None else ""
    return "".join(said), Outcome(None if error else not bad, None, bad, error, seconds=time.perf_counter() - begun)


def _copied(retake: Retake, adjust: Callable[[Any], None]) -> Twin:
    try:
        return twin_of_step(retake, adjust)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:  # a tensor that cannot be cloned
        raise ReplayRefused(f"the optimizer cannot be copied: {first_line(error)}") from error


def _raised_by(step: Callable[[], None]) -> str:
    """What taking the step raised, in words; "" where it raised nothing."""
    try:
        step()
    except (ReplayRefused, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as failure:  # a user's optimizer may not like a copy, or needs a closure
        return f"{_RAISED} {type(failure).__name__}: {first_line(failure)}"
    return ""


def with_step_trials(
    event: NaNEvent,
    retake: Retake | None,
    names: Mapping[int, str],
    budget_s: float,
    *,
    option: str = "",
    rates: Sequence[float] = (),
) -> NaNEvent:
    """`event` with what was tried on the optimizer's step that it tells of. Never raises on the training's account.

    Args:
        event: The located event.
        retake: How the step is taken again; None where that is not known.
        names: Names of parameters by identity.
        budget_s: Seconds that all trials together may take, at most.
        option: The setting that is not finite; "" where all are.
        rates: Learning rates of the steps before, oldest first.
    """
    if retake is None:
        return event
    try:
        with one_at_a_time(budget_s):
            facts = _facts(event, retake, option, rates)
            lab = StepLab(retake, names, event, facts, budget_s=budget_s)
            return replace(event, trials=(*event.trials, *_run_all(lab)))
    except ReplayRefused as refusal:
        return replace(event, notes=(*event.notes, f"no trials: {refusal}"))
    except Exception as error:
        if strict():
            raise
        logger.exception("the trials failed; the event keeps what was found before them")
        return replace(event, notes=(*event.notes, f"the trials failed: {type(error).__name__}: {error}"))


def _facts(event: NaNEvent, retake: Retake, option: str, rates: Sequence[float]) -> StepFacts:
    groups = retake.optimizer.param_groups
    parameters = [p for group in groups for p in group["params"]]
    held = (retake.optimizer.state.get(p) for p in parameters if p in retake.optimizer.state)
    state = [t for h in held if isinstance(h, dict) for t in h.values() if isinstance(t, torch.Tensor)]
    code = event.cause.code if event.cause is not None else ""
    centered = any(group.get("centered") for group in groups)
    on_device = any(p.device.type != "cpu" for p in parameters)
    return StepFacts(
        cause=code,
        option=option.partition("[")[0],
        rate=next((r for r in reversed(rates) if 0.0 < r < float("inf")), None),
        state=event.op == "optimizer_state",
        fixable=code in FIXES and not option and (code != "sqrt_of_negative" or centered),
        eps=event.op in _GUARDED and any("eps" in group for group in groups),
        half=any(t.dtype in _HALVES for t in (*parameters, *state)),
        # Where nothing is chosen, torch takes the fast form on an accelerator alone.
        fast=any(g.get("fused") or g.get("foreach") or (on_device and g.get("foreach", 0) is None) for g in groups),
    )


def _run_all(lab: StepLab) -> tuple[Trial, ...]:
    done: list[Trial] = []
    why = ""
    for p in plan_of_step(lab.facts):
        if p.why_not or why:
            done.append(Trial(p.name, p.question, None, p.why_not or why))
            continue
        try:
            trial = RUNNERS[p.name](lab, p)
        except Spent:
            trial = Trial(p.name, p.question, None, f"the budget of {MAX_RUNS} steps was spent")
        except Untold as untold:
            trial = Trial(p.name, p.question, None, str(untold))
        done.append(trial)
        if p.name == AGAIN and trial.finite is not False and not trial.detail.startswith(_RAISED):
            why = "without a copy that does what the step did, it would show nothing"
    return tuple(done)


# -- the trials ----------------------------------------------------------------------------------------------------


def _again(lab: StepLab, planned: Planned) -> Trial:
    _, outcome = lab.take(nothing)
    if outcome.finite is None:
        return Trial(planned.name, planned.question, None, outcome.error)
    said = "on a copy it is finite" if outcome.finite else f"on a copy as well {outcome.bad} is not finite"
    return Trial(planned.name, planned.question, outcome.finite, said)


def _with(change: Callable[[StepLab], StepChange]) -> Callable[[StepLab, Planned], Trial]:
    def run(lab: StepLab, planned: Planned) -> Trial:
        said, outcome = lab.take(change(lab))
        if outcome.finite is None:
            return Trial(planned.name, planned.question, None, outcome.error)
        return Trial(
            planned.name, planned.question, outcome.finite, said if outcome.finite else f"{outcome.bad} is not"
        )

    return run


def _fix(lab: StepLab, planned: Planned) -> Trial:
    """The changes that the cause's advice stands for, until one is enough."""
    told: Trial | None = None
    for change in FIXES[lab.facts.cause]:
        if change is widened and not lab.facts.half:
            continue
        try:
            said, outcome = lab.take(change)
        except Untold as untold:
            told = told or Trial(planned.name, planned.question, None, str(untold))
            continue
        if outcome.finite:
            return Trial(planned.name, planned.question, True, f"{said}: {_FINITE}")
        if outcome.finite is None:
            told = told or Trial(planned.name, planned.question, None, outcome.error)
        elif told is None or told.finite is None:
            told = Trial(planned.name, planned.question, False, f"{said}: {outcome.bad} is not finite")
    return told or Trial(planned.name, planned.question, None, "there is nothing here to change")


#: How each trial is made.
RUNNERS: Mapping[str, Callable[[StepLab, Planned], Trial]] = {
    AGAIN: _again,
    FIX: _fix,
    RATE: _with(lambda lab: with_rate(lab.facts.rate)),
    OPTION: _with(lambda lab: with_first_options),
    EPS: _with(lambda lab: with_larger_eps),
    CLIPPED: _with(lambda lab: clipped),
    FLOAT32: _with(lambda lab: widened),
    UNFUSED: _with(lambda lab: unfused),
    STATE: _with(lambda lab: mended),
}
