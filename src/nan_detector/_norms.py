"""The L2 norm of every gradient: the screen of each step, its warning threshold and its row in the recorder.

One vector, nothing written, no read to the host. Copying small tensors side by side, to reduce them in one call, was
tried and cost more than it saved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nan_detector._quiet import quiet
from nan_detector._values import PLAIN, local_part, real_values


def norms(grads: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each tensor, without a read to the host.

    A non-finite element makes its tensor's norm non-finite. A norm can also overflow (float32: above 1.8e19) or
    underflow to 0 with finite elements: confirm the former with `is_finite`.

    Args:
        grads: Gradients of any dtype, layout and device; of a distributed one the local shard counts.

    Returns:
        Vector of ``len(grads)`` on the device of the first: float32, or float64 where any of them is double.
        The norm of what holds no values (empty, or meta beside real ones) is 0.
    """
    with quiet():
        if not grads:
            return torch.empty(0, dtype=torch.float32, device="cpu")
        parts = list(grads)
        if not PLAIN.issuperset(map(type, parts)):
            parts = [local_part(g) for g in parts]
        if PLAIN.issuperset(map(type, parts)):
            try:
                return _fused(parts, _accumulator(parts[0]))
            except (RuntimeError, TypeError):  # a mixture: of layouts, complex and real, double and single, devices
                pass
        nothing = torch.empty(0, dtype=torch.float32, device=parts[0].device)
        values = [nothing if v is None else v for v in map(real_values, parts)]
        dtype = _accumulator(*parts, *values)
        try:
            return _fused(values, dtype)
        except (RuntimeError, TypeError):
            return _one_by_one(values, dtype)


def in_two_factors(grad: Tensor) -> Tensor:
    """The L2 norm of a finite gradient as two numbers with that product: its squares may leave the range of any dtype.

    Not for each step: it copies the gradient.

    Returns:
        float64 vector of 2 on the CPU: the largest magnitude, and the norm of the gradient divided by it.
    """
    with quiet():
        values = real_values(local_part(grad))
        if values is None or not values.numel():
            return torch.zeros(2, dtype=torch.float64, device="cpu")
        largest = values.abs().max()
        rest = torch.linalg.vector_norm(values / largest, dtype=_accumulator(values))
        return torch.stack([largest.to(rest), rest]).to("cpu").double()


def _accumulator(*values: Tensor) -> torch.dtype:
    return torch.float64 if any(v.dtype is torch.float64 for v in values) else torch.float32


def _fused(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    # Of halves this dtype is wide enough; to narrow doubles to it is an error, so that none can overflow unseen.
    return torch.stack(torch._foreach_norm(grads, 2, dtype=dtype))


def _one_by_one(values: list[Tensor], dtype: torch.dtype) -> Tensor:
    device = values[0].device
    found = [torch.linalg.vector_norm(v, dtype=_accumulator(v)) for v in values]
    return torch.stack([n.to(device=device, dtype=dtype, non_blocking=True) for n in found])
