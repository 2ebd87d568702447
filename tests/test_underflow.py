"""Zeros that underflowed, told from zeros that were there: the operation that made them is named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import _faults as faults
from _programs import Run, assert_quiet, train
from nan_detector._records import NaNEvent


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as small as these take less time than what a replay costs before it begins."""
    monkeypatch.setattr("nan_detector._trial_lab.MAX_RUNS", 500)
    torch.manual_seed(0)


def run_of(loss_of: Callable[..., Tensor]) -> Run:
    return train(faults.Net(), [faults.ones()], loss_of)


def event_of(loss_of: Callable[..., Tensor]) -> NaNEvent:
    event = run_of(loss_of).event
    assert event is not None and event.cause is not None
    return event


def squared(m: nn.Module, x: Tensor) -> Tensor:
    scale = (m(x) * 0 + 1e-27).mean()
    return (m(x) / (2 * scale**2)).sum()


def square_method(m: nn.Module, x: Tensor) -> Tensor:
    return (m(x) / (m(x) * 0 + 1e-30).square().sum(-1, keepdim=True)).sum()


def of_two(m: nn.Module, x: Tensor) -> Tensor:
    small = m(x) * 0 + 1e-25
    return (1.0 / (small * small).expand(5, 4)).sum()


def gaussian(m: nn.Module, x: Tensor) -> Tensor:
    weights = torch.exp(-((m(x) + 40.0) ** 2))
    return (weights / weights.sum(-1, keepdim=True)).sum()


def running_product(m: nn.Module, x: Tensor) -> Tensor:
    return torch.rsqrt((m(x).sigmoid() * 1e-30).prod(-1)).sum()


def cast(m: nn.Module, x: Tensor) -> Tensor:
    return (x.half() / ((m(x).sum() * 0 + 1.0) / 1e9).half()).float().sum() + m(x).sum()


@pytest.mark.parametrize(
    ("loss_of", "said"),
    [
        (squared, "pow made 0 of 1.00e-27 in float32"),
        (square_method, "pow made 0 of 1.00e-30 in float32"),
        (of_two, "mul made 0 of 1.00e-25 in float32"),
        (gaussian, "exp of -"),
        (running_product, "prod made 0 of "),
        (cast, "to_copy made 0 of 1.00e-09 in float16"),
    ],
)
def test_the_operation_that_made_the_zero_is_named(loss_of: Callable[..., Tensor], said: str) -> None:
    event = event_of(loss_of)
    assert event.cause is not None and event.cause.code == "underflow_to_zero"
    assert said in event.cause.evidence[0]
    assert not any("underflow" in note for note in event.notes)


def times_zero(m: nn.Module, x: Tensor) -> Tensor:
    return (m(x) / (m(x) * 0.0)).sum()


def masked(m: nn.Module, x: Tensor) -> Tensor:
    keep = torch.tensor([True, True, False, True])
    return (m(x) / (m(x) * keep)).sum()


def counted(m: nn.Module, x: Tensor) -> Tensor:
    return (m(x) / (m(x) * torch.tensor([1, 2, 0, 3]))).sum()


def cancelled(m: nn.Module, x: Tensor) -> Tensor:
    z = m(x)
    return (1.0 / (z - z.detach())).sum()


def products_that_cancel(m: nn.Module, x: Tensor) -> Tensor:
    z = m(x)[0, 0] * 0 + torch.tensor([1.0, -1.0])
    return (1.0 / (z @ torch.ones(2))).sum()


@pytest.mark.parametrize("loss_of", [times_zero, masked, counted, cancelled, products_that_cancel])
def test_a_zero_that_was_there_has_not_underflowed(loss_of: Callable[..., Tensor]) -> None:
    event = event_of(loss_of)
    assert event.cause is not None and event.cause.code == "division_by_zero"


def impossible(m: nn.Module, x: Tensor) -> Tensor:
    z = m(x).masked_fill(torch.arange(4) < 4, -math.inf)
    return (m(x) / z.exp().sum(-1, keepdim=True)).sum()


def test_the_exponential_of_minus_infinity_is_rightly_zero() -> None:
    event = event_of(impossible)
    assert event.cause is not None and event.cause.code == "division_by_zero"


def log_of_sum(m: nn.Module, x: Tensor) -> Tensor:
    return torch.log(torch.exp(m(x) - 200.0).sum(-1)).sum()


def log_of_running_sum(m: nn.Module, x: Tensor) -> Tensor:
    return torch.log(torch.cumsum(torch.exp(m(x) - 200.0), 0)).sum()


def log_of_whole_sum(m: nn.Module, x: Tensor) -> Tensor:
    return (m(x) - 200.0).exp().sum().log()


def kept(m: nn.Module, x: Tensor) -> Tensor:
    return torch.log((m(x) - 200.0).exp().sum(dim=1, keepdim=True)).mean()


@pytest.mark.parametrize(
    ("loss_of", "written", "loss"),
    [
        (log_of_sum, "torch.logsumexp(z, -1)", lambda z: z.logsumexp(-1).sum()),
        (log_of_running_sum, "torch.logcumsumexp(z, 0)", lambda z: z.logcumsumexp(0).sum()),
        (log_of_whole_sum, "torch.logsumexp(z.flatten(), 0)", lambda z: z.flatten().logsumexp(0)),
        (kept, "torch.logsumexp(z, 1, keepdim=True)", lambda z: z.logsumexp(1).mean()),
    ],
)
def test_the_logarithm_of_a_sum_of_exponentials(
    loss_of: Callable[..., Tensor], written: str, loss: Callable[[Tensor], Tensor]
) -> None:
    model, batch = faults.Net(), faults.ones()
    with torch.no_grad():
        expected = f"loss {loss(model(batch) - 200.0).item():.4g}"
    event = train(model, [batch], loss_of).event
    assert event is not None and event.cause is not None and event.cause.code == "log_of_zero"
    assert "exp of -" in event.cause.evidence[1] and "logsumexp" in event.cause.fix
    (fix,) = (t for t in event.trials if t.name == "fix")
    assert fix.finite is True and fix.detail.startswith(written) and expected in fix.detail


def test_small_numbers_that_do_not_reach_the_end_are_quiet() -> None:
    assert_quiet(run_of(lambda m, x: (m(x) / (m(x) * 0 + 1e-8).square()).mean() * 1e-16))


def test_of_a_weight_and_its_bias_the_one_with_more_bad_values_is_named() -> None:
    for bad in (("weight", "bias"), ("bias",)):
        model = faults.Net()
        with torch.no_grad():
            for name in bad:
                getattr(model.fc, name).fill_(math.nan)
        event = train(model, [faults.ones()], lambda m, x: m(x).sum()).event
        assert event is not None and event.tensor_name == f"fc.{bad[0]}"


def test_what_else_the_note_says_is_still_shown() -> None:
    from nan_detector._diagnosis.facts import underflowed
    from nan_detector._events import _shown
    from nan_detector._trace import UNDERFLOWED, Birth

    told = f"{UNDERFLOWED} pow made 0 of 1.00e-27 in float32"
    assert (
        _shown(told) == ()
        and _shown(f"{told}; and more") == ("and more",)
        and _shown("the number inf; x") == ("the number inf; x",)
    )
    birth = Birth(0, "operation", "div", "aten.div.Tensor", "loss", note=f"{told}; and more")
    assert underflowed(birth) == "pow made 0 of 1.00e-27 in float32"
    assert underflowed(Birth(0, "operation", "div", "aten.div.Tensor", "loss", note="and more")) == ""
