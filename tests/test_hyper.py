"""Hyperparameters as numbers: what is refused, what must pass, and that no device is waited for."""

from __future__ import annotations

import math
import timeit
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from nan_detector._hyper import HyperProblem, bad_hyperparameter, eps_underflow

NAN, INF = math.nan, math.inf

# torch wraps a class's `step` when its first instance is made, for good: not something that a test leaves behind.
torch.optim.LBFGS([torch.zeros(1)])


def parameter(dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3, dtype=dtype, device=device))


def adam(**group: object) -> torch.optim.Optimizer:
    """Adam whose group was changed after construction, as schedulers do it (the constructor refuses some of these)."""
    optimizer = torch.optim.Adam([parameter()], lr=1e-3)
    optimizer.param_groups[0].update(group)
    return optimizer


def found(optimizer: torch.optim.Optimizer) -> HyperProblem:
    problem = bad_hyperparameter(optimizer)
    assert problem is not None
    return problem


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("key", "value", "name", "kind"),
    [
        ("lr", NAN, "lr", "nan"),
        ("lr", INF, "lr", "inf"),
        ("lr", -INF, "lr", "inf"),
        ("lr", -1e-3, "lr", "negative"),
        ("lr", -1, "lr", "negative"),
        ("lr", (-2.0) ** 0.5, "lr", "complex"),
        ("lr", complex(1e-3, 0.0), "lr", "complex"),
        ("lr", complex(NAN, 0.0), "lr", "complex"),
        ("lr", np.float64(NAN), "lr", "nan"),
        ("lr", np.float32(INF), "lr", "inf"),
        ("lr", np.float16(NAN), "lr", "nan"),
        ("lr", np.complex64(1e-3 + 1e-9j), "lr", "complex"),
        ("lr", np.complex128(1e-3), "lr", "complex"),
        ("lr", np.array(NAN), "lr", "nan"),
        ("lr", np.int64(-1), "lr", "negative"),
        ("lr", torch.tensor(NAN), "lr", "nan"),
        ("lr", torch.tensor([INF]), "lr", "inf"),
        ("lr", torch.tensor(-0.5, requires_grad=True), "lr", "negative"),
        ("lr", torch.tensor(NAN, dtype=torch.bfloat16), "lr", "nan"),
        ("lr", torch.nn.Parameter(torch.tensor(NAN)), "lr", "nan"),
        ("lr", -(10**400), "lr", "inf"),
        ("betas", (NAN, 0.999), "betas[0]", "nan"),
        ("betas", (0.9, INF), "betas[1]", "inf"),
        ("betas", [0.9, NAN], "betas[1]", "nan"),
        ("betas", (0.9, torch.tensor(NAN)), "betas[1]", "nan"),
        ("betas", (0.9, 0.99, NAN), "betas[2]", "nan"),
        ("eps", NAN, "eps", "nan"),
        ("eps", INF, "eps", "inf"),
        ("eps", (None, NAN), "eps[1]", "nan"),
        ("momentum", NAN, "momentum", "nan"),
        ("weight_decay", INF, "weight_decay", "inf"),
        ("weight_decay", 1j, "weight_decay", "complex"),
        ("weight_decay", torch.tensor(NAN), "weight_decay", "nan"),
    ],
)
def test_refused(key: str, value: object, name: str, kind: str) -> None:
    problem = found(adam(**{key: value}))
    assert (problem.group, problem.name, problem.kind) == (0, name, kind)
    assert type(problem.value) in (float, complex)
    assert f"{name}={problem.value!r} of parameter group 0 is" in problem.message
    assert f"optimizer.param_groups[0][{key!r}]" in problem.message


def test_the_guilty_group_is_named() -> None:
    optimizer = torch.optim.SGD([{"params": [parameter()]}, {"params": [parameter()]}], lr=0.1, momentum=0.9)
    optimizer.param_groups[1]["momentum"] = NAN
    problem = found(optimizer)
    assert (problem.group, problem.name) == (1, "momentum")
    assert "param_groups[1]['momentum']" in problem.message


def test_the_learning_rate_comes_first() -> None:
    assert found(adam(lr=NAN, eps=NAN, betas=(NAN, NAN))).name == "lr"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_float_learning_rate_is_refused_exactly_when_not_finite_or_below_zero(lr: float) -> None:
    assert (bad_hyperparameter(adam(lr=lr)) is not None) == (not math.isfinite(lr) or lr < 0)


