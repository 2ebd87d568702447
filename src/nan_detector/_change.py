"""What a replay may do differently, and the cheap companion of the op tracer for replays that ask only "finite?"."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nan_detector._entries import Entry, Made, Outside
from nan_detector._errors import ReplayRefused
from nan_detector._opinfo import info_of
from nan_detector._quiet import quiet
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor


class Change:
    """One thing that a replay does differently. This one: nothing. Each method gives what takes a value's place.

    Parameters and buffers stay in their modules as they are, because other threads may be using the model: what stands
    for them (`stand_in`) takes their place where they go into a call.
    """

    #: Every loss scale is taken to be 1.
    unscaled = False

    def __init__(self) -> None:
        self.stand_ins: dict[int, tuple[Tensor, Tensor]] = {}  # by identity: a leaf, and what stands for it
        self.is_replays_own: Callable[[Tensor], bool] = lambda t: False  # told by the replay

    def starts(self, step: Any) -> None:
        """A replay with this change is about to be made: `step`, a `Step`."""
        return None

    def stand_in(self, t: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """What stands for leaf `t` in this replay: one leaf, with a gradient of its own."""
        known = self.stand_ins.get(id(t))
        if known is None:
            with quiet():
                leaf = make(t.detach())
            if t.requires_grad:
                leaf.requires_grad_()
                self._take_over_hooks(leaf, t)
            known = self.stand_ins[id(t)] = (t, leaf)
        return known[1]

    def outside(self, t: Tensor) -> Tensor:
        """Of a tensor from outside the step: batch, labels, masks."""
        return t

    def given(self, t: Tensor, token: Made | Outside, entry: Entry) -> Tensor:
        """Of an argument that a recorded call `entry` is given."""
        return t

    def argument(self, t: Tensor) -> Tensor:
        """Of an argument that the step function is given."""
        return t

    def _take_over_hooks(self, leaf: Tensor, t: Tensor) -> None:
        """What the user's hooks do to a gradient is part of the step."""
        for hook in (t._backward_hooks or {}).values():
            leaf.register_hook(hook)
        if not self.is_replays_own(t):
            return  # a tensor of the user's: its gradient is left alone, and what a hook of its own would do as well
        leaf.register_post_accumulate_grad_hook(lambda s: _mirror(s, t))
        for hook in (getattr(t, "_post_accumulate_grad_hooks", None) or {}).values():
            leaf.register_post_accumulate_grad_hook(hook)

    def by_identity(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A call that is about tensors themselves, not their values (`autograd.grad`): about those that stand in."""
        known = self.stand_ins

        def stands_for(value: Any) -> Any:
            return known[id(value)][1] if id(value) in known else value

        return func(*mapped(args, stands_for), **mapped(kwargs, stands_for))

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Make a call of a function of the library."""
        return func(*args, **kwargs)

    def around(self) -> contextlib.AbstractContextManager[None]:
        """What is different around the whole replay."""
        return contextlib.nullcontext()


class Follower(OpTracer):
    """An op tracer that looks at no value: it keeps the user's memory and gradients safe, and the time.

    A replay under it costs little more than the step itself.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        info = info_of(func)
        if info.collective:
            raise ReplayRefused(f"the step talks to other processes ({info.aten}), which a replay must not do")
        self.operations += 1
        if not self.operations & 63 and time.perf_counter() > self.deadline:
            raise ReplayRefused("the replay ran out of its time budget (replay_budget_s)")
        if self.on_leaf is not None:
            for t in _floating((args, kwargs)):
                if t.requires_grad and t.is_leaf:
                    self.on_leaf(t)
        if info.mutates:
            with torch._C.DisableTorchFunction():
                self.journal.about_to_run(info, args, kwargs)
        out = func(*args, **kwargs)
        if not info.is_view:
            for t in _floating(out):
                self.has_made(t)
        return out


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with `change` made to all that its lists, tuples and dicts hold."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([mapped(v, change) for v in value])
    if kind is dict:
        return {k: mapped(v, change) for k, v in value.items()}
    if isinstance(value, tuple):  # a named one, or torch's own (`torch.return_types`)
        fields = [mapped(v, change) for v in value]
        if all(a is b for a, b in zip(fields, value, strict=True)):
            return value
        return type(value)(*fields) if hasattr(value, "_fields") else type(value)(fields)
    return change(value)


def _mirror(leaf: Tensor, t: Tensor) -> None:
    """Code that works on gradients (clipping) finds them where it looks for them."""
    if leaf.grad is not None:
        t.grad = leaf.grad.to(t.dtype)


def _floating(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _floating(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from _floating(v)
