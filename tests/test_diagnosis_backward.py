"""Derivatives at edges, and forward values that come back."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from _births import born, born_backward, traced
from nan_detector._diagnosis import diagnose
from nan_detector._records import Location
from nan_detector._trace import Birth, Trace

GRADIENT = ("gradient",)


def derivative(
    forward: str, forward_inputs: list, aten: str, inputs: list, out: torch.Tensor, **fields: object
) -> Trace:
    return traced(born_backward(forward, forward_inputs, aten, inputs, out, **fields), GRADIENT)


def root_at_zero(gradient: float = 1.0, forward: str = "sqrt", dtype: torch.dtype = torch.float32) -> Trace:
    x = torch.tensor([0.0, 4.0], dtype=dtype)
    g, twice = torch.tensor([gradient, 1.0], dtype=dtype), 2 * x.sqrt()
    return derivative(forward, [x], "div", [g, twice], g / twice)


def root_near_zero_in_half() -> Trace:
    x = torch.tensor([6e-8, 4.0], dtype=torch.float16)
    g, twice = torch.tensor([6e4, 1.0], dtype=torch.float16), 2 * x.sqrt()
    return derivative("sqrt", [x], "div", [g, twice], g / twice)


def std_of_constant() -> Trace:
    x = torch.full((4,), 7.0)
    g, s = torch.ones(1), torch.zeros(1)
    return derivative("std", [x], "div", [g, s], g / s)


def fractional_power(exponent: float = 0.5, base: float = 0.0) -> Trace:
    x = torch.tensor([base, 4.0])
    return derivative("pow", [x], "pow", [x], x.pow(exponent - 1), args=(f"exponent={exponent - 1}",))


def edge(forward: str, value: float, aten: str = "rsqrt") -> Trace:
    x = torch.tensor([value, 0.5 * value])
    inside = (1 - x * x) if forward in ("acos", "asin", "atanh") else (x * x - 1)
    out = inside.rsqrt() if aten == "rsqrt" else inside.reciprocal()
    return derivative(forward, [x], aten, [inside], out)


def logit_at_zero() -> Trace:
    x, g = torch.tensor([0.0, 0.5]), torch.ones(2)
    return derivative("logit", [x], "logit_backward", [g, x], torch.tensor([torch.inf, 4.0]))


def atan2_at_origin() -> Trace:
    r = torch.zeros(2)
    return derivative("atan2", [r, r], "reciprocal", [r], r.reciprocal())


def svd() -> Trace:
    gap, g = torch.zeros(3, 3), torch.zeros(3, 3)
    return derivative("linalg_svd", [torch.eye(3)], "div", [g, gap], g / gap)


def eigh() -> Trace:
    gap, g = torch.zeros(3, 3), torch.ones(3, 3)
    return derivative("linalg_eigh", [torch.eye(3)], "div_", [g, gap], g / gap)


def slogdet() -> Trace:
    a = torch.zeros(2, 2)
    return derivative(
        "linalg_slogdet", [a], "linalg_lu_solve", [a, a], torch.full((2, 2), torch.nan), elementwise=False
    )


def custom(by_note: bool) -> Trace:
    x = torch.tensor([0.0, 2.0])
    fields: dict[str, object] = {"phase": "backward"}
    fields |= {"derivative_of": "MySqrt", "note": "custom_function"} if by_note else {"function": "MySqrt.backward"}
    return traced(born("div", [torch.ones(2), x], 1 / x, line="return g / ctx.y", **fields), GRADIENT)


def recomputed() -> Trace:
    """A checkpointed forward runs again during the backward, and fails there."""
    x = torch.tensor([0.0, 1.0])
    return traced(born("log", [x], torch.log(x), phase="backward"), GRADIENT)


def dropped(op: str) -> Trace:
    x = torch.tensor([0.0, 4.0])
    if op == "log":
        birth = born("log", [x], torch.log(x), phase="loss", call="torch.log")
    elif op == "div":
        birth = born("div", [x, x], x / x, phase="loss", call="num / den")
    elif op == "exp":
        big = torch.tensor([119.0, 0.0])
        birth = born("exp", [big], torch.exp(big), phase="loss")
    elif op == "square":
        big = torch.tensor([300.0, 1.0], dtype=torch.float16)
        birth = born("pow", [big], big.pow(2), args=("exponent=2",))
    else:
        logp = torch.tensor([-torch.inf, -1.0])
        birth = born("mul", [logp.exp(), logp], logp.exp() * logp, kind="intended_met")
    return traced(birth, GRADIENT)


def division_came_back() -> Trace:
    x, n, g = torch.tensor([0.0, 1.0]), torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0])
    return derivative("div", [x, n], "div", [g, n], g / n)


def reciprocal_power_came_back() -> Trace:
    return fractional_power(-1.0)


def masked_product_came_back() -> Trace:
    p, logp, g = torch.tensor([0.5, 0.5]), torch.tensor([-torch.inf, -1.0]), torch.tensor([0.0, 1.0])
    return derivative("mul", [p, logp], "mul", [g, logp], g * logp, kind="intended_met")


def exp_came_back(forward: str = "exp", value: float = 119.0) -> Trace:
    x, g = torch.tensor([value, 0.0]), torch.tensor([0.0, 1.0])
    y = getattr(torch, forward)(x)
    return derivative(forward, [x], "mul", [g, y], g * y)


FIRES = [
    ("sqrt_gradient_at_zero", root_at_zero, "1 of 2 inputs of sqrt is exactly 0."),
    ("sqrt_gradient_at_zero", lambda: root_at_zero(0.0), "The gradient that arrives there is 0: 0 · inf = NaN."),
    ("sqrt_gradient_at_zero", lambda: root_at_zero(0.0, "linalg_vector_norm"), None),
    ("sqrt_gradient_at_zero", lambda: root_at_zero(1.0, "norm"), None),
    ("sqrt_gradient_at_zero", lambda: root_at_zero(1.0, dtype=torch.float16), None),
    ("sqrt_gradient_at_zero", std_of_constant, None),
    ("pow_gradient_at_zero", fractional_power, "1 of 2 inputs of x ** 0.5 is exactly 0."),
    ("gradient_at_domain_boundary", lambda: edge("acos", 1.0), "An input of acos is exactly 1."),
    ("gradient_at_domain_boundary", lambda: edge("asin", -1.0), "An input of asin is exactly -1."),
    ("gradient_at_domain_boundary", lambda: edge("atanh", 1.0, "reciprocal"), None),
    ("gradient_at_domain_boundary", logit_at_zero, "An input of logit is exactly 0."),
    ("gradient_at_domain_boundary", atan2_at_origin, "The derivative of atan2 divides by 0 at 2 elements."),
    (
        "degenerate_decomposition",
        svd,
        "The derivative of linalg_svd of a matrix of shape (3, 3) divides by a gap of 0 in 9 entries.",
    ),
    ("degenerate_decomposition", eigh, None),
    ("determinant_not_positive", slogdet, "The derivative of linalg_slogdet inverts a singular matrix."),
    (
        "custom_backward",
        lambda: custom(True),
        "div in MySqrt.backward made a non-finite value, where its inputs are 1.00 and 0.",
    ),
    ("custom_backward", lambda: custom(False), None),
    ("unselected_branch", lambda: dropped("log"), "1 of 2 inputs is exactly 0."),
    ("unselected_branch", lambda: dropped("div"), "1 of 2 denominators is exactly 0."),
    ("unselected_branch", lambda: dropped("mul"), None),
    (
        "unselected_branch",
        division_came_back,
        "In the forward 1 of 2 denominators is exactly 0, so div was non-finite there.",
    ),
    ("unselected_branch", reciprocal_power_came_back, "In the forward x ** -1 was infinite at 0."),
    ("unselected_branch", masked_product_came_back, None),
    ("exp_overflow", exp_came_back, "exp overflows above 88.72 in float32, and its input reached 119."),
    (
        "exp_overflow",
        lambda: exp_came_back("exp2", 130.0),
        "exp2 overflows above 128 in float32, and its input reached 130.",
    ),
    ("exp_overflow", lambda: dropped("exp"), None),
    ("half_overflow", lambda: dropped("square"), None),
    ("log_of_zero", recomputed, None),
]

NEAR = [
    ("unselected_branch", lambda: dataclasses.replace(dropped("div"), reached=("loss",)), "division_by_zero"),
    ("sqrt_gradient_at_zero", root_near_zero_in_half, "half_gradient_overflow"),
    ("sqrt_gradient_at_zero", fractional_power, "pow_gradient_at_zero"),
    ("pow_gradient_at_zero", reciprocal_power_came_back, "unselected_branch"),
    ("pow_gradient_at_zero", lambda: fractional_power(-1.5, 1e-30), "overflow"),
    ("gradient_at_domain_boundary", root_at_zero, "sqrt_gradient_at_zero"),
    ("division_by_zero", root_at_zero, "sqrt_gradient_at_zero"),
    ("degenerate_decomposition", slogdet, "determinant_not_positive"),
    ("custom_backward", recomputed, "log_of_zero"),
    ("custom_backward", root_at_zero, "sqrt_gradient_at_zero"),
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
    assert code not in [c.code for c in others if c.code != instead]


@pytest.mark.parametrize(
    ("op", "codes"),
    [
        ("log", ["unselected_branch", "log_of_zero"]),
        ("div", ["unselected_branch", "division_by_zero"]),
        ("mul", ["unselected_branch", "zero_times_inf"]),
        ("exp", ["exp_overflow", "unselected_branch"]),
        ("square", ["half_overflow", "unselected_branch"]),
    ],
)
def test_undefined_values_blame_the_dropping_and_large_ones_the_overflow(op: str, codes: list[str]):
    best, others = diagnose(dropped(op))
    assert [c.code for c in (best, *others) if c is not None] == codes


@pytest.mark.parametrize("op", ["log", "div", "exp", "square", "mul"])
def test_what_reached_the_loss_was_not_dropped(op: str):
    best, others = diagnose(dataclasses.replace(dropped(op), reached=("loss", "gradient")))
    assert "unselected_branch" not in [c.code for c in (best, *others) if c is not None]


def test_an_exponential_that_came_back_has_the_dropping_as_runner_up():
    assert [c.code for c in diagnose(exp_came_back())[1]] == ["unselected_branch"]


def test_a_custom_backward_says_what_its_operation_did():
    assert [c.code for c in diagnose(custom(True))[1]] == ["division_by_zero"]


def test_a_training_function_named_backward_is_not_a_custom_backward():
    """GANs often have a method `backward` that computes the loss: its lines are forward lines of the derivative."""
    birth = root_at_zero().birth
    assert birth is not None
    place = Location("gan.py", 9, "Trainer.backward", "d = v.pow(2).sum(-1).sqrt()")
    best, _ = diagnose(traced(dataclasses.replace(birth, location=place), GRADIENT))
    assert best is not None and best.code == "sqrt_gradient_at_zero"


def test_the_operation_that_ran_is_read_from_aten():
    """`op` names the forward operation in a derivative; a pole is looked for in what `aten` says."""
    birth = root_at_zero().birth
    assert isinstance(birth, Birth) and birth.op == "sqrt"
    unknown = dataclasses.replace(
        birth, aten="aten.mul.Tensor", forward_inputs=(dataclasses.replace(birth.forward_inputs[0], zero_count=0),)
    )
    best, _ = diagnose(traced(unknown, GRADIENT))
    assert best is not None and best.code != "sqrt_gradient_at_zero"
