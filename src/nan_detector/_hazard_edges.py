"""The edges of operations, and how near to them an operand or a result is: the numbers behind `hazards()`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector._hazard_facts import Fact, rounded
from nan_detector._hazard_scale import extremes, is_plain, least_positive, limits_of
from nan_detector._opinfo import OpInfo

Tensor = torch.Tensor

#: Share of a dtype's range (and digits) below which a value counts as near its end. For float32: 7 of 76 decades to
#: overflow, and 3.4 of its 6.9 digits to 0.
OVERFLOW_SHARE = 0.1
DIGITS_SHARE = 0.5
#: A logarithm's argument is near 0 within so many decades of its logarithm: for float32 below 0.04.
LOG_DECADES = 1.5
#: Least exponent that is told from 0: an argument of exp that is no larger may still grow.
LEAST_EXPONENT = 1e-3

_EXPONENTIALS = frozenset("exp expm1 exp2 cosh sinh".split())
_LOGS = frozenset("log log2 log10".split())
_DOMAINS = frozenset("acos asin atanh erfinv".split())
_SOFTMAXES = frozenset("softmax log_softmax safe_softmax".split())
#: These grow so fast that they are named at any distance.
_FAST = frozenset("lgamma digamma prod cumprod matrix_exp linalg_matrix_power".split())


@dataclass(frozen=True, slots=True)
class Edge:
    """What is near, and how near.

    Attributes:
        kind: The kind of the hazard.
        distance: In decades.
        value: The value that is nearest.
        count: Gives the number of values that are about as near.
        message: For a person.
        far: Of interest only where it is seen to move towards its edge.
    """

    kind: str
    distance: float
    value: float
    count: Callable[[], int]
    message: str
    far: bool = False


def edges_of(
    op: str, args: tuple[Any, ...], kwargs: dict[str, Any], mine: dict[int, tuple[Tensor, Fact]]
) -> Iterator[Edge]:
    """The edges that the operands of an operation of the forward came near to.

    Args:
        op: Its plain name.
        args: Its arguments.
        kwargs: Its keyword arguments.
        mine: Of its floating arguments, by identity: their values before it ran, and what is known of them.
    """
    operands = [mine.get(id(a)) if isinstance(a, Tensor) else None for a in args[:2]]
    first = operands[0] if operands else None
    second = operands[1] if len(operands) > 1 else None
    found: list[Edge | None] = []
    if op == "div" and second is not None:
        found.append(_zero("small_denominator", *second, of="the denominator"))
    if first is not None and is_plain(first[0]):
        tracked = bool(isinstance(args[0], Tensor) and args[0].requires_grad)
        found += [_of_first(op, args, *first, tracked=tracked), _lost_eps(op, args, kwargs, first[0])]
    yield from (edge for edge in found if edge is not None)


def _of_first(op: str, args: tuple[Any, ...], x: Tensor, fact: Fact, *, tracked: bool) -> Edge | None:
    """The edge of an operation's first operand; `tracked`: a gradient flows through it."""
    if op in _EXPONENTIALS:
        return _exponential(op, x, fact)
    if op in _LOGS:
        return _logarithm(x, fact)
    if op == "log1p":
        low, high = fact.range
        return _zero("log_zero", x + 1, Fact((low + 1, high + 1)), of="1 + x", unit=1.0)
    if op == "sqrt":
        return _zero("sqrt_zero", x, fact, of="the argument", only_error=not tracked)
    if op in ("rsqrt", "reciprocal"):
        return _zero("small_denominator", x, fact, of="the argument")
    if op == "pow" and isinstance(args[1], (int, float)) and args[1] < 1 and args[1] != 0:
        kind = "sqrt_zero" if args[1] > 0 else "small_denominator"
        return _zero(kind, x, fact, of="the base", only_error=args[1] > 0 and not tracked)
    if op in _DOMAINS or op == "logit":
        return _domain(op, x, fact)
    if op in _SOFTMAXES:
        return _masked(x, args)
    return _gaps(op, x) if op in ("linalg_eigh", "linalg_svd") and tracked else None


