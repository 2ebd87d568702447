"""What a gate must know of a `GradScaler`: whether its overflow is the scaler's business or the training's.

A dynamic loss scale overflows now and then by design; the scaler skips the step and halves the scale. Such a step is
the training's own only where it is bad at any scale, and the scaler would skip for ever.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from nan_detector._session import Session
from nan_detector._tape import Tape

Tensor = torch.Tensor


class Skips:
    """Steps in a row that each scaler skipped."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def worth_a_look(self, scaler: Any) -> bool:
        """Note a skipped step. True for the 1st, 2nd, 4th, 8th ... in a row: a warm-up must not cost a replay each."""
        count = self._counts[scaler] = self._counts.get(scaler, 0) + 1
        return count & (count - 1) == 0

    def over(self, scaler: Any) -> None:
        """A step was taken."""
        self._counts.pop(scaler, None)


def scale_in_use(current: Session) -> Tensor | None:
    """The loss scale, on its device, where the step that is judged belongs to a GradScaler."""
    scaler = current.scaler
    return None if scaler is None or not scaler.is_enabled() else scaler._scale


def still_scaled(optimizer: Any) -> bool:
    """True inside the step of an optimizer that unscales, and skips, by itself (torch's fused ones)."""
    return getattr(optimizer, "found_inf", None) is not None and getattr(optimizer, "grad_scale", None) is not None


def skips_itself(optimizer: Any) -> bool:
    """True where the optimizer, or the scaler around it, will not take a step with non-finite gradients."""
    return optimizer is None or getattr(optimizer, "found_inf", None) is not None


def knows_scale(tape: Tape) -> bool:
    """True when the scaling of the loss is on the tape, so that the step can be replayed without it."""
    return any(e.kind == "scale" and e.number >= tape.boundary for e in tape.entries)
