"""Whose fault it is, in one word: a pure function of what was found and what the trials showed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nan_detector._records import Cause, NaNEvent, Trial, Verdict
from nan_detector._trace import Birth, BirthKind
from nan_detector._trial_plan import (
    AGAIN,
    BEYOND,
    CLIPPED,
    DATA,
    EAGER,
    EPS,
    FIX,
    FLOAT32,
    FLOAT64,
    OPTION,
    RATE,
    SAMPLES,
    STATE,
    UNFUSED,
    UNSCALED,
)

#: What stands in these was bad before any operation of the step ran.
_SOURCES: Mapping[str, Verdict] = {"input": "data", "label": "data", "parameter": "state", "buffer": "state"}
#: Mechanisms that are a matter of the number format by their nature.
_OF_PRECISION = ("half_overflow", "half_gradient_overflow", "eps_underflow", "underflow_to_zero", "loss_scale_zero")
#: Mechanisms in which a number grows without end: a wider format only puts it off.
_OF_GROWTH = (
    *("exp_overflow", "overflow", "gradient_explosion", "learning_rate_too_high", "gradients_accumulated"),
    *("clip_norm_overflow", "optimizer_state_overflow"),
)
#: Births that the step's own operations made.
_COMPUTED = (
    BirthKind.OPERATION.value,
    BirthKind.INTENDED_MET.value,
    BirthKind.INTENDED_REACHED.value,
)
#: For each verdict, the trials that show it when they end finite, the best first.
_SHOWN_BY: Mapping[Verdict, tuple[str, ...]] = {
    "data": (SAMPLES, DATA),
    "precision": (FLOAT32, UNSCALED, FLOAT64),
    "formula": (FIX,),
    "state": (STATE,),
    "optimizer": (FIX, RATE, OPTION, STATE, EPS, CLIPPED, FLOAT32, UNFUSED),
    "compiler": (EAGER,),
    "not_reproducible": (AGAIN,),
    "undecided": (),
}


def verdict(birth: Birth | None, cause: Cause | None, trials: Iterable[Trial], reproduced: str) -> Verdict:
    """One of the record's verdicts.

    Args:
        birth: What the replay found; None where it found nothing.
        cause: Why it happened, where that is known.
        trials: What was tried.
        reproduced: Whether the replay did what the step did, as records say it.
    """
    made = tuple(trials)
    finite, tried = {t.name for t in made if _tells(t)}, {t.name for t in made}
    if birth is None:
        # Where no run was made, as part of the step was not recorded, "finite" would be said of the rest alone.
        if reproduced != "no" or (tried and AGAIN not in tried):
            return "undecided"
        return "compiler" if EAGER in finite else "not_reproducible"
    if AGAIN in finite:
        return "not_reproducible"
    if birth.phase == "optimizer":
        return "optimizer"
    if birth.kind in _SOURCES:
        return _SOURCES[birth.kind]
    code = cause.code if cause is not None else ""
    if code in _OF_PRECISION or finite & {FLOAT32, UNSCALED}:
        return "precision"
    # A fix that works in the same number format says more than that a wider one would have been enough.
    if FLOAT64 in finite and FIX not in finite and code not in _OF_GROWTH:
        return "precision"
    if birth.kind in _COMPUTED or FIX in finite:
        return "formula"
    return "undecided"


def shown_by(event: NaNEvent) -> Trial | None:
    """The trial that shows the event's verdict; None where none does."""
    for name in _SHOWN_BY.get(event.verdict, ()):
        for trial in event.trials:
            if trial.name == name and _tells(trial):
                return trial
    return None


def _tells(trial: Trial) -> bool:
    """True for a trial that ended with numbers one could train with."""
    return bool(trial.finite) and not trial.detail.endswith(BEYOND)
