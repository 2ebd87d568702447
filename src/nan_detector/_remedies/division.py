"""Denominators kept away from 0, averages of nothing, deviations of one."""

from __future__ import annotations

import re
from typing import Any

import torch

from nan_detector._remedies.call import Call, Repaired, Words, eps_of, number
from nan_detector._remedies.guards import away_from_zero, one_for_zero, root_of_squares
from nan_detector._remedies.registry import Remedy, remedy

Tensor = torch.Tensor

#: Words for numbers of things, where nothing but zeros tells.
_COUNTS = re.compile(r"count|cnt|len|num|mask|valid|ignore|deg|scale|\bn\b", re.IGNORECASE)
#: What is left of a setting (a temperature, a width) that would be 0.
_LEAST_SETTING = 1e-2
_DENOMINATOR = {"div": 1, "reciprocal": 0, "addcdiv": 2, "fmod": 1, "remainder": 1, "floor_divide": 1}


def counted(call: Call) -> Repaired:
    """A denominator that counts something: of nothing, 1."""
    index = _DENOMINATOR[call.name]
    n = call.operand(index)
    named = _COUNTS.search(call.context.split("\n")[0]) is not None
    if not isinstance(n, Tensor):
        if n != 0 or not (named or isinstance(n, int)):
            call.unfit()
        return Repaired(call.again({index: 1}), Words(operands={index: "max({}, 1)"}))
    whole = n.detach()
    if whole.is_floating_point():
        if not bool(((whole == whole.round()) & (whole >= 0)).all()):
            call.unfit()
        # Zeros and ones are as often a sine or a determinant.
        if not named and not bool((whole > 1).any()):
            call.unfit()
    return Repaired(call.again({index: one_for_zero(n)}), Words(operands={index: "{}.clamp_min(1)"}))


def guarded(call: Call) -> Repaired:
    """A denominator kept away from 0, on its side of 0."""
    index = _DENOMINATOR[call.name]
    if isinstance(call.operand(index), (int, float)):
        return _guarded_number(call, index)
    n = call.tensor(index)
    eps = eps_of(n)
    if bool((n.detach() < 0).any()):
        written = f"torch.where({{0}}.abs() < {number(eps)}, {number(eps)}, {{0}})".replace("{0}", "{}")
    else:
        written = f"{{}}.clamp_min({number(eps)})"
    return Repaired(call.again({index: away_from_zero(n, eps)}), Words(operands={index: written}))


def _guarded_number(call: Call, index: int) -> Repaired:
    """A number that a schedule took to 0, such as a temperature."""
    if call.operand(index) != 0:
        call.unfit()
    return Repaired(
        call.again({index: _LEAST_SETTING}), Words(operands={index: f"max({{}}, {number(_LEAST_SETTING)})"})
    )


def nothing_for_zero(call: Call) -> Repaired:
    """0 where there is nothing to divide by."""
    index = _DENOMINATOR[call.name]
    n = call.operand(index)
    if not isinstance(n, Tensor) or call.name not in ("div", "reciprocal"):
        call.unfit()
    value = call.again({index: one_for_zero(n)})
    value = torch.where(n == 0, torch.zeros_like(value), value)
    top = "1.0" if call.name == "reciprocal" else "{0}"
    inner = f"{top} / torch.where({{{index}}} == 0, 1.0, {{{index}}})"
    return Repaired(value, Words(whole=f"torch.where({{{index}}} == 0, 0.0, {inner})"))


def normalised(call: Call) -> Repaired:
    """A row divided by its own norm, however that was computed: without the slope of a root at 0."""
    x, n = call.tensor(0), call.tensor(1)
    for dim in range(-1, -x.dim() - 1, -1):
        if n.shape == (*x.shape[:dim], 1, *(x.shape[dim + 1 :] if dim != -1 else ())):
            norm = torch.linalg.vector_norm(x.detach(), dim=dim, keepdim=True)
            if torch.allclose(norm, n.detach(), rtol=1e-3, atol=1e-6):
                return Repaired(
                    torch.nn.functional.normalize(x, dim=dim), Words(whole=f"F.normalize({{0}}, dim={dim})")
                )
    call.unfit()


