"""Which learning rate schedulers there are: learned when they step, while somebody wants to know.

A scheduler knows its optimizer and nothing knows the scheduler, so `step` is wrapped for as long as it is needed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

#: Called with a scheduler that is about to step.
Meet = Callable[[Any], object]

_lock = threading.RLock()
_meets: list[Meet] = []
_undo: list[Callable[[], object]] = []


def watch(meet: Meet) -> None:
    """Call `meet` before each step of any scheduler, until `unwatch`."""
    with _lock:
        if not _meets:
            for cls in dict.fromkeys(_classes(LRScheduler)):
                if "step" in vars(cls):
                    _wrap(cls)
        _meets.append(meet)


def unwatch(meet: Meet) -> None:
    """Call `meet` no more; with the last one, every class is as it was."""
    with _lock:
        if meet in _meets:
            _meets.remove(meet)
        if not _meets:
            while _undo:
                _undo.pop()()


def _classes(cls: type[Any]) -> Iterator[type[Any]]:
    # Some have a step of their own, which does not call that of the base class.
    yield cls
    for sub in cls.__subclasses__():
        yield from _classes(sub)


def _wrap(cls: type[Any]) -> None:
    original = vars(cls)["step"]

    @functools.wraps(original)
    def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            for meet in list(_meets):
                meet(scheduler)
        return original(scheduler, *args, **kwargs)

    setattr(cls, "step", step)  # noqa: B010  # an assignment would have to be of the same type
    _undo.append(lambda: setattr(cls, "step", original))
