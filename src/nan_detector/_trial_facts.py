"""What must be known of a step before it is decided what to try on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from nan_detector._again import Again
from nan_detector._change import Change
from nan_detector._entries import Entry, Made, Outside, tokens_in
from nan_detector._lineage import key_of
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._tape import Tape
from nan_detector._trial_plan import Facts

Tensor = torch.Tensor

_HALVES = (torch.float16, torch.bfloat16)
_LOST = "part of the batch was let go (max_hold_bytes)"
_ELSEWHERE = "the step function takes its batch from elsewhere than its arguments"
_NORMALISES = (torch.nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True, slots=True)
class Batch:
    """What holds one row for each sample, and where it can be cut.

    The calls that prepare the batch (they use nothing of the model) are made with all samples, as they may know their
    number; what they made is cut where the model and the loss take it.

    Attributes:
        size: Number of samples; 0 where there is no batch.
        users: Calls of the model and of the loss, in one backward pass.
        prepared: Calls that prepare the batch.
        fixed: Identities of tensors that are the model's own.
        uncut: Why it cannot be cut.
    """

    size: int = 0
    users: frozenset[Entry] = frozenset()
    prepared: frozenset[Entry] = frozenset()
    fixed: frozenset[int] = frozenset()
    uncut: str = ""

    def is_cut(self, token: Made | Outside, entry: Entry) -> bool:
        """True for an argument of `entry` that may be part of the batch."""
        if entry not in self.users:
            return False
        return token.entry in self.prepared if isinstance(token, Made) else token.ident not in self.fixed


def is_of_batch(t: Tensor, size: int) -> bool:
    """True for a plain tensor whose first dimension is `size` long, and that is nobody's parameter."""
    plain = t.layout is torch.strided and not isinstance(t, torch.nn.Parameter)
    return plain and t.dim() > 0 and t.shape[0] == size


def batch_of(again: Again, micro_step: int) -> Batch:
    """The batch of one backward pass of the step; of a tape without its size, which a run tells."""
    if again.call is not None:
        tape = Tape()
        tape.unbounded = True
        with quiet():
            given = tokens_in((tape.encode(again.call.args), tape.encode(again.call.kwargs)))
            found = [t.tensor for t in given if isinstance(t, Outside) and not _is_models(t, again.names)]
        size = _commonest((t.shape[0], t.numel()) for t in found if t.layout is torch.strided and t.dim())
        return Batch(size, uncut="" if found else _ELSEWHERE)
    entries = list(again.entries)
    fixed = frozenset(t.ident for e in entries for t in _outside(e) if not t.gone and _is_models(t, again.names))
    if any(t.gone for e in entries for t in _outside(e)):
        return Batch(uncut=_LOST)
    prepared = _prepared(entries, fixed)
    return Batch(0, _of_micro_step(entries, micro_step) - prepared, prepared, fixed)


def cut_early(batch: Batch, again: Again) -> Batch | None:
    """`batch` cut before its preparation, for a birth within that; None where there is none to be cut before."""
    makers = frozenset(e for e in batch.prepared if e.writes or next(tokens_in((e.args, e.kwargs)), None) is None)
    if again.call is not None or makers == batch.prepared:
        return None
    return replace(batch, users=batch.users | (batch.prepared - makers), prepared=makers)


class Measuring(Change):
    """Nothing is different; the sizes of what may be part of the batch are noted."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch
        self._seen: dict[int, tuple[int, int]] = {}

    def given(self, t: Tensor, token: Made | Outside, entry: Entry) -> Tensor:
        if self.batch.is_cut(token, entry) and t.layout is torch.strided and t.dim():
            self._seen[id(token)] = t.shape[0], t.numel()
        return t

    @property
    def measured(self) -> Batch:
        """The batch with its size: the first dimension that most have; of several, that of the largest."""
        if self.batch.size:
            return self.batch
        return replace(self.batch, size=_commonest(self._seen.values()))


def _commonest(sizes: Iterable[tuple[int, int]]) -> int:
    sizes = list(sizes)
    lengths = Counter(n for n, _ in sizes)
    return max(lengths, key=lambda n: (lengths[n], max(numel for m, numel in sizes if m == n)), default=0)


def _is_models(token: Outside, names: Names) -> bool:
    t = token.tensor
    return isinstance(t, torch.nn.Parameter) or names.of_memory(key_of(t)) is not None


def _prepared(entries: list[Entry], fixed: frozenset[int]) -> frozenset[Entry]:
    """Calls that use neither the model nor anything that it made."""
    found: set[Entry] = set()
    for e in entries:
        if e.kind == "call" and all(
            t.entry in found if isinstance(t, Made) else t.ident not in fixed for t in tokens_in((e.args, e.kwargs))
        ):
            found.add(e)
    return frozenset(found)


def _of_micro_step(entries: list[Entry], micro_step: int) -> frozenset[Entry]:
    ends = [e.number for e in entries if e.kind == "backward"]
    return frozenset(e for e in entries if len(ends) < 2 or sum(end < e.number for end in ends) == micro_step)


def _outside(entry: Entry) -> Iterator[Outside]:
    return (t for t in tokens_in((entry.args, entry.kwargs)) if isinstance(t, Outside))


def facts_of(again: Again, batch: Batch, compiled_after: bool) -> Facts:
    """What can be known without running anything.

    Args:
        again: The step.
        batch: Its batch.
        compiled_after: Compiled code was entered after the step's first recorded call.
    """
    entries = again.entries
    modules = [m for model in again.models.values() for m in model.modules()]
    tensors: list[Tensor] = [t for _, t in [*again.names.parameters(), *again.names.buffers()]]
    tensors += [t.tensor for e in entries for t in _outside(e) if not t.gone]
    contexts = [e.autocast for e in entries] + ([again.call.autocast] if again.call is not None else [])
    return Facts(
        samples=batch.size,
        uncut=batch.uncut,
        half=any(t.dtype in _HALVES for t in tensors) or _any_autocast(contexts),
        scaled=any(e.kind == "scale" for e in entries),
        compiled=compiled_after or any(e.compiled for e in entries) or any(_is_compiled(m) for m in modules),
        opaque=again.opaque[0] if again.opaque else "",
        overwritten=again.overwritten,
        batch_norm=any(m.training and isinstance(m, _NORMALISES) for m in modules),
        no_float64="this device has no float64" if any(t.device.type == "mps" for t in tensors) else "",
    )


def _any_autocast(contexts: Iterable[Any]) -> bool:
    return any(enabled for c in contexts if c is not None for _, enabled, _ in c[:-1])


def _is_compiled(module: torch.nn.Module) -> bool:
    compiled = getattr(module, "_compiled_call_impl", None) is not None
    return compiled or type(module).__name__ == "OptimizedModule"
