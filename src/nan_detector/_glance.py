"""The gate of an ordinary healthy step, in one piece.

What the gate does is spread over several modules, each with one job; but nearly every step of a run is healthy and like
the one before, and there the way through the modules costs more than the measurement. So this does the same in one go,
and gives up at the first sight of anything unusual: what the full gate then costs is of no account.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from nan_detector._gate import Reading
from nan_detector._hyper import bad_hyperparameter
from nan_detector._layers import Layers
from nan_detector._quiet import quiet
from nan_detector._records import StepRow
from nan_detector._shared_step import with_others
from nan_detector._stepped import Places, Stepped

if TYPE_CHECKING:
    from nan_detector._judge import Judge
    from nan_detector._session import Session

Tensor = torch.Tensor

#: Up to so many norms, a call for each, into its place, costs less than one for all and another to gather them.
FEWEST = 12
#: Gradients whose norms are all read: of more, their total and the largest.
MOST = 4096

_NoTorchFunction = torch._C.DisableTorchFunction
_dispatch_modes = torch._C._len_torch_dispatch_stack
_foreach_norm = torch._foreach_norm
_vector_norm = torch.linalg.vector_norm
_hypot = math.hypot
_isfinite = math.isfinite
_stack = torch.stack


class Glance:
    """The short way through the gate of one run.

    Args:
        judge: The long way.
        layers: What the layers' outputs reached, at that level.
    """

    def __init__(self, judge: Judge, layers: Layers | None) -> None:
        self.judge = judge
        self.run = judge.run
        self.layers = layers
        self.most = judge.run.config.grad_norm_warn

    def passes(self, stepped: Stepped, optimizer: torch.optim.Optimizer, current: Session) -> bool:
        """True where the step about to be taken is an ordinary, healthy one: it is measured and recorded then.

        Else nothing has been done, and the judge does it all.

        Args:
            stepped: What the optimizer steps.
            optimizer: The optimizer.
            current: The session, with one backward on its tape.
        """
        judge, run = self.judge, self.run
        if (
            not stepped.counted
            or id(optimizer.state) != stepped.state_seen
            or stepped.optimizer() is not optimizer
            or current.scaler is not None
            or current.looks
            or judge.evaluation.waiting
        ):
            return False
        entries = current.tape.entries
        backward = entries[-1]
        if backward.kind != "backward":  # gradients were clipped, or looked at
            backward = next(e for e in reversed(entries) if e.kind == "backward" and not e.judged)
        losses = backward.unscaled or backward.losses
        if len(losses) != 1:
            return False
        groups = optimizer.param_groups
        if not (stepped.one_unchanged(groups[0]) if len(groups) == 1 else stepped.unchanged(groups)):
            if not stepped.fits(optimizer) or bad_hyperparameter(optimizer) is not None:
                return False
            stepped.settled(optimizer)
        rate = groups[0].get("lr")
        lr = rate if type(rate) is float else float(rate) if isinstance(rate, (int, float)) else None
        rounds = judge.rounds
        state = rounds.due()
        layers = self.layers
        asked = with_others(state, stepped.others) if stepped.others else state
        if _dispatch_modes():
            with quiet():
                found = _measured(self, stepped, groups, losses[0], asked, lr)
        else:
            # Nothing is made here that needs a graph; where a gradient has one, this is not an ordinary step.
            with _NoTorchFunction():
                found = _measured(self, stepped, groups, losses[0], asked, lr)
        if found is None:
            judge.fetched = (state,)
            return False
        loss, norms, largest, reached, row = found
        total = _hypot(*norms)
        if layers is not None:
            layers.forget()
        step = run.step
        if run.book.log is not None:
            run.book.write(StepRow(step, loss, total, largest, lr, None))
        stepped.call = current.steps
        forewarning = stepped.forewarning
        if layers is None:
            if not forewarning.note(run, step, lr, loss, total):
                reading = Reading(row, 1 + len(norms), len(norms), loss, total, largest, norms)
                forewarning.feed(run, optimizer, reading, stepped.names, lr)
        else:
            reached_by = dict(zip(layers.columns, reached, strict=True))
            if forewarning.note(run, step, lr, loss, total):
                forewarning.note_layers(run, step, reached_by, layers.limits)
            else:
                reading = Reading(row, len(row), len(norms), loss, total, largest, norms)
                forewarning.feed(run, optimizer, reading, stepped.names, lr, None, False, reached_by, layers.limits)
        if state is not None:
            rounds.fine()
        judge.clean = True
        run.ledger.last_good_step = step
        return True


#: Loss, norms, the largest of them, what each layer reached, and the row that they stand in.
_Measured = tuple[float, list[float], float, Sequence[float], Tensor]


def _measured(
    glance: Glance, stepped: Stepped, groups: list[dict[str, Any]], loss: Tensor, state: Tensor | None, lr: float | None
) -> _Measured | None:
    """Measure and record the step; None where anything is unusual."""
    run, places = glance.run, stepped.places
    recorder = run.recorder
    try:
        with run.lock:
            if (
                places is None
                or glance.layers is not None
                or not (places.table is recorder.table or recorder.turn_to(places.table))
            ):
                return _gathered(glance, stepped, groups, loss, state, lr)
            scratch = places.scratch
            places.first.copy_(loss)
            # Of what is stepped now: a parameter may have been replaced in its list.
            parameters = groups[0]["params"] if len(groups) == 1 else [p for g in groups for p in g["params"]]
            if len(parameters) != places.gradients:
                return None
            for p, place in zip(parameters, places.norms, strict=True):
                g = p.grad
                if g is None:
                    return None
                _vector_norm(g, out=place)
            values: list[float] = (scratch if state is None else torch.cat([scratch, state])).tolist()
            norms = values[1 : 1 + places.gradients]
            largest = max(norms)
            if not (_isfinite(sum(values)) and 0.0 < largest <= glance.most):
                return None
            row = places.table.rows[places.table.next]
            row.copy_(scratch)
            recorder.keep(run.step, lr)
            return values[0], norms, largest, (), row
    except RuntimeError:  # a mixture of layouts, dtypes or devices
        return None


def _gathered(
    glance: Glance, stepped: Stepped, groups: list[dict[str, Any]], loss: Tensor, state: Tensor | None, lr: float | None
) -> _Measured | None:
    """`_measured` for many gradients, or with layers; and for few of them the first time, when places are made."""
    run, layers = glance.run, glance.layers
    grads = [g for group in groups for p in group["params"] if (g := p.grad) is not None]
    count = len(grads)
    if not 0 < count <= MOST or count != len(stepped.names) or loss.dim() or loss.is_complex():
        return None
    extremes, width = None, 0
    names = stepped.columns(stepped.names, True, count + 1)
    if layers is not None:
        extremes = layers.complete
        if extremes is None or extremes.device != loss.device:
            return None
        width = len(extremes)
        names = _joined(layers.recorded_names, names)
    row = run.recorder.next_row(names, loss)
    if row is None:
        return None
    part = row
    if extremes is not None:
        torch.amax(extremes.abs(), 1, out=row[:width])
        part = row[width:]
    _stack([loss, *_foreach_norm(grads, 2, dtype=torch.float32)], out=part)
    values: list[float] = (row if state is None else torch.cat([row, state])).tolist()
    norms = values[width + 1 : width + 1 + count]
    largest = max(norms)
    if not (_isfinite(sum(values)) and 0.0 < largest <= glance.most):
        return None
    run.recorder.keep(run.step, lr)
    if layers is None and count <= FEWEST and all(g.dtype is torch.float32 for g in grads):
        stepped.places = Places.of(run.recorder.table, row)
    return values[width], norms, largest, values[:width], row


@lru_cache(maxsize=64)
def _joined(layers: tuple[str, ...], gradients: tuple[str, ...]) -> tuple[str, ...]:
    """The same object for the same names: the recorder then knows them without comparing."""
    return (*layers, *gradients)