@given(st.sampled_from(["momentum", "weight_decay", "eps"]), st.floats())
def test_other_floats_are_refused_exactly_when_not_finite(key: str, value: float) -> None:
    assert (bad_hyperparameter(adam(**{key: value})) is not None) == (not math.isfinite(value))


# ----------------------------------------------------------------------------------------------------- near misses


@pytest.mark.parametrize(
    "group",
    [
        {"lr": 0.0},
        {"lr": -0.0},
        {"lr": 0},
        {"lr": 5e-324},
        {"lr": 1.7e308},
        {"lr": np.float32(1e-3)},
        {"lr": np.int64(1)},
        {"lr": Fraction(1, 1000)},
        {"lr": torch.tensor(1e-3)},
        {"lr": torch.tensor(0.0)},
        {"lr": "nan"},  # nonsense, but no number: torch's own error says so better
        {"lr": None},
        {"betas": (0.0, 0.0)},
        {"betas": None},
        {"betas": 0.9},
        {"betas": torch.tensor([0.9, 0.99])},
        {"momentum": -0.5},
        {"weight_decay": -1e-2},  # odd, but finite, and some optimizers want it
        {"eps": (None, 1e-3)},
        {"eps": None},
        {"max_norm": INF},  # "off", in a key of the user's own
        {"maximize": True, "foreach": True},
    ],
)
def test_near_misses_pass(group: dict[str, object]) -> None:
    assert bad_hyperparameter(adam(**group)) is None


def test_a_group_without_any_of_the_keys_passes() -> None:
    class Bare(torch.optim.Optimizer):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            return None

    assert bad_hyperparameter(Bare([parameter()], {})) is None


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "ASGD"])
def test_torchs_defaults_pass(name: str) -> None:
    assert bad_hyperparameter(getattr(torch.optim, name)([parameter()])) is None


@pytest.mark.parametrize("name", ["Adadelta", "Rprop", "Adafactor", "SparseAdam", "LBFGS"])
def test_torchs_other_defaults_pass(name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")
    assert bad_hyperparameter(getattr(torch.optim, name)([parameter()])) is None


# ------------------------------------------------------------------------------------------------------ schedulers


def step_until_refused(optimizer: torch.optim.Optimizer, scheduler: lr_scheduler.LRScheduler, most: int) -> int:
    for step in range(most):
        if bad_hyperparameter(optimizer) is not None:
            return step
        optimizer.step()
        scheduler.step()
    return most


def test_a_schedule_that_takes_a_root_of_a_negative_number() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: (1 - epoch / 4) ** 0.9)
    assert step_until_refused(optimizer, scheduler, 10) == 5
    assert found(optimizer).kind == "complex"


def test_a_schedule_that_divides_zero_by_zero() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    left = np.array([3.0, 2.0, 1.0, 0.0])

    def share(epoch: int) -> float:
        with np.errstate(invalid="ignore"):
            return float(left[epoch] / left[epoch])

    scheduler = lr_scheduler.LambdaLR(optimizer, share)
    assert step_until_refused(optimizer, scheduler, 10) == 3
    assert found(optimizer).kind == "nan"


def test_a_schedule_that_grows_without_bound() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=1e300)
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=1e3)
    assert 0 < step_until_refused(optimizer, scheduler, 10) < 10
    assert found(optimizer).kind == "inf"


def test_a_linear_decay_that_runs_past_its_end() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.1)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / 4)
    assert step_until_refused(optimizer, scheduler, 10) == 5  # at 4 it is 0, which is fine
    assert found(optimizer).kind == "negative"


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
        lambda o: lr_scheduler.PolynomialLR(o, total_iters=5, power=0.9),
        lambda o: lr_scheduler.CyclicLR(o, base_lr=0.0, max_lr=0.1, cycle_momentum=False),
        lambda o: lr_scheduler.LinearLR(o, start_factor=1e-9, total_iters=4),
    ],
)
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_torchs_schedulers_pass(
    make: Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler], tensor_lr: bool
) -> None:
    optimizer = torch.optim.Adam([parameter()], lr=torch.tensor(0.1) if tensor_lr else 0.1)
    scheduler = make(optimizer)
    assert step_until_refused(optimizer, scheduler, 12) == 12


