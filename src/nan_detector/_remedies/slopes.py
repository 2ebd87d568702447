"""Slopes that are infinite where the value is not: norms, distances, decompositions, functions of single elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nan_detector._remedies.call import Call, Repaired, Words, number
from nan_detector._remedies.guards import ridge, root_of_squares
from nan_detector._remedies.registry import Remedy, remedy

Tensor = torch.Tensor

#: Below this a sum of squares is taken for 0.
_SQUARE = 1e-24
#: Values at which a function of single elements is probably finite, and its slope as well.
_SAFE = (1.0, 0.5, 2.0)


def smooth_norm(call: Call) -> Repaired:
    """A Euclidean norm with a slope of 0 at 0, at the second derivative too."""
    x = call.tensor(0)
    order = call.argument(1, "p" if "p" in call.kwargs else "ord")
    dim, keepdim = call.argument(2, "dim"), bool(call.argument(3, "keepdim", False))
    if order not in (None, 2, "fro"):
        call.unfit()
    squares = x * x
    total = squares.sum() if dim is None else squares.sum(dim, keepdim)
    where = "" if dim is None else f"{dim}{', keepdim=True' if keepdim else ''}"
    return Repaired(
        root_of_squares(total, _SQUARE),
        Words(whole=f"{{0}}.pow(2).sum({where}).clamp_min({number(_SQUARE)}).sqrt()"),
    )


def smooth_distance(call: Call) -> Repaired:
    """A Euclidean distance with a slope of 0 where two points are the same."""
    a, b = call.tensor(0), call.tensor(1)
    if call.argument(2, "p", 2.0) != 2:
        call.unfit()
    if call.name == "cdist":
        total = (a.unsqueeze(-2) - b.unsqueeze(-3)).pow(2).sum(-1)
        written = "({0}.unsqueeze(-2) - {1}.unsqueeze(-3)).pow(2).sum(-1)"
    elif call.name == "pairwise_distance":
        total = (a - b).pow(2).sum(-1, bool(call.argument(4, "keepdim", False)))
        written = "({0} - {1}).pow(2).sum(-1)"
    elif call.name == "dist":
        total = (a - b).pow(2).sum()
        written = "({0} - {1}).pow(2).sum()"
    else:
        total = a * a + b * b
        written = "({0} ** 2 + {1} ** 2)"
    return Repaired(root_of_squares(total, _SQUARE), Words(whole=f"{written}.clamp_min({number(_SQUARE)}).sqrt()"))


def smooth_normalize(call: Call) -> Repaired:
    """X over its norm, with a slope of 0 of the norm at 0."""
    bound = call.bound()
    if bound.get("p", 2.0) != 2:
        call.unfit()
    x, dim, eps = bound["input"], bound["dim"], max(float(bound["eps"]), 1e-12)
    norm = root_of_squares((x * x).sum(dim, keepdim=True), eps * eps)
    return Repaired(x / norm, Words(whole=f"{{0}} / {{0}}.pow(2).sum({dim}, keepdim=True).clamp_min(1e-24).sqrt()"))


def with_ridge(strength: float) -> Callable[[Call], Repaired]:
    """A remedy for functions of a matrix: something is added to its diagonal."""

    def repair(call: Call) -> Repaired:
        a = call.operand(0)
        if not isinstance(a, Tensor) or a.dim() < 2:
            call.unfit()
        rising = call.name in _DECOMPOSITIONS
        eye = "torch.diag(torch.linspace(1, 2, {}.shape[-1]))" if rising else "torch.eye({}.shape[-1])"
        if a.shape[-2] != a.shape[-1]:
            eye = "torch.eye(*{}.shape[-2:])" + (" * torch.linspace(1, 2, {}.shape[-1])" if rising else "")
        written = f"({{}} + {number(strength)} * {eye})"
        return Repaired(call.again({0: ridge(a, strength, rising=rising)}), Words(operands={0: written}))

    return repair


_DECOMPOSITIONS = frozenset(
    "linalg_svd linalg_eigh linalg_eig linalg_svdvals linalg_eigvalsh linalg_eigvals svd_lowrank".split()
)


def slogdet(call: Call) -> Repaired:
    """The logarithm of the magnitude of the determinant."""
    if call.name != "logdet":
        call.unfit()
    value = torch.linalg.slogdet(call.tensor(0)).logabsdet
    return Repaired(value, Words(whole="torch.linalg.slogdet({0}).logabsdet"))


def safe_elements(call: Call) -> Repaired:
    """A function of single elements: 0 where its value or its slope is not finite, of a safe number there."""
    operands = {
        i: v
        for i in range(min(2, len(call.args)))
        if isinstance(v := call.operand(i), Tensor) and v.is_floating_point()
    }
    if not operands:
        call.unfit()
    bad = _bad_elements(call, operands)
    if bad is None or not bool(bad.any()):
        call.unfit()
    for safe in _SAFE:
        changed = {i: torch.where(bad, torch.full_like(v, safe), v) for i, v in operands.items()}
        value = call.again(changed)
        if bool(torch.isfinite(value.detach()[bad]).all()):
            break
    else:
        call.unfit()
    words = Words(
        operands=dict.fromkeys(operands, f"torch.where(ok, {{}}, {number(safe)})"),
        after="and 0 as the result elsewhere, ok being where value and slope are finite",
    )
    return Repaired(torch.where(bad, torch.zeros_like(value), value), words)


def _bad_elements(call: Call, operands: dict[int, Tensor]) -> Tensor | None:
    """Where the result, or the slope in one of `operands`, is not finite; None where they do not correspond."""
    with torch.enable_grad():
        fresh = {i: v.detach().requires_grad_() for i, v in operands.items()}
        value: Any = call.again(fresh)
        if not isinstance(value, Tensor) or any(v.shape != value.shape for v in fresh.values()):
            return None
        slopes = (
            torch.autograd.grad(value.sum(), list(fresh.values()), allow_unused=True) if value.requires_grad else ()
        )
    bad = ~torch.isfinite(value.detach())
    for slope in slopes:
        if slope is not None:
            bad = bad | ~torch.isfinite(slope)
    return bad


_ZERO_SLOPES = "sqrt_gradient_at_zero gradient_at_domain_boundary unselected_branch division_by_zero"
_MATRIX = "determinant_not_positive singular_matrix degenerate_decomposition unselected_branch inf_minus_inf"
_OF_MATRICES = (
    "logdet slogdet linalg_slogdet det cholesky linalg_cholesky linalg_cholesky_ex linalg_ldl_factor_ex linalg_inv "
    "linalg_inv_ex inverse linalg_solve linalg_solve_ex linalg_solve_triangular triangular_solve cholesky_inverse "
    "linalg_tensorinv linalg_svd linalg_eigh linalg_eig linalg_qr geqrf linalg_pinv pinverse linalg_lstsq svd_lowrank "
    "linalg_svdvals linalg_eigvalsh linalg_eigvals linalg_lu linalg_lu_factor linalg_matrix_norm"
)
_ELEMENTWISE = (
    "log log2 log10 log1p sqrt rsqrt pow acos asin atan atanh acosh erfinv logit ndtri lgamma digamma div reciprocal "
    "exp expm1 exp2 tan xlogy xlog1py atan2 hypot abs sinc entr i0 cosh sinh fmod remainder"
)
_ALL_POINTS = (
    "log_of_zero log_of_negative sqrt_of_negative pow_of_negative pow_of_zero outside_domain boundary_of_domain "
    "division_by_zero sqrt_gradient_at_zero pow_gradient_at_zero gradient_at_domain_boundary unselected_branch "
    "exp_overflow underflow_to_zero eps_underflow"
)

#: Asked after the remedies that know their function.
REMEDIES: tuple[Remedy, ...] = (
    remedy(_ZERO_SLOPES, "norm", smooth_norm),
    remedy(_ZERO_SLOPES, "cdist dist pairwise_distance hypot", smooth_distance),
    remedy(_ZERO_SLOPES + " eps_underflow", "normalize", smooth_normalize),
    remedy("determinant_not_positive", "logdet", slogdet),
    remedy(_MATRIX, _OF_MATRICES, with_ridge(1e-6)),
    remedy(_MATRIX, _OF_MATRICES, with_ridge(1e-3)),
    remedy(_MATRIX, _OF_MATRICES, with_ridge(1e-1)),
    remedy(_ALL_POINTS, _ELEMENTWISE, safe_elements),
)
