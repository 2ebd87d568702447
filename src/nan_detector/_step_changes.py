"""What trials of an optimizer's step change: settings, gradients, state, the number format, on a copy of the optimizer.

Each takes the copy, changes it in place and says what it did, in a few words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._before import number
from nan_detector._damage import FAST_FORMS
from nan_detector._hyper import bad_hyperparameter
from nan_detector._retake import make_finite
from nan_detector._trial_samples import Untold

Tensor = torch.Tensor

#: What a trial does to a copy of an optimizer.
StepChange = Callable[[Any], str]

_HALVES = (torch.float16, torch.bfloat16)
#: The least epsilon that guards a division in a dtype with room to spare: float16 has nothing normal below 6.1e-5.
_GUARDS = {torch.float16: 1e-4}
_GUARD = 1e-8  # what torch's optimizers use, in float32
#: Settings that may be bad at once in one optimizer.
_MOST_OPTIONS = 64


def nothing(twin: Any) -> str:
    """The step as it is."""
    return ""


def with_rate(rate: float | None) -> StepChange:
    """The learning rates that are not finite are `rate`."""

    def change(twin: Any) -> str:
        for group in twin.param_groups:
            if rate is not None and not _is_finite_number(group.get("lr")):
                group["lr"] = rate
        return "" if rate is None else f"lr={number(rate)}"

    return change


def with_first_options(twin: Any) -> str:
    """The settings that are not finite are those that the optimizer was made with."""
    said: list[str] = []
    for _ in range(_MOST_OPTIONS):
        problem = bad_hyperparameter(twin)
        if problem is None or problem.kind == "negative":
            return ", ".join(dict.fromkeys(said))
        key = problem.name.partition("[")[0]
        first = twin.defaults.get(key)
        values = first if isinstance(first, (tuple, list)) else (first,)
        if not all(map(_is_finite_number, values)):
            raise Untold(f"the optimizer was made with {key}={first!r}")
        twin.param_groups[problem.group][key] = first
        said.append(f"{key}={first!r}")
    raise Untold("too many of its settings are not finite")


def with_larger_eps(twin: Any) -> str:
    """Each epsilon is one that its parameters' dtype holds with room to spare; a hundredfold where it is already."""
    chosen: list[float] = []
    for group in twin.param_groups:
        eps = group.get("eps")
        if not _is_finite_number(eps):
            continue
        least = max((_GUARDS.get(p.dtype, _GUARD) for p in group["params"]), default=_GUARD)
        group["eps"] = least if float(eps) < least else 100.0 * float(eps)
        chosen.append(group["eps"])
    if not chosen:
        raise Untold("the optimizer has no eps")
    return f"eps={number(max(chosen))}"


def not_centered(twin: Any) -> str:
    """The running mean of the squares is not made a variance."""
    for group in twin.param_groups:
        if "centered" in group:
            group["centered"] = False
    return "centered=False"


def clipped(twin: Any) -> str:
    """The norm of all gradients together is 1 at most."""
    gradients = [p.grad for p in _parameters(twin) if p.grad is not None and p.grad.layout is torch.strided]
    largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
    if not 0.0 < largest < math.inf:
        raise Untold("the gradients are all 0" if largest == 0.0 else "the gradients are not finite")
    # Divided first: a norm adds squares, which overflow long before the gradients do.
    norm = largest * math.hypot(*(_finite.scalar(g.double().div(largest).norm()) for g in gradients))
    if norm <= 1.0:
        raise Untold(f"the gradients have norm {number(norm)} already")
    for g in gradients:
        g.copy_(g.double().div(norm))
    return "clip_grad_norm_(params, 1.0)"


def widened(twin: Any) -> str:
    """Weights, gradients and state of half precision are float32."""
    for p in _parameters(twin):
        state = twin.state.get(p) if p in twin.state else None
        if isinstance(state, dict):
            wide = {k: v.float() for k, v in state.items() if isinstance(v, Tensor) and v.dtype in _HALVES}
            state.update(wide)
        if p.dtype in _HALVES:
            grad, p.grad = p.grad, None
            p.data = p.data.float()
            p.grad = None if grad is None else grad.float()
    return "float32"


def unfused(twin: Any) -> str:
    """Each parameter is stepped by itself."""
    for group in twin.param_groups:
        group.update({k: False for k in FAST_FORMS if k in group})
    return "foreach=False, fused=False"


def cleared(twin: Any) -> str:
    """The state is gone."""
    twin.state.clear()
    return "optimizer.state.clear()"


def mended(twin: Any) -> str:
    """Zeros stand where the state is not finite."""
    for p in _parameters(twin):
        state = twin.state.get(p) if p in twin.state else None
        for value in state.values() if isinstance(state, dict) else ():
            make_finite(value)
    return "zeros"


#: The changes that follow a cause's advice, tried in this order until one is enough.
FIXES: Mapping[str, tuple[StepChange, ...]] = {
    "eps_underflow": (with_larger_eps, widened),
    "sqrt_of_negative": (not_centered,),
    "optimizer_state_overflow": (clipped, widened),
    "optimizer_state_non_finite": (cleared,),
}


def _parameters(twin: Any) -> Iterator[Tensor]:
    return (p for group in twin.param_groups for p in group["params"])


def _is_finite_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
