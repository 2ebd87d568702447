"""Results within the range of their dtype: exponentials bounded, halves computed in float32, infinities replaced."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._entries import tensors_in
from nan_detector._remedies.call import HALF, Call, Repaired, Words, eps_of, number
from nan_detector._remedies.guards import bounded, finite_in
from nan_detector._remedies.registry import Remedy, remedy

Tensor = torch.Tensor

#: An infinity that meets other numbers is replaced by this: what masks are commonly written with.
BIG = 1e4
#: A result is bounded by this: its square is still finite in float32.
BOUND = 1e18
_NORMALISED = re.compile(r"/\s*\(?\w[\w.\[\]]*\.sum\(|softmax")
_CASTS = ("to_copy",)
#: exp of this is 5e8: more events than anybody counts.
_MOST_LOG_RATE = 20
#: log2(e): how much further exp2 goes.
_SCALES = {"exp2": 1.0 / math.log(2.0)}


def less_the_maximum(call: Call) -> Repaired:
    """An exponential that is normalised afterwards: the largest of each row becomes exp(0)."""
    x = call.tensor(0)
    if call.name != "exp" or x.dim() == 0 or not _NORMALISED.search(call.context):
        call.unfit()
    shifted = x - x.amax(-1, keepdim=True).detach()
    return Repaired(call.again({0: shifted}), Words(operands={0: "({} - {}.amax(-1, keepdim=True))"}))


def bounded_exponent(share: float, at_most: float = math.inf) -> Callable[[Call], Repaired]:
    """A remedy that bounds the argument of an exponential.

    Args:
        share: Of the logarithm of the dtype's largest number.
        at_most: A bound that is not passed in any dtype.
    """

    def repair(call: Call) -> Repaired:
        index = 1 if call.name == "pow" else 0
        x = call.tensor(index)
        base = call.operand(0) if call.name == "pow" else math.e
        if isinstance(base, Tensor) or base <= 1:
            call.unfit()
        scale = _SCALES.get(call.name, 1.0 / math.log(base))
        limit = math.floor(min(math.log(torch.finfo(x.dtype).max) * share, at_most) * scale)
        both = call.name in ("sinh", "cosh")
        value = x.clamp(-limit, limit) if both else x.clamp(max=limit)
        written = f"{{}}.clamp(-{limit}, {limit})" if both else f"{{}}.clamp(max={limit})"
        return Repaired(call.again({index: value}), Words(operands={index: written}))

    return repair


def in_float32(call: Call) -> Repaired:
    """The call, and what follows from it, in float32."""
    halves = [i for i, v in enumerate(call.args) if isinstance(v, Tensor) and v.dtype in HALF]
    if call.name in _CASTS:
        x = call.tensor(0)
        if x.dtype in HALF:
            call.unfit()
        return Repaired(x, Words(whole="{0}", after="kept in float32"), promotes=True)
    args, kwargs = widened((call.args, call.kwargs))
    if not _computes_in_half(call):
        call.unfit()
    with torch.autocast(_device_of(call), enabled=False):
        value = call.func(*args, **kwargs)
    positions = [1 - i for i in halves] if call.reflected else halves
    return Repaired(
        value, Words(operands=dict.fromkeys(positions, "{}.float()"), after="in float32 from here on"), promotes=True
    )


def _computes_in_half(call: Call) -> bool:
    halves = any(t.dtype in HALF for t in tensors_in((call.args, call.kwargs)))
    return halves or torch.is_autocast_enabled(_device_of(call))


def _device_of(call: Call) -> str:
    return next((v.device.type for v in call.args if isinstance(v, Tensor)), "cpu")


def widened(value: Any) -> Any:
    """`value`, an argument or a nest of them, with tensors of 16 bits as float32."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if isinstance(value, dict):
        return {k: widened(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(widened(v) for v in value)
    return value


def saturated(call: Call) -> Repaired:
    """The call in float32, its result bounded by what the half dtype holds."""
    if call.name not in _CASTS and not _computes_in_half(call):
        call.unfit()
    args, kwargs = widened((call.args, call.kwargs))
    with torch.autocast(_device_of(call), enabled=False):
        value = widened(call.tensor(0)) if call.name in _CASTS else call.func(*args, **kwargs)
    if not isinstance(value, Tensor):
        call.unfit()
    most = torch.finfo(torch.float16).max
    if call.name in _CASTS:  # bfloat16 would round the bound up to 65536, which is inf in float16
        widening = ".float()" if call.tensor(0).dtype in HALF else ""
        words = Words(whole=f"{{0}}{widening}.clamp(-65504, 65504).half()")
    else:
        words = Words(after="in float32, then .clamp(-65504, 65504).half()")
    return Repaired(bounded(value, most).half(), words)


def bounded_result(call: Call) -> Repaired:
    """The result, bounded."""
    value = call.again()
    if not isinstance(value, Tensor) or not value.is_floating_point():
        call.unfit()
    limit = BIG if value.dtype is torch.float16 else BOUND
    return Repaired(bounded(value, limit), Words(after=f".clamp(-{number(limit)}, {number(limit)})"))


def bounded_operands(call: Call) -> Repaired:
    """The operands, bounded: for functions that grow faster than their argument."""
    changed: dict[int, Any] = {}
    for i, value in enumerate(call.args[:2]):
        if isinstance(value, Tensor) and value.is_floating_point():
            changed[1 - i if call.reflected else i] = bounded(value, BOUND)
    if not changed:
        call.unfit()
    written = f"{{}}.clamp(-{number(BOUND)}, {number(BOUND)})"
    return Repaired(call.again(changed), Words(operands=dict.fromkeys(changed, written)))


def in_log_space(call: Call) -> Repaired:
    """A product as the exponential of a sum, which can be bounded."""
    x = call.tensor(0)
    dim = call.argument(1, "dim")
    logs = x.abs().clamp_min(eps_of(x)).log()
    most = math.floor(math.log(torch.finfo(x.dtype).max) * 0.45)
    if call.name == "cumprod":
        sums, signs = logs.cumsum(dim), x.detach().sign().cumprod(dim)
    elif dim is None:
        sums, signs = logs.sum(), x.detach().sign().prod()
    else:
        keepdim = bool(call.argument(2, "keepdim", False))
        sums, signs = logs.sum(dim, keepdim), x.detach().sign().prod(dim, keepdim)
    total = f"{'cumsum' if call.name == 'cumprod' else 'sum'}({'' if dim is None else dim})"
    written = f"{{0}}.clamp_min({number(eps_of(x))}).log().{total}.clamp(max={most}).exp()"
    return Repaired(sums.clamp(max=most).exp() * signs, Words(whole=written))


def smaller_gradient(times: int) -> Callable[[Call], Repaired]:
    """A remedy that leaves the value and divides the gradient that arrives there: what a smaller loss scale does."""

    def repair(call: Call) -> Repaired:
        value = call.again()
        if not isinstance(value, Tensor) or not value.requires_grad:
            call.unfit()
        value.register_hook(lambda g: g / times)
        return Repaired(value, Words(after=f"with a loss scale {times} times smaller"))

    return repair


def soft_margin(call: Call) -> Repaired:
    """log(1 + exp(-y * x)) without the large number."""
    bound = call.bound()
    x, y = bound["input"], bound["target"]
    terms, reduction = torch.nn.functional.softplus(-y * x), bound["reduction"]
    reduced = {"mean": terms.mean, "sum": terms.sum}.get(reduction, lambda: terms)()
    after = f".{reduction}()" if reduction in ("mean", "sum") else ""
    return Repaired(reduced, Words(whole=f"F.softplus(-{{1}} * {{0}}){after}"))


def bounded_log_rate(call: Call) -> Repaired:
    """A Poisson likelihood whose rate, the exponential of what it is given, stays in range."""
    bound = call.bound()
    if not bound.get("log_input") or not isinstance(bound.get("input"), Tensor):
        call.unfit()
    value = call.again({0: bound["input"].clamp(max=_MOST_LOG_RATE)})
    return Repaired(value, Words(operands={0: f"{{}}.clamp(max={_MOST_LOG_RATE})"}))


def finite_operands(call: Call) -> Repaired:
    """Infinities among the operands replaced by large numbers."""
    changed: dict[int, Any] = {}
    for i, value in enumerate(call.args[:3]):
        if isinstance(value, Tensor) and value.is_floating_point() and bool(value.detach().isinf().any()):
            changed[1 - i if call.reflected and i < 2 else i] = finite_in(value, BIG)
    if not changed:
        call.unfit()
    written = f"{{}}.nan_to_num(posinf={number(BIG)}, neginf=-{number(BIG)})"
    return Repaired(call.again(changed), Words(operands=dict.fromkeys(changed, written)))


def nothing_times_infinity(call: Call) -> Repaired:
    """A product whose infinite factor is 0 where the other one is 0."""
    a, b = call.operand(0), call.operand(1)
    for i, (x, infinite) in enumerate(((a, b), (b, a))):
        if isinstance(x, Tensor) and isinstance(infinite, float) and math.isinf(infinite):
            return _nothing_times(call, i, x, infinite)
    if call.name != "mul" or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        call.unfit()
    a_safe = torch.where(a.isinf() & (b == 0), torch.zeros_like(a), a) if a.is_floating_point() else a
    b_safe = torch.where(b.isinf() & (a == 0), torch.zeros_like(b), b) if b.is_floating_point() else b
    changed = {i: v for i, v, old in ((0, a_safe, a), (1, b_safe, b)) if not _same(v, old)}
    if not changed:
        call.unfit()
    names = {0: "torch.where({1} == 0, 0.0, {0})", 1: "torch.where({0} == 0, 0.0, {1})"}
    written = " * ".join(names[i] if i in changed else f"{{{i}}}" for i in (0, 1))
    return Repaired(call.again({0: a_safe, 1: b_safe}), Words(whole=written))


def _nothing_times(call: Call, index: int, x: Tensor, infinite: float) -> Repaired:
    nothing = x == 0
    product = call.again({index: torch.where(nothing, torch.ones_like(x), x)})
    written = f"{{{index}}} * {'-' if infinite < 0 else ''}torch.inf"
    return Repaired(
        torch.where(nothing, torch.zeros_like(product), product),
        Words(whole=f"torch.where({{{index}}} == 0, 0.0, {written})"),
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and bool((a.isinf() == b.isinf()).all()))


_EXPS = "exp expm1 exp2 sinh cosh pow"
_TOO_LARGE = "exp_overflow unselected_branch overflow half_overflow"

REMEDIES: tuple[Remedy, ...] = (
    remedy("exp_overflow unselected_branch", "exp", less_the_maximum),
    remedy("exp_overflow", "soft_margin_loss", soft_margin),
    remedy("exp_overflow", "poisson_nll_loss", bounded_log_rate),
    remedy(_TOO_LARGE, _EXPS, bounded_exponent(0.99)),
    remedy(_TOO_LARGE, _EXPS, bounded_exponent(0.45)),
    remedy(_TOO_LARGE, _EXPS, bounded_exponent(0.45, 20.0)),
    remedy("half_overflow eps_underflow underflow_to_zero half_gradient_overflow overflow", "", in_float32),
    remedy("half_overflow", "", saturated),
    remedy("half_gradient_overflow", "", smaller_gradient(2**8)),
    remedy("half_gradient_overflow", "", smaller_gradient(2**16)),
    remedy("overflow half_overflow", "prod cumprod", in_log_space),
    remedy("overflow unselected_branch", "lgamma pow mul square cosh", bounded_operands),
    remedy("overflow", "", bounded_result),
    remedy("zero_times_inf unselected_branch", "mul", nothing_times_infinity),
    remedy("zero_times_inf inf_minus_inf", "", finite_operands),
)