def _exponential(op: str, x: Tensor, fact: Fact) -> Edge | None:
    limit = limits_of(x.dtype)
    edge = math.log(limit.largest) / (math.log(2.0) if op == "exp2" else 1.0)
    both = op in ("cosh", "sinh")
    low, high = fact.range
    if high <= 0.99 * edge and not (both and low < -0.99 * edge):
        return None
    size = x.abs() if both else x
    least, most = extremes(size)
    if not math.isfinite(most) or (most == 0.0 and least < 0.0):  # `exp(x - x.max())` never overflows
        return None
    reach = max(most, LEAST_EXPONENT)
    return Edge(
        "exp_overflow",
        math.log10(edge / reach),
        most,
        lambda: int((size >= reach / 2).sum()),
        f"the largest argument of {op} is {most:.3g}; {limit.name} overflows at {edge:.3g}",
    )


def _logarithm(x: Tensor, fact: Fact) -> Edge | None:
    limit = limits_of(x.dtype)
    least = least_positive(x)
    if least is None or not 0 < least < 1:
        return None
    if fact.error and least < 1e3 * fact.error:
        return _zero("log_zero", x, fact, of="the argument")
    if fact.range[0] > 0:
        return None
    distance = math.log10(math.log(limit.least) / math.log(least))
    return Edge(
        "log_zero",
        distance,
        least,
        lambda: int((x <= 2 * least).sum()),
        f"the smallest argument of the logarithm is {least:.3g}; log(0) is -inf, and its derivative inf",
        far=distance > LOG_DECADES,
    )


def _zero(
    kind: str,
    x: Tensor,
    fact: Fact,
    *,
    of: str,
    only_error: bool = False,
    unit: float | None = None,
) -> Edge | None:
    """An operand that must not be 0, counted in roundings of `unit`, else of the largest number beside it."""
    if not is_plain(x):
        return None
    low, high = fact.range
    guarded = low > 0 or high < 0
    if guarded and not fact.error > max(low, -high, 0.0):
        return None
    size = x.abs()
    least, most = extremes(size)
    limit = limits_of(x.dtype)
    if not math.isfinite(most) or most == 0.0:
        return None
    cancelled = fact.error > 0 and least < 1e3 * fact.error
    if only_error and not cancelled:
        return None
    shown = max(least, limit.least)
    if cancelled:
        kind, distance = "cancellation", math.log10(shown / fact.error)
    else:
        # Against the others of its tensor, or, where they shrink together, against 1.
        distance = math.log10(shown / max(limit.eps * (unit or most), limit.eps**2))
    told = (
        f"{of} is {least:.3g} at least, the rest of a subtraction whose rounding error is {fact.error:.2g} there"
        if cancelled
        else f"{of} is {least:.3g} at the smallest and {most:.3g} at the largest"
    )
    far = distance > DIGITS_SHARE * limit.digits
    return Edge(kind, distance, least, lambda: int((size <= 2 * least).sum()), told, far=far)


def _domain(op: str, x: Tensor, fact: Fact) -> Edge | None:
    limit = limits_of(x.dtype)
    low, high = fact.range
    if op == "logit":
        if low > 0 and high < 1:
            return None
        room = torch.minimum(x, 1 - x)
    else:
        if low > -1 and high < 1:
            return None
        room = 1 - x.abs()
    least, _ = extremes(room)
    if not math.isfinite(least):
        return None
    distance = math.log10(max(least, limit.least) / limit.eps)
    edge = "0 or 1" if op == "logit" else "±1"
    return Edge(
        "domain_edge",
        distance,
        least,
        lambda: int((room <= max(2 * least, limit.eps)).sum()),
        f"the argument of {op} comes within {max(least, 0.0):.3g} of {edge}, where its derivative is infinite",
        far=distance > DIGITS_SHARE * limit.digits,
    )


