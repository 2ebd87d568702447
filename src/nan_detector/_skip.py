"""Cancels one optimizer step without touching the optimizer.

An optimizer's `step` is a plain function of its first argument, and torch lets a step pre-hook replace the arguments.
So the step is made to run on a *stand-in*: an object of the same class with nothing real in it. There is no state to
put back afterwards, so there is no hole when `step` raises, and no moment in which the user's optimizer looks odd.

Two kinds of stand-in:

* torch's own optimizers are known to do nothing when their parameter groups are empty (held by a test for each);
* any other class may read ``param_groups[0]["params"][0]``, call a foreach kernel (which refuses an empty list), or
  index its buffers by position. It gets throwaway clones of everything it owns, with gradients of zero: every shape,
  index and key is as it expects, and nothing is left to blow up.

What a stand-in cannot reach: objects of unknown classes held in attributes (process groups, streams, schedulers) are
shared with the real optimizer, so collectives inside `step` still take place: all ranks must cancel together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from nan_detector._isolate import hollow_copy, is_twin, isolated_copy, share_attributes, slots, twin_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Refuse = Callable[[Any, bool], bool]


def is_stand_in(optimizer: object) -> bool:
    """Whether this is one of our stand-ins.

    A subclass that calls ``super().step()`` fires the hooks again, with the stand-in as the optimizer: a gate must let
    that call pass.
    """
    return is_twin(optimizer)


def was_cancelled(optimizer: Optimizer, args: Args) -> bool:
    """In a step post-hook: whether this step was cancelled, and stayed so.

    False where a later pre-hook of the user's put the real optimizer back into the arguments.

    Args:
        optimizer: The optimizer that stepped.
        args: The positional arguments that the post-hook received.
    """
    return bool(args) and is_twin(args[0]) and vars(args[0]) is not vars(optimizer)


def stand_in(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class on which `step` changes nothing real.

    Memory: none for torch's own optimizers; for any other class as much as its parameters, gradients and state
    together, until `step` returns. Where that cannot be had, its parameter groups are empty instead.
    """
    if type(optimizer) is LBFGS:
        return _settled_lbfgs(optimizer)
    if _steps_as_torchs(type(optimizer)):
        return _without_parameters(optimizer)
    try:
        return isolated_copy(optimizer)
    except (RuntimeError, MemoryError, TypeError):
        pass  # no memory for the clones, or a tensor that cannot be cloned: the next best
    try:
        return _without_parameters(hollow_copy(optimizer))
    except (RuntimeError, MemoryError, TypeError):
        return _without_parameters(optimizer)


