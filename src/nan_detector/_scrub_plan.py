"""Which part of which tensor is looked at in which call, so that each call costs about the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nan_detector._scrub_slots import Slot
from nan_detector._values import FP8, PLAIN, local_part, readable

#: What a call of torch costs, in elements that a sum reads meanwhile: 1.5 to 2.5 µs at 10 to 30 elements a ns.
CALL = 32768
#: The same for a tensor that is copied beside others of its shape, and the largest one for which that pays.
COPY, SMALL = 4096, 4096
#: Elements copied at a time: what fits in a cache.
TOGETHER = 2**18


@dataclass(frozen=True, slots=True)
class Unit:
    """Work of one or two calls of torch.

    Attributes:
        slots: Positions in the list of slots; several are small tensors of one shape, which are stacked.
        plain: True for tensors that can be summed as they are.
        convert: True where the sum must be told to give float32.
        dim: Dimension that is cut; None where the whole is looked at.
        size: Its size when the plan was made.
        start: First index of it.
        length: Number of indices.
    """

    slots: tuple[int, ...]
    plain: bool
    convert: bool = False
    dim: int | None = None
    size: int = 1
    start: int = 0
    length: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """What one call looks at.

    Attributes:
        units: The work.
        mixed: True where the results lie on several devices, or not all units are plain.
        masks: Position, start, and number of parts in all, of each slot that may hold -inf on purpose.
    """

    units: tuple[Unit, ...] = ()
    mixed: bool = False
    masks: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Job:
    """A tensor that may be cut, or small ones of one shape: `count` pieces of a cost of `each`."""

    slots: tuple[int, ...]
    device: str
    plain: bool
    convert: bool
    count: int
    each: float
    dim: int | None


def plan(slots: Sequence[Slot], special: Iterable[str], period: int, max_elements: int | None) -> list[Share]:
    """One share per call, `period` of them, or more where `max_elements` does not allow for it.

    Args:
        slots: Places of the tensors.
        special: Names of slots in which -inf is meant.
        period: Calls in which all is seen.
        max_elements: Elements that one call may read.
    """
    jobs = _jobs(slots, frozenset(special))
    total = sum(CALL + j.count * j.each for j in jobs)
    # A call that reads less than it costs is not worth it: where all is small, some calls have nothing to do.
    quota, most = max(total / period, 2.0 * CALL), math.inf if max_elements is None else CALL + max_elements
    bins = _filled(jobs, min(quota, most))
    while len(bins) > period and quota < most:  # cutting costs calls of its own
        quota *= 1.05
        bins = _filled(jobs, min(quota, most))
    devices = {i: j.device for j in jobs for i in j.slots}
    parts: dict[int, int] = {}
    for unit in (u for units in bins for u in units):
        for i in unit.slots:
            parts[i] = parts.get(i, 0) + 1
    shares = [
        Share(
            tuple(units),
            len({devices[i] for u in units for i in u.slots}) > 1 or not all(u.plain for u in units),
            tuple((i, u.start, parts[i]) for u in units for i in u.slots if slots[i].mask),
        )
        for units in bins
    ]
    spread = [Share()] * max(period, len(shares))
    for n, share in enumerate(shares):
        spread[n * len(spread) // len(shares)] = share
    return spread


def _filled(jobs: list[_Job], quota: float) -> list[list[Unit]]:
    bins: list[list[Unit]] = []
    room = 0.0
    for job in jobs:
        done = 0
        while done < job.count:
            left = job.count - done
            take = min(left, int((room - CALL) // job.each))
            if not bins or (room < quota and (take < 1 or (take < left and take * job.each < CALL))):
                bins.append([])
                room = quota
                continue
            take = max(1, take)
            bins[-1].append(_unit(job, done, take))
            room -= CALL + take * job.each
            done += take
    return bins


def _unit(job: _Job, start: int, length: int) -> Unit:
    if len(job.slots) > 1:
        return Unit(job.slots[start : start + length], job.plain, job.convert)
    whole = job.dim is None or length == job.count
    return Unit(job.slots, job.plain, job.convert, None if whole else job.dim, job.count, start, length)


def _jobs(slots: Sequence[Slot], special: frozenset[str]) -> list[_Job]:
    jobs: list[_Job] = []
    small: dict[tuple[Any, ...], list[int]] = {}
    seen: set[int] = set()
    for i, slot in enumerate(slots):
        try:
            value = slot.owner[slot.key]
        except (KeyError, IndexError):
            continue
        if id(value) in seen and value is not None:  # tied weights
            continue
        seen.add(id(value))
        if not isinstance(value, Tensor):
            jobs.append(_Job((i,), "cpu", False, False, 1, float(CALL + _elements(value)), None))
            continue
        t = local_part(value)
        if not readable(t) or is_freed(t):
            if t.is_floating_point() or t.is_complex():  # a lazy or meta parameter that will get its values later
                jobs.append(_Job((i,), "cpu", False, False, 1, float(CALL), None))
            continue
        n, device = t.numel(), str(t.device)
        dense = t.layout is torch.strided
        plain = t is value and type(t) in PLAIN and dense and slot.name not in special and _sums(t)
        if plain and n <= SMALL:
            small.setdefault((device, t.dtype, tuple(t.shape)), []).append(i)
        elif not dense or t.dim() == 0 or type(t) not in PLAIN:
            jobs.append(_Job((i,), device, plain, _other(t), 1, float(CALL + n), None))
        else:
            dim = 0 if t.shape[0] >= n // CALL else max(range(t.dim()), key=lambda d: t.shape[d])
            jobs.append(_Job((i,), device, plain, _other(t), t.shape[dim], n / t.shape[dim], dim))
    for (device, dtype, shape), group in small.items():
        size = math.prod(shape)
        step = max(1, TOGETHER // size)
        for at in range(0, len(group), step):
            some = tuple(group[at : at + step])
            jobs.append(_Job(some, device, True, dtype is not torch.float32, len(some), float(COPY + size), None))
    return sorted(jobs, key=lambda j: j.device)


def is_freed(t: Tensor) -> bool:
    """True where the memory of a dense tensor was given back, as sharding does in between: reading it is a crash."""
    return t.layout is torch.strided and t.data_ptr() == 0


def _sums(t: Tensor) -> bool:
    return not t.is_complex() and t.dtype not in FP8


def _other(t: Tensor) -> bool:
    return t.dtype is not torch.float32


def _elements(value: Any, depth: int = 3) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if depth == 0 or not isinstance(value, (list, tuple, dict)):
        return 0
    return sum(_elements(v, depth - 1) for v in (value.values() if isinstance(value, dict) else value))
