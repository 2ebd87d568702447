"""Per-thread state that hooks ask before they do anything, and the rule for our own failures."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger("nan_detector")


#: What is logged, with the traceback, when we fail ourselves.
BUG = "nan_detector has a bug and stands down; training goes on unwatched. Please report this."


def log_beside_stderr(level: int, message: str) -> None:
    """Log for whoever listens, except on standard error: the same is about to be printed there in full."""
    if not logger.isEnabledFor(level):
        return
    record = logger.makeRecord(logger.name, level, __file__, 0, message, (), None, "log_beside_stderr")
    found: Any = logger.filter(record)
    if not found:
        return
    record = found if isinstance(found, logging.LogRecord) else record  # from Python 3.12 on a filter may replace it
    source: logging.Logger | None = logger
    while source is not None:
        for handler in source.handlers:
            if level >= handler.level and getattr(handler, "stream", None) not in (sys.stderr, sys.__stderr__):
                handler.handle(record)
        source = source.parent if source.propagate else None


class _Local(threading.local):
    replaying: int = 0
    may_step: Callable[[Any], bool] | None = None


#: The calling thread's. Hooks that run in every step look into it themselves: calling a function costs more.
local = _Local()


def is_replaying() -> bool:
    """True while this thread replays a step to find a birthplace.

    Code with side effects of its own (a metric, a counter, a print in ``forward``) can ask this to stay quiet.
    """
    return local.replaying > 0


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """Mark this thread as replaying: every hook of ours returns at once."""
    local.replaying += 1
    try:
        yield
    finally:
        local.replaying -= 1


@contextlib.contextmanager
def replay_may_step(allowed: Callable[[Any], bool]) -> Iterator[None]:
    """In this thread's replay, optimizers that are `allowed` step; the first other one ends it."""
    outer, local.may_step = local.may_step, allowed
    try:
        yield
    finally:
        local.may_step = outer


def steps_in_replay(optimizer: Any) -> bool:
    """True when `optimizer` belongs to the replayed step itself."""
    return local.may_step is not None and local.may_step(optimizer)


def pickled_hook() -> tuple[Any, ...]:
    """What a hook of ours becomes in a pickle: a function that takes anything and does nothing.

    A model that is saved whole must load where nan_detector is not installed, so it is one of Python's own.
    """
    return (getattr, (contextlib.nullcontext(), "__exit__"))


def switched_off() -> bool:
    """True when the environment says NAN_DETECTOR=off: everything becomes a no-op."""
    return os.environ.get("NAN_DETECTOR", "").strip().lower() in ("off", "0", "false", "no")


def process_rank() -> int:
    """Rank of this process among those that train together; 0 where it is alone."""
    group: Any = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        return int(group.get_rank())
    told = os.environ.get("RANK", "")  # set by launchers, before there is a process group
    return int(told) if told.isascii() and told.isdecimal() else 0


def strict() -> bool:
    """True when our own failures must be raised instead of contained (set by the test suite)."""
    return os.environ.get("NAN_DETECTOR_STRICT", "") == "1"
