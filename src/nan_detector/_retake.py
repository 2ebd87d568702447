"""A step of an optimizer taken once more on a copy of it, so that nothing of the user's is written.

The copy shares with the optimizer what nobody knows how to copy (an object of the user's own). What the step writes
there is put back afterwards: memory, what Python's containers hold, random streams.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector._again import muted
from nan_detector._change import Follower
from nan_detector._errors import ReplayRefused
from nan_detector._isolate import is_twin, isolated_copy
from nan_detector._moment import Snapshot
from nan_detector._patches import ReplayEnds
from nan_detector._quiet import quiet
from nan_detector._state import replay_may_step, replaying
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Retake:
    """How a step is taken again.

    Attributes:
        optimizer: The optimizer; as it was before the step, or as the step left it.
        mean: Key of the state that stands for the gradient of each parameter, zeros where it has none; None where the
            gradients are those of the step.
        mend_weights: Weights that are not finite are given finite values before: the step has spoilt them.
        mend_state: The same for state.
    """

    optimizer: Any
    mean: str | None = None
    mend_weights: bool = False
    mend_state: bool = False


@dataclass(frozen=True, slots=True)
class Twin:
    """A copy of an optimizer that is ready to step.

    Attributes:
        optimizer: The copy.
        parameters: Its parameters, by the identity of those that they are copies of.
        own: Memory that is the copy's.
    """

    optimizer: Any
    parameters: dict[int, Tensor]
    own: Set[int]


Adjust = Callable[[Any], None]


def twin_of_step(retake: Retake, adjust: Adjust | None = None) -> Twin:
    """The copy, with what it is to begin with.

    Args:
        retake: How the step is taken again.
        adjust: Changes the copy before it steps.

    Raises:
        RuntimeError: No memory for the copy, or a tensor that cannot be copied.
    """
    optimizer, follower = retake.optimizer, Follower()
    with quiet(), follower:
        twin = isolated_copy(optimizer)
        parameters: dict[int, Tensor] = {}
        for copied, real in zip(twin.param_groups, optimizer.param_groups, strict=True):
            for p, original in zip(copied["params"], real["params"], strict=True):
                parameters[id(original)] = p
                state = twin.state.get(p, {})
                if retake.mend_weights:
                    make_finite(p)
                if retake.mend_state and isinstance(state, dict):
                    for value in state.values():
                        make_finite(value)
                if retake.mean is not None:
                    p.grad = _typical_gradient(p, state, retake.mean)
                elif original.grad is not None:
                    p.grad = original.grad.detach().clone()
        if adjust is not None:
            adjust(twin)
    return Twin(twin, parameters, follower.own)


@contextlib.contextmanager
def stepping(retake: Retake, twin: Twin, tracer: OpTracer) -> Iterator[Callable[[], None]]:
    """What takes the copy's step under `tracer`. When this is left, all that was not the copy's is as it was."""
    optimizer, take = retake.optimizer, step_of(retake.optimizer)
    tracer.journal.protected = lambda key: key not in twin.own
    torchs = type(optimizer).__module__.startswith("torch.optim.")
    snapshot = Snapshot([], [], () if torchs else (take, optimizer))

    def step() -> None:
        with replaying(), replay_may_step(is_twin), muted(), warnings.catch_warnings(), torch.no_grad(), tracer:
            warnings.simplefilter("ignore")  # they were given when the step was taken
            try:
                take(twin.optimizer)
            except ReplayEnds:
                raise ReplayRefused("the optimizer steps another one, which is not part of its copy") from None

    try:
        yield step
    finally:
        with quiet():
            tracer.journal.undo()
        snapshot.restore()


def step_of(optimizer: Any) -> Any:
    """The function of its class that takes a step, without what torch wraps around it."""
    return inspect.unwrap(type(optimizer).step)


def make_finite(t: Any) -> None:
    """Zeros where a tensor is not finite; anything else is left as it is."""
    if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()):
        t.detach().nan_to_num_(0.0, 0.0, 0.0)


def _typical_gradient(p: Tensor, state: Any, key: str) -> Tensor | None:
    if not isinstance(state, dict) or not state:
        return None if p.grad is None else torch.zeros_like(p)  # a copy has a gradient where the parameter has one
    mean = state.get(key)
    known = isinstance(mean, Tensor) and mean.shape == p.shape
    return mean.detach().clone() if known and isinstance(mean, Tensor) else torch.zeros_like(p)
