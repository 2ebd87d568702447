"""Finite or not, and the numbers that prove it: the only place that reads a tensor to the host.

Every function is invisible to the user's run: it records no autograd graph, is seen by no function or dispatch mode,
and neither writes a tensor nor bumps a version. The norms of the hot path are in `_norms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nan_detector._norms import norms
from nan_detector._quiet import quiet
from nan_detector._records import TensorStats
from nan_detector._values import (
    HALF,
    PLAIN,
    as_real,
    computable,
    has_values,
    local_part,
    readable,
    real_values,
    size_of,
)

__all__ = [
    "bad_column",
    "bad_mask",
    "bad_rows",
    "checkable",
    "first_bad_index",
    "in_range",
    "is_finite",
    "norms",
    "pack",
    "quiet",
    "read",
    "scalar",
    "stats",
    "stats_where",
]

#: Elements that statistics widen at a time, so that a report about a huge tensor does not need its memory again.
_CHUNK = 2**20
#: A power of two by which float64 values are scaled where their plain sum overflows; undone exactly on the host.
_SCALE = 2.0**-64


def checkable(t: Tensor) -> bool:
    """Whether `t` can hold a NaN or Inf, and its values can be read.

    True for floating and complex tensors with elements, dense or sparse; False for integers, quantised and nested
    tensors, and for those without values of their own (meta, fake, ZeroTensors, those inside ``torch.func``).
    """
    if type(t) in PLAIN:
        # What is asked of it is no operation: there is nothing to hide from dispatch modes, which costs more than this.
        with torch._C.DisableTorchFunction():
            return readable(t)
    with quiet():
        return readable(local_part(t))


def is_finite(t: Tensor) -> bool:
    """Whether `t` holds no NaN, inf or -inf: exact, and one read to the host where all is well.

    True where it is not `checkable`.
    """
    with quiet():
        t = local_part(t)
        if type(t) in PLAIN:
            return _is_finite(t)
        try:
            return _is_finite(t)
        except (RuntimeError, TypeError):  # a tensor-like of another library that cannot sum: not for us to judge
            return True


def _is_finite(t: Tensor) -> bool:
    v = real_values(t)
    if v is None or v.numel() == 0:
        return True
    # A sum misses no NaN or Inf, and is cheap; halves would overflow in it early.
    total = v.sum(dtype=torch.float32) if v.dtype in HALF else v.sum()
    return math.isfinite(total.item()) or in_range(v)


def in_range(v: Tensor) -> bool:
    """`is_finite` of a plain, dense, real floating tensor with elements, whose sum does not tell."""
    low, high = torch.aminmax(v)  # NaN wins in both
    return math.isfinite(low.item()) and math.isfinite(high.item())


def bad_mask(t: Tensor) -> Tensor:
    """Where `t` is NaN, inf or -inf.

    Returns:
        A dense bool tensor of the shape and device of `t` (of the local shard of a distributed tensor); all False
        where `t` is not `checkable`.
    """
    with quiet():
        return _mask(local_part(t))


def stats(t: Tensor) -> TensorStats:
    """Statistics of `t`, by a few reads to the host.

    Counts of negative values include -inf. Of a sparse tensor they are over its stored values, of a distributed
    tensor over the local shard, of integers and bools over their values as floats. Where values cannot be read
    (quantised, nested, meta), only shape, dtype and device are given.
    """
    with quiet():
        t = local_part(t)
        return _stats(real_values(t) if _is_inexact(t) else _integers(t), t, size_of(t))


def stats_where(t: Tensor, mask: Tensor) -> TensorStats:
    """Statistics over the elements of `t` that a mask selects; both are broadcast to one shape.

    Args:
        t: Any tensor.
        mask: Bool tensor.

    Returns:
        Statistics with the shape ``(count,)``, counted in elements of `t`; without values where `t` has none to read.

    Raises:
        ValueError: The shapes do not broadcast; the message names both.
    """
    with quiet():
        t = local_part(t)
        if not has_values(t) or not has_values(mask):
            return TensorStats((0,), str(t.dtype), str(t.device))
        try:
            shape = torch.broadcast_shapes(t.shape, mask.shape)
        except RuntimeError:
            raise ValueError(
                f"mask of shape {tuple(mask.shape)} does not fit a tensor of shape {tuple(t.shape)}; "
                "give one that broadcasts with it."
            ) from None
        chosen = computable(t).expand(shape)[mask.to(t.device).expand(shape)]
        return _stats(as_real(chosen), t, tuple(chosen.shape))


def first_bad_index(t: Tensor) -> tuple[int, ...]:
    """The index of the first non-finite element in row-major order; () where there is none, or no dimension."""
    with quiet():
        t = local_part(t)
        if not readable(t):
            return ()
        mask = _mask(t)
        flat = mask.flatten().to(torch.uint8)  # argmax knows no bool, and gives the first of equals
        at = flat.argmax()
        position, found = (int(n) for n in torch.stack([at, flat[at].to(at.dtype)]).tolist())
        if not found:
            return ()
        index = []
        for size in reversed(mask.shape):
            position, rest = divmod(position, size)
            index.append(rest)
        return tuple(reversed(index))


def bad_column(t: Tensor) -> int | None:
    """The one column of a matrix that holds all its non-finite elements, of several rows; else None."""
    with quiet():
        t = local_part(t)
        if t.dim() != 2 or t.shape[1] < 2 or not readable(t):
            return None
        columns = _mask(t).sum(dim=0)
        found = columns.nonzero().flatten()
        return int(found) if found.numel() == 1 and int(columns[found]) > 1 else None


def bad_rows(t: Tensor, limit: int = 32) -> tuple[int, ...]:
    """Indices along the first dimension that hold a non-finite element, ascending, at most `limit` of them."""
    with quiet():
        t = local_part(t)
        if t.dim() == 0 or not readable(t):
            return ()
        mask = _mask(t)
        rows = mask.reshape(mask.shape[0], -1).any(dim=1).nonzero().flatten()
        return tuple(int(n) for n in rows[:limit].tolist())


def scalar(t: Tensor) -> float:
    """The value of a tensor with one element; of a complex one its magnitude.

    Raises:
        ValueError: It has another number of elements; the message names the shape.
    """
    with quiet():
        t = local_part(t)
        if t.numel() != 1:
            raise ValueError(f"a tensor of shape {tuple(t.shape)} has no single value; give one with one element.")
        value = computable(t).item()
        return float(abs(value)) if isinstance(value, complex) else float(value)


def pack(parts: Sequence[Tensor]) -> Tensor:
    """Small floating tensors in one vector, so that one read fetches them all; reads nothing itself.

    Args:
        parts: Tensors of any shapes; those elsewhere are copied to the first accelerator among them, else the CPU.

    Returns:
        Vector of their values in order, in the widest of their dtypes (so each value is exact).
    """
    with quiet():
        flat = [as_real(computable(local_part(p))).reshape(-1) for p in parts]
        if not flat:
            return torch.empty(0, device="cpu", dtype=torch.float32)
        if any(p.device != flat[0].device for p in flat):
            target = next((p.device for p in flat if p.device.type != "cpu"), flat[0].device)
            flat = [p.to(target, non_blocking=True) for p in flat]
        return torch.cat(flat)


def read(packed: Tensor) -> list[float]:
    """The values of a vector: the one read to the host of a step."""
    with quiet():
        values: list[float] = packed.tolist()
        return values


def _is_inexact(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _integers(t: Tensor) -> Tensor | None:
    return t if has_values(t) and t.layout is torch.strided else None


def _mask(t: Tensor) -> Tensor:
    if not readable(t):
        return torch.zeros(size_of(t), dtype=torch.bool, device=t.device)
    v = computable(t)
    # Of what is not finite the difference to itself is NaN: two operations, where `isfinite` makes four.
    return (v - v) != 0 if v.is_floating_point() else ~torch.isfinite(v)


def _stats(v: Tensor | None, of: Tensor, shape: tuple[int, ...]) -> TensorStats:
    if v is None or v.numel() == 0:
        return TensorStats(shape, str(of.dtype), str(of.device))
    rows = [_summary(piece) for piece in _pieces(v)]
    nan, posinf, neginf, zero, negative, low, high, least, total, scaled = zip(*rows, strict=True)
    finite = v.numel() - int(sum(nan) + sum(posinf) + sum(neginf))
    return TensorStats(
        shape,
        str(of.dtype),
        str(of.device),
        min=min(low) if finite else None,
        max=max(high) if finite else None,
        mean=_mean(total, scaled, finite) if finite else None,
        min_nonzero=min(least) if min(least) < math.inf else None,
        nan_count=int(sum(nan)),
        posinf_count=int(sum(posinf)),
        neginf_count=int(sum(neginf)),
        # A complex number is 0 where both its parts are; everything else is counted in parts.
        zero_count=int((v == 0).all(-1).sum() if of.is_complex() else sum(zero)),
        negative_count=int(sum(negative) + sum(neginf)),
    )


def _mean(totals: Sequence[float], scaled: Sequence[float], count: int) -> float:
    try:
        if all(map(math.isfinite, totals)):
            return math.fsum(totals) / count
    except OverflowError:  # only their sum is too large
        pass
    return math.fsum(scaled) / count / _SCALE


def _summary(v: Tensor) -> list[float]:
    """Ten numbers of one piece, in the order that `_stats` unpacks; negatives without -inf."""
    if v.numel() == 1:  # a loss: one read instead of a dozen operations
        return _summary_of_one(float(v.item()))
    w = v.to(torch.float32 if v.device.type == "mps" else torch.float64)
    bad = [0.0, 0.0, 0.0]
    low, high = torch.stack(torch.aminmax(w)).tolist()
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = torch.stack([torch.count_nonzero(b) for b in (w.isnan(), w == math.inf, w == -math.inf)]).tolist()
        w = w[torch.isfinite(w)]
        if w.numel() == 0:
            return [*bad, 0, 0, math.inf, -math.inf, math.inf, 0.0, 0.0]
        low, high = torch.stack(torch.aminmax(w)).tolist()
    nonzero, negative = torch.count_nonzero(w).to(w.dtype), torch.count_nonzero(w < 0).to(w.dtype)
    nonzero, negative, least, total = torch.stack([nonzero, negative, w.abs().amin(), w.sum()]).tolist()
    if not least:
        least = w[w != 0].abs().amin().item() if nonzero else math.inf
    scaled = total * _SCALE if math.isfinite(total) else (w * _SCALE).sum().item()
    return [*bad, w.numel() - nonzero, negative, low, high, least, total, scaled]


def _summary_of_one(value: float) -> list[float]:
    if not math.isfinite(value):
        bad = [float(math.isnan(value)), float(value == math.inf), float(value == -math.inf)]
        return [*bad, 0, 0, math.inf, -math.inf, math.inf, 0.0, 0.0]
    least = abs(value) or math.inf
    return [0.0, 0.0, 0.0, value == 0, value < 0, value, value, least, value, value * _SCALE]


def _pieces(v: Tensor) -> Iterator[Tensor]:
    if v.numel() <= _CHUNK:
        yield v
    elif v.is_contiguous():
        yield from v.view(-1).split(_CHUNK)
    else:
        dim = max(range(v.dim()), key=lambda d: v.shape[d])
        step = max(1, v.shape[dim] * _CHUNK // v.numel())
        for start in range(0, v.shape[dim], step):
            yield from _pieces(v.narrow(dim, start, min(step, v.shape[dim] - start)))
