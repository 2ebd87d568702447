"""What of a model is not finite, and whether the step that is looked into made it so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from nan_detector import _finite
from nan_detector._entries import Entry, Outside
from nan_detector._lineage import EMPTY
from nan_detector._moment import Moment
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._replayed import Replayed
from nan_detector._trace import Birth, BirthKind


def overwritten(replayed: Replayed, birth: Birth | None) -> str:
    """The buffer that the birth was written into by a call of its own; "" where there is none."""
    if birth is None or birth.kind != BirthKind.OPERATION.value:
        return ""
    return next((n for n, line in replayed.written.items() if any(g.record.index == birth.number for g in line)), "")


def poisoned_buffers(replayed: Replayed, names: Names, birth: Birth) -> tuple[str, ...]:
    """Buffers of the model that are not finite: the one that was blamed, and those that this step's births reached."""
    with quiet():
        bad = {name for name, b in names.buffers() if not _finite.is_finite(b)}
        reached = [
            name
            for name, copy in replayed.buffers.items()
            if name in bad
            and any(
                not g.intended and g.kind is not BirthKind.BUFFER
                for g in replayed.tracer.ancestry(copy) | replayed.written.get(name, EMPTY)
            )
        ]
    blamed = [birth.tensor_name] if birth.kind == BirthKind.BUFFER.value and birth.tensor_name in bad else []
    return tuple(dict.fromkeys([*blamed, *reached]))


def weights_lost(entries: list[Entry], names: Names, outside: Mapping[int, Outside]) -> bool:
    """True when the step's weights were damaged after it used them: what a replay found now would be another story.

    Where it was the step's own recorded call that wrote them, what stood there before was kept.

    Args:
        entries: The calls of the step.
        names: Names of the models.
        outside: The tensors from outside the step, by identity.
    """
    if unmoved(entries) is not False:
        return False
    moved = [(name, p) for name, p in names.parameters() if not _is_kept(outside.get(id(p)), p)]
    return weights_state(moved, ()) != "clean"


def _is_kept(token: Outside | None, p: Tensor) -> bool:
    return token is not None and token.snapshot is not None and token.stands_for(p)


def unmoved(entries: Iterable[Entry]) -> bool | None:
    """True when nothing has written into the weights since the model was called; None where it was not."""
    last = {id(e.owner): e.extra for e in entries if e.kind == "root" and isinstance(e.extra, Moment)}
    if not last:
        return None
    with quiet():
        return all(p._version == version for moment in last.values() for p, version in moment.versions)


def weights_state(parameters: Any, buffers: Any) -> str:
    """'clean', or which parameter or buffer holds non-finite values."""
    with quiet():
        for name, t in [*parameters, *buffers]:
            if not _finite.is_finite(t):
                return name  # type: ignore[no-any-return]  # pairs of str and Tensor
    return "clean"
