"""Births as a tracer gives them, with the numbers of real tensors: what an operation did is computed, never made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nan_detector._records import Location, TensorStats
from nan_detector._trace import Birth, GuiltyInput, Trace

Tensor = torch.Tensor


def stats(t: Tensor) -> TensorStats:
    """Statistics of `t`, of any shape, dtype and device."""
    flat = t.detach().reshape(-1).double()
    finite = flat[torch.isfinite(flat)]
    nonzero = finite[finite != 0].abs()
    return TensorStats(
        shape=tuple(t.shape),
        dtype=str(t.dtype),
        device=str(t.device),
        min=finite.min().item() if finite.numel() else None,
        max=finite.max().item() if finite.numel() else None,
        mean=finite.mean().item() if finite.numel() else None,
        min_nonzero=nonzero.min().item() if nonzero.numel() else None,
        nan_count=int(flat.isnan().sum()),
        posinf_count=int((flat == torch.inf).sum()),
        neginf_count=int((flat == -torch.inf).sum()),
        zero_count=int((flat == 0).sum()),
        negative_count=int((finite < 0).sum()),
    )


def born(
    op: str,
    inputs: Sequence[Tensor],
    out: Tensor | None,
    *,
    line: str = "",
    function: str = "Head.forward",
    elementwise: bool = True,
    **fields: Any,
) -> Birth:
    """A birth at `op`, whose result was `out`. Fields not given are those of an operation in a module's forward."""
    bad = ~torch.isfinite(out) if out is not None else None
    guilty = tuple(_guilty(i, t, bad, elementwise) for i, t in enumerate(inputs))
    given = {
        "number": 7,
        "kind": "operation",
        "aten": f"aten.{op}.default",
        "phase": "forward",
        "call": f"torch.{op}",
        "layer_name": "net.head",
        "module_type": "Head",
        "location": Location("models/head.py", 41, function, line or f"y = torch.{op}(x)"),
        "inputs": guilty,
        "output": stats(out) if out is not None else None,
        "guilty_count": int(bad.sum()) if bad is not None else 0,
    }
    return Birth(op=op, **{**given, **fields})


def born_backward(
    forward: str,
    forward_inputs: Sequence[Tensor],
    aten: str,
    inputs: Sequence[Tensor],
    out: Tensor,
    **fields: Any,
) -> Birth:
    """A birth in the derivative of `forward`; the operation that ran is `aten` ("div")."""
    given = {
        "phase": "backward",
        "aten": f"aten.{aten}.default",
        "derivative_of": forward,
        "forward_inputs": tuple(stats(t) for t in forward_inputs),
    }
    return born(forward, inputs, out, **{**given, **fields})


def came(kind: str, t: Tensor, name: str, **fields: Any) -> Birth:
    """A source: the values of `t` were there before the step."""
    given: dict[str, Any] = {"number": 0, "kind": kind, "op": "addmm", "aten": "aten.addmm.default", "phase": "state"}
    given |= {"tensor_name": name, "output": stats(t), "guilty_count": int((~torch.isfinite(t)).sum())}
    return Birth(**{**given, **fields})


def traced(birth: Birth | None, reached: tuple[str, ...] = ("loss", "gradient"), **fields: Any) -> Trace:
    """The trace of a step that went wrong at `birth`."""
    return Trace(birth=birth, reached=reached, **fields)


def _guilty(position: int, t: Tensor, bad: Tensor | None, elementwise: bool) -> GuiltyInput:
    at = None
    if elementwise and bad is not None:
        at = stats(t.expand(bad.shape)[bad])
    return GuiltyInput(position=position, whole=stats(t), at_guilty=at)
