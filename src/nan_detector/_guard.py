"""The two shortest ways to a watched training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from nan_detector._detector import NaNDetector
from nan_detector._errors import OptionError
from nan_detector._records import NaNEvent


def watch_for_nans(model: torch.nn.Module, **options: Any) -> NaNDetector:
    """A detector for `model` that is not attached yet; `options` are those of `NaNDetector`."""
    return NaNDetector(model, **options)


def train_with_nan_guard(
    model: torch.nn.Module,
    loader: Iterable[Any],
    criterion: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    max_batches: int | None = None,
    device: str | torch.device = "cpu",
    **options: Any,
) -> tuple[list[float], NaNEvent | None]:
    """Train over `loader` once, and stop at the first step that would poison the weights.

    Args:
        model: Called as ``model(x)``; moved to `device`.
        loader: Gives pairs ``(x, y)`` of tensors.
        criterion: Called as ``criterion(model(x), y)``; gives the loss.
        optimizer: Steps the model's parameters.
        max_batches: Batches to train on at most, 0 or more; None for all.
        device: Where model and batches go.
        options: Those of `NaNDetector`.

    Returns:
        The loss of each step, that of the bad step included, and the event or None.

    Raises:
        NonFiniteError: With ``on_nan="raise"``.
        OptionError: `max_batches` or one of `options` cannot be used; nothing was trained.
    """
    if max_batches is not None and (
        isinstance(max_batches, bool) or not isinstance(max_batches, int) or max_batches < 0
    ):
        raise OptionError(f"max_batches={max_batches!r} must be a whole number of at least 0, or None for all batches.")
    model.to(device)
    losses: list[float] = []
    with NaNDetector(model, **options) as det:
        for index, (x, y) in enumerate(loader):
            if max_batches is not None and index >= max_batches:
                break
            det.set_batch(index)
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)), y.to(device))
            loss.backward()
            det.check_grad_norms()
            optimizer.step()
            losses.append(float(loss.detach()))
            if det.triggered and det._config.stop_on_first:
                break
    return losses, det.event
