"""Memory of a training step, from the allocator and from a census of living storages: not from our own count."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from nan_detector._bench.timing import Step
from nan_detector._bench.workloads import Task

_STEPS = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of tensors.

    Attributes:
        peak: The most within a step.
        steady: What is there between two steps.
    """

    peak: int
    steady: int


def memory_of(watch: Any, task: Task, warm: int = 3) -> Memory:
    """What training steps of `task` need under `watch`, which gives the step to take."""
    with watch(task) as step:
        for _ in range(warm):
            step()
        return _on_cuda(step) if task.x.is_cuda else _on_cpu(step)


def _on_cuda(step: Step) -> Memory:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(_STEPS):
        step()
    torch.cuda.synchronize()
    return Memory(torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated())


def _on_cpu(step: Step) -> Memory:
    changes = _changes(step)
    now, most = 0, 0
    for change in changes:
        now += change
        most = max(most, now)
    steady = living_bytes()
    # The profiler counts from its own beginning: what it ends at is what lives at the end.
    return Memory(steady + most - now, steady)


def _changes(step: Step) -> list[int]:
    """Bytes that were taken (above 0) and given back, in order.

    What was taken before the first of these is not seen when it is given back; after one step that is little.
    """
    with _silent(), profile(profile_memory=True) as profiler:
        for _ in range(_STEPS):
            step()
    results: Any = profiler.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event[0])
    return [size for _, size in events]


def living_bytes() -> int:
    """Bytes of all storages that a Python object can reach, each counted once."""
    gc.collect()
    found: dict[int, int] = {}
    for t in [o for o in gc.get_objects() if issubclass(type(o), Tensor)]:
        for each in (t, t.grad if t.is_leaf else None):
            if each is not None and each.layout is torch.strided:
                storage = each.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


@contextmanager
def _silent() -> Iterator[None]:
    """The profiler's library writes to standard error by itself."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
