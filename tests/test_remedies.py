"""Each remedy leaves alone what was healthy, and makes finite, with its slope, what was not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from nan_detector._causes import CAUSES
from nan_detector._remedies import NOT_TRIED, REMEDIES, Remedy, guards, remedies_for, span
from nan_detector._remedies.call import Call, Unfit, name_of, number
from nan_detector._remedies.domain import in_a_product, product_with_log

Function = Callable[..., Any]

#: Functions of one tensor: the values that a guard must not touch (beyond an ulp or a margin of their edge).
UNARY: dict[Function, Callable[[Tensor], Tensor]] = {
    torch.log: lambda x: x > 1e-11,
    torch.log2: lambda x: x > 1e-11,
    torch.log10: lambda x: x > 1e-11,
    torch.log1p: lambda x: x > -1 + 1e-5,
    torch.sqrt: lambda x: x > 1e-11,
    torch.rsqrt: lambda x: x > 1e-11,
    torch.reciprocal: lambda x: x.abs() > 1e-11,
    torch.acos: lambda x: x.abs() < 1 - 1e-5,
    torch.asin: lambda x: x.abs() < 1 - 1e-5,
    torch.atanh: lambda x: x.abs() < 1 - 1e-5,
    torch.erfinv: lambda x: x.abs() < 1 - 1e-5,
    torch.logit: lambda x: (x > 1e-5) & (x < 1 - 1e-5),
    torch.special.ndtri: lambda x: (x > 1e-5) & (x < 1 - 1e-5),
    torch.acosh: lambda x: x > 1 + 1e-5,
    torch.lgamma: lambda x: x > 1e-5,
    torch.digamma: lambda x: x > 1e-5,
    torch.exp: lambda x: x < 19,
    torch.expm1: lambda x: x < 19,
    torch.exp2: lambda x: x < 19,
    torch.sinh: lambda x: x.abs() < 19,
    torch.cosh: lambda x: x.abs() < 19,
}
_EDGES = [0.0, -0.0, 1.0, -1.0, 1e-30, 1e-13, 0.5, 2.0, -2.0, -1e-3, 88.0, 100.0, -100.0, 1e4]
VALUES = st.lists(st.sampled_from(_EDGES) | st.floats(-50, 50, width=32), min_size=1, max_size=8)


def fitting(func: Function, *, needing: bool = False) -> list[Remedy]:
    """Remedies that name `func`."""
    return [r for r in REMEDIES if name_of(func) in r.names and bool(r.needs) is needing]


def call_of(func: Function, *args: Any, **kwargs: Any) -> Call:
    return Call(func, args, kwargs)


def slopes_are_finite(value: Tensor, *inputs: Tensor) -> bool:
    found = torch.autograd.grad(value.sum(), inputs, allow_unused=True)
    return all(g is None or bool(torch.isfinite(g).all()) for g in found)


@pytest.mark.parametrize("func", UNARY, ids=lambda f: name_of(f))
@settings(max_examples=25)
@given(values=VALUES)
def test_functions_of_one_tensor(func: Function, values: list[float]) -> None:
    x = torch.tensor(values, requires_grad=True)
    plain = func(x)
    kept = UNARY[func](x.detach()) & torch.isfinite(plain.detach())
    finite = []
    for remedy in fitting(func):
        try:
            repaired = remedy.repair(call_of(func, x)).value
        except Unfit:
            continue
        torch.testing.assert_close(repaired[kept], plain[kept], rtol=1e-5, atol=1e-6)
        finite.append(bool(torch.isfinite(repaired).all()) and slopes_are_finite(repaired, x))
    assert any(finite)


@given(VALUES, st.data())
def test_division(values: list[float], data: st.DataObject) -> None:
    denominators = data.draw(st.lists(st.sampled_from(_EDGES), min_size=len(values), max_size=len(values)))
    a, n = torch.tensor(values, requires_grad=True), torch.tensor(denominators, requires_grad=True)
    plain = a / n
    kept = n.detach().abs() > 1e-11
    for remedy in fitting(torch.div):
        try:
            repaired = remedy.repair(call_of(torch.div, a, n)).value
        except Unfit:
            continue
        torch.testing.assert_close(repaired[kept], plain[kept])
        assert torch.isfinite(repaired[a.detach().abs() < 1e4]).all() or bool((n.detach().abs() < 1e-20).any())


@given(VALUES, st.sampled_from([0.5, 0.3, -0.5, -1.0, -2.0, 1.5]))
def test_powers(values: list[float], exponent: float) -> None:
    x = torch.tensor(values, requires_grad=True)
    plain = x**exponent
    kept = torch.isfinite(plain.detach()) & (x.detach().abs() > 1e-11)
    remedy = next(r for r in fitting(torch.pow) if "pow_of_zero" in r.causes)
    repaired = remedy.repair(call_of(torch.pow, x, exponent)).value
    torch.testing.assert_close(repaired[kept], plain[kept])
    assert torch.isfinite(repaired).all()


@given(st.lists(st.sampled_from([-math.inf, 0.0, 1.0, -3.0, 20.0]), min_size=8, max_size=8))
def test_rows_that_have_a_score_are_left_alone(values: list[float]) -> None:
    x = torch.tensor(values).reshape(2, 4).requires_grad_()
    dead = (x.detach() == -math.inf).all(1)
    for func, args in ((torch.softmax, (x, 1)), (torch.logsumexp, (x, 1))):
        plain = func(*args)
        for remedy in fitting(func):
            if not remedy.causes & {"softmax_fully_masked", "logsumexp_fully_masked"}:
                continue
            try:
                repaired = remedy.repair(call_of(func, *args)).value
            except Unfit:
                continue
            torch.testing.assert_close(repaired[~dead], plain[~dead])
            assert slopes_are_finite(repaired.nan_to_num(neginf=0.0), x)


@given(st.lists(st.sampled_from([0.0, 1.0, -2.0, math.inf, -math.inf]), min_size=6, max_size=6))
def test_products_with_infinities(values: list[float]) -> None:
    a, b = torch.tensor(values[:3]), torch.tensor(values[3:])
    plain = a * b
    kept = torch.isfinite(plain)
    for remedy in fitting(torch.mul):
        if "zero_times_inf" not in remedy.causes:
            continue
        try:
            repaired = remedy.repair(call_of(torch.mul, a, b)).value
        except Unfit:
            continue
        torch.testing.assert_close(repaired[kept], plain[kept])
        assert not repaired.isnan().any()


@given(st.lists(st.floats(-3, 3, width=32), min_size=12, max_size=12))
def test_norms_and_distances(values: list[float]) -> None:
    x = torch.tensor(values).reshape(4, 3)
    assume(bool((x.norm(dim=1) > 1e-6).all()))
    pairs: list[tuple[Function, tuple[Any, ...], dict[str, Any]]] = [
        (torch.norm, (x,), {"dim": 1}),
        (torch.Tensor.norm, (x,), {"dim": 1, "keepdim": True}),
        (torch.linalg.vector_norm, (x,), {"dim": (0, 1)}),
        (torch.linalg.norm, (x, 2, 1), {}),
        (torch.hypot, (x, x + 1), {}),
        (F.pairwise_distance, (x, x + 1.0), {"eps": 0.0}),
        (F.normalize, (x,), {"dim": 1}),
    ]
    for func, args, kwargs in pairs:
        remedy = next(r for r in fitting(func) if "sqrt_gradient_at_zero" in r.causes)
        repaired = remedy.repair(call_of(func, *args, **kwargs)).value
        torch.testing.assert_close(repaired, func(*args, **kwargs), rtol=1e-4, atol=1e-5)


@given(st.lists(st.floats(-3, 3, width=32), min_size=12, max_size=12))
def test_deviations_in_all_their_spellings(values: list[float]) -> None:
    x = torch.tensor(values).reshape(4, 3)
    assume(bool((x.var(0) > 1e-4).all()) and bool((x.var(1) > 1e-4).all()))
    remedy = next(r for r in fitting(torch.std) if "std_of_one" not in r.causes)
    for args, kwargs in (
        ((x,), {}),
        ((x, 0), {}),
        ((x, 1, False), {}),
        ((x, False), {}),
        ((x,), {"dim": 1, "correction": 0, "keepdim": True}),
        ((x, 0, True, True), {}),
    ):
        for func in (torch.std, torch.var):
            torch.testing.assert_close(remedy.repair(call_of(func, *args, **kwargs)).value, func(*args, **kwargs))
    spread, mean = remedy.repair(call_of(torch.std_mean, x, 1)).value
    torch.testing.assert_close((spread, mean), torch.std_mean(x, 1))


def test_a_well_conditioned_matrix_is_hardly_changed() -> None:
    a = torch.tensor([[3.0, 1.0], [0.0, 2.0]])
    torch.testing.assert_close(guards.ridge(a, 1e-6, rising=True), a, rtol=0, atol=3e-6)
    remedy = remedies_for("singular_matrix", frozenset(("linalg_inv",)))[0]
    torch.testing.assert_close(
        remedy.repair(call_of(torch.linalg.inv, a)).value, torch.linalg.inv(a), rtol=1e-4, atol=1e-5
    )


def test_a_loss_over_some_labels_is_the_same_loss() -> None:
    x, y = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, -100, 3, 2, -100])
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    remedy = remedies_for("reduction_of_empty", frozenset(("cross_entropy",)))[0]
    for kwargs in ({}, {"weight": weight}, {"label_smoothing": 0.0}):
        repaired = remedy.repair(call_of(F.cross_entropy, x, y, **kwargs)).value
        torch.testing.assert_close(repaired, F.cross_entropy(x, y, **kwargs))
    mean = remedies_for("reduction_of_empty", frozenset(("mean",)))[0]
    torch.testing.assert_close(mean.repair(call_of(torch.mean, x, 1, True)).value, x.mean(1, True))


def test_half_precision_is_computed_in_float32_and_saturates() -> None:
    x = torch.tensor([300.0, 2.0], dtype=torch.float16)
    wide = span.in_float32(call_of(torch.Tensor.pow, x, 2))
    assert wide.promotes
    assert wide.value.tolist() == [90000.0, 4.0]
    full = span.saturated(call_of(torch.Tensor.pow, x, 2)).value
    assert full.dtype is torch.float16
    assert full.tolist() == [65504.0, 4.0]
    wider = torch.tensor([90112.0, 4.0], dtype=torch.bfloat16)  # where 65504 is 65536, which is inf in float16
    cast = span.saturated(call_of(torch.Tensor.half, wider))
    assert cast.value.dtype is torch.float16 and cast.value.tolist() == [65504.0, 4.0]
    assert cast.words.whole == "{0}.float().clamp(-65504, 65504).half()"
    with pytest.raises(Unfit):
        span.in_float32(call_of(torch.sqrt, torch.ones(2)))


def test_operands_of_reflected_operators_and_of_keywords() -> None:
    x = torch.tensor([2.0])
    reflected = call_of(torch.Tensor.__rtruediv__, x, 1.0)
    assert reflected.operand(0) == 1.0
    assert reflected.operand(1) is x
    assert reflected.again({1: torch.tensor([4.0])}).tolist() == [0.25]
    named = call_of(torch.div, input=torch.tensor([1.0]), other=x)
    assert named.operand(1) is x
    assert named.again({1: torch.tensor([4.0])}).tolist() == [0.25]


@pytest.mark.parametrize(("log", "edge"), [(torch.log, 0.0), (torch.log1p, -1.0)])
@given(values=VALUES, factors=st.data(), swapped=st.booleans())
def test_a_weighted_logarithm_is_the_same_product_but_for_zero_times_infinity(
    log: Function, edge: float, values: list[float], factors: st.DataObject, swapped: bool
) -> None:
    drawn = factors.draw(st.lists(st.sampled_from(_EDGES), min_size=len(values), max_size=len(values)))
    b, a = torch.tensor(values), torch.tensor(drawn, requires_grad=True)
    made = log(b)
    made_by = {id(made): call_of(log, b)}
    call = Call(torch.mul, (made, a) if swapped else (a, made), {}, "", lambda t: made_by.get(id(t)))
    plain, infinite = call.func(*call.args).detach(), b == edge
    if bool((infinite & (a.detach() != 0)).any() or (b < edge).any()):
        with pytest.raises(Unfit):
            product_with_log(call)
        return
    repaired = product_with_log(call)
    torch.testing.assert_close(repaired.value[~infinite], plain[~infinite], equal_nan=True)
    assert bool((repaired.value[infinite] == 0).all())
    assert repaired.words.after == "in place of {0} * {1}"


@pytest.mark.parametrize(
    ("x", "func", "context", "fits"),
    [
        (torch.zeros(2), torch.log, "(t * torch.log(t)).sum()", True),
        (torch.zeros(2), torch.log, "torch.mul(t, torch.log(t))", True),
        (torch.zeros(2), torch.log, "torch.log(t).mean()", False),
        (torch.zeros(2), torch.Tensor.log_, "(t * s.log_()).sum()", False),
        (torch.zeros(2, requires_grad=True), torch.log, "(t * torch.log(t)).sum()", False),
    ],
)
def test_which_logarithms_are_followed_to_their_product(x: Tensor, func: Function, context: str, fits: bool) -> None:
    call = Call(func, (x,), {}, context)
    if fits:
        in_a_product(call)
        return
    with pytest.raises(Unfit):
        in_a_product(call)


def test_codes_are_known_and_a_cause_is_either_tried_or_says_why_not() -> None:
    known = set(CAUSES)
    assert {code for r in REMEDIES for code in r.causes} <= known
    assert set(NOT_TRIED) <= known
    assert not set(NOT_TRIED) & {code for r in REMEDIES for code in r.causes}
    left = known - set(NOT_TRIED) - {code for r in REMEDIES for code in r.causes}
    assert left == {
        *("clip_norm_overflow", "clip_spreads_nan", "compiler", "custom_backward", "not_reproducible", "unknown"),
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-12, "1e-12"), (1e-4, "1e-4"), (0.5, "0.5"), (87.0, "87"), (1e18, "1e18"), (-1.0, "-1"), (1e4, "10000")],
)
def test_numbers_as_they_are_written(value: float, text: str) -> None:
    assert number(value) == text
