"""The training loop's own faults, and growth read from the history of the steps."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from _births import born, born_backward, came, traced
from nan_detector._diagnosis import diagnose
from nan_detector._diagnosis.growth import growth, jump, linear_growth
from nan_detector._records import Site
from nan_detector._trace import Birth, Trace

INF, NAN = torch.inf, torch.nan
HALF = torch.float16


def option(name: str, note: str, **fields: object) -> Trace:
    birth = Birth(
        number=0,
        kind="constant",
        op=name,
        aten="",
        phase="optimizer",
        tensor_name=f"param_groups[0][{name!r}]",
        note=note,
    )
    return Trace(birth=birth, reached=("parameter",), **fields)


def schedule_past_its_end() -> Trace:
    return option("lr", "lr=nan of parameter group 0 is not a number.", learning_rates=(0.05, 0.0386, 0.0147, 0.0, NAN))


def update_with_bad_rate() -> Trace:
    p, g = torch.ones(2), torch.tensor([NAN, NAN])
    birth = born("add", [p, torch.ones(2)], g, phase="optimizer", line="optimizer.step()", call=None)
    return traced(birth, ("parameter",), learning_rates=(0.1, INF))


def scale_by_hand(value: float = 0.0, line: str = "inv = 1.0 / scale.float()", phase: str = "loss") -> Trace:
    scale = torch.tensor(value)
    return traced(born("reciprocal", [scale], scale.reciprocal(), phase=phase, line=line, call=line[6:]), ("gradient",))


AFTER_THE_BACKWARD = (Site("reciprocal", "loss"), Site("mul", "loss"))
THROUGH_THE_BACKWARD = (Site("div", "loss"), Site("div", "backward"))


def division_of_gradients(spread: tuple[Site, ...]) -> Trace:
    g, norm = torch.zeros(3), torch.zeros(())
    birth = born("div", [g, norm], g / norm, phase="loss", call="p.grad / norm", layer_name=None)
    return traced(birth, ("gradient",), spread=spread)


def norm_by_hand(spread: tuple[Site, ...]) -> Trace:
    g = torch.full((4,), 3e38)
    line = "total_norm += (p.grad ** 2).sum()"
    birth = born("pow", [g], g.pow(2), args=("exponent=2",), phase="loss", line=line)
    return traced(birth, ("gradient",), spread=spread)


def unscale_kernel() -> Trace:
    g, inv = torch.ones(3), torch.tensor([INF])
    fields = {"phase": "optimizer", "elementwise": False, "kind": "intended_met"}
    return traced(born("amp_foreach_non_finite_check_and_unscale", [g, inv], g * INF, **fields))


def infinite_max_norm(call: str = "nn.utils.clip_grad_norm_") -> Trace:
    """clip_grad_norm_(parameters, inf), to measure, with a norm that is inf: as a replay gives it, without inputs."""
    birth = born("div", [], None, call=call, phase="backward", note="the number inf", args=("other=inf",))
    return Trace(birth=birth, reached=("gradient",))


def clip(*grads: torch.Tensor, name: str | None = None) -> Trace:
    norm = torch.stack([g.norm() for g in grads]).norm()
    fields = {"phase": "optimizer", "elementwise": False, "tensor_name": name, "line": "clip_grad_norm_(params, 1.0)"}
    return traced(born("clip_grad_norm", grads, norm, **fields), ("gradient",))


def foreach_norm(value: float, dtype: torch.dtype = torch.float32) -> Trace:
    g = torch.full((4,), value, dtype=dtype)
    fields = {"phase": "optimizer", "elementwise": False, "call": "torch.nn.utils.clip_grad_norm_"}
    fields |= {"line": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"}
    return traced(born("foreach_norm", [g], (g * g).sum().sqrt(), **fields), ("gradient",))


def clip_by_hand() -> Trace:
    g = torch.full((4,), 300.0, dtype=HALF)
    line = "total_norm += p.grad.pow(2).sum()"
    return traced(born("pow", [g], g.pow(2), args=("exponent=2",), phase="optimizer", line=line), ("gradient",))


def second_moment(value: float = 1e20, dtype: torch.dtype = torch.float32) -> Trace:
    v, g = torch.zeros(2, dtype=dtype), torch.tensor([value, 1.0], dtype=dtype)
    fields = {"phase": "optimizer", "line": "optimizer.step()", "call": None, "args": ("value=0.001",)}
    return traced(born("addcmul", [v, g, g], v + g * g, **fields), ("parameter",))


def state(name: str, *values: float, **fields: object) -> Trace:
    t = torch.tensor(values)
    return traced(came("parameter", t, name, **{"op": "optimizer_state", "phase": "optimizer", **fields}))


def overflowing(op: str = "pow", **fields: object) -> Birth:
    x = torch.tensor([3e20, 1.0])
    if op == "pow":
        return born("pow", [x], x.pow(2), args=("exponent=2",), call="err ** 2", phase="loss", **fields)
    if op == "exp":
        big = torch.tensor([100.0])
        return born("exp", [big], big.exp(), **fields)
    a = torch.full((2, 2), 3e20)
    return born_backward("addmm", [a], "mm", [a, a], a @ a, elementwise=False, **fields)


GROWING = (6.4e4, 3e10, 1.5e16, 7e21, 3e27, 8e36)
CALM = (2.3, 2.1, 1.9, 1.8, 1.75, 1.7)


def exploding(**history: object) -> Trace:
    return traced(overflowing(), ("loss",), **history)


FIRES = [
    (
        "learning_rate_non_finite",
        schedule_past_its_end,
        "The learning rate is nan; the steps before had 0.0386, 0.0147, 0.",
    ),
    ("learning_rate_non_finite", update_with_bad_rate, "The learning rate is inf; the steps before had 0.1."),
    ("learning_rate_non_finite", lambda: option("lr", "lr=(0.1+0.2j) of parameter group 0 is complex"), None),
    (
        "hyperparameter_non_finite",
        lambda: option("weight_decay", "weight_decay=inf of parameter group 0 is infinite."),
        "param_groups[0]['weight_decay'] is inf.",
    ),
    (
        "hyperparameter_non_finite",
        lambda: option("betas[1]", "betas[1]=nan of parameter group 0 is not a number."),
        None,
    ),
    ("hyperparameter_non_finite", lambda: option("loss_scale", "the number inf"), None),
    ("loss_scale_zero", scale_by_hand, "The loss scale is exactly 0 (float32), and unscaling divides by it."),
    ("loss_scale_zero", unscale_kernel, "The inverse of the loss scale is inf."),
    ("loss_scale_zero", lambda: option("loss_scale", "0.0"), None),
    (
        "clip_spreads_nan",
        lambda: clip(torch.ones(2), torch.tensor([NAN, 1.0]), name="aux.gain"),
        "1 of 2 gradients (aux.gain) was non-finite before clipping; now all are.",
    ),
    (
        "clip_norm_overflow",
        lambda: clip(torch.full((4,), 3e38), torch.ones(2)),
        "Every gradient is finite (greatest element 3.00e+38), and the norm over them overflows float32.",
    ),
    ("clip_norm_overflow", lambda: foreach_norm(3e38), None),
    (
        "clip_norm_overflow",
        infinite_max_norm,
        "Every gradient is finite, and both max_norm and the norm over them are inf: inf / inf = NaN.",
    ),
    ("clip_norm_overflow", clip_by_hand, None),
    ("optimizer_state_overflow", second_moment, "The optimizer squares gradients of up to 1.00e+20, beyond float32."),
    ("optimizer_state_overflow", lambda: second_moment(300.0, HALF), None),
    (
        "optimizer_state_overflow",
        lambda: state("head.weight.exp_avg_sq", INF, 1.0),
        "1 of 2 values of head.weight.exp_avg_sq are inf, none is NaN.",
    ),
    (
        "optimizer_state_non_finite",
        lambda: state("head.weight.exp_avg", NAN, 1.0),
        "1 of 2 values of head.weight.exp_avg are non-finite before the step.",
    ),
    ("optimizer_state_non_finite", lambda: state("head.weight.momentum_buffer", NAN, 1.0, op="add"), None),
    ("optimizer_state_non_finite", lambda: state("head.weight.exp_avg_sq", NAN, INF), None),
    ("gradients_accumulated", lambda: traced(overflowing(note="gradients_accumulated")), None),
    (
        "gradients_accumulated",
        lambda: exploding(grad_norms=(1.0, 2.0, 3.1, 4.0, 5.1, 6.0), losses=CALM),
        "The gradient norm grew by about the same amount in each of 5 steps: 1.00 to 6.00.",
    ),
    (
        "learning_rate_too_high",
        lambda: exploding(losses=GROWING, learning_rates=(0.2,) * 6),
        "The loss grew from 6.40e+04 to 8.00e+36 in 5 steps, 2.63e+06-fold each.",
    ),
    (
        "learning_rate_too_high",
        lambda: exploding(losses=(*GROWING, INF), learning_rates=(0.2,) * 7),
        "The learning rate is 0.2.",
    ),
    ("learning_rate_too_high", lambda: exploding(losses=(1.0, 2.0, 4.0)), None),
    ("learning_rate_too_high", lambda: exploding(losses=(1.0, 1e5)), None),
    (
        "learning_rate_too_high",
        lambda: exploding(losses=CALM, learning_rates=(3e-4, 3e-4, 0.03)),
        "The learning rate had jumped from 0.0003 to 0.03.",
    ),
    ("learning_rate_too_high", lambda: traced(overflowing("mm"), losses=GROWING), None),
    (
        "gradient_explosion",
        lambda: exploding(grad_norms=GROWING, losses=CALM),
        "The gradient norm grew from 6.40e+04 to 8.00e+36 in 5 steps, 2.63e+06-fold each.",
    ),
]

NEAR = [
    ("hyperparameter_non_finite", schedule_past_its_end, "learning_rate_non_finite"),
    (
        "learning_rate_non_finite",
        lambda: option("weight_decay", "weight_decay=nan", learning_rates=(0.1,)),
        "hyperparameter_non_finite",
    ),
    ("loss_scale_zero", lambda: scale_by_hand(line="inv = 1.0 / norm"), "unselected_branch"),
    ("loss_scale_zero", lambda: scale_by_hand(phase="forward"), "unselected_branch"),
    ("clip_spreads_nan", lambda: clip(torch.full((4,), 3e38)), "clip_norm_overflow"),
    ("clip_norm_overflow", lambda: clip(torch.tensor([NAN])), "clip_spreads_nan"),
    ("clip_norm_overflow", second_moment, "optimizer_state_overflow"),
    ("clip_norm_overflow", lambda: infinite_max_norm("rescale"), "unknown"),
    ("optimizer_state_overflow", clip_by_hand, "clip_norm_overflow"),
    ("optimizer_state_overflow", lambda: state("head.weight.exp_avg", INF, 1.0), "optimizer_state_non_finite"),
    ("optimizer_state_non_finite", lambda: state("head.summary", NAN, op="add"), "parameter_non_finite"),
    ("learning_rate_too_high", lambda: exploding(losses=CALM, learning_rates=(1e-3,) * 6), "overflow"),
    ("learning_rate_too_high", lambda: exploding(losses=(1.0, 1.9, 3.5)), "overflow"),
    ("learning_rate_too_high", lambda: exploding(losses=(1.0, 50.0)), "overflow"),
    ("learning_rate_too_high", lambda: exploding(losses=(1e-3, 1e6, 1e5)), "overflow"),
    ("learning_rate_too_high", lambda: exploding(losses=(), learning_rates=(1e-6, 2e-6, 3e-6)), "overflow"),
    ("gradient_explosion", lambda: exploding(grad_norms=(1.0, 1.5, 1.2, 2.0), losses=CALM), "overflow"),
    ("gradients_accumulated", lambda: exploding(grad_norms=(1.0, 1.1, 1.2, 1.3, 1.4), losses=CALM), "overflow"),
    ("gradients_accumulated", lambda: exploding(grad_norms=GROWING, losses=CALM), "gradient_explosion"),
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


def test_the_operation_that_overflowed_first_is_the_last_runner_up():
    best, others = diagnose(exploding(losses=GROWING, grad_norms=GROWING))
    assert best is not None and best.code == "learning_rate_too_high"
    assert [c.code for c in others] == ["gradient_explosion", "overflow"]


def test_an_exponential_stays_the_cause_when_the_loss_grew_before():
    best, others = diagnose(traced(overflowing("exp"), losses=GROWING))
    assert best is not None and best.code == "exp_overflow"
    assert [c.code for c in others] == ["learning_rate_too_high"]


def test_growth_does_not_explain_what_is_undefined():
    x = torch.tensor([0.0, 1.0])
    best, others = diagnose(traced(born("log", [x], x.log()), losses=GROWING, grad_norms=GROWING))
    assert best is not None and best.code == "log_of_zero" and others == ()


def test_the_fix_names_a_learning_rate():
    best, _ = diagnose(exploding(losses=GROWING, learning_rates=(0.2,) * 6))
    assert best is not None and best.fix is not None and best.fix.startswith("a learning rate of 0.02 or less")


DECAYED = (0.02, 0.01, 0.0, -0.01, -0.02, -0.03)


@pytest.mark.parametrize("op", ["pow", "exp"])
def test_a_learning_rate_below_0_is_told_as_such(op: str):
    best, _ = diagnose(traced(overflowing(op), ("loss",), losses=GROWING, learning_rates=DECAYED))
    assert best is not None and best.code == "learning_rate_too_high"
    assert best.title == "the learning rate is below 0: each step goes uphill"
    assert best.evidence[0] == "The learning rate is -0.03, and below 0 since 2 steps before."
    assert best.fix == "end the schedule at 0: max(0.0, 1 - it / total), or stop there"


def test_a_learning_rate_below_0_from_the_first_step_on_needs_no_growth_to_be_named():
    best, _ = diagnose(exploding(losses=CALM, learning_rates=(-0.1, -0.1)))
    assert best is not None and best.evidence[0] == "The learning rate is -0.1."


def test_a_learning_rate_that_came_back_from_below_0_is_judged_as_any_other():
    best, _ = diagnose(exploding(losses=GROWING, learning_rates=(-0.1, -0.1, 0.2, 0.2)))
    assert best is not None and best.fix is not None and best.fix.startswith("a learning rate of 0.02 or less")


def test_arithmetic_on_gradients_is_told_from_a_forward_value_that_comes_back():
    after, _ = diagnose(division_of_gradients(AFTER_THE_BACKWARD))
    through, _ = diagnose(division_of_gradients(THROUGH_THE_BACKWARD))
    assert after is not None and through is not None
    assert (after.code, through.code) == ("division_by_zero", "unselected_branch")


def test_a_norm_by_hand_is_a_clip_only_after_the_backward():
    after, _ = diagnose(norm_by_hand(AFTER_THE_BACKWARD))
    through, _ = diagnose(norm_by_hand(THROUGH_THE_BACKWARD))
    assert after is not None and through is not None
    assert (after.code, through.code) == ("clip_norm_overflow", "overflow")


# -- growth ----------------------------------------------------------------------------------------------------------


@given(
    st.floats(min_value=1e-6, max_value=1e6),
    st.floats(min_value=2.001, max_value=1e3),
    st.integers(min_value=2, max_value=9),
)
def test_growth_by_a_constant_factor_is_seen(first: float, factor: float, steps: int):
    found = growth([first * factor**k for k in range(steps + 1)])
    assert found is not None
    assert found.steps == steps
    assert found.factor == pytest.approx(factor, rel=1e-6)


@given(st.lists(st.floats(min_value=0.5, max_value=0.99), min_size=1, max_size=20))
def test_a_falling_series_never_grows(values: list[float]):
    falling = sorted(values, reverse=True)
    assert growth(falling) is None and linear_growth(falling) is None


@given(st.lists(st.floats(), max_size=12))
def test_growth_takes_any_history(values: list[float]):
    for found in (growth(values), linear_growth(values)):
        assert found is None or (found.last > found.first > 0 and found.steps >= 1 and found.factor > 1)
    assert jump(values) is None or jump(values)[1] >= 10 * jump(values)[0] > 0


@pytest.mark.parametrize("last", [math.inf, math.nan])
def test_the_step_that_failed_is_left_out(last: float):
    assert growth([1.0, 10.0, 100.0, last]) == growth([1.0, 10.0, 100.0])
