"""Which parameters an in-place call writes into: a loop without an optimizer updates its weights like that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nan_detector._entries import Made, Outside, tensors_in
from nan_detector._lineage import key_of
from nan_detector._tape import Tape

Tensor = torch.Tensor


def weights_behind(tape: Tape, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The parameters that an in-place call writes into; none where it writes into anything else as well."""
    if getattr(func, "__name__", "") in ("__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if attribute != "data":
            return []
    targets = [*tensors_in(args[:1]), *tensors_in(kwargs.get("out"))]
    found = [parameter_behind(tape, t) for t in targets]
    return [] if None in found else found  # type: ignore[return-value]  # None was ruled out


def parameter_behind(tape: Tape, t: Tensor) -> Tensor | None:
    """The parameter that `t` is, or is a view or the `.data` of."""
    if isinstance(t, torch.nn.Parameter):
        return t
    if isinstance(t._base, torch.nn.Parameter):
        return t._base
    entry = tape.made_by(t)
    while entry is not None and entry.args:
        source = entry.args[0]
        if isinstance(source, Outside):
            p = None if source.gone else source.tensor
            return p if isinstance(p, torch.nn.Parameter) and p.data_ptr() <= t.data_ptr() and _shares(p, t) else None
        entry = source.entry if isinstance(source, Made) else None
    return None


def _shares(a: Tensor, b: Tensor) -> bool:
    return key_of(a) == key_of(b) != 0
