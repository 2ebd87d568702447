"""Trials: the step again with one thing changed, each of which answers a question, within a budget of time.

They come after the located event is written down, the most telling first. What could not be tried says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from nan_detector._again import Again, Outcome
from nan_detector._change import Change
from nan_detector._errors import ReplayRefused
from nan_detector._finding import Finding
from nan_detector._hit import one_at_a_time
from nan_detector._records import NaNEvent, Trial
from nan_detector._samples import sample_ids
from nan_detector._state import logger, strict
from nan_detector._trial_changes import FiniteData, FiniteState, Part, Unscaled, Widened
from nan_detector._trial_facts import Batch, Measuring, batch_of, cut_early, facts_of
from nan_detector._trial_fix import try_remedies
from nan_detector._trial_lab import Lab, Spent, patience_of_others, why_spent
from nan_detector._trial_plan import (
    AGAIN,
    BEYOND,
    DATA,
    EAGER,
    FIX,
    FLOAT32,
    FLOAT32_MAX,
    FLOAT64,
    MAX_NAMED,
    SAMPLES,
    STATE,
    UNSCALED,
    Facts,
    Planned,
    plan,
)
from nan_detector._trial_samples import Rows, Untold, find_guilty
from nan_detector._verdict import verdict

Runner = Callable[[Lab, Planned], Trial]


def with_trials(event: NaNEvent, finding: Finding, budget_s: float, compiled_after: bool = False) -> NaNEvent:
    """`event` with what was tried on its step, and the verdict that follows. Never raises on the training's account.

    Args:
        event: The located event.
        finding: What the replay found, with what is needed to run the step again.
        budget_s: Seconds that all trials together may take, at most.
        compiled_after: Compiled code was entered after the step's first recorded call.
    """
    if finding.again is None:
        return event
    try:
        with one_at_a_time(budget_s):
            return _tried(event, finding, finding.again, budget_s, compiled_after)
    except ReplayRefused as refusal:
        return replace(event, notes=(*event.notes, f"no trials: {refusal}"))
    except Exception as error:
        if strict():
            raise
        logger.exception("the trials failed; the event keeps what was found before them")
        return replace(event, notes=(*event.notes, f"the trials failed: {type(error).__name__}: {error}"))


def _tried(event: NaNEvent, finding: Finding, again: Again, budget_s: float, compiled_after: bool) -> NaNEvent:
    birth = finding.trace.birth if finding.trace is not None else None
    batch = batch_of(again, finding.micro_step)
    lab = Lab(again, event, birth, Facts(), batch, budget_s=min(budget_s, patience_of_others()))
    if finding.reproduced != "not_tried" and not again.opaque:
        measuring = Measuring(batch)
        lab.run(measuring, checksum=True)
        lab.batch = measuring.measured
    lab.facts = facts = facts_of(again, lab.batch, compiled_after)
    trials = _run_all(lab, plan(birth, finding.reproduced, facts))
    judged = verdict(birth, event.cause, trials, finding.reproduced)
    event = replace(event, trials=trials, verdict=judged)
    if lab.rows and not event.sample_index and len(lab.rows) <= MAX_NAMED:
        ids = sample_ids(again.names, again.entries, lab.rows, lab.batch.size, event.tensor_name or "")
        event = replace(event, sample_index=lab.rows, sample_id=ids)
    return event


def _run_all(lab: Lab, planned: tuple[Planned, ...]) -> tuple[Trial, ...]:
    done: list[Trial] = []
    why = ""
    for p in planned:
        runner = RUNNERS.get(p.name)
        if runner is None:
            continue
        if p.why_not or why:
            done.append(Trial(p.name, p.question, None, p.why_not or why))
            continue
        try:
            trial = runner(lab, p)
        except Spent:
            trial = Trial(p.name, p.question, None, why_spent(lab))
        except Untold as untold:
            trial = Trial(p.name, p.question, None, str(untold))
        done.append(trial)
        if p.name == AGAIN and lab.birth is not None and trial.finite is not False:
            why = "without a replay that does what the step did, it would show nothing"
    return tuple(done)


# -- the trials ----------------------------------------------------------------------------------------------------


def _again(lab: Lab, planned: Planned) -> Trial:
    first = lab.first or lab.run(Change(), checksum=True)
    if first.finite is None:
        return _told(planned, first)
    second = lab.run(Change(), checksum=True)
    if second.finite is None:
        return _told(planned, second)
    if first.finite is not second.finite:
        return Trial(planned.name, planned.question, True, "one of two runs was finite: it does not always happen")
    same = first.print == second.print
    how = "twice the same, bit for bit" if same else "twice, with different numbers: not deterministic"
    return Trial(planned.name, planned.question, first.finite, how)


def _eager(lab: Lab, planned: Planned) -> Trial:
    first = lab.first
    if first is None or first.finite is None:
        return Trial(planned.name, planned.question, None, first.error if first is not None else "")
    if not first.finite:
        return Trial(planned.name, planned.question, False, "every replay is eager, and does the same")
    if lab.again.changed:
        said = f"{lab.again.changed[0]} was changed in place since, so the replay is another step"
        return Trial(planned.name, planned.question, None, said)
    if first.drew:
        said = "the step draws random numbers, and compiled code draws others than eager code"
        return Trial(planned.name, planned.question, None, said)
    return _told(planned, first)


def _in_dtype(dtype: torch.dtype) -> Runner:
    def run(lab: Lab, planned: Planned) -> Trial:
        return _told(planned, lab.run(Widened(dtype)))

    return run


def _unscaled(lab: Lab, planned: Planned) -> Trial:
    return _told(planned, lab.run(Unscaled()))


def _state(lab: Lab, planned: Planned) -> Trial:
    guilty = lab.birth.tensor_name if lab.birth is not None else None
    return _told(planned, lab.run(FiniteState(lab.again.names, guilty)))


def _data(lab: Lab, planned: Planned) -> Trial:
    return _told(planned, lab.run(FiniteData()))


def _samples(lab: Lab, planned: Planned) -> Trial:
    birth, batch = lab.birth, lab.batch
    suspects: Rows = ()
    if birth is not None:
        rows = birth.sample_index or birth.guilty_rows
        fits = bool(birth.output is not None and birth.output.shape[:1] == (batch.size,))
        suspects = rows if fits and len(rows) < MAX_NAMED else ()

    def bad(rows: Rows, batch: Batch = batch) -> bool:
        outcome = lab.run(Part(rows, batch))
        if outcome.finite is None:
            raise Untold(f"on part of the batch {outcome.error}")
        return not outcome.finite

    found = find_guilty(batch.size, suspects, bad)
    early = cut_early(batch, lab.again) if found.everywhere else None
    if early is not None:
        # Perhaps it is born where the batch is prepared, before it was cut.
        with contextlib.suppress(Spent, Untold):
            found = find_guilty(batch.size, (), partial(bad, batch=early))
    lab.rows = found.rows
    caveat = "; BatchNorm's statistics change with the batch" if lab.facts.batch_norm else ""
    return Trial(planned.name, planned.question, found.finite_without, found.shown + caveat)


def _told(planned: Planned, outcome: Outcome) -> Trial:
    """What came of one run, in words."""
    if outcome.finite is None:
        return Trial(planned.name, planned.question, None, outcome.error)
    if not outcome.finite:
        return Trial(planned.name, planned.question, False, _of(outcome.bad))
    said = "" if outcome.loss is None else f"loss {outcome.loss:.4g}"
    if planned.name == FLOAT64 and abs(outcome.loss or 0.0) > FLOAT32_MAX:
        said += f", {BEYOND}"
    return Trial(planned.name, planned.question, True, said)


def _of(bad: str) -> str:
    return bad if bad.startswith("the step") else f"{bad} is not"


def _fix(lab: Lab, planned: Planned) -> Trial:
    if lab.birth is None:
        return Trial(planned.name, planned.question, None, "there is no guilty call")

    def run(change: Change) -> Outcome | None:
        try:
            return lab.run(change)
        except Spent:
            return None

    fixed = try_remedies(run, lab.again.site, lab.birth, lab.event.cause)
    return Trial(planned.name, planned.question, fixed.finite, fixed.detail)


#: How each trial is made. A kind that is planned and has no runner here is left out.
RUNNERS: Mapping[str, Runner] = {
    AGAIN: _again,
    EAGER: _eager,
    FIX: _fix,
    FLOAT32: _in_dtype(torch.float32),
    FLOAT64: _in_dtype(torch.float64),
    UNSCALED: _unscaled,
    STATE: _state,
    DATA: _data,
    SAMPLES: _samples,
}
