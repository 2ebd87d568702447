"""Repaired operands: each function keeps ordinary values as they are, and moves the others to where all is finite.

The gradient of an element that was moved is 0: it no longer depends on what stood there.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def away_from_zero(n: Tensor, eps: float) -> Tensor:
    """`n`, of any shape and floating dtype, with magnitudes below `eps` replaced by `eps` of the same sign."""
    return torch.where(n.abs() < eps, torch.where(torch.signbit(n), -eps, eps).to(n.dtype), n)


def one_for_zero(n: Tensor) -> Tensor:
    """`n`, of any shape and dtype, with 1 in the place of each 0."""
    return torch.where(n == 0, torch.ones_like(n), n)


def bounded(x: Tensor, limit: float) -> Tensor:
    """`x` with its infinities, and what is beyond `limit`, moved to `limit` of the same sign."""
    return x.clamp(-limit, limit)


def finite_in(x: Tensor, big: float) -> Tensor:
    """`x` with its infinities replaced by `big` of the same sign; NaN stays, as it was not made here."""
    return torch.where(x.isinf(), torch.where(x > 0, big, -big).to(x.dtype), x)


def softmax_rows(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Scores without rows that are -inf everywhere, and which those were.

    Args:
        x: Scores of any shape and floating dtype.
        dim: The dimension that the softmax runs over.

    Returns:
        `x` with 0 in such rows, and a bool tensor that is True for them, of size 1 along `dim`.
    """
    dead = (x == -torch.inf).all(dim, keepdim=True)
    return x.masked_fill(dead, 0.0), dead


def ridge(a: Tensor, strength: float, *, rising: bool) -> Tensor:
    """A matrix (or a batch of them) with something added to its diagonal.

    Args:
        a: Shape (..., m, n), floating or complex.
        strength: How much.
        rising: Up to twice as much towards the end of the diagonal: equal singular values are as bad for the
            derivative of a decomposition as zero ones.
    """
    n = min(a.shape[-2:])
    diagonal = torch.linspace(1.0, 2.0 if rising else 1.0, n, dtype=a.real.dtype, device=a.device)
    eye = torch.zeros(a.shape[-2:], dtype=a.dtype, device=a.device)
    eye.diagonal()[:] = diagonal.to(a.dtype)
    return a + strength * eye


def root_of_squares(squares: Tensor, eps: float) -> Tensor:
    """The root of sums of squares, with a slope of 0 where a sum is below `eps`."""
    return squares.clamp_min(eps).sqrt()
