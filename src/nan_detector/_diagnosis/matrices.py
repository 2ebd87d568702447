"""Matrices that are singular, not positive, or degenerate: determinants and decompositions."""

from __future__ import annotations

from nan_detector._causes import cause
from nan_detector._diagnosis.facts import (
    Rule,
    base_op,
    inputs_finite,
    is_derivative,
    mentions,
    op_of,
    operands,
    user_written,
)
from nan_detector._records import Cause, TensorStats
from nan_detector._trace import Birth, Trace

_DETERMINANTS = (
    *(
        "logdet",
        "slogdet",
        "linalg_slogdet",
        "cholesky",
        "linalg_cholesky",
        "linalg_cholesky_ex",
        "linalg_ldl_factor_ex",
    ),
)
#: They go on where linalg.inv and solve raise.
_SOLVERS = (
    *("linalg_inv_ex", "linalg_inv", "inverse", "linalg_solve_ex", "linalg_solve", "linalg_lu_solve", "lu_solve"),
    *("linalg_solve_triangular", "triangular_solve", "cholesky_solve", "cholesky_inverse", "linalg_tensorinv"),
)
_DECOMPOSITIONS = (
    *("linalg_svd", "linalg_eigh", "linalg_eig", "linalg_qr", "geqrf", "linalg_pinv", "linalg_lstsq", "svd_lowrank"),
    *("linalg_svdvals", "linalg_householder_product"),
)


def determinant_not_positive(birth: Birth, trace: Trace) -> Cause | None:
    """Logdet and Cholesky-like calls, and what they are made of inside the library."""
    op = op_of(birth)
    inside = op in ("where", "scalar_tensor", "log", "sum", "mul") and mentions(birth, r"\b(slog|log)det\s*\(")
    return _determinant(birth) if user_written(birth) and (inside or op in _DETERMINANTS) else None


def singular_matrix(birth: Birth, trace: Trace) -> Cause | None:
    """An inverse or the solution of a system, of a finite matrix that has none."""
    if is_derivative(birth) or op_of(birth) not in _SOLVERS or not inputs_finite(birth):
        return None
    matrix = _square(birth)
    shape = f" of shape {tuple(matrix.shape)}" if matrix is not None else ""
    return cause("singular_matrix", f"{birth.call or birth.op} met a matrix{shape} without an inverse.")


def determinant_in_log(birth: Birth, trace: Trace) -> Cause | None:
    """log(det(A)) by hand: the logarithm failed, because of the determinant."""
    by_hand = user_written(birth, "log", "log2", "log10") and mentions(birth, r"\bdet\s*\(|\.det\b")
    return _determinant(birth) if by_hand else None


def _determinant(birth: Birth) -> Cause:
    matrix = _square(birth)
    shape = f" of shape {tuple(matrix.shape)}" if matrix is not None else ""
    sign = "0 or negative"
    if birth.output is not None:
        sign = "negative (the result is NaN)" if birth.output.nan_count else "0 (the result is infinite)"
    return cause("determinant_not_positive", f"The determinant of the matrix{shape} is {sign}.")


def _square(birth: Birth) -> TensorStats | None:
    return next((s for s in operands(birth) if len(s.shape) >= 2 and s.shape[-1] == s.shape[-2]), None)


def determinant_gradient(birth: Birth, trace: Trace) -> Cause | None:
    """The derivative of a log-determinant or Cholesky factor at a singular matrix."""
    if not is_derivative(birth) or base_op(birth.derivative_of) not in (*_DETERMINANTS, "det"):
        return None
    return cause("determinant_not_positive", f"The derivative of {birth.derivative_of} inverts a singular matrix.")


def degenerate_decomposition(birth: Birth, trace: Trace) -> Cause | None:
    """The derivative of an SVD, eigen- or QR decomposition."""
    if not is_derivative(birth) or base_op(birth.derivative_of) not in _DECOMPOSITIONS:
        return None
    matrix = birth.forward_inputs[0] if birth.forward_inputs else None
    shape = f" of a matrix of shape {tuple(matrix.shape)}" if matrix is not None else ""
    gaps = f"{birth.guilty_count} entries" if birth.guilty_count else "some entries"
    said = f"The derivative of {birth.derivative_of}{shape} divides by a gap of 0 in {gaps}."
    return cause("degenerate_decomposition", said)


#: In the forward.
DETERMINANT: tuple[Rule, ...] = (determinant_not_positive, singular_matrix)
#: After the logarithm's own rules.
IN_LOG: tuple[Rule, ...] = (determinant_in_log,)
#: In the backward.
BACKWARD: tuple[Rule, ...] = (degenerate_decomposition, determinant_gradient)
#: Forward operations whose derivative is explained here.
EXPLAINED = (*_DETERMINANTS, *_DECOMPOSITIONS, "det")
