"""Arguments outside, or at the edge of, a function's domain: logarithms, roots, powers, inverse functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nan_detector._causes import cause
from nan_detector._diagnosis.dtypes import is_half, limits, safe_eps
from nan_detector._diagnosis.facts import (
    Rule,
    argument,
    in_optimizer_step,
    made_inf,
    made_nan,
    mentions,
    op_of,
    operand,
    underflowed,
    user_written,
    whole_operand,
)
from nan_detector._diagnosis.numbers import against, number, share
from nan_detector._diagnosis.reach import power
from nan_detector._records import Cause, TensorStats
from nan_detector._trace import Birth, Trace

#: Logarithms: which operand is the argument, the edges where it is infinite, and the formula.
_LOGS: dict[str, tuple[int, tuple[float, ...]]] = {
    "log": (0, (0.0,)),
    "log2": (0, (0.0,)),
    "log10": (0, (0.0,)),
    "log1p": (0, (-1.0,)),
    "logit": (0, (0.0, 1.0)),
    "xlogy": (1, (0.0,)),
    "xlog1py": (1, (-1.0,)),
}


@dataclass(frozen=True, slots=True)
class _Domain:
    """A function on [low, high]; `open` names the edges where its value is infinite."""

    low: float
    high: float
    open: tuple[float, ...] = ()
    instead: str = ""


_DOMAINS = {
    "acos": _Domain(-1.0, 1.0, instead="torch.acos(x.clamp(-1 + 1e-6, 1 - 1e-6)), or torch.atan2(sin, cos)"),
    "asin": _Domain(-1.0, 1.0, instead="torch.asin(x.clamp(-1 + 1e-6, 1 - 1e-6)), or torch.atan2(sin, cos)"),
    "atanh": _Domain(-1.0, 1.0, (-1.0, 1.0), "torch.atanh(x.clamp(-1 + 1e-6, 1 - 1e-6))"),
    "acosh": _Domain(1.0, math.inf, instead="torch.acosh(x.clamp_min(1 + 1e-6))"),
    "erfinv": _Domain(-1.0, 1.0, (-1.0, 1.0), "torch.erfinv(x.clamp(-1 + 1e-6, 1 - 1e-6))"),
    "ndtri": _Domain(0.0, 1.0, (0.0, 1.0), "torch.special.ndtri(p.clamp(1e-6, 1 - 1e-6))"),
}
_POLES = {"lgamma": 0, "digamma": 0, "polygamma": 0, "multigammaln": 0}
_PERIODIC = ("sin", "cos", "tan")
#: So many values are hardly all negative by chance.
_FEW = 16


def log_of_negative(birth: Birth, trace: Trace) -> Cause | None:
    """Log below 0, log1p below -1, logit outside [0, 1]."""
    found = _log_argument(birth)
    if found is None or not made_nan(birth):
        return None
    stats, whole, edges = found
    below = stats.neginf_count > 0 or (stats.min is not None and stats.min < edges[0])
    above = len(edges) > 1 and stats.max is not None and stats.max > edges[1]
    if not below and not above:
        return None
    if above and not below and stats.max is not None:
        return cause(
            "log_of_negative",
            f"{_how_many(birth, whole)} above 1 (greatest {against(stats.max, 1.0)}): log(1 - x) is undefined there.",
        )
    least = "-inf" if stats.min is None or stats.neginf_count else against(stats.min, edges[0])
    at = f"{edges[0]:g}"
    count = _how_many(birth, whole, whole.negative_count if edges[0] == 0 else None)
    rounding = ""
    if edges[0] == 0 and _tiny_beside(stats.min, whole.max):
        rounding = "They are below 0 by rounding errors only: something that cancels comes before."
    fix = None
    if mentions(birth, r"tanh|log_?p|action") and mentions(birth, r"1(\.0*)?\s*-.*(\*\*\s*2|pow\(2\)|square)"):
        fix = (
            "1 - a**2 must use the a = tanh(u) before it is scaled; stable: 2 * (math.log(2) - u - F.softplus(-2 * u))"
        )
    elif rounding:
        fix = f"torch.{op_of(birth)}(x.clamp_min({safe_eps(stats.dtype)}))"
    return cause("log_of_negative", f"{count} below {at} (least {least}).", rounding, fix=fix)


def log_of_zero(birth: Birth, trace: Trace) -> Cause | None:
    """Log at 0, log1p at -1, logit at 0 or 1."""
    found = _log_argument(birth)
    if found is None:
        return None
    stats, whole, edges = found
    hits = [e for e in edges if _touches(stats, e)]
    if not hits:
        return None
    edge = hits[0]
    count = _how_many(birth, whole, whole.zero_count if edge == 0 else None)
    least = whole.min_nonzero
    floor = limits(stats.dtype)
    underflow = ""
    if edge == 0 and least is not None and floor is not None and least < floor.smallest_normal:
        underflow = f"Others are next to it (least non-zero {number(least)}): the zeros are underflowed small values."
    elif edge == 0 and (said := underflowed(birth)):
        underflow = f"The zeros are underflowed small values: {said}."
    return cause("log_of_zero", f"{count} exactly {edge:g}.", underflow, fix=_log_fix(birth, stats.dtype))


def _log_argument(birth: Birth) -> tuple[TensorStats, TensorStats, tuple[float, ...]] | None:
    op = op_of(birth)
    if op not in _LOGS or not user_written(birth):
        return None
    index, edges = _LOGS[op]
    stats, whole = operand(birth, index), whole_operand(birth, index)
    return None if stats is None or whole is None else (stats, whole, edges)


def _log_fix(birth: Birth, dtype: str) -> str:
    op = op_of(birth)
    called = (birth.call or "").rpartition(".")[2]
    if called == "poisson_nll_loss":
        return "F.poisson_nll_loss(..., eps=1e-8), or log_input=True with the logarithm of the rate as the input"
    if called in ("log_prob", "kl_divergence", "entropy"):
        # The logarithm is of what the distribution is made of; xlogy and log1p take the value itself.
        if op == "log":
            return "keep the distribution away from its edge: log_std.clamp(-20, 2).exp(), or F.softplus(s) + 1e-4"
        return "keep the value inside the support: value.clamp(1e-6, 1 - 1e-6)"
    if underflowed(birth).startswith("exp of"):
        return f"torch.logsumexp(z, dim) for torch.{op}(torch.exp(z).sum(dim)): stay in log space"
    if mentions(birth, "sigmoid"):
        return "F.logsigmoid(z), or F.binary_cross_entropy_with_logits(z, y) for the whole loss"
    if mentions(birth, "rand|exponential|gumbel"):
        return "draw away from the edge: torch.empty_like(z).exponential_().clamp_min(1e-6).log(), or F.gumbel_softmax"
    if op == "log1p":
        return (
            f"torch.log1p(x.clamp_min(-1 + {safe_eps(dtype)}))"
            if is_half(dtype)
            else "torch.log1p(x.clamp_min(-1 + 1e-6))"
        )
    if op == "logit":
        return "torch.logit(x, eps=1e-6)"
    if op in ("xlogy", "xlog1py"):
        return f"torch.xlogy(x, y.clamp_min({safe_eps(dtype)}))"
    return f"torch.{op}(x.clamp_min({safe_eps(dtype)})), or F.log_softmax(z, -1) where x is a softmax of z"


def sqrt_of_negative(birth: Birth, trace: Trace) -> Cause | None:
    """Sqrt or rsqrt below 0."""
    if not user_written(birth, "sqrt", "rsqrt") or not made_nan(birth):
        return None
    stats, whole = operand(birth, 0), whole_operand(birth, 0)
    if stats is None or whole is None or not (stats.neginf_count or (stats.min is not None and stats.min < 0)):
        return None
    least = "-inf" if stats.neginf_count or stats.min is None else number(stats.min)
    evidence = f"{_how_many(birth, whole, whole.negative_count + whole.neginf_count)} below 0 (least {least})."
    op = op_of(birth)
    if in_optimizer_step(birth) and not mentions(birth, r"rmsprop"):
        why = (
            "The optimizer takes the root of a running mean of squares, and none of its steps makes one negative: it "
            "came so from a checkpoint, a narrower format, or code that writes to the state."
        )
        fix = "give the optimizer a fresh state, or state[key].clamp_(min=0) after loading it"
        return cause("sqrt_of_negative", evidence, why, fix=fix)
    if in_optimizer_step(birth):
        why = (
            "Inside the optimizer it is E[g²] - E[g]², which cancels when a gradient hardly changes; eps is added "
            "after the root."
        )
        return cause("sqrt_of_negative", evidence, why, fix="centered=False")
    # A running moment has as many elements as its gradient: one number is a rate or a count of the optimizer's.
    if birth.phase == "optimizer" and whole.numel > 1:
        why = "E[g²] - E[g]² of running means falls below 0 by rounding, or where the two forget at different rates."
        return cause("sqrt_of_negative", evidence, why, fix=f"x.clamp_min(0).{op}() in the optimizer's step")
    if whole.numel >= _FEW and whole.negative_count == whole.numel:
        why = "All of them are, which rounding does not do: nothing keeps what comes before positive."
        fix = f"torch.{op}(F.softplus(x) + {safe_eps(stats.dtype)}) where x is what a layer gives"
        return cause("sqrt_of_negative", evidence, why, fix=fix)
    if mentions(birth, r"\bvar|mean|std|moment"):
        why = "A variance as E[x²] - E[x]² loses its digits when the mean is large against the spread."
        fix = f"torch.{op}(torch.var(x, dim, correction=0, keepdim=True) + eps), dim being that of the mean"
        return cause("sqrt_of_negative", evidence, why, fix=fix)
    if _tiny_beside(stats.min, whole.max):
        why = "They are below 0 by rounding errors only: large numbers that nearly cancel come before."
        return cause("sqrt_of_negative", evidence, why, fix=f"torch.{op}(x.clamp_min({safe_eps(stats.dtype)}))")
    return cause("sqrt_of_negative", evidence)


def variance_of_negative(birth: Birth, trace: Trace) -> Cause | None:
    """A batch norm in evaluation whose running variance is below 0: no training makes it so."""
    if not op_of(birth).endswith("batch_norm") or not user_written(birth) or not made_nan(birth):
        return None
    variance = whole_operand(birth, 4) if len(birth.inputs) > 4 else None
    if variance is None or variance.min is None or variance.min >= 0 or argument(birth, "training", "5") == "True":
        return None
    name = f"{birth.layer_name}.running_var" if birth.layer_name else "running_var"
    count = share(variance.negative_count, variance.numel, f"values of {name}")
    return cause(
        "sqrt_of_negative",
        f"{count} below 0 (least {number(variance.min)}), and the layer divides by sqrt(running_var + eps).",
        "Training makes no such variance: it came so from a checkpoint, or from averaging or adding checkpoints.",
        fix=f"clamp it when the weights are merged: {name}.clamp_(min=0); or train the layer's statistics anew",
    )


def pow_of_negative(birth: Birth, trace: Trace) -> Cause | None:
    """A negative base under a fractional exponent."""
    if not user_written(birth, "pow") or not made_nan(birth):
        return None
    base, whole, exponent = power(birth)
    if whole is None or base is None or base.min is None or base.min >= 0:
        return None
    if isinstance(exponent, float) and exponent == int(exponent):
        return None
    power_text = (
        f"the exponent is {exponent:g}" if isinstance(exponent, float) else "the exponents are not whole numbers"
    )
    p = f"{exponent:g}" if isinstance(exponent, float) else "p"
    count = _how_many(birth, whole, whole.negative_count, "bases")
    return cause(
        "pow_of_negative",
        f"{count} below 0 (least {number(base.min)}), and {power_text}.",
        fix=f"x.clamp_min(0).pow({p}), or x.sign() * x.abs().pow({p}) when the sign is meant",
    )


def pow_of_zero(birth: Birth, trace: Trace) -> Cause | None:
    """Zero to a negative exponent."""
    if not user_written(birth, "pow") or not made_inf(birth):
        return None
    base, whole, exponent = power(birth)
    if whole is None or base is None or not base.zero_count:
        return None
    least = exponent if isinstance(exponent, float) else exponent.min if exponent is not None else None
    if least is None or least >= 0:
        return None
    count = _how_many(birth, whole, whole.zero_count, "bases")
    fix = f"x.clamp_min({safe_eps(base.dtype)}).pow({least:g})"
    return cause("pow_of_zero", f"{count} exactly 0, and the exponent is {number(least)}.", fix=fix)


def outside_domain(birth: Birth, trace: Trace) -> Cause | None:
    """acos, asin, atanh, erfinv beyond ±1, acosh below 1; sine of an infinity."""
    op = op_of(birth)
    if not user_written(birth):
        return None
    stats, whole = operand(birth, 0), whole_operand(birth, 0)
    if stats is None or whole is None:
        return None
    infinities = stats.posinf_count + stats.neginf_count
    if op in _PERIODIC and infinities:
        return cause("outside_domain", f"{_how_many(birth, whole, infinities)} infinite, where {op} has no value.")
    if op not in _DOMAINS or not made_nan(birth):
        return None
    domain = _DOMAINS[op]
    if infinities or stats.min is None or stats.max is None:
        return cause("outside_domain", f"{_how_many(birth, whole, infinities)} infinite.") if infinities else None
    sentences = []
    if stats.max > domain.high:
        sentences.append(
            f"{_how_many(birth, whole)} above {domain.high:g} (greatest {against(stats.max, domain.high)})."
        )
    if stats.min < domain.low:
        sentences.append(f"{_how_many(birth, whole)} below {domain.low:g} (least {against(stats.min, domain.low)}).")
    if not sentences:
        return None
    excess = max(stats.max - domain.high, domain.low - stats.min)
    if excess < 1e-2:
        sentences.append("That little is rounding: mathematically the argument is inside.")
    return cause("outside_domain", *sentences, fix=domain.instead)


def boundary_of_domain(birth: Birth, trace: Trace) -> Cause | None:
    """Atanh and erfinv at ±1, ndtri at 0 and 1, lgamma and digamma at their poles."""
    op = op_of(birth)
    if not user_written(birth):
        return None
    index = 1 if op == "polygamma" and len(birth.inputs) > 1 else 0
    stats, whole = operand(birth, index), whole_operand(birth, index)
    if stats is None or whole is None or stats.min is None or stats.max is None:
        return None
    if op in _POLES and stats.min <= 0:
        count = _how_many(birth, whole, whole.zero_count if stats.min == 0 else None)
        where = "exactly 0" if stats.min == 0 else f"a pole: a whole number of 0 or below (least {number(stats.min)})"
        return cause("boundary_of_domain", f"{count} {where}.", fix=f"torch.{op}(x.clamp_min({safe_eps(stats.dtype)}))")
    if op not in _DOMAINS:
        return None
    hits = [e for e in _DOMAINS[op].open if _touches(stats, e)]
    if not hits:
        return None
    return cause("boundary_of_domain", f"{_how_many(birth, whole)} exactly {hits[0]:g}.", fix=_DOMAINS[op].instead)


def _how_many(birth: Birth, whole: TensorStats, part: int | None = None, noun: str = "inputs") -> str:
    """The start of a sentence, "22 of 64 inputs are": counted in the operand, or else in the guilty results."""
    if part:
        return share(part, whole.numel, noun)
    total = birth.output.numel if birth.output is not None else whole.numel
    part = birth.guilty_count or (birth.output.bad_count if birth.output is not None else 0)
    return share(part, total, noun) if part else f"some {noun} are"


def _touches(stats: TensorStats, edge: float) -> bool:
    return stats.zero_count > 0 if edge == 0 else edge in (stats.min, stats.max)


def _tiny_beside(below: float | None, largest: float | None) -> bool:
    """True when a negative value is nothing but rounding beside the positive ones."""
    return below is not None and largest is not None and largest > 0 and abs(below) < 1e-4 * max(largest, 1e-2)


#: Before the divisions: rsqrt of negative and zero values fails for the negative ones first.
ROOTS: tuple[Rule, ...] = (sqrt_of_negative, variance_of_negative)
#: In order of specificity.
RULES: tuple[Rule, ...] = (
    log_of_negative,
    log_of_zero,
    pow_of_negative,
    pow_of_zero,
    outside_domain,
    boundary_of_domain,
)