def _masked(x: Tensor, args: tuple[Any, ...]) -> Edge | None:
    if x.dim() == 0 or len(args) < 2 or not isinstance(args[1], int):
        return None
    rows = x.amax(args[1]) <= 0.5 * torch.finfo(x.dtype).min
    count = int(rows.sum())
    if not count:
        return None
    return Edge(
        "masked_row",
        1.0,
        float(x.max()),
        lambda: count,
        f"{count} of {rows.numel()} rows of the softmax are masked as a whole: it is finite only because the mask is",
    )


def _gaps(op: str, x: Tensor) -> Edge | None:
    try:
        spectrum = torch.linalg.eigvalsh(x) if op == "linalg_eigh" else torch.linalg.svdvals(x).flip(-1)
    except RuntimeError:
        return None
    if spectrum.shape[-1] < 2:
        return None
    limit = limits_of(x.dtype)
    gap, _ = extremes(spectrum.diff(dim=-1).abs())
    most = float(spectrum.abs().max())
    if not most > 0:
        return None
    distance = math.log10(max(gap, limit.least) / (limit.eps * most))
    if not distance <= DIGITS_SHARE * limit.digits:
        return None
    return Edge(
        "equal_eigenvalues",
        distance,
        gap,
        lambda: int((spectrum.diff(dim=-1).abs() <= 2 * gap).sum()),
        f"two of the values differ by {gap:.3g} only (largest {most:.3g}): the derivative divides by that",
    )


def _lost_eps(op: str, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> Edge | None:
    if op not in ("add", "clamp_min", "clamp"):
        return None
    eps = args[1] if len(args) > 1 else kwargs.get("min")
    if not isinstance(eps, float) or eps <= 0 or rounded(eps, x.dtype) != 0.0:
        return None
    least, most = extremes(x.abs())
    limit = limits_of(x.dtype)
    if not math.isfinite(most):
        return None
    distance = math.log10(max(least, limit.least) / (limit.eps * most)) if most else 0.0
    return Edge(
        "eps_lost",
        min(distance, limit.digits),
        least,
        lambda: int((x.abs() <= 2 * least).sum()),
        f"{eps:.3g} is 0 in {limit.name}, so it guards nothing; the smallest value beside it is {least:.3g}",
    )


def overflow(
    info: OpInfo,
    args: tuple[Any, ...],
    values: list[Tensor],
    outs: list[Tensor],
    *,
    of: str,
    backward: bool,
    scaled: bool,
) -> Edge | None:
    """A result near the greatest number of its dtype.

    Args:
        info: Facts about the operation.
        args: Its arguments.
        values: Its floating arguments as they were before it ran.
        outs: Its floating results.
        of: What it is called; in the backward, the operation that it is the derivative of.
        backward: It belongs to the backward.
        scaled: The loss is multiplied by a loss scale.
    """
    op = info.op
    if op in _EXPONENTIALS or info.literal or op in ("copy", "clone") or (info.mutates and not info.pointwise):
        return None
    power = args[1] if op == "pow" and len(args) > 1 and isinstance(args[1], (int, float)) else 1.0
    if not outs or not is_plain(outs[0]):
        return None
    out, limit = outs[0], limits_of(outs[0].dtype)
    if backward and scaled and limit.largest < 1e6:
        return None
    least, greatest = extremes(out)
    if -least > greatest and any(is_plain(v) and extremes(v)[0] == torch.finfo(v.dtype).min for v in values):
        least = 0.0  # of a mask
    most = max(-least, greatest)
    if not math.isfinite(most) or most < 1.0 or most >= limit.largest:  # a mask holds the greatest number itself
        return None
    distance = math.log10(limit.largest / most) / max(float(power), 1.0)
    return Edge(
        "overflow",
        distance,
        most,
        lambda: int((out.abs() >= most / 2).sum()),
        f"the largest result of {of} is {most:.3g}{' (in its derivative)' if backward else ''}; {limit.name} ends at "
        f"{limit.largest:.3g}",
        far=distance > OVERFLOW_SHARE * limit.decades and op not in _FAST,
    )