# -------------------------------------------------------------------------------------------------- no host is read


def test_a_number_on_a_device_is_not_read() -> None:
    # On "meta" there is no value: any read raises.
    lr = torch.tensor(NAN, device="meta")
    optimizer = adam(lr=lr, weight_decay=lr, betas=(lr, lr), eps=lr)
    assert bad_hyperparameter(optimizer) is None
    assert eps_underflow(optimizer) == []


def test_a_fake_tensor_is_not_read() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        lr = torch.zeros(()).exp()  # no constant: its value is unknown
    assert lr.device.type == "cpu"
    assert bad_hyperparameter(adam(lr=lr)) is None


def test_cheap_enough_for_every_step() -> None:
    optimizer = torch.optim.AdamW([parameter()])
    seconds = min(timeit.repeat(lambda: bad_hyperparameter(optimizer), number=2000, repeat=20)) / 2000
    # The promise is 1.5 µs; ten times that still catches a tensor operation or a device read on this path.
    assert seconds < 15e-6


# -------------------------------------------------------------------------------------------------------- eps


def test_adams_eps_in_float16_is_named_and_does_make_a_nan() -> None:
    p = parameter(torch.float16)
    optimizer = torch.optim.Adam([p], foreach=False)
    (problem,) = eps_underflow(optimizer)
    assert (problem.kind, problem.group, problem.name, problem.value) == ("eps_underflow", 0, "eps", 1e-8)
    assert "eps=1e-08 of parameter group 0 rounds to 0 in torch.float16" in problem.message
    assert "at least 6.1e-05" in problem.message
    p.grad = torch.tensor([0, 1, 1], dtype=torch.float16)
    optimizer.step()
    assert p.isnan().tolist() == [True, False, False]


def test_the_advised_eps_is_quiet_and_makes_no_nan() -> None:
    p = parameter(torch.float16)
    optimizer = torch.optim.Adam([p], eps=6.1e-5, foreach=False)
    assert eps_underflow(optimizer) == []
    p.grad = torch.tensor([0, 1, 1], dtype=torch.float16)
    optimizer.step()
    assert not p.isnan().any()


def test_the_fused_kernel_is_left_out_and_rightly_so() -> None:
    p = parameter(torch.float16)
    optimizer = torch.optim.Adam([p], fused=True)
    assert eps_underflow(optimizer) == []
    p.grad = torch.tensor([0, 1, 1], dtype=torch.float16)
    optimizer.step()
    assert not p.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_wider_dtypes_hold_adams_eps(dtype: torch.dtype) -> None:
    assert eps_underflow(torch.optim.Adam([parameter(dtype)])) == []


@pytest.mark.parametrize(
    ("eps", "underflows"),
    [(2.0**-24, False), (2.0**-25, True), (2.0**-25 * (1 + 2.0**-22), False), (0.0, False), (1e-5, False)],
)
def test_the_edge_is_exact(eps: float, underflows: bool) -> None:
    # float16's least number is 2**-24; half of it is a tie, which rounds to even: to 0. The third
    # is just above, by as much as float32, through which torch converts, can tell.
    assert bool(eps_underflow(torch.optim.Adam([parameter(torch.float16)], eps=eps))) == underflows


def test_one_problem_per_group_and_dtype() -> None:
    half, single = parameter(torch.float16), parameter()
    groups = [{"params": [single]}, {"params": [single.clone().detach(), half, parameter(torch.float16)], "eps": 1e-50}]
    problems = eps_underflow(torch.optim.RMSprop(groups))
    assert [(p.group, "in torch.float16" in p.message, "in torch.float32" in p.message) for p in problems] == [
        (1, False, True),
        (1, True, False),
    ]


def test_a_tuple_eps_is_judged_by_element() -> None:
    (problem,) = eps_underflow(torch.optim.Adafactor([parameter(torch.float16)], eps=(1e-30, 1e-3)))
    assert problem.name == "eps[0]"
    assert eps_underflow(torch.optim.Adafactor([parameter(torch.float16)])) == []


def test_groups_without_eps_are_quiet() -> None:
    assert eps_underflow(torch.optim.SGD([parameter(torch.float16)], lr=0.1)) == []


def test_a_problem_is_frozen() -> None:
    with pytest.raises(AttributeError):
        found(adam(lr=NAN)).value = 0.0
