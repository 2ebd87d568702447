"""What the op tracer asks of an operation's arguments and results: which can hold bad values, and whether they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._lineage import OpRecord
from nan_detector._opinfo import OpInfo
from nan_detector._trace import GuiltyInput
from nan_detector._values import PLAIN, local_part, readable

Tensor = torch.Tensor

_sum = torch.ops.aten.sum.default
_HALF = (torch.float16, torch.bfloat16)
_SUMMABLE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def set_version(t: Tensor, version: int) -> None:
    """Set the counter by which autograd knows that `t` was written in place."""
    counter = torch._C._autograd._unsafe_set_version_counter
    try:
        counter((t,), (version,))
    except TypeError:  # before torch 2.6: one tensor at a time
        counter(t, version)  # type: ignore[arg-type]  # the stubs are of the newer torch


def floats_in(value: Any) -> Iterator[Tensor]:
    """Tensors in an operation's arguments or results that can hold non-finite values. To be called under `quiet`."""
    if isinstance(value, Tensor):
        if readable(local_part(value)):
            yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from floats_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from floats_in(v)


def written_by(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Tensors that an operation writes into, of any dtype."""
    for position, name in info.written:
        value = args[position] if position < len(args) else kwargs.get(name)
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, Tensor):
                yield t


def described(value: Any) -> Iterator[Tensor]:
    """Floating tensors among arguments, empty ones included: a mean of nothing is told by its input's shape."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from described(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from described(v)


def numbers_in(value: Any) -> Iterator[float | complex]:
    if isinstance(value, (float, complex)):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from numbers_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from numbers_in(v)


def finite_number(value: float | complex) -> bool:
    return (
        math.isfinite(value.real) and math.isfinite(value.imag) if isinstance(value, complex) else math.isfinite(value)
    )


def finite_fast(t: Tensor) -> bool:
    """Exact; one cheap reduction where the tensor is finite, which is nearly always."""
    if t.layout is not torch.strided or t.dtype not in _SUMMABLE:
        return _finite.is_finite(t)
    total = _sum(t, dtype=torch.float32) if t.dtype in _HALF else _sum(t)
    if math.isfinite(total.item()):
        return True
    if type(t) not in PLAIN:
        return _finite.is_finite(t)
    return t.numel() > 1 and _finite.in_range(t)  # of one number it was the sum


def is_dense(t: Tensor) -> bool:
    return t.layout is torch.strided


def has_nan(t: Tensor) -> bool:
    return _finite.stats(t).nan_count > 0


def mask_like(stats: Any) -> bool:
    """True for an additive mask: -inf and one other value, or -inf alone."""
    return stats.min is None or stats.min == stats.max


def literal_values(info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any], scalars: list[Any]) -> float | None:
    """The non-finite literal that `info` writes, if it does."""
    if not info.literal:
        return None
    for value in scalars:
        return value.real if isinstance(value, complex) else value
    return None


def plain_arguments(info: OpInfo, args: tuple[Any, ...]) -> tuple[str, ...]:
    out = []
    for i, value in enumerate(args):
        if isinstance(value, (bool, int, float)) or (
            isinstance(value, (list, tuple)) and all(isinstance(v, (int, float)) for v in value)
        ):
            name = info.argument_names[i] if i < len(info.argument_names) else str(i)
            out.append(f"{name}={value!r}")
    return tuple(out)


def guilty_input(position: int, t: Tensor, mask: Tensor, out: Tensor, info: OpInfo, record: OpRecord) -> GuiltyInput:
    whole = _finite.stats(t)
    at: Any = None
    try:
        if info.pointwise or t.shape == out.shape:
            at = _finite.stats_where(t.expand(mask.shape), mask)
        elif info.reduction:
            at = _finite.stats_where(t, spread_mask(mask, t, record))
    except (RuntimeError, IndexError):  # no correspondence of elements: the whole tensor has to do
        at = None
    return GuiltyInput(position=position, whole=whole, at_guilty=at)


def spread_mask(mask: Tensor, t: Tensor, record: OpRecord) -> Tensor:
    """The elements of a reduction's input that went into its bad results."""
    if mask.dim() == t.dim():
        return mask.expand(t.shape)
    if mask.dim() == 0:
        return mask.expand(t.shape)
    dims = next((eval_dims(a) for a in record.args if a.startswith("dim=")), [])
    for d in sorted(d % t.dim() for d in dims):
        mask = mask.unsqueeze(d)
    return mask.expand(t.shape)


def eval_dims(text: str) -> list[int]:
    """'dim=[0, -1]' -> [0, -1]."""
    import ast

    value = ast.literal_eval(text.split("=", 1)[1])
    return [value] if isinstance(value, int) else list(value)