def larger_eps(call: Call) -> Repaired:
    """The epsilon of a function of the library, large enough for the dtype."""
    bound = call.bound()
    if "eps" not in bound or bound["eps"] is None:
        call.unfit()
    x = next((v for v in bound.values() if isinstance(v, Tensor) and v.is_floating_point()), None)
    if x is None:
        call.unfit()
    eps = max(eps_of(x), 1e-3 if x.dtype is torch.float16 else 1e-6)
    if eps <= float(bound["eps"]):
        call.unfit()
    return Repaired(call.again(eps=eps), Words(keywords={"eps": number(eps)}))


def safe_rows(call: Call) -> Repaired:
    """Weight norm of rows that are not all 0."""
    v, g = call.tensor(0), call.tensor(1)
    dim = call.argument(2, "dim", 0)
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    norm = root_of_squares((v * v).sum(others, keepdim=True), 1e-24)
    return Repaired(v * (g / norm), Words(whole="v * (g / v.norm(...).clamp_min(1e-12))"))


def mean_of_nothing(call: Call) -> Repaired:
    """A sum divided by the count, or by 1."""
    x = call.tensor(0)
    dim, keepdim = call.argument(1, "dim"), bool(call.argument(2, "keepdim", False))
    total = x.sum() if dim is None else x.sum(dim, keepdim)
    count = max(1, round(x.numel() / total.numel()) if total.numel() else 1)
    where = "" if dim is None else f"{dim}{', keepdim=True' if keepdim else ''}"
    return Repaired(total / count, Words(whole=f"{{0}}.sum({where}) / max({_count(dim)}, 1)"))


def _count(dim: Any) -> str:
    """How many elements a mean over `dim` adds up, in code."""
    if dim is None:
        return "{0}.numel()"
    dims = dim if isinstance(dim, (list, tuple)) else (dim,)
    return " * ".join(f"{{0}}.shape[{d}]" for d in dims) or "{0}.numel()"


def mean_of_what_is_known(call: Call) -> Repaired:
    """A mean over the elements that are not NaN; 0 where all of them are."""
    x = call.tensor(0)
    dim, keepdim = call.argument(1, "dim"), bool(call.argument(2, "keepdim", False))
    known = ~x.isnan()
    total = x.nansum() if dim is None else x.nansum(dim, keepdim)
    count = known.sum() if dim is None else known.sum(dim, keepdim)
    where = "" if dim is None else f"{dim}{', keepdim=True' if keepdim else ''}"
    written = f"{{0}}.nansum({where}) / (~{{0}}.isnan()).sum({where}).clamp_min(1)"
    return Repaired(total / count.clamp_min(1), Words(whole=written))


def loss_of_nothing(call: Call) -> Repaired:
    """A loss averaged over the elements that count, or over 1."""
    bound = call.bound()
    if bound.get("reduction") != "mean":
        call.unfit()
    value = call.again(reduction="sum", **{k: None for k in ("size_average", "reduce") if k in call.kwargs})
    target = bound.get("target")
    count: Any = target.numel() if isinstance(target, Tensor) else 0
    written = "max({0}.numel(), 1)"
    if isinstance(target, Tensor) and "ignore_index" in bound and not target.is_floating_point():
        valid = target != bound["ignore_index"]
        count = valid.sum()
        written = f"({{1}} != {bound['ignore_index']}).sum().clamp_min(1)"
        weight = bound.get("weight")
        if isinstance(weight, Tensor):
            count = weight[target.clamp(0, weight.numel() - 1)][valid].sum()
            written = "the weights of its labels, or by 1"
    if isinstance(count, Tensor):
        count = torch.where(count == 0, torch.ones_like(count), count)
    value = value / (count if isinstance(count, Tensor) else max(count, 1))
    return Repaired(value, Words(keywords={"reduction": "'sum'"}, after=f"/ {written}"))


