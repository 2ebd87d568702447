"""What a return to an earlier state brings back: the same learning rates, the same draws; said, not prevented."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._before import number
from nan_detector._good_state import GoodState, copied_value


def recurrence(state: GoodState, known: Collection[Any], *, same_draws: bool) -> tuple[str, ...]:
    """What will come again after a return, in sentences for a person. To be called before the return.

    Args:
        state: Where the training goes back to.
        known: Schedulers (and loss scalers) that were seen.
        same_draws: The random streams go back as well.
    """
    batches = "a data loader goes on with its next batch, not with this one again"
    if same_draws:
        batches += "; batches that the loop draws at random come again, as the random streams went back"
    rate = _rate(state, known)
    return (rate, batches) if rate else (batches,)


def _rate(state: GoodState, known: Collection[Any]) -> str:
    """Of the parameter group whose learning rate differs most."""
    found = max(_rates(state), key=lambda f: _apart(f[1], f[2]), default=None)
    if found is None:
        return ""
    optimizer, then, now = found
    if then == now:
        return f"the learning rate was the same then, {number(now)}"
    said = f"the learning rate is {number(then)} again, as before step {state.step}, not {number(now)}"
    restored = [ref() for ref, _ in state.holders]
    mine = [holder for holder in known if getattr(holder, "optimizer", None) is optimizer]
    if not mine:
        return f"{said}; no scheduler was seen, and a loop that sets the rate by itself is not taken back"
    if any(not any(holder is r for r in restored) for holder in mine):
        return f"{said}, until its scheduler steps, which could not be taken back and goes on from where it was"
    return f"{said}; its scheduler went back as well, so it comes to {number(now)} again unless that is changed"


def _rates(state: GoodState) -> Iterator[tuple[Any, float, float]]:
    """Optimizer, rate then and rate now of each parameter group."""
    for saved in state.optimizers:
        optimizer = saved.optimizer()
        for settings, group in zip(saved.groups, optimizer.param_groups if optimizer is not None else (), strict=False):
            then, now = _number(copied_value(settings.get("lr"))), _number(group.get("lr"))
            if then is not None and now is not None:
                yield optimizer, then, now


def _number(rate: Any) -> float | None:
    if isinstance(rate, torch.Tensor):
        return _finite.scalar(rate) if rate.numel() == 1 else None
    return float(rate) if isinstance(rate, (int, float)) else None


def _apart(then: float, now: float) -> float:
    """How far a rate has gone; one that is not finite has gone farthest."""
    if then == now:
        return 0.0
    return abs(math.log(now / then)) if then > 0.0 and 0.0 < now < math.inf else math.inf
