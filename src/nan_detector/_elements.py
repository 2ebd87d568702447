"""Which elements of a result descend from which birth, where more than one birth meets in an operation.

A tensor may hold two births in different elements, of which a later slice or mask takes only one. Where the operation
is not known here, all births that go in are taken to be in all bad elements that come out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._opinfo import OpInfo

Tensor = torch.Tensor

#: Elements of a result beyond which births are not told apart, and births.
MAX_ELEMENTS = 1 << 22
MAX_BIRTHS = 16

#: Operations that move elements: what they do to the values, they do to a mask.
_MOVES = frozenset(
    [
        "cat",
        "stack",
        "index",
        "index_select",
        "gather",
        "take",
        "where",
        "masked_fill",
        "masked_select",
        "masked_scatter",
        "clone",
        "copy",
        "to_copy",
        "index_put",
        "index_put_impl",
        "scatter",
        "slice_scatter",
        "select_scatter",
        "constant_pad_nd",
        "flip",
        "roll",
        "repeat",
        "embedding",
        "slice_backward",
        "select_backward",
        "index_copy",
        "index_fill",
        "unfold_backward",
        "diagonal_scatter",
        "triu",
        "tril",
        "diag_embed",
    ]
)
#: Sums of products: a bad element spoils each sum that it goes into. The position of a term that is only added.
_SUMS = {
    "sum": None, "mean": None, "mm": None, "bmm": None, "mv": None, "dot": None, "cumsum": None, "addmm": 0,
    "addmv": 0, "addbmm": 0, "baddbmm": 0, "linear": 2, "convolution": 2, "avg_pool2d": None, "index_add": None,
}  # fmt: skip
#: One bad element spoils all along the dimension in the second argument.
_ALONG = frozenset(("softmax", "log_softmax"))


def spread(
    info: OpInfo,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    masks: dict[int, Tensor],
    out: Tensor,
) -> Tensor | None:
    """Where the bad elements of one birth go.

    Args:
        info: The operation.
        func: It.
        args: Its arguments; the ones it wrote into hold what they hold now.
        kwargs: Its keyword arguments.
        tensors: The floating tensors among the arguments, in order.
        masks: The birth's elements in those of them, by position; bool, of their shapes.
        out: The result.

    Returns:
        Bool, of the shape of `out`; None where that is not known.
    """
    try:
        if info.op in _MOVES:
            moved = _run(func, args, kwargs, tensors, lambda i, t: _ones_at(t, masks.get(i)))
            return moved if moved is not None and moved.shape == out.shape else None
        if info.op in _SUMS:
            return _summed(info, func, args, kwargs, tensors, masks, out)
        if info.op in _ALONG:
            return masks[0].any(dim=int(args[1]), keepdim=True).expand(out.shape) if 0 in masks else None
        if info.pointwise:
            reached = torch.zeros(out.shape, dtype=torch.bool, device=out.device)
            for mask in masks.values():
                reached = reached | mask
            return reached
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):  # a form of it not foreseen here
        return None
    return None


def _summed(
    info: OpInfo, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], masks: dict[int, Tensor], out: Tensor
) -> Tensor | None:
    added = _SUMS[info.op]
    reached = torch.zeros(out.shape, dtype=torch.bool, device=out.device)
    for position, mask in masks.items():

        def stand_in(i: int, t: Tensor, position: int = position, mask: Tensor = mask) -> Tensor:
            if i == position:
                return _ones_at(t, mask)
            return torch.zeros_like(t) if i == added else torch.ones_like(t)

        part = _run(func, args, kwargs, tensors, stand_in)
        if part is None or part.shape != out.shape:
            return None
        reached = reached | part
    return reached


def _ones_at(t: Tensor, mask: Tensor | None) -> Tensor:
    ones = torch.zeros_like(t)
    return ones if mask is None else ones.masked_fill(mask, 1.0)


def _run(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], stand_in: Callable[[int, Tensor], Tensor]) -> Any:
    """Where the result of `func` is not zero when `stand_in(i, t)` takes the place of floating tensor number i."""
    place = {id(t): stand_in(i, t) for i, t in enumerate(tensors)}

    def swap(value: Any) -> Any:
        if isinstance(value, Tensor):
            return place.get(id(value), value)
        if isinstance(value, float) and not math.isfinite(value):
            return 0.0
        if isinstance(value, (list, tuple)):
            return type(value)([swap(v) for v in value])
        return value

    result = func(*swap(args), **{k: swap(v) for k, v in kwargs.items()})
    return result != 0 if isinstance(result, Tensor) else None