def population(call: Call) -> Repaired:
    """A deviation by n instead of n - 1, with a slope of 0 where it is 0."""
    return _deviation(call, correction=0)


def smooth_deviation(call: Call) -> Repaired:
    """A deviation with a slope of 0 where all values are equal."""
    return _deviation(call, correction=None)


def _deviation(call: Call, correction: int | None) -> Repaired:
    x = call.tensor(0)
    dim, keepdim, given = _deviation_arguments(call)
    used = given if correction is None else correction
    eps = eps_of(x)
    var = torch.var(x, dim, correction=used, keepdim=keepdim)
    spread = var if call.name.startswith("var") else root_of_squares(var, eps)
    value = spread
    if call.name.endswith("_mean"):
        axes = tuple(range(x.dim())) if dim is None else dim
        return Repaired((spread, x.mean(axes, keepdim)), _deviation_words(call, eps, used))
    return Repaired(value, _deviation_words(call, eps, used))


def _deviation_words(call: Call, eps: float, correction: float) -> Words:
    dims = _deviation_arguments(call)[0]
    where = "" if dims is None else f"{dims}, "
    text = f"{{0}}.var({where}correction={number(correction)})"
    return Words(whole=text if call.name.startswith("var") else f"{text}.clamp_min({number(eps)}).sqrt()")


def _deviation_arguments(call: Call) -> tuple[Any, bool, float]:
    """dim, keepdim and correction of std, var and their pairs, in any of their spellings."""
    given = dict(call.kwargs)
    rest = list(call.args[1:])
    dim = given.get("dim")
    unbiased = given.get("unbiased")
    if rest and isinstance(rest[0], bool):
        unbiased = rest.pop(0)
    elif rest:
        dim = rest.pop(0)
        unbiased = rest.pop(0) if rest else unbiased
    keepdim = given.get("keepdim", rest[0] if rest else False)
    correction = given.get("correction")
    if correction is None:
        correction = 0 if unbiased is False else 1
    return dim, bool(keepdim), correction


_ZEROS = (
    "division_by_zero underflow_to_zero eps_underflow unselected_branch overflow half_overflow zero_times_inf "
    "gradient_at_domain_boundary"
)
_SPREADS = "std std_mean var var_mean"
_LOSSES = (
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits kl_div poisson_nll_loss gaussian_nll_loss hinge_embedding_loss "
    "margin_ranking_loss soft_margin_loss multi_margin_loss triplet_margin_loss cosine_embedding_loss"
)

REMEDIES: tuple[Remedy, ...] = (
    remedy("division_by_zero underflow_to_zero loss_scale_zero", " ".join(_DENOMINATOR), counted),
    remedy("unselected_branch", "div reciprocal", nothing_for_zero),
    remedy(_ZEROS, " ".join(_DENOMINATOR), guarded),
    remedy(_ZEROS, "div reciprocal", nothing_for_zero),
    remedy("division_by_zero underflow_to_zero", "div", normalised),
    remedy(
        "eps_underflow division_by_zero log_of_zero sqrt_of_negative overflow half_overflow sqrt_gradient_at_zero",
        "",
        larger_eps,
    ),
    remedy("division_by_zero sqrt_gradient_at_zero", "weight_norm weight_norm_interface", safe_rows),
    remedy("reduction_of_empty", "mean", mean_of_nothing),
    remedy("reduction_of_empty", "nanmean", mean_of_what_is_known),
    remedy("reduction_of_empty", _LOSSES, loss_of_nothing),
    remedy("std_of_one", _SPREADS, population),
    remedy("sqrt_gradient_at_zero gradient_at_domain_boundary unselected_branch", _SPREADS, smooth_deviation),
)
