"""The gate of an ordinary healthy step, in one piece.

What the gate does is spread over several modules, each with one job; but nearly every step of a run is healthy and like
the one before, and there the way through the modules costs more than the measurement. So this does the same in one go,
and gives up at the first sight of anything unusual: what the full gate then costs is of no account.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from nan_detector._gate import FEW, Reading, take_more
from nan_detector._hyper import bad_hyperparameter
from nan_detector._quiet import quiet
from nan_detector._records import StepRow
from nan_detector._run import Run
from nan_detector._stepped import Stepped

Tensor = torch.Tensor

_NoTorchFunction = torch._C.DisableTorchFunction
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled
_foreach_norm = torch._foreach_norm
_stack = torch.stack
_isfinite = math.isfinite


def is_sound(run: Run, stepped: Stepped, optimizer: Any, call: int, loss: Tensor, state: Tensor | None) -> bool:
    """Measure and record the step that is about to be taken. False where it is not plainly an ordinary, healthy one.

    Args:
        run: The watched run.
        stepped: What the optimizer steps.
        optimizer: The optimizer.
        call: Which call of an optimizer's step this is: a closure's further evaluations are not fed to the warnings.
        loss: The loss, of one element.
        state: Numbers on the device that must be finite as well; None where there are none.
    """
    if id(optimizer.state) != stepped.state_seen:
        return False
    if not stepped.unchanged(optimizer):
        if bad_hyperparameter(optimizer) is not None:
            return False
        stepped.settled(optimizer)
    rate = optimizer.param_groups[0].get("lr")
    lr = rate if type(rate) is float else float(rate) if isinstance(rate, (int, float)) else None
    if _dispatch_modes():
        with quiet():
            reading = _measured(run, stepped, loss, state, lr)
    else:
        # As `quiet` does, which is for any number of modes.
        with _NoTorchFunction():
            grad_enabled = _is_grad_enabled()
            _set_grad_enabled(False)
            try:
                reading = _measured(run, stepped, loss, state, lr)
            finally:
                _set_grad_enabled(grad_enabled)
    if reading is None:
        return False
    if run.book.log is not None:
        run.book.write(StepRow(run.step, reading.loss, reading.total, reading.largest, lr, None))
    if stepped.call != call:
        stepped.call = call
        stepped.forewarning.note(run, optimizer, reading, stepped.names, lr)
    return True


def _measured(run: Run, stepped: Stepped, loss: Tensor, state: Tensor | None, lr: float | None) -> Reading | None:
    grads = [g for p in stepped.parameters if (g := p.grad) is not None]
    count = len(grads)
    if not 0 < count <= FEW or count != len(stepped.names) or loss.dim():
        return None
    names = stepped.columns(stepped.names, True, count + 1)
    try:
        if state is not None:
            return _with_state(run, names, grads, loss, state, lr)
        with run.lock:
            row = run.recorder.next_row(names) if loss.dtype is torch.float32 else None
            if row is None:
                return _with_state(run, names, grads, loss, loss.new_zeros(1), lr)
            values: list[float] = _stack([loss, *_foreach_norm(grads, 2, dtype=torch.float32)], out=row).tolist()
            if not _isfinite(sum(values)):
                return None
            norms = values[1:]
            largest = max(norms)
            if not 0.0 < largest <= run.config.grad_norm_warn:
                return None
            run.recorder.keep(run.step, lr)
    except RuntimeError:  # a mixture of layouts, dtypes or devices
        return None
    return Reading(row, count + 1, count, values[0], math.hypot(*norms), largest)


def _with_state(
    run: Run, names: tuple[str, ...], grads: list[Tensor], loss: Tensor, state: Tensor, lr: float | None
) -> Reading | None:
    """The same where more is read along, or the flight recorder has no such row yet."""
    if loss.is_complex():
        return None
    reading = take_more(grads, loss, state)
    if reading is None or reading.suspicious or not 0.0 < (reading.largest or 0.0) <= run.config.grad_norm_warn:
        return None
    with run.lock:
        run.recorder.set_columns(names)
        run.recorder.append(run.step, reading.row, lr, None)
    return reading
