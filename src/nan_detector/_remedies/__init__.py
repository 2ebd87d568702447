"""Repaired forms of calls, by the cause that they are meant for. Nothing here knows of replays or events."""

from __future__ import annotations

from typing import Any

from nan_detector._remedies import division, domain, masks, slopes, span
from nan_detector._remedies.registry import Remedy

__all__ = ["NOT_TRIED", "REMEDIES", "Remedy", "remedies_for"]

#: In the order in which they are tried.
REMEDIES: tuple[Remedy, ...] = (
    *masks.REMEDIES,
    *domain.REMEDIES,
    *division.REMEDIES,
    *slopes.REMEDIES[:-1],
    *span.REMEDIES,
    slopes.REMEDIES[-1],
)
#: Causes that name no mechanism: whatever can be done about the function is tried.
_ANY = ("custom_backward", "unknown")
#: Causes for which no change of one call would be the cure, and why.
_STEPS = "it would show only in the steps to come"
_OUTSIDE = "what is bad comes from outside of the step, so no operation of the step is to blame"
NOT_TRIED: dict[str, str] = {
    **dict.fromkeys(("learning_rate_too_high", "gradient_explosion", "gradients_accumulated"), _STEPS),
    **dict.fromkeys(
        (
            *("parameter_non_finite", "buffer_non_finite", "ema_non_finite", "uninitialised_memory"),
            *("input_non_finite", "label_non_finite", "gradient_from_outside", "optimizer_state_non_finite"),
        ),
        _OUTSIDE,
    ),
    **dict.fromkeys(
        ("learning_rate_non_finite", "hyperparameter_non_finite", "optimizer_state_overflow"),
        "it is a setting of the optimizer, which a replay up to the optimizer's step does not use",
    ),
    "literal_nan": "the value is written down in the code: only its author knows what belongs there",
    "opaque_kernel": "the code that made it is not seen, so it cannot be changed",
}


def remedies_for(code: str, names: frozenset[str]) -> tuple[Remedy, ...]:
    """Remedies for a cause, in the order in which they are tried.

    Args:
        code: The cause code.
        names: The functions that may be called at the place, by `name_of`.
    """
    found: dict[Any, Remedy] = {}
    for r in REMEDIES:
        known = r.names & names
        if known if code in _ANY else code in r.causes and (known or not r.names):
            found.setdefault(r.repair, r)
    return tuple(found.values())
