"""One recorded call, made again: the frame that bounds it, the modes it ran under, what cannot be used twice."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from nan_detector._entries import Entry
from nan_detector._errors import ReplayRefused


def make_call(func: Any, args: Any, kwargs: Any) -> Any:
    """The barrier: frames outside this one are not the replayed call's."""
    return func(*args, **kwargs)


@contextlib.contextmanager
def modes_of(entry: Entry) -> Iterator[None]:
    """Grad mode and autocast as they were when the call was recorded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(entry.grad_enabled))
        if entry.autocast is not None:
            *regions, cache = entry.autocast
            for device, enabled, dtype in regions:
                if enabled:
                    stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        yield


def eager_stance() -> Any:
    """Compiled code must run eagerly under a dispatch mode, or it is compiled wrongly for ever after."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return set_stance("force_eager") if set_stance is not None else _eager_without_stances()


@contextlib.contextmanager
def _eager_without_stances() -> Iterator[None]:
    """The same before PyTorch 2.6: a call of compiled code is told not to look for any."""
    frame: Any = sys.modules.get("torch._dynamo.eval_frame")  # nothing is compiled before it is imported
    name = frame_setter(frame)
    if name is None:
        yield
        return
    original = getattr(frame, name)

    def set_eval_frame(callback: Any) -> Any:
        return original(None if callable(callback) else callback)

    setattr(frame, name, set_eval_frame)
    try:
        yield
    finally:
        setattr(frame, name, original)


def frame_setter(frame: Any) -> str | None:
    """The name in ``torch._dynamo.eval_frame`` of what compiled code is entered and left with: of 2.5, and of 2.4."""
    return next((n for n in ("_maybe_set_eval_frame", "set_eval_frame") if hasattr(frame, n)), None)


def refuse_iterators(args: Any, kwargs: Any) -> None:
    """Raise `ReplayRefused` where a model is given an iterator: the step has used it up."""
    for name, value in [*enumerate(args), *kwargs.items()]:
        if hasattr(value, "__next__"):
            raise ReplayRefused(
                f"argument {name!r} of the model is an iterator ({type(value).__name__}), which can be used only once"
            )


def has_hook(args: Any) -> bool:
    """True where the arguments of a `register_hook` are a tensor and a hook that it has."""
    return len(args) > 1 and any(hook is args[1] for hook in (args[0]._backward_hooks or {}).values())
