"""Arguments outside a domain, and denominators that are zero."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from _births import born, traced
from nan_detector._diagnosis import diagnose
from nan_detector._trace import Trace

# torch warns of what these births are.
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")

torch.manual_seed(0)


def softmax_underflow() -> Trace:
    p = torch.softmax(torch.tensor([[0.0, 500.0, 3.0], [1.0, 2.0, 300.0]]), -1)
    return traced(born("log", [p], torch.log(p), line="nll = -torch.log(p)"))


def half_gumbel() -> Trace:
    e = torch.tensor([0.25, 0.0, 1.5], dtype=torch.float16)
    return traced(born("log", [e], torch.log(e), line="g = -torch.log(e)"))


def tanh_correction() -> Trace:
    x = 1 - (2.0 * torch.tanh(torch.linspace(-2, 2, 9))) ** 2
    return traced(born("log", [x], torch.log(x), line="logp -= torch.log(1 - a.pow(2) + 1e-6)"))


def log1p(*values: float) -> Trace:
    x = torch.tensor(values)
    return traced(born("log1p", [x], torch.log1p(x)))


def logit(*values: float) -> Trace:
    x = torch.tensor(values)
    return traced(born("logit", [x], torch.logit(x)))


def xlogy() -> Trace:
    x, y = torch.ones(3), torch.tensor([0.0, 0.5, 1.0])
    return traced(born("xlogy", [x, y], torch.xlogy(x, y)))


def cancelled_variance(op: str = "sqrt") -> Trace:
    x = torch.full((4, 64), 5.0e3) + 0.3 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    var = (x * x).mean(-1) - x.mean(-1) ** 2
    var[0] = -10.0  # of the order that float32 resolves at 2.5e7
    return traced(born(op, [var], getattr(torch, op)(var), line=f"x / torch.{op}(var)"))


def centered_rmsprop() -> Trace:
    avg = torch.tensor([-1e-9, 2.0, 3.0])
    birth = born("sqrt", [avg], torch.sqrt(avg), phase="optimizer", call=None, line="optimizer.step()", layer_name=None)
    return traced(birth, ("parameter",))


def power(values: list[float], exponent: float) -> Trace:
    x = torch.tensor(values)
    return traced(born("pow", [x], x.pow(exponent), args=(f"exponent={exponent}",), call=f"x ** {exponent}"))


def one_argument(op: str, values: list[float], dtype: torch.dtype = torch.float32) -> Trace:
    x = torch.tensor(values, dtype=dtype)
    function = {"erfinv": torch.erfinv, "ndtri": torch.special.ndtri}.get(op) or getattr(torch, op)
    return traced(born(op, [x], function(x)))


def division(numerators: list[float], denominators: list[float], line: str = "y = x / n", **fields: object) -> Trace:
    x, n = torch.tensor(numerators), torch.tensor(denominators)
    return traced(born("div", [x, n], x / n, call=line.split("= ")[-1], line=line, **fields))


def division_by_number_zero() -> Trace:
    x = torch.tensor([1.0, 0.0])
    return traced(born("div", [x], x / 0, args=("other=0",), call="x / n"))


def division_by_int_count() -> Trace:
    # The tracer describes floating tensors only: the count is not among the inputs.
    x = torch.zeros(3, 4)
    return traced(born("div", [x], x / torch.tensor([[0], [2], [3]]), call="h.sum(1) / lengths"))


def weight_norm_of_zeros() -> Trace:
    v, g = torch.zeros(2, 3), torch.ones(2, 1)
    return traced(born("weight_norm_interface", [v, g], torch._weight_norm(v, g, 0), elementwise=False))


def normalize(dtype: torch.dtype, **fields: object) -> Trace:
    z = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=dtype)
    n = z.norm(dim=1, keepdim=True)
    return traced(born("div", [z, n], z / n, call="F.normalize", line="return F.normalize(z, dim=1)", **fields))


def eps_in_source(literal: str, dtype: torch.dtype = torch.float16) -> Trace:
    x, s = torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([0.0, 2.0], dtype=dtype)
    return traced(born("div", [x, s], x / s, call=f"x / (s + {literal})", line=f"z = x / (s + {literal})"))


def log_with_eps() -> Trace:
    p = torch.tensor([0.0, 0.5], dtype=torch.float16)
    return traced(born("log", [p], torch.log(p), line="loss = -torch.log(p + 1e-8).mean()"))


def half_adam() -> Trace:
    p, m, v = (torch.zeros(3, dtype=torch.float16) for _ in range(3))
    fields = {"phase": "optimizer", "call": None, "line": "optimizer.step()"}
    return traced(born("addcdiv", [p, m, v], torch.addcdiv(p, m, v), **fields), ("parameter",))


def kernel_underflow() -> Trace:
    d = torch.tensor([[1.0, 2.0], [200.0, 300.0], [80.0, 85.0]])
    w = torch.exp(-d)
    s = w.sum(1, keepdim=True)
    return traced(born("div", [w, s], w / s, call="w / w.sum(1, keepdim=True)"))


def half_square_underflow() -> Trace:
    x = torch.tensor([1e-4, 6e-3, 0.5], dtype=torch.float16)
    s = x * x
    return traced(born("div", [x, s], x / s, call="x / (x * x)"))


def logdet_chosen_nan() -> Trace:
    w, nan = -torch.eye(3), torch.tensor(torch.nan)
    fields = {"kind": "constant", "in_library": True, "aten": "aten.scalar_tensor.default", "args": ("s=nan",)}
    return traced(born("logdet", [w], nan, elementwise=False, line="ld = torch.logdet(self.W)", **fields))


def slogdet_singular() -> Trace:
    w = torch.zeros(3, 3)
    return traced(born("linalg_slogdet", [w], torch.linalg.slogdet(w)[1], elementwise=False))


def solver(op: str, rows: list[list[float]]) -> Trace:
    a = torch.tensor(rows)
    if op == "linalg_inv_ex":
        return traced(born(op, [a], torch.linalg.inv_ex(a)[0], elementwise=False))
    b = torch.ones(2, 1)
    return traced(born(op, [a, b], torch.linalg.solve_triangular(a, b, upper=True), elementwise=False))


def log_of_det() -> Trace:
    d = torch.linalg.det(-torch.eye(3))[None]
    return traced(born("log", [d], torch.log(d), line="ld = torch.log(torch.det(self.W))"))


def empty(op: str) -> Trace:
    x = torch.zeros(0, 4)
    out = {"mean": torch.mean, "mse_loss": lambda t: F.mse_loss(t, t), "var": torch.var}[op](x)
    return traced(born(op, [x], out, elementwise=False, call="err.mean" if op == "mean" else f"F.{op}"))


def all_ignored(dtype_inputs: bool = True) -> Trace:
    z, y = torch.log_softmax(torch.randn(3, 4), 1), torch.full((3,), -100)
    inputs = [z, y] if dtype_inputs else [z]
    fields = {"args": ("reduction=1", "ignore_index=-100"), "call": "F.cross_entropy"}
    return traced(born("nll_loss_forward", inputs, F.nll_loss(z, y), elementwise=False, **fields))


def spread_of(op: str, shape: tuple[int, ...], **kwargs: object) -> Trace:
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    out = getattr(torch, op)(x, dim=0, **kwargs)
    return traced(born(op, [x], out, elementwise=False, args=("dim=[0]",), call=f"x.{op}"))


def jacobian_named_logdet() -> Trace:
    x = torch.tensor([0.0, 1.0])
    return traced(born("log", [x], torch.log(x), line="logdet = torch.log(torch.abs(1 + psi @ u))"))


def equal_row(eps: float, first: float = 2.0) -> Trace:
    x = torch.tensor([[first, 2.0, 2.0], [1.0, 2.0, 3.0]])
    out = F.layer_norm(x, (3,), eps=0.0)
    args = ("normalized_shape=[3]", f"eps={eps}")
    return traced(born("native_layer_norm", [x], out, elementwise=False, args=args, call="self.norm"))


FIRES = [
    ("log_of_zero", softmax_underflow, "4 of 6 inputs are exactly 0."),
    ("log_of_zero", half_gumbel, "1 of 3 inputs is exactly 0."),
    ("log_of_zero", lambda: log1p(-1.0, 0.5), "1 of 2 inputs is exactly -1."),
    ("log_of_zero", lambda: logit(0.0, 0.5), "1 of 2 inputs is exactly 0."),
    ("log_of_zero", lambda: logit(1.0, 0.5, 0.2), "1 of 3 inputs is exactly 1."),
    ("log_of_zero", xlogy, "1 of 3 inputs is exactly 0."),
    ("log_of_zero", lambda: one_argument("log2", [0.0, 0.0, 4.0]), "2 of 3 inputs are exactly 0."),
    ("log_of_negative", tanh_correction, "6 of 9 inputs are below 0 (least -2.72)."),
    ("log_of_negative", lambda: log1p(-1.5, 0.5), "1 of 2 inputs is below -1 (least -1.50)."),
    (
        "log_of_negative",
        lambda: logit(1.5, 0.5),
        "1 of 2 inputs is above 1 (greatest 1.50): log(1 - x) is undefined there.",
    ),
    ("log_of_negative", lambda: one_argument("log", [-torch.inf, 1.0]), "1 of 2 inputs is below 0 (least -inf)."),
    ("sqrt_of_negative", cancelled_variance, None),
    ("sqrt_of_negative", lambda: cancelled_variance("rsqrt"), None),
    ("sqrt_of_negative", centered_rmsprop, "1 of 3 inputs is below 0 (least -1.00e-09)."),
    (
        "pow_of_negative",
        lambda: power([-2.0, 3.0], 0.4),
        "1 of 2 bases is below 0 (least -2.00), and the exponent is 0.4.",
    ),
    ("pow_of_zero", lambda: power([0.0, 3.0], -0.5), "1 of 2 bases is exactly 0, and the exponent is -0.500."),
    (
        "outside_domain",
        lambda: one_argument("acos", [1.0 + 2.4e-7, 0.2]),
        "1 of 2 inputs is above 1 (greatest 1 + 2.38e-07).",
    ),
    ("outside_domain", lambda: one_argument("acosh", [0.5, 2.0]), "1 of 2 inputs is below 1 (least 0.500)."),
    ("outside_domain", lambda: one_argument("atanh", [1.5, 1.0, 0.0]), None),
    (
        "outside_domain",
        lambda: one_argument("cos", [torch.inf, 0.0]),
        "1 of 2 inputs is infinite, where cos has no value.",
    ),
    ("boundary_of_domain", lambda: one_argument("atanh", [-1.0, 0.5, 0.0]), "1 of 3 inputs is exactly -1."),
    ("boundary_of_domain", lambda: one_argument("erfinv", [1.0, 0.5]), "1 of 2 inputs is exactly 1."),
    ("boundary_of_domain", lambda: one_argument("ndtri", [0.0, 0.5]), "1 of 2 inputs is exactly 0."),
    ("boundary_of_domain", lambda: one_argument("lgamma", [-3.0, 2.0]), None),
    ("boundary_of_domain", lambda: one_argument("digamma", [0.0, 2.0]), "1 of 2 inputs is exactly 0."),
    ("division_by_zero", lambda: division([0.0, 1.0], [0.0, 2.0]), "1 of 2 denominators is exactly 0."),
    ("division_by_zero", lambda: one_argument("reciprocal", [0.0, 5.0, 950.0]), "1 of 3 denominators is exactly 0."),
    ("division_by_zero", lambda: one_argument("rsqrt", [0.0, 5.0]), "1 of 2 inputs is exactly 0."),
    ("division_by_zero", division_by_number_zero, "The divisor is the number 0."),
    ("division_by_zero", division_by_int_count, "A whole-number divisor (a count) is 0."),
    ("division_by_zero", weight_norm_of_zeros, None),
    (
        "division_by_zero",
        lambda: equal_row(0.0),
        "3 of 6 results are NaN: there all values that are normalised together are equal, so their spread is 0, and "
        "eps=0 adds nothing to it.",
    ),
    ("eps_underflow", lambda: normalize(torch.float16), None),
    ("eps_underflow", lambda: eps_in_source("1e-8"), None),
    ("eps_underflow", lambda: eps_in_source("2.9e-8"), None),
    ("eps_underflow", log_with_eps, None),
    ("eps_underflow", half_adam, None),
    ("underflow_to_zero", kernel_underflow, None),
    ("underflow_to_zero", half_square_underflow, None),
    (
        "determinant_not_positive",
        logdet_chosen_nan,
        "The determinant of the matrix of shape (3, 3) is negative (the result is NaN).",
    ),
    (
        "determinant_not_positive",
        slogdet_singular,
        "The determinant of the matrix of shape (3, 3) is 0 (the result is infinite).",
    ),
    (
        "singular_matrix",
        lambda: solver("linalg_inv_ex", [[1.0, 2.0], [2.0, 4.0]]),
        "torch.linalg_inv_ex met a matrix of shape (2, 2) without an inverse.",
    ),
    ("singular_matrix", lambda: solver("linalg_solve_triangular", [[1.0, 2.0], [0.0, 0.0]]), None),
    ("reduction_of_empty", lambda: empty("mean"), "err.mean got a tensor of shape (0, 4): no elements."),
    ("reduction_of_empty", lambda: empty("mse_loss"), None),
    ("reduction_of_empty", lambda: empty("var"), None),
    ("reduction_of_empty", all_ignored, "All 3 labels are -100, the ignore_index -100."),
    ("reduction_of_empty", lambda: all_ignored(dtype_inputs=False), None),
    (
        "std_of_one",
        lambda: spread_of("std", (1, 3)),
        "std runs over 1 element of a tensor of shape (1, 3), and divides by 1 - 1 = 0.",
    ),
    ("std_of_one", lambda: spread_of("var", (1, 2)), None),
]

#: What looks alike, the code that must not be named at all, and the one that is right.
NEAR = [
    ("log_of_zero", lambda: one_argument("log", [-2.0, 1.0]), "log_of_negative"),
    ("determinant_not_positive", jacobian_named_logdet, "log_of_zero"),
    ("division_by_zero", lambda: equal_row(1e-5), "unknown"),
    ("division_by_zero", lambda: equal_row(0.0, first=torch.nan), "unknown"),
    ("log_of_negative", lambda: one_argument("log", [0.0, -0.0, 1.0]), "log_of_zero"),
    ("log_of_negative", lambda: log1p(-1.0, -0.5), "log_of_zero"),
    ("sqrt_of_negative", lambda: one_argument("rsqrt", [0.0, 4.0]), "division_by_zero"),
    ("pow_of_negative", lambda: power([-1e30, 3.0], 2.0), "overflow"),
    ("pow_of_zero", lambda: power([0.0, 1e30], 2.0), "overflow"),
    ("pow_of_zero", lambda: power([1e-30, 3.0], -2.0), "overflow"),
    ("outside_domain", lambda: one_argument("atanh", [1.0, 0.5]), "boundary_of_domain"),
    ("boundary_of_domain", lambda: one_argument("lgamma", [3e37, 1.0]), "overflow"),
    ("boundary_of_domain", lambda: one_argument("acos", [1.5, 1.0]), "outside_domain"),
    ("division_by_zero", lambda: division([1e30, 0.0], [1e-20, 1.0]), "overflow"),
    ("division_by_zero", lambda: division([torch.inf, 0.0], [torch.inf, 1.0]), "zero_times_inf"),
    ("eps_underflow", lambda: eps_in_source("1e-6"), "division_by_zero"),
    ("eps_underflow", lambda: eps_in_source("3e-8"), "division_by_zero"),
    ("eps_underflow", lambda: eps_in_source("1e-8", torch.bfloat16), "division_by_zero"),
    ("eps_underflow", lambda: normalize(torch.float32), "division_by_zero"),
    ("eps_underflow", lambda: division([0.0, 1.0], [0.0, 2.0], line="y = 1e-12 * x / n"), "division_by_zero"),
    ("underflow_to_zero", lambda: division([0.0, 1.0], [0.0, 0.5]), "division_by_zero"),
    ("underflow_to_zero", lambda: division([1e-3, 1.0], [0.0, 1e-20]), "division_by_zero"),
    ("determinant_not_positive", lambda: one_argument("log", [-1.0]), "log_of_negative"),
    ("singular_matrix", slogdet_singular, "determinant_not_positive"),
    ("determinant_not_positive", lambda: solver("linalg_inv_ex", [[1.0, 2.0], [2.0, 4.0]]), "singular_matrix"),
    ("reduction_of_empty", lambda: spread_of("std", (1, 3)), "std_of_one"),
    ("std_of_one", lambda: empty("var"), "reduction_of_empty"),
]


def ids(table: list[tuple]) -> list[str]:
    return [f"{row[0]}-{i}" for i, row in enumerate(table)]


@pytest.mark.parametrize(("code", "build", "evidence"), FIRES, ids=ids(FIRES))
def test_the_cause_is_named(code: str, build, evidence: str | None):
    best, _ = diagnose(build())
    assert best is not None
    assert best.code == code
    assert best.evidence and best.fix
    if evidence is not None:
        assert evidence in best.evidence


@pytest.mark.parametrize(("code", "build", "instead"), NEAR, ids=ids(NEAR))
def test_a_near_miss_is_something_else(code: str, build, instead: str):
    best, others = diagnose(build())
    assert best is not None
    assert best.code == instead
    assert code not in [c.code for c in others]


def test_a_determinant_in_a_logarithm_is_the_runner_up():
    best, others = diagnose(log_of_det())
    assert best is not None
    assert (best.code, [c.code for c in others]) == ("log_of_negative", ["determinant_not_positive"])


def test_guilty_elements_decide_and_not_the_range_of_the_tensor():
    # The tensor has a zero and a negative number, but the division failed where the denominator is tiny.
    x, n = torch.tensor([1e30, 1.0, 1.0]), torch.tensor([1e-20, 2.0, -3.0])
    birth = born("div", [x, n], x / n)
    assert birth.inputs[1].at_guilty is not None
    best, _ = diagnose(traced(birth))
    assert best is not None and best.code == "overflow"


def test_cancellation_is_explained_by_the_words_on_the_line():
    best, _ = diagnose(cancelled_variance())
    assert best is not None
    assert "A variance as E[x²] - E[x]² loses its digits when the mean is large against the spread." in best.evidence
    assert best.fix == "torch.sqrt(torch.var(x, dim, correction=0, keepdim=True) + eps), dim being that of the mean"


@pytest.mark.parametrize(
    ("build", "fix"),
    [
        (softmax_underflow, "torch.log(x.clamp_min(1e-12)), or F.log_softmax(z, -1) where x is a softmax of z"),
        (half_gumbel, "torch.log(x.clamp_min(1e-6)), or F.log_softmax(z, -1) where x is a softmax of z"),
        (lambda: logit(0.0), "torch.logit(x, eps=1e-6)"),
        (lambda: division([0.0], [0.0], "y = x / mask.sum(1)"), "x / n.clamp_min(1): a sum over nothing then stays 0"),
        (lambda: division([0.0, 1.0], [0.0, 0.25], "y = num / den"), "x / n.clamp_min(1e-12)"),
        (lambda: normalize(torch.float16), "F.normalize(x, dim=1, eps=1e-6), or F.normalize(x.float(), dim=1)"),
    ],
)
def test_the_fix_fits_the_call(build, fix: str):
    best, _ = diagnose(build())
    assert best is not None and best.fix == fix


@pytest.mark.parametrize("eps", ["1e-6", "1e-12"])
def test_the_eps_in_a_fix_is_one_that_its_dtype_can_hold(eps: str):
    dtype = torch.float16 if eps == "1e-6" else torch.float32
    best, _ = diagnose(one_argument("rsqrt", [0.0, 1.0], dtype))
    assert best is not None and best.fix is not None and eps in best.fix
    assert torch.tensor(float(eps), dtype=dtype).item() > 0
