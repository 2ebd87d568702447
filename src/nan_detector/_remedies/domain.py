"""Arguments moved into the domain: logarithms, roots, powers, inverse functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from nan_detector._remedies.call import HALF, Call, Repaired, Words, eps_of, margin_of, number, writes_in_place
from nan_detector._remedies.guards import away_from_zero
from nan_detector._remedies.registry import Remedy, remedy

Tensor = torch.Tensor


def log_softmax(call: Call) -> Repaired:
    """log(softmax(z)) in one."""
    made = call.made_by(call.tensor(0))
    if made is None or call.name != "log":
        call.unfit()
    z = made.tensor(0)
    dim = made.argument(1, "dim")
    if made.name == "softmax" and isinstance(dim, int):
        value = F.log_softmax(z, dim)
        return Repaired(value.to(call.tensor(0).dtype), Words(whole=f"F.log_softmax(z, {dim})", after=_MADE_OF_SOFTMAX))
    if made.name == "sigmoid":
        return Repaired(F.logsigmoid(z), Words(whole="F.logsigmoid(z)", after=_MADE_OF_SIGMOID))
    call.unfit()


_COMPLEX_EPS = 1e-12
_MADE_OF_SOFTMAX = "where {0} is the softmax of z"
_MADE_OF_SIGMOID = "where {0} is the sigmoid of z"


def log_of_sum_of_exponentials(call: Call) -> Repaired:
    """log(sum(exp(z))) in one, also where the sum runs on."""
    made = call.made_by(call.tensor(0))
    if made is None or made.name not in ("sum", "cumsum") or call.name != "log":
        call.unfit()
    inner, dim = made.made_by(made.tensor(0)), made.argument(1, "dim")
    if inner is None or inner.name != "exp":
        call.unfit()
    z = inner.tensor(0)
    if made.name == "cumsum":
        value, written = torch.logcumsumexp(z, dim), f"torch.logcumsumexp(z, {dim})"
    elif dim is None:
        value, written = torch.logsumexp(z.flatten(), 0), "torch.logsumexp(z.flatten(), 0)"
    else:
        keepdim = bool(made.argument(2, "keepdim", False))
        value = torch.logsumexp(z, dim, keepdim)
        written = f"torch.logsumexp(z, {dim}{', keepdim=True' if keepdim else ''})"
    return Repaired(value, Words(whole=written, after=f"where {{0}} is the {made.name} of torch.exp(z)"))


def in_a_log_of_a_sum(call: Call) -> None:
    """Whether the logarithm of a sum of this exponential is worth looking for."""
    if writes_in_place(call.func) or not _LOG_OF_SUM.search(call.context):
        call.unfit()


def log_of_one_minus_sigmoid(call: Call) -> Repaired:
    """log(1 - sigmoid(z)) in one."""
    made = call.made_by(call.tensor(0))
    if made is None or made.name not in ("sub", "rsub") or call.name != "log":
        call.unfit()
    one, p = (made.operand(i) for i in ((0, 1) if made.name == "sub" else (1, 0)))
    inner = made.made_by(p) if isinstance(p, Tensor) else None
    if inner is None or inner.name != "sigmoid" or isinstance(one, Tensor) or one != 1:
        call.unfit()
    return Repaired(
        F.logsigmoid(-inner.tensor(0)), Words(whole="F.logsigmoid(-z)", after="where {0} is 1 - torch.sigmoid(z)")
    )


_LOG_OF_SUM = re.compile(r"\blog\b.*\b(?:cum)?sum\b|\b(?:cum)?sum\b.*\blog\b", re.DOTALL)
_PRODUCTS = re.compile(r"\*|\bmul")
_XLOG = {"log": (torch.xlogy, "torch.xlogy", "log"), "log1p": (torch.special.xlog1py, "torch.special.xlog1py", "log1p")}


def in_a_product(call: Call) -> None:
    """Whether what weights this logarithm is worth looking for.

    Not where the argument is trained: the slope of a * log(b) in b is a / b, 0 / 0 at the place in question.
    """
    x = call.tensor(0)
    if x.requires_grad or writes_in_place(call.func) or not _PRODUCTS.search(call.context):
        call.unfit()


def product_with_log(call: Call) -> Repaired:
    """A * log(b), or a * log1p(b), which is 0 where a is 0 whatever b is there."""
    for i in (0, 1):
        made = call.made_by(call.operand(i)) if isinstance(call.operand(i), Tensor) else None
        if made is None or made.name not in _XLOG:
            continue
        function, written, name = _XLOG[made.name]
        b, a = made.tensor(0), call.operand(1 - i)
        edge = 0 if name == "log" else -1
        # Below the edge the logarithm is NaN whatever weights it: these functions would hide that behind a 0.
        if bool((b < edge).any()) or not bool(((torch.as_tensor(a) == 0) | (b != edge)).all()):
            call.unfit()
        value = function(a, b)
        if value.dtype != call.again().dtype:
            call.unfit()
        # Python turns 0 * x into x * 0: which side a number stands on is not known, and it is its own text.
        factor, names = f"{{{1 - i}}}" if isinstance(a, Tensor) else repr(a), ("x", "x") if a is b else ("x", "y")
        whole = f"{written}({factor}, {factor if a is b else '{of}'})"
        general = f"{written}({names[0]}, {names[1]}) in place of {names[0]} * torch.{name}({names[1]})"
        place = "in place of {0} * {1}"  # not of the logarithm alone, which is what the report points at
        return Repaired(value, Words(whole=whole, after=place, of=None if a is b else made, general=general))
    call.unfit()


def slogdet_in_log(call: Call) -> Repaired:
    """log(det(A)) in one."""
    made = call.made_by(call.tensor(0))
    if made is None or made.name != "det" or call.name != "log":
        call.unfit()
    value = torch.linalg.slogdet(made.tensor(0)).logabsdet
    return Repaired(value, Words(whole="torch.linalg.slogdet(A).logabsdet", after="where {0} is det(A)"))


def variance(call: Call) -> Repaired:
    """The root of E[x²] - E[x]², by the formula that does not cancel."""
    argument = call.tensor(0)
    made, shift = call.made_by(argument), 0.0
    if made is not None and made.name == "add" and not isinstance(made.operand(1), Tensor):
        shift = float(made.operand(1))
        made = made.made_by(made.tensor(0))
    if made is None or made.name != "sub" or not all(isinstance(made.operand(i), Tensor) for i in (0, 1)):
        call.unfit()
    of_squares, of_mean = made.made_by(made.tensor(0)), made.made_by(made.tensor(1))
    mean = of_mean and _squared(of_mean)
    mean_call = call.made_by(mean) if isinstance(mean, Tensor) else None
    squares_of = call.made_by(of_squares.tensor(0)) if of_squares is not None and of_squares.name == "mean" else None
    x = _squared(squares_of) if squares_of is not None else None
    if not isinstance(x, Tensor) or mean_call is None or mean_call.name != "mean" or mean_call.operand(0) is not x:
        call.unfit()
    dim, keepdim = mean_call.argument(1, "dim"), bool(mean_call.argument(2, "keepdim", False))
    value = torch.var(x, dim, correction=0, keepdim=keepdim)
    if value.shape != argument.shape:
        call.unfit()
    added = f" + {number(shift)}" if shift else ""
    guard = "" if shift else f".clamp_min({number(eps_of(x))})"
    value = (value + shift if shift else value.clamp_min(eps_of(x))).to(argument.dtype)
    kept = ", keepdim=True" if keepdim else ""
    written = f"torch.var(x, {_dims(dim)}correction=0{kept}){guard}{added}"
    return Repaired(call.again({0: value}), Words(operands={0: written}))


def _dims(dim: Any) -> str:
    if dim is None:
        return ""
    return f"{dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim}, "


def _squared(made: Call) -> Tensor | None:
    """x, where `made` is x ** 2, x * x or x.square()."""
    first = made.operand(0)
    if made.name == "pow" and (getattr(made.func, "__name__", "") == "square" or made.operand(1) == 2):
        return first if isinstance(first, Tensor) else None
    if made.name == "mul" and made.operand(1) is first and isinstance(first, Tensor):
        return first
    return None


def clamped_below(low: float | None) -> Callable[[Call], Repaired]:
    """A remedy that keeps the argument at `low` plus a guard or above; None: at the guard alone."""

    def repair(call: Call) -> Repaired:
        index = 1 if call.name in ("xlogy", "xlog1py") else 0
        x = call.tensor(index)
        if low is None:
            bound = eps_of(x)
            written = f"{{}}.clamp_min({number(bound)})"
        else:
            bound = low + margin_of(x)
            written = f"{{}}.clamp_min({number(low)} + {number(margin_of(x))})"
        return Repaired(call.again({index: x.clamp_min(bound)}), Words(operands={index: written}))

    return repair


def clamped_within(low: float, high: float) -> Callable[[Call], Repaired]:
    """A remedy that keeps the argument strictly inside [low, high]."""

    def repair(call: Call) -> Repaired:
        x = call.tensor(0)
        m = margin_of(x)
        start = number(m) if low == 0 else f"{number(low)} + {number(m)}"
        written = f"{{}}.clamp({start}, {number(high)} - {number(m)})"
        return Repaired(call.again({0: x.clamp(low + m, high - m)}), Words(operands={0: written}))

    return repair


def safe_base(call: Call) -> Repaired:
    """X ** p with bases for which it has no value, or no slope, moved away from there."""
    x, p = call.tensor(0), call.operand(1) if call.name == "pow" else call.unfit()
    eps = eps_of(x)
    if isinstance(p, Tensor):
        whole = p == p.round()
        base = torch.where(~whole & (x < eps), eps, torch.where(whole & (p < 0), away_from_zero(x, eps), x))
        return Repaired(call.again({0: base.to(x.dtype)}), Words(operands={0: f"{{}}.clamp_min({number(eps)})"}))
    if p == int(p):
        if p >= 0:
            call.unfit()
        ok = f"torch.where({{0}}.abs() < {number(eps)}, {number(eps)}, {{0}})"
        return Repaired(call.again({0: away_from_zero(x, eps)}), Words(operands={0: ok.replace("{0}", "{}")}))
    return Repaired(call.again({0: x.clamp_min(eps)}), Words(operands={0: f"{{}}.clamp_min({number(eps)})"}))


def complex_root(call: Call) -> Repaired:
    """The root of a complex number, which has no slope at 0 either."""
    z = call.operand(0)
    if not isinstance(z, Tensor) or not z.is_complex():
        call.unfit()
    safe = torch.where(z == 0, torch.full((), _COMPLEX_EPS, dtype=z.dtype, device=z.device), z)
    return Repaired(call.again({0: safe}), Words(operands={0: f"torch.where({{}} == 0, {number(_COMPLEX_EPS)}, {{}})"}))


def logit_eps(call: Call) -> Repaired:
    """The guard that logit has built in."""
    m = margin_of(call.tensor(0))
    return Repaired(call.again(eps=m), Words(keywords={"eps": number(m)}))


def before_the_poles(call: Call) -> Repaired:
    """Lgamma and digamma of positive numbers only."""
    index = 1 if call.name == "polygamma" else 0
    x = call.tensor(index)
    eps = 1e-2 if x.dtype in HALF else 1e-6
    written = f"{{}}.clamp_min({number(eps)})"
    return Repaired(call.again({index: x.clamp_min(eps)}), Words(operands={index: written}))


_LOGS = "log_of_zero log_of_negative eps_underflow underflow_to_zero unselected_branch determinant_not_positive"
_ROOTS = "sqrt_of_negative sqrt_gradient_at_zero division_by_zero underflow_to_zero eps_underflow unselected_branch"
_POWERS = "pow_of_negative pow_of_zero pow_gradient_at_zero division_by_zero unselected_branch sqrt_gradient_at_zero"
_EDGES = "outside_domain boundary_of_domain gradient_at_domain_boundary log_of_zero log_of_negative unselected_branch"

REMEDIES: tuple[Remedy, ...] = (
    remedy("log_of_zero unselected_branch", "log", log_softmax, needs="softmax sigmoid"),
    remedy("log_of_zero unselected_branch", "log", log_of_one_minus_sigmoid, needs="sigmoid sub rsub"),
    remedy("log_of_zero", "log", log_of_sum_of_exponentials, needs="sum cumsum exp"),
    remedy(
        "exp_overflow",
        "exp",
        log_of_sum_of_exponentials,
        needs="sum cumsum exp",
        follows="log",
        suits=in_a_log_of_a_sum,
    ),
    remedy("log_of_zero log_of_negative determinant_not_positive", "log", slogdet_in_log, needs="det"),
    remedy(
        "log_of_zero unselected_branch",
        "log log1p",
        product_with_log,
        needs="log log1p",
        follows="mul",
        suits=in_a_product,
    ),
    remedy(_LOGS, "log log2 log10 xlogy", clamped_below(None)),
    remedy(_LOGS, "log1p xlog1py", clamped_below(-1.0)),
    remedy("sqrt_of_negative", "sqrt rsqrt", variance, needs="sub add mean pow mul"),
    remedy(_ROOTS, "sqrt rsqrt", clamped_below(None)),
    remedy(_ROOTS, "sqrt rsqrt", complex_root),
    remedy(_POWERS, "pow", safe_base),
    remedy(_EDGES, "acos asin atanh erfinv", clamped_within(-1.0, 1.0)),
    remedy(_EDGES, "logit", logit_eps),
    remedy(_EDGES, "ndtri", clamped_within(0.0, 1.0)),
    remedy(_EDGES, "acosh", clamped_below(1.0)),
    remedy(_EDGES, "lgamma digamma polygamma multigammaln mvlgamma", before_the_poles),
)