def cancelled(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """The arguments with which `step` does nothing: what a step pre-hook returns to cancel it.

    A closure stays in place and is evaluated as often as the optimizer does it for one step (once, by torch's own),
    so the user still gets the loss and the gradients that go with it.

    Args:
        optimizer: The optimizer about to step.
        args: Positional arguments of the step; the first is the optimizer itself.
        kwargs: Keyword arguments of the step.
    """
    if was_cancelled(optimizer, args):
        return args, kwargs  # another watcher was faster
    return (stand_in(optimizer), *args[1:]), kwargs


def closure_of(args: Args, kwargs: Kwargs) -> Callable[..., Any] | None:
    """The closure passed to ``step(closure)``; None where there is none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure if callable(closure) else None


def judged(optimizer: Optimizer, args: Args, kwargs: Kwargs, refuse: Refuse) -> tuple[Args, Kwargs] | None:
    """The arguments for ``step(closure)`` when the verdict must wait until the closure has run.

    In the pre-hook the gradients of such a step do not exist yet. The step runs on an object that shares the
    optimizer's attributes; when `refuse` says so, these are exchanged for a stand-in's between the closure and the
    update. Nothing has to be restored, and a healthy step is exactly the optimizer's own.

    An optimizer that moves its parameters before the closure (SAM) cannot be cancelled at that point any more.
    LBFGS can: it is put back to where the step began, at the cost of one copy of the parameters per step. With a line
    search only its first evaluation is judged, because the search tries points beyond the edge on purpose.

    Args:
        optimizer: The optimizer about to step.
        args: Positional arguments of the step; the first is the optimizer itself.
        kwargs: Keyword arguments of the step.
        refuse: Called after the closure with its loss and whether the step can still be cancelled; True cancels it
            where it can be. What it raises leaves `step`, with the optimizer as it was before.

    Returns:
        What the pre-hook returns, or None when there is no closure, when the step is cancelled already, or when the
        optimizer's class keeps values in ``__slots__``, which two objects cannot share.
    """
    closure = closure_of(args, kwargs)
    if closure is None or was_cancelled(optimizer, args) or any(slots(optimizer)):
        return None
    twin = twin_of(optimizer)
    share_attributes(twin, optimizer)
    run = _JudgedClosure(optimizer, twin, closure, refuse)
    if len(args) > 1:
        return (twin, run, *args[2:]), kwargs
    return (twin,), {**kwargs, "closure": run}


class _JudgedClosure:
    """The user's closure with a verdict after it."""

    def __init__(self, optimizer: Optimizer, twin: Optimizer, closure: Callable[..., Any], refuse: Refuse) -> None:
        self._optimizer = optimizer
        self._twin = twin
        self._closure = closure
        self._refuse = refuse
        self._versions = _versions(optimizer)
        self._rewind = _lbfgs_rewind(optimizer) if type(optimizer) is LBFGS else None
        self._searches_a_line = type(optimizer) is LBFGS and optimizer.param_groups[0]["line_search_fn"] is not None
        self._evaluations = 0
        self._over = False
        self._loss: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._over:
            return self._loss
        can_cancel = self._rewind is not None or _versions(self._optimizer) == self._versions
        self._loss = self._closure(*args, **kwargs)
        self._evaluations += 1
        if self._searches_a_line and self._evaluations > 1:
            return self._loss
        try:
            refused = self._refuse(self._loss, can_cancel)
        except BaseException:
            self._withdraw()
            raise
        if refused and can_cancel:
            self._withdraw()
        return self._loss

    def _withdraw(self) -> None:
        self._over = True
        if self._rewind is not None:
            self._rewind()
        share_attributes(self._twin, stand_in(self._optimizer))


def _versions(optimizer: Optimizer) -> list[int]:
    # Inference tensors keep no version.
    return [p._version for group in optimizer.param_groups for p in group["params"] if not p.is_inference()]


def _lbfgs_rewind(optimizer: LBFGS) -> Callable[[], None]:
    """What puts LBFGS back to this moment, even from within its step.

    Its `step` holds on to the dict of its state: with another one in its place, that one is simply forgotten.
    """
    group = optimizer.param_groups[0]
    first = group["params"][0]
    # With a line search only the first evaluation is judged, before anything moved.
    saved = [(p, p.detach().clone()) for p in group["params"]] if group["line_search_fn"] is None else []
    state = _lbfgs_state(optimizer.state[first]) if first in optimizer.state else None

    def rewind() -> None:
        with torch.no_grad():
            for p, value in saved:
                p.copy_(value)
        if state is None:
            optimizer.state.pop(first, None)
        else:
            optimizer.state[first] = state

    return rewind


def _lbfgs_state(state: dict[str, Any]) -> dict[str, Any]:
    # Its lists change in place and so does prev_flat_grad; every other tensor in it is replaced, never written to.
    saved = {key: list(value) if isinstance(value, list) else value for key, value in state.items()}
    if isinstance(previous := state.get("prev_flat_grad"), torch.Tensor):
        saved["prev_flat_grad"] = previous.clone()
    return saved


def _steps_as_torchs(cls: type[Optimizer]) -> bool:
    # A subclass that leaves these two alone (a user's own __init__, say) steps as torch's does.
    methods = (getattr(cls, name, None) for name in ("step", "_init_group"))
    return not issubclass(cls, LBFGS) and all(m is None or m.__module__.startswith("torch.optim.") for m in methods)


def _twin_with(optimizer: Optimizer, **attributes: Any) -> Optimizer:
    twin = twin_of(optimizer)
    share_attributes(twin, optimizer)
    object.__setattr__(twin, "__dict__", {**vars(optimizer), **attributes})
    return twin


def _without_parameters(optimizer: Optimizer) -> Optimizer:
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    return _twin_with(optimizer, param_groups=groups, state=defaultdict(dict))


def _settled_lbfgs(optimizer: LBFGS) -> Optimizer:
    # One parameter that is at its optimum already: LBFGS returns after the evaluation it is in.
    like = optimizer.param_groups[0]["params"][0]
    settled = torch.zeros(1, dtype=like.dtype, device=like.device)
    settled.grad = torch.zeros_like(settled)
    params = [settled]
    groups = [{**optimizer.param_groups[0], "params": params}]
    return _twin_with(optimizer, param_groups=groups, state=defaultdict(dict), _params=params, _numel_cache=None)
