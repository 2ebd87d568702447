"""The gate of an ordinary healthy step, in one piece.

What the gate does is spread over several modules, each with one job; but nearly every step of a run is healthy and like
the one before, and there the way through the modules costs more than the measurement. So this does the same in one go,
and gives up at the first sight of anything unusual: what the full gate then costs is of no account.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from nan_detector._gate import Reading
from nan_detector._hyper import bad_hyperparameter
from nan_detector._layers import Layers
from nan_detector._quiet import quiet
from nan_detector._records import StepRow
from nan_detector._run import Run
from nan_detector._stepped import Stepped

Tensor = torch.Tensor

#: Up to so many norms, a call for each, into its place, costs less than one for all and another to gather them.
FEWEST = 12
#: Gradients whose norms are all read: of more, their total and the largest.
MOST = 4096

_NoTorchFunction = torch._C.DisableTorchFunction
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_foreach_norm = torch._foreach_norm
_vector_norm = torch.linalg.vector_norm
_stack = torch.stack
_isfinite = math.isfinite


def is_sound(
    run: Run, stepped: Stepped, optimizer: Any, call: int, loss: Tensor, state: Tensor | None, layers: Layers | None
) -> bool:
    """Measure and record the step that is about to be taken. False where it is not plainly an ordinary, healthy one.

    Args:
        run: The watched run.
        stepped: What the optimizer steps.
        optimizer: The optimizer.
        call: Which call of an optimizer's step this is: a closure's further evaluations are not fed to the warnings.
        loss: The loss, of one element.
        state: Numbers on the device that must be finite as well; None where there are none.
        layers: What the layers' outputs reached, at that level.
    """
    if id(optimizer.state) != stepped.state_seen:
        return False
    if not stepped.unchanged(optimizer):
        if not stepped.fits(optimizer) or bad_hyperparameter(optimizer) is not None:
            return False
        stepped.settled(optimizer)
    rate = optimizer.param_groups[0].get("lr")
    lr = rate if type(rate) is float else float(rate) if isinstance(rate, (int, float)) else None
    if _dispatch_modes():
        with quiet():
            reading, reached = _measured(run, stepped, optimizer, loss, state, lr, layers)
    else:
        # As `quiet` does, which is for any number of modes.
        with _NoTorchFunction():
            grad_enabled = _is_grad_enabled()
            _set_grad_enabled(False)
            try:
                reading, reached = _measured(run, stepped, optimizer, loss, state, lr, layers)
            finally:
                _set_grad_enabled(grad_enabled)
    if reading is None:
        return False
    if layers is not None:
        layers.forget()
    if run.book.log is not None:
        run.book.write(StepRow(run.step, reading.loss, reading.total, reading.largest, lr, None))
    if stepped.call != call:
        stepped.call = call
        if layers is None:
            stepped.forewarning.note(run, optimizer, reading, stepped.names, lr)
        else:
            reached_by = dict(zip(layers.columns, reached, strict=True))
            stepped.forewarning.note(run, optimizer, reading, stepped.names, lr, reached_by, layers.limits)
    return True


_Measured = tuple[Reading | None, Sequence[float]]
_NOT: _Measured = (None, ())


def _measured(
    run: Run,
    stepped: Stepped,
    optimizer: Any,
    loss: Tensor,
    state: Tensor | None,
    lr: float | None,
    layers: Layers | None,
) -> _Measured:
    """The reading, and the largest magnitude of each layer; no reading where anything is unusual."""
    # Of what is stepped now: a parameter may have been replaced in its list.
    grads = [g for group in optimizer.param_groups for p in group["params"] if (g := p.grad) is not None]
    count = len(grads)
    if not 0 < count <= MOST or count != len(stepped.names) or loss.dim() or loss.is_complex():
        return _NOT
    extremes, width = None, 0
    if layers is not None:
        extremes = layers.complete
        if extremes is None or extremes.device != loss.device:
            return _NOT
        width = len(extremes)
    names = stepped.columns(stepped.names, True, count + 1)
    if layers is not None:
        names = _joined(layers.recorded_names, names)
    try:
        with run.lock:
            row = run.recorder.next_row(names, loss)
            if row is None:
                return _NOT
            part = row
            if extremes is not None:
                torch.amax(extremes.abs(), 1, out=row[:width])
                part = row[width:]
            if count <= FEWEST and extremes is None and grads[0].dtype is torch.float32:
                scratch, first, places = stepped.places_like(row)
                first.copy_(loss)
                for g, place in zip(grads, places, strict=True):
                    _vector_norm(g, out=place)
                row.copy_(scratch)
            else:
                _stack([loss, *_foreach_norm(grads, 2, dtype=torch.float32)], out=part)
            values: list[float] = (row if state is None else torch.cat([row, state])).tolist()
            norms = values[width + 1 : width + 1 + count]
            largest = max(norms)
            if not (_isfinite(sum(values)) and 0.0 < largest <= run.config.grad_norm_warn):
                return _NOT
            run.recorder.keep(run.step, lr)
    except RuntimeError:  # a mixture of layouts, dtypes or devices
        return _NOT
    reading = Reading(row, width + 1 + count, count, values[width], math.hypot(*norms), largest, norms)
    return reading, values[:width]


@lru_cache(maxsize=64)
def _joined(layers: tuple[str, ...], gradients: tuple[str, ...]) -> tuple[str, ...]:
    """The same object for the same names: the recorder then knows them without comparing."""
    return (*layers, *gradients)
