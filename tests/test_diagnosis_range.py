"""Results beyond the range of their dtype, and the exact place where it ends."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from _births import born, born_backward, traced
from nan_detector._diagnosis import diagnose
from nan_detector._diagnosis.dtypes import exp_limit, limits, rounds_to_zero
from nan_detector._diagnosis.reach import exp_overflows
from nan_detector._trace import Trace

HALF = torch.float16
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def exponential(values: list[float], op: str = "exp", dtype: torch.dtype = torch.float32, line: str = "") -> Trace:
    x = torch.tensor(values, dtype=dtype)
    return traced(born(op, [x], getattr(torch, op)(x), line=line))


def two_to_the(*values: float) -> Trace:
    x = torch.tensor(values)
    return traced(born("pow", [x], 2.0**x, args=("self=2.0",), call="2 ** x"))


def power_of_a_half(exponent: float) -> Trace:
    x = torch.tensor([exponent])
    return traced(born("pow", [x], 0.5**x, args=("self=0.5",), call="0.5 ** x"))


def product(a: torch.Tensor, b: torch.Tensor, op: str = "mm", **fields: object) -> Trace:
    return traced(born(op, [a, b], a @ b, elementwise=False, call="q @ k.T", line="s = q @ k.T", **fields))


def half_attention() -> Trace:
    q = torch.full((2, 64), 220.0, dtype=HALF)
    return product(q, q.T.contiguous())


def square_half_attention() -> Trace:
    # Results of the inputs' shape: statistics at the guilty places would show other numbers than the guilty ones.
    q = torch.ones(4, 4, dtype=HALF)
    q[0], q[:, 1] = 300.0, 300.0
    return product(q, q)


def squared(value: float, dtype: torch.dtype, op: str = "pow", line: str = "ms = h.pow(2).mean(-1)") -> Trace:
    x = torch.tensor([1.0, value], dtype=dtype)
    if op == "pow":
        return traced(born("pow", [x], x.pow(2), args=("exponent=2",), call="h.pow", line=line))
    return traced(born("mul", [x, x], x * x, call="h * h"))


def cast(value: float, to: torch.dtype = HALF, line: str = "ema.half()", **fields: object) -> Trace:
    x = torch.tensor([1.0, value])
    return traced(born("to_copy", [x], x.to(to), call="ema.half", line=line, **fields))


def mask_cast() -> Trace:
    return cast(torch.finfo(torch.float32).min)


def summed(dtype: torch.dtype) -> Trace:
    x = torch.full((4000,), 60.0, dtype=dtype)
    return traced(born("sum", [x], x.sum(), elementwise=False, call="x.sum"))


def positions() -> Trace:
    x, y = torch.tensor([65504.0, 1.0], dtype=HALF), torch.tensor([40.0, 1.0], dtype=HALF)
    return traced(born("add", [x, y], x + y, call="pos + offset"))


def running_statistics() -> Trace:
    x = torch.tensor([[-3000.0], [3000.0]], dtype=HALF)
    inf = torch.tensor([torch.inf], dtype=HALF)
    return traced(born("native_batch_norm", [x, torch.ones(1, dtype=HALF)], inf, elementwise=False))


def lgamma() -> Trace:
    x = torch.tensor([3.0, 2.24e37])
    return traced(born("lgamma", [x], torch.lgamma(x)))


def grown_product(dtype: torch.dtype) -> Trace:
    a, b = torch.full((2, 8), 3e20, dtype=dtype), torch.full((8, 2), 5e19, dtype=dtype)
    return product(a, b, "mm")


def probabilities_product() -> Trace:
    x = torch.full((50,), 10.0)
    return traced(born("prod", [x], x.prod(), elementwise=False, call="x.prod"))


def scaled_gradient() -> Trace:
    g, w = torch.full((2, 4), 3.0e4, dtype=HALF), torch.full((4, 3), 2.0, dtype=HALF)
    return traced(born_backward("addmm", [w], "mm", [g, w], g @ w, elementwise=False), ("gradient",))


def gradient_cast() -> Trace:
    g = torch.tensor([7e4, 1.0])
    return traced(born_backward("to_copy", [torch.ones(2, dtype=HALF)], "_to_copy", [g], g.half()), ("gradient",))


def deep_gradient(value: float = 1e25) -> Trace:
    g, w = torch.full((2, 4), value), torch.full((4, 3), value)
    return traced(born_backward("addmm", [w], "mm", [g, w], g @ w, elementwise=False), ("gradient",))


FIRES = [
    (
        "exp_overflow",
        lambda: exponential([91.8]),
        "The argument is above 88.72, where exp leaves float32 (greatest 91.8).",
    ),
    (
        "exp_overflow",
        lambda: exponential([1.0, 134.0, 90.0]),
        "2 of 3 arguments are above 88.72, where exp leaves float32 (greatest 134).",
    ),
    (
        "exp_overflow",
        lambda: exponential([12.0, 1.0], dtype=HALF),
        "1 of 2 arguments is above 11.09, where exp leaves float16 (greatest 12.0).",
    ),
    ("exp_overflow", lambda: exponential([710.0], dtype=torch.float64), None),
    ("exp_overflow", lambda: exponential([89.0], dtype=torch.bfloat16), None),
    (
        "exp_overflow",
        lambda: exponential([128.0, 3.0], "exp2"),
        "1 of 2 arguments is above 128, where exp2 leaves float32 (greatest 128).",
    ),
    (
        "exp_overflow",
        lambda: exponential([-90.0, 3.0], "cosh"),
        "1 of 2 arguments is above 89.42, where cosh leaves float32 (greatest 90.0).",
    ),
    ("exp_overflow", lambda: exponential([100.0], "expm1"), None),
    ("exp_overflow", lambda: two_to_the(200.0, 1.0), "2 to a power above 128 leaves float32 (greatest 200)."),
    (
        "half_overflow",
        half_attention,
        "Magnitudes up to 220 and 220 were multiplied and summed over 64 products.",
    ),
    ("half_overflow", square_half_attention, None),
    ("half_overflow", lambda: squared(300.0, HALF), "Magnitudes up to 300 were raised to 2."),
    ("half_overflow", lambda: squared(300.0, HALF, "mul"), None),
    ("half_overflow", lambda: cast(3.9e6), "Values up to 3.90e+06 were cast."),
    ("half_overflow", lambda: cast(65520.0), "Values up to 65520 were cast."),
    ("half_overflow", lambda: summed(HALF), None),
    ("half_overflow", positions, None),
    ("half_overflow", running_statistics, None),
    ("half_overflow", mask_cast, None),
    ("overflow", lgamma, "The inputs of lgamma reach 2.24e+37 in magnitude; float32 ends at 3.40e+38."),
    (
        "overflow",
        lambda: squared(1e20, torch.float32),
        "Magnitudes up to 1.00e+20 were raised to 2; float32 ends at 3.40e+38.",
    ),
    ("overflow", lambda: squared(1e20, torch.bfloat16), None),
    ("overflow", lambda: squared(1e200, torch.float64), None),
    ("overflow", lambda: grown_product(torch.float32), None),
    ("overflow", lambda: grown_product(torch.bfloat16), None),
    ("overflow", probabilities_product, None),
    ("half_gradient_overflow", scaled_gradient, None),
    ("half_gradient_overflow", gradient_cast, "Values up to 70000 were cast."),
    ("gradient_explosion", deep_gradient, None),
]

NEAR = [
    ("exp_overflow", lambda: power_of_a_half(-200.0), "overflow"),
    ("exp_overflow", lgamma, "overflow"),
    ("half_overflow", lambda: squared(1e20, torch.bfloat16), "overflow"),
    ("overflow", half_attention, "half_overflow"),
    ("half_overflow", scaled_gradient, "half_gradient_overflow"),
    ("half_gradient_overflow", half_attention, "half_overflow"),
    ("half_gradient_overflow", deep_gradient, "gradient_explosion"),
    ("half_overflow", lambda: exponential([12.0], dtype=HALF), "exp_overflow"),
]


def ids(table: list[tuple]) -> list[str]:
    return [f"{row[0]}-{i}" for i, row in enumerate(table)]


@pytest.mark.parametrize(("code", "build", "evidence"), FIRES, ids=ids(FIRES))
def test_the_cause_is_named(code: str, build, evidence: str | None):
    best, _ = diagnose(build())
    assert best is not None and best.code == code
    assert best.evidence and best.fix
    if evidence is not None:
        assert evidence in best.evidence


@pytest.mark.parametrize(("code", "build", "instead"), NEAR, ids=ids(NEAR))
def test_a_near_miss_is_something_else(code: str, build, instead: str):
    best, others = diagnose(build())
    assert best is not None and best.code == instead
    assert code not in [c.code for c in others]


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
@pytest.mark.parametrize("op", ["mul", "mm", "add", "sum", "to_copy", "pow", "mse_loss", "exp"])
def test_small_inputs_cannot_have_overflowed(op: str, dtype: torch.dtype):
    # A kernel that gives inf for inputs of 1 is broken; to call it an overflow would send the reader astray.
    x = torch.ones(2, 2, dtype=dtype)
    args = ("exponent=2",) if op == "pow" else ()
    inputs = [x] if op in ("sum", "to_copy", "pow", "exp") else [x, x]
    best, others = diagnose(traced(born(op, inputs, torch.full((2, 2), torch.inf, dtype=dtype), args=args)))
    assert best is not None and best.code == "unknown"
    assert others == ()


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("y = (1 + x.exp()).log()", None),
        ("y = torch.log(1 + torch.exp(x))", "F.softplus"),
        ("y = 1 / (1 + torch.exp(-x))", "torch.sigmoid"),
        ("e = torch.exp(-z)", "torch.sigmoid"),
        ("p = z.exp() / z.exp().sum(-1, keepdim=True)", "torch.softmax"),
        ("s = self.logit_scale.exp()", "math.log(100)"),
        ("kl = logvar.exp()", "logvar.clamp"),
        ("ratio = torch.exp(logp - old)", "clamp the log-ratio"),
    ],
)
def test_the_fix_of_an_exponential_fits_its_line(line: str, fix: str | None):
    best, _ = diagnose(exponential([100.0], line=line))
    assert best is not None and best.fix is not None
    assert (fix or "x.clamp(max=87).exp()") in best.fix


def test_a_cast_is_not_advised_to_square_and_a_square_not_to_average():
    best, _ = diagnose(cast(92672.0, line="energy = x.pow(2).sum(-1).half()"))
    assert best is not None and best.fix is not None and best.fix.startswith("keep this tensor in float32")
    for line, fix in (
        ("e = h.pow(2)", "x.float().pow(2)"),
        ("h.pow(2).mean(-1)", "x.float().pow(2).mean(-1, keepdim=True)"),
    ):
        best, _ = diagnose(squared(300.0, HALF, line=line))
        assert best is not None and best.fix == f"square in float32: {fix}"


def test_the_bound_in_the_fix_is_inside_the_range():
    for dtype, bound in ((HALF, 10), (torch.float32, 87), (torch.float64, 708)):
        best, _ = diagnose(exponential([1000.0], dtype=dtype))
        assert best is not None and best.fix == f"x.clamp(max={bound}).exp()"
        assert torch.isfinite(torch.exp(torch.tensor(float(bound), dtype=dtype)))


# -- edges of the dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_limits_are_torchs(dtype: torch.dtype):
    found, info = limits(str(dtype)), torch.finfo(dtype)
    assert found is not None
    assert (found.max, found.smallest_normal) == (info.max, info.smallest_normal)
    assert torch.tensor(found.smallest, dtype=dtype).item() == found.smallest
    assert torch.tensor(found.smallest / 2, dtype=torch.float64).to(dtype).item() == 0.0


def rounds_to_inf(value: float, dtype: str) -> bool:
    """What `overflow_at` says: that a finite `value` is out of range in `dtype`, after rounding."""
    found = limits(dtype)
    assert found is not None
    return abs(value) >= found.overflow_at


@pytest.mark.parametrize(
    ("value", "infinite"), [(65504.0, False), (65519.0, False), (65519.99, False), (65520.0, True), (-65520.0, True)]
)
def test_float16_rounds_to_infinity_from_65520_on(value: float, infinite: bool):
    assert rounds_to_inf(value, "torch.float16") is infinite
    assert bool(torch.tensor(value, dtype=torch.float64).to(HALF).isinf()) is infinite


@given(st.floats(min_value=6e4, max_value=7e4))
def test_casts_to_float16_overflow_where_torch_says(value: float):
    assert rounds_to_inf(value, "float16") == bool(torch.tensor(value, dtype=torch.float64).to(HALF).isinf())


@given(st.floats(min_value=3.3e38, max_value=3.5e38))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts_from_float64_overflow_where_torch_says(dtype: torch.dtype, value: float):
    source = torch.tensor(value, dtype=torch.float64)
    if dtype is torch.bfloat16:
        source = source.float()  # torch goes through float32: one rounding more
        if not source.isfinite():
            return
    assert rounds_to_inf(source.item(), str(dtype)) == bool(source.to(dtype).isinf())


@given(st.floats(min_value=0.0, max_value=1e-6))
def test_an_eps_vanishes_in_float16_where_torch_says(eps: float):
    assert rounds_to_zero(eps, "float16") == (torch.tensor(eps, dtype=torch.float64).to(HALF).item() == 0.0)


@pytest.mark.parametrize(
    ("dtype", "limit"), [("float16", 11.0901), ("bfloat16", 88.7209), ("float32", 88.7228), ("float64", 709.7827)]
)
def test_exp_ends_at_the_logarithm_of_the_range(dtype: str, limit: float):
    assert exp_limit(dtype) == pytest.approx(limit, abs=1e-4)


@given(st.floats(min_value=10.9, max_value=11.3))
def test_exp_overflows_in_float16_where_torch_says(x: float):
    t = torch.tensor(x, dtype=HALF)
    assert exp_overflows("exp", t.item(), "torch.float16") == bool(torch.exp(t).isinf())


@given(st.floats(min_value=88.0, max_value=89.5, width=32))
def test_exp_overflows_in_float32_where_torch_says(x: float):
    if abs(x - exp_limit("float32")) < 2e-5:  # two units in the last place: the kernel may round either way
        return
    assert exp_overflows("exp", x, "float32") == bool(torch.exp(torch.tensor(x)).isinf())


@given(st.floats(min_value=709.0, max_value=711.0))
def test_exp_overflows_in_float64_where_torch_says(x: float):
    if abs(x - math.log(torch.finfo(torch.float64).max)) < 1e-12:
        return
    assert exp_overflows("exp", x, "float64") == bool(torch.exp(torch.tensor(x, dtype=torch.float64)).isinf())


@given(st.floats(min_value=89.0, max_value=1e30), st.sampled_from(DTYPES[1:3]))
def test_every_exponential_beyond_the_range_is_called_one(x: float, dtype: torch.dtype):
    best, _ = diagnose(exponential([x], dtype=dtype))
    assert best is not None and best.code == "exp_overflow"


@given(
    st.sampled_from([HALF, torch.float32]),
    st.floats(min_value=1e-3, max_value=1e30),
    st.floats(min_value=1e-3, max_value=1e30),
)
def test_no_real_overflow_of_a_product_is_missed(dtype: torch.dtype, a: float, b: float):
    x, y = torch.full((2, 3), a).to(dtype), torch.full((3, 2), b).to(dtype)
    out = x @ y
    if not (torch.isfinite(x).all() and torch.isfinite(y).all()) or torch.isfinite(out).all():
        return
    best, _ = diagnose(product(x, y))
    assert best is not None and best.code == ("half_overflow" if dtype is HALF else "overflow")
