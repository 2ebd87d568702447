"""Which operation of a healthy step is how near an edge: the numbers behind `hazards()`.

Distances are in decades, so that they compare: how many powers of ten the operand has yet to go, as the operation's
own scale counts them. 0 is the edge itself; 0.3 is a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector._hazard_facts import ALL, UNKNOWN, Fact, Range, error_of, range_of, rounded
from nan_detector._lineage import OpRecord, key_of
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


@dataclass(slots=True)
class Near:
    """One operation near an edge."""

    record: OpRecord
    kind: str
    distance: float
    value: float
    count: int
    message: str
    far: bool = False  # of interest only where it is seen to move towards its edge


@dataclass(frozen=True, slots=True)
class _Limits:
    """The edges of one dtype."""

    name: str
    eps: float
    largest: float
    least: float  # the smallest number that is not 0
    digits: float  # decades that it resolves
    decades: float  # of its range


_limits: dict[torch.dtype, _Limits] = {}


def limits_of(dtype: torch.dtype) -> _Limits:
    """The edges of a floating dtype."""
    found = _limits.get(dtype)
    if found is None:
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        found = _limits[dtype] = _Limits(
            name=str(dtype).removeprefix("torch."),
            eps=info.eps,
            largest=info.max,
            least=least,
            digits=-math.log10(info.eps),
            decades=math.log10(info.max) - math.log10(info.smallest_normal),
        )
    return found


class Observer:
    """Is shown each operation of a replay that gave finite values, and keeps those near an edge.

    Args:
        scaled: The loss is multiplied by a loss scale, which by design drives half gradients towards their end.
    """

    def __init__(self, scaled: bool = False) -> None:
        self.scaled = scaled
        self.found: dict[tuple[Any, str], Near] = {}
        self._facts: dict[int, Fact] = {}

    def __call__(
        self,
        info: OpInfo,
        record: OpRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ins: list[Tensor],
        values: list[Tensor],
        outs: list[Tensor],
    ) -> None:
        """One operation.

        Args:
            info: Facts about it.
            record: Where it stands.
            args: Its arguments.
            kwargs: Its keyword arguments.
            ins: Its floating arguments.
            values: Their values before it ran.
            outs: Its floating results, all finite.
        """
        before = [self._facts.get(key_of(t), UNKNOWN) for t in ins]
        mine = {id(t): (v, f) for t, v, f in zip(ins, values, before, strict=True)}
        backward = record.phase == "backward" and not record.own_frame
        if not backward:
            self._forward(info.op, record, args, kwargs, mine)
        self._headroom(info, record, args, mine, outs, backward)
        self._remember(info, args, kwargs, before, values, mine, outs)

    # -- what is known of the values ------------------------------------------------------------------------------

    def _remember(
        self,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: list[Fact],
        values: list[Tensor],
        mine: dict[int, tuple[Tensor, Fact]],
        outs: list[Tensor],
    ) -> None:
        for i, out in enumerate(outs):
            self._facts.pop(key_of(out), None)
            if i or not _plain(out) or (info.mutates and out.numel() * out.element_size() < _nbytes(out)):
                continue
            low, high = range_of(info.op, args, kwargs, _known(mine))
            fact = Fact(
                (rounded(low, out.dtype), rounded(high, out.dtype)),
                error_of(info.op, args, before, values, out, limits_of(out.dtype).eps),
            )
            if fact != UNKNOWN:
                self._facts[key_of(out)] = fact

    # -- the edges --------------------------------------------------------------------------------------------------

    def _forward(
        self,
        op: str,
        record: OpRecord,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mine: dict[int, tuple[Tensor, Fact]],
    ) -> None:
        operands = [mine.get(id(a)) if isinstance(a, Tensor) else None for a in args[:2]]
        first = operands[0] if operands else None
        second = operands[1] if len(operands) > 1 else None
        if op == "div" and second is not None:
            self._zero(record, "small_denominator", *second, of="the denominator")
        if first is None or not _plain(first[0]):
            return
        x, fact = first
        tracked = bool(isinstance(args[0], Tensor) and args[0].requires_grad)
        if op in _EXPONENTIALS:
            self._exponential(op, record, x, fact)
        elif op in _LOGS:
            self._logarithm(record, x, fact)
        elif op == "log1p":
            low, high = fact.range
            self._zero(record, "log_zero", x + 1, Fact((low + 1, high + 1)), of="1 + x", unit=1.0)
        elif op == "sqrt":
            self._zero(record, "sqrt_zero", x, fact, of="the argument", only_error=not tracked)
        elif op in ("rsqrt", "reciprocal"):
            self._zero(record, "small_denominator", x, fact, of="the argument")
        elif op == "pow" and isinstance(args[1], (int, float)) and args[1] < 1 and args[1] != 0:
            kind = "sqrt_zero" if args[1] > 0 else "small_denominator"
            self._zero(record, kind, x, fact, of="the base", only_error=args[1] > 0 and not tracked)
        elif op in _DOMAINS or op == "logit":
            self._domain(op, record, x, fact)
        elif op in _SOFTMAXES:
            self._masked(record, x, args)
        elif op in ("linalg_eigh", "linalg_svd") and tracked:
            self._gaps(op, record, x)
        self._lost_eps(op, record, args, kwargs, x)

    def _exponential(self, op: str, record: OpRecord, x: Tensor, fact: Fact) -> None:
        limit = limits_of(x.dtype)
        edge = math.log(limit.largest) / (math.log(2.0) if op == "exp2" else 1.0)
        both = op in ("cosh", "sinh")
        low, high = fact.range
        if high <= 0.99 * edge and not (both and low < -0.99 * edge):
            return
        size = x.abs() if both else x
        least, most = _extremes(size)
        if not math.isfinite(most) or (most == 0.0 and least < 0.0):  # `exp(x - x.max())` never overflows
            return
        reach = max(most, LEAST_EXPONENT)
        self._near(
            record,
            "exp_overflow",
            math.log10(edge / reach),
            most,
            lambda: int((size >= reach / 2).sum()),
            f"the largest argument of {op} is {most:.3g}; {limit.name} overflows at {edge:.3g}",
        )

    def _logarithm(self, record: OpRecord, x: Tensor, fact: Fact) -> None:
        limit = limits_of(x.dtype)
        least = _least_positive(x)
        if least is None or not 0 < least < 1:
            return
        if fact.error and least < 1e3 * fact.error:
            self._zero(record, "log_zero", x, fact, of="the argument")
            return
        if fact.range[0] > 0:
            return
        distance = math.log10(math.log(limit.least) / math.log(least))
        self._near(
            record,
            "log_zero",
            distance,
            least,
            lambda: int((x <= 2 * least).sum()),
            f"the smallest argument of the logarithm is {least:.3g}; log(0) is -inf, and its derivative inf",
            far=distance > LOG_DECADES,
        )

    def _zero(
        self,
        record: OpRecord,
        kind: str,
        x: Tensor,
        fact: Fact,
        *,
        of: str,
        only_error: bool = False,
        unit: float | None = None,
    ) -> None:
        """An operand that must not be 0, counted in roundings of `unit`, else of the largest number beside it."""
        if not _plain(x):
            return
        low, high = fact.range
        guarded = low > 0 or high < 0
        if guarded and not fact.error > max(low, -high, 0.0):
            return
        size = x.abs()
        least, most = _extremes(size)
        limit = limits_of(x.dtype)
        if not math.isfinite(most) or most == 0.0:
            return
        cancelled = fact.error > 0 and least < 1e3 * fact.error
        if only_error and not cancelled:
            return
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
        self._near(record, kind, distance, least, lambda: int((size <= 2 * least).sum()), told, far=far)

    def _domain(self, op: str, record: OpRecord, x: Tensor, fact: Fact) -> None:
        limit = limits_of(x.dtype)
        low, high = fact.range
        if op == "logit":
            if low > 0 and high < 1:
                return
            room = torch.minimum(x, 1 - x)
        else:
            if low > -1 and high < 1:
                return
            room = 1 - x.abs()
        least, _ = _extremes(room)
        if not math.isfinite(least):
            return
        distance = math.log10(max(least, limit.least) / limit.eps)
        edge = "0 or 1" if op == "logit" else "±1"
        self._near(
            record,
            "domain_edge",
            distance,
            least,
            lambda: int((room <= max(2 * least, limit.eps)).sum()),
            f"the argument of {op} comes within {max(least, 0.0):.3g} of {edge}, where its derivative is infinite",
            far=distance > DIGITS_SHARE * limit.digits,
        )

    def _masked(self, record: OpRecord, x: Tensor, args: tuple[Any, ...]) -> None:
        if x.dim() == 0 or len(args) < 2 or not isinstance(args[1], int):
            return
        rows = x.amax(args[1]) <= 0.5 * torch.finfo(x.dtype).min
        count = int(rows.sum())
        if count:
            self._near(
                record,
                "masked_row",
                1.0,
                float(x.max()),
                lambda: count,
                f"{count} of {rows.numel()} rows of the softmax are masked as a whole: it is finite only because the "
                "mask is",
            )

    def _gaps(self, op: str, record: OpRecord, x: Tensor) -> None:
        try:
            spectrum = torch.linalg.eigvalsh(x) if op == "linalg_eigh" else torch.linalg.svdvals(x).flip(-1)
        except RuntimeError:
            return
        if spectrum.shape[-1] < 2:
            return
        limit = limits_of(x.dtype)
        gap, _ = _extremes(spectrum.diff(dim=-1).abs())
        most = float(spectrum.abs().max())
        if not most > 0:
            return
        distance = math.log10(max(gap, limit.least) / (limit.eps * most))
        if distance <= DIGITS_SHARE * limit.digits:
            self._near(
                record,
                "equal_eigenvalues",
                distance,
                gap,
                lambda: int((spectrum.diff(dim=-1).abs() <= 2 * gap).sum()),
                f"two of the values differ by {gap:.3g} only (largest {most:.3g}): the derivative divides by that",
            )

    def _lost_eps(self, op: str, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> None:
        if op not in ("add", "clamp_min", "clamp"):
            return
        eps = args[1] if len(args) > 1 else kwargs.get("min")
        if not isinstance(eps, float) or eps <= 0 or rounded(eps, x.dtype) != 0.0:
            return
        least, most = _extremes(x.abs())
        limit = limits_of(x.dtype)
        if not math.isfinite(most):
            return
        distance = math.log10(max(least, limit.least) / (limit.eps * most)) if most else 0.0
        self._near(
            record,
            "eps_lost",
            min(distance, limit.digits),
            least,
            lambda: int((x.abs() <= 2 * least).sum()),
            f"{eps:.3g} is 0 in {limit.name}, so it guards nothing; the smallest value beside it is {least:.3g}",
        )

    def _headroom(
        self,
        info: OpInfo,
        record: OpRecord,
        args: tuple[Any, ...],
        mine: dict[int, tuple[Tensor, Fact]],
        outs: list[Tensor],
        backward: bool,
    ) -> None:
        """Results near the greatest number of their dtype."""
        op = info.op
        if op in _EXPONENTIALS or info.literal or op in ("copy", "clone") or (info.mutates and not info.pointwise):
            return
        power = args[1] if op == "pow" and len(args) > 1 and isinstance(args[1], (int, float)) else 1.0
        for out in outs[:1]:
            if not _plain(out):
                continue
            limit = limits_of(out.dtype)
            if backward and self.scaled and limit.largest < 1e6:
                continue
            least, greatest = _extremes(out)
            if -least > greatest and any(
                _plain(v) and _extremes(v)[0] == torch.finfo(v.dtype).min for v, _ in mine.values()
            ):
                least = 0.0  # of a mask
            most = max(-least, greatest)
            if (
                not math.isfinite(most) or most < 1.0 or most >= limit.largest
            ):  # a mask holds the greatest number itself
                continue
            distance = math.log10(limit.largest / most) / max(float(power), 1.0)
            self._near(
                record,
                "overflow",
                distance,
                most,
                lambda out=out, most=most: int((out.abs() >= most / 2).sum()),  # type: ignore[misc]  # defaults bind
                f"the largest result of {record.forward.info.op if backward and record.forward else op} is {most:.3g}"
                f"{' (in its derivative)' if backward else ''}; {limit.name} ends at {limit.largest:.3g}",
                far=distance > OVERFLOW_SHARE * limit.decades and op not in _FAST,
            )

    def _near(
        self,
        record: OpRecord,
        kind: str,
        distance: float,
        value: float,
        count: Callable[[], int],
        message: str,
        far: bool = False,
    ) -> None:
        distance = max(0.0, distance)
        where = record.mark or record.module or "?"
        known = self.found.get((where, kind))
        if known is None or distance < known.distance:
            self.found[(where, kind)] = Near(record, kind, distance, value, 0 if far else count(), message, far)


def _known(mine: dict[int, tuple[Tensor, Fact]]) -> Callable[[Any], Range]:
    def known(value: Any) -> Range:
        if isinstance(value, (int, float)):
            return (float(value), float(value))
        found = mine.get(id(value))
        return ALL if found is None else found[1].range

    return known


def _plain(t: Tensor) -> bool:
    return t.layout is torch.strided and t.numel() > 0 and t.dtype in _FLOATS


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _nbytes(t: Tensor) -> int:
    return int(t.untyped_storage().nbytes())


def _extremes(t: Tensor) -> tuple[float, float]:
    least, most = torch.aminmax(t)
    return float(least), float(most)


def _least_positive(t: Tensor) -> float | None:
    least, most = _extremes(t)
    if least > 0 or not most > 0:
        return least if least > 0 else None
    positive = t[t > 0]
    return float(positive.min()) if positive.numel() else None
