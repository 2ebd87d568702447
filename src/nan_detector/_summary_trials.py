"""What was tried on a step, as lines of a report: the fix, the other trials, and the verdict that they show."""

from __future__ import annotations

import re
from collections.abc import Sequence

from nan_detector._records import NaNEvent, Trial
from nan_detector._verdict import shown_by

#: Stands between a fix and what came of it.
GAP = " " * 6
_VERDICTS = {
    "data": "data: the batch has to change",
    "precision": "precision: a wider number format keeps the step finite",
    "formula": "formula: the computation has to change",
    "state": "state: bad before the step began",
    "optimizer": "optimizer: the gradients were finite, the step itself was not",
    "compiler": "compiler: run eagerly, the step is finite",
    "not_reproducible": "not reproducible: run again, the step was finite",
}
#: Names of trials for a person, and those whose detail is the whole answer.
_TRIALS = {
    "again": "again",
    "eager": "with nothing compiled",
    "float32": "in float32",
    "float64": "in float64",
    "loss_scale_1": "at loss scale 1",
    "finite_state": "with finite state",
    "finite_data": "with finite data",
    "samples": "samples",
    "rate": "with the last finite learning rate",
    "option": "with the option as it was at first",
    "eps": "with a larger eps",
    "clipped": "with gradients clipped to norm 1",
    "unfused": "without multi-tensor and fused kernels",
}
_TOLD_IN_FULL = ("again", "samples")
#: Causes for which what is tried on one step tells less than it seems to: the numbers grow from step to step.
_GROWTH = ("learning_rate_too_high", "gradient_explosion", "gradients_accumulated")
_SETTINGS = ("learning_rate_non_finite", "hyperparameter_non_finite")
_FEW_SAMPLES = 3  # that are named again where it is said what the step did without them
#: What came of the fix is told beside it up to this length, of its own and with the fix.
_BESIDE_FIX, _LONGEST_BESIDE = 70, 120


def _is_fix(trial: Trial) -> bool:
    return trial.name.startswith("fix")


def fix_lines(event: NaNEvent) -> list[str]:
    """The fix, and what came of it on this step."""
    general = (event.cause.fix or "").strip().splitlines() if event.cause is not None else []
    tried = next((t for t in event.trials if _is_fix(t)), None)
    if tried is None:
        return general
    if not general:
        return []
    form, _, followed = tried.detail.rstrip(".").rpartition(": ")
    if not tried.finite or not form:
        return _beside(general, _outcome_of_fix(tried))
    # What was seen to work comes first: it is written for the user's own line.
    return [*_beside([form], f"tried on this step: {followed}"), *_in_general(general, form)]


def _beside(lines: Sequence[str], outcome: str) -> list[str]:
    *above, last = lines
    if len(outcome) > _BESIDE_FIX or len(last) + len(GAP) + len(outcome) > _LONGEST_BESIDE:
        return [*lines, outcome]
    return [*above, f"{last}{GAP}{outcome}"]


def _in_general(general: Sequence[str], form: str) -> list[str]:
    """The cause's own advice, unless the form that was tried is nothing but that advice followed."""
    said = " ".join(general)
    names = _names_in(said)
    if said in form or (names and names <= _names_in(form) and " or " not in said):
        return []
    return [f"in general: {general[0]}", *general[1:]]


def _names_in(code: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*(?=\()|(?<=\.)[A-Za-z_]\w*", code))


def _outcome_of_fix(trial: Trial) -> str:
    detail = trial.detail.rstrip(".")
    if trial.finite is None:
        return "not tried" + (f": {detail}" if detail else "")
    if not trial.finite:
        return "tried on this step, and not enough" + (f": {detail}" if detail else "")
    return "tried on this step: " + (detail if "finite" in detail else ", ".join(filter(None, [detail, "all finite"])))


def trial_name(trial: Trial) -> str:
    """What was changed, in words."""
    return _TRIALS.get(trial.name, trial.name.replace("_", " "))


def trial_lines(event: NaNEvent) -> list[str]:
    """One sentence for each trial that tells something of its own."""
    return [_trial(t, event) for t in _telling(event)]


def _telling(event: NaNEvent) -> list[Trial]:
    """The trials that tell something of their own."""
    growth = event.cause is not None and event.cause.code in _GROWTH  # of which every sample and format has its share
    hidden = ("samples", "float64") if growth else ()
    return [t for t in event.trials if not _is_fix(t) and not _is_same(t) and t.name not in hidden]


def _is_same(trial: Trial) -> bool:
    """True for the step run again with nothing changed that did the same: "reproduced" tells that."""
    return trial.name == "again" and trial.finite is False and trial.detail.startswith(("twice", "on a copy"))


def _trial(trial: Trial, event: NaNEvent) -> str:
    name = trial_name(trial)
    if trial.name == "samples" and trial.finite is not None and trial.detail:
        if len(event.sample_index) > _FEW_SAMPLES:  # they stand in a row of their own
            return re.sub(r"^without samples [\d, and to]*(more )?(?=the step)", "without those samples ", trial.detail)
        return trial.detail
    if trial.finite is not None and trial.name in _TOLD_IN_FULL and trial.detail:
        return f"{name}: {trial.detail}"
    outcome = {True: "finite", False: "not finite", None: "not tried"}[trial.finite]
    # Which gradient stays bad is in the record; here it would drown what did help.
    detail = trial.detail if trial.finite is not False or trial.name not in _TRIALS else ""
    return f"{name}: {outcome}" + (f" ({detail})" if detail else "")


def verdict_line(event: NaNEvent) -> str:
    """What the verdict means, and what was tried that shows it (the fix has a row of its own)."""
    code = event.cause.code if event.cause is not None else ""
    if event.verdict == "formula" and code in _GROWTH:
        return "formula: the growth has to stop; a wider number format only puts it off"
    if event.verdict == "optimizer" and code in _SETTINGS:
        return "optimizer: loss and gradients are finite, a setting of the optimizer is not"
    said = _VERDICTS.get(event.verdict, "")
    shown = shown_by(event)
    if shown is None or shown.name in _TOLD_IN_FULL or _is_fix(shown):
        return said
    return f"{said} (tried {_TRIALS[shown.name]})" if said and shown.name in _TRIALS else said
