"""What a watch costs: `NaNDetector.cost`, and what an attached detector keeps in memory, in bytes.

Tensors are counted by the memory behind them, each once; what a watched model or its optimizer owns anyway, and what
only refers to it, costs nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from nan_detector._answers import Cost
from nan_detector._engine import Engine
from nan_detector._entries import Entry, Outside, tensors_in, tokens_in
from nan_detector._hazards import Judged
from nan_detector._quiet import quiet
from nan_detector._session import Session
from nan_detector._shared_step import Kept
from nan_detector._watchers import LayerWatch

Tensor = torch.Tensor


class Held(NamedTuple):
    """Bytes by what they are kept for; see `nan_detector.Cost`."""

    recorder: int = 0
    moments: int = 0
    tape: int = 0
    snapshots: int = 0
    shadows: int = 0


def cost_of(steps: int, spent: list[float], bytes_: Held) -> Cost:
    """The record of what a watch costs.

    Args:
        steps: Steps that were watched.
        spent: Milliseconds that the last of them took.
        bytes_: What is held.
    """
    return Cost(
        steps=steps,
        mean_ms=statistics.fmean(spent) if spent else 0.0,
        median_ms=statistics.median(spent) if spent else 0.0,
        max_ms=max(spent, default=0.0),
        recorder_bytes=bytes_.recorder,
        moment_bytes=bytes_.moments,
        tape_bytes=bytes_.tape,
        snapshot_bytes=bytes_.snapshots,
        shadow_bytes=bytes_.shadows,
    )


def held(engine: Engine, current: Session) -> Held:
    """What `engine` keeps now, with the tape of the thread that it watches."""
    with quiet():
        seen = _storages(_owned(engine))
        entries = [*current.tape.entries, *(engine.hazards.last.entries if engine.hazards.last is not None else ())]
        roots = [e for e in entries if e.kind == "root"]
        layers = engine.watch.layers.nbytes if isinstance(engine.watch, LayerWatch) else 0
        return Held(
            recorder=engine.run.recorder.nbytes + layers,
            moments=_bytes(_of_moments(roots), seen),
            tape=_bytes((*_of_tokens(entries), *_of_weights(engine.hazards.last)), seen),
            snapshots=0 if engine.keeper is None or engine.keeper.state is None else engine.keeper.state.nbytes,
            shadows=engine.aftermath.nbytes,
        )


def _owned(engine: Engine) -> Iterator[Tensor]:
    """What is there without a detector as well."""
    yield from (p for _, p in engine.run.names.parameters())
    yield from (b for _, b in engine.run.names.buffers())
    for optimizer in engine.optimizers.alive():
        yield from (p for group in optimizer.param_groups for p in group["params"])
        yield from (t for state in optimizer.state.values() for t in tensors_in(state, 2))


def _of_moments(roots: Iterable[Entry]) -> Iterator[Tensor]:
    """What the calls of watched modules were given, and what else was kept of their start."""
    for e in roots:
        yield from _of_tokens((e,))
        moment = e.extra
        if moment is None:
            continue
        yield from moment.rng
        yield from (b for _, _, b in moment.buffers)
        yield from (t for _, _, value in moment.attributes for t in tensors_in(value))
        yield from (state for _, state in moment.generators)


def _of_tokens(entries: Iterable[Entry]) -> Iterator[Tensor]:
    for e in entries:
        for token in tokens_in((e.args, e.kwargs)):
            if isinstance(token, Outside):
                yield from token.kept
        yield from (*e.losses, *e.unscaled)


def _of_weights(last: Judged | None) -> Iterator[Tensor]:
    """Weights that a step used and that have moved since."""
    for token in last.weights.values() if isinstance(last, Kept) else ():
        yield from token.kept


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {key for t in tensors for key, _ in _memory(t)}


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    """Bytes behind `tensors` that are not among `seen`; they are from now on."""
    total = 0
    for t in tensors:
        for key, size in _memory(t):
            if key not in seen:
                seen.add(key)
                total += size
    return total


def _memory(t: Any) -> Iterator[tuple[int, int]]:
    """Identity and size of the memory behind a tensor; nothing where it is not laid out plainly."""
    try:
        storage = t.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse, or of a library with memory of its own
        return
    yield storage._cdata, storage.nbytes()
