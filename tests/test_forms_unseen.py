"""Fixes that a line can be given as they are told, and causes told by what was really there: real, small trainings."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import _faults as faults
from _programs import Run, assert_born, assert_quiet, train
from nan_detector import NaNDetector
from nan_detector._records import NaNEvent


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as small as these take less time than what a replay costs before it begins."""
    monkeypatch.setattr("nan_detector._trial_lab.MAX_RUNS", 500)
    torch.manual_seed(0)


def faulty(loss_of: Callable[..., Tensor]) -> Run:
    return train(faults.Net(), [faults.ones()], loss_of)


def told(run: Run) -> tuple[str, str]:
    """The cause, and what the trial of the fix says; it must have ended finite."""
    event = run.event
    assert event is not None and event.cause is not None
    (fix,) = (t for t in event.trials if t.name == "fix")
    assert fix.finite is True, fix
    return event.cause.code, fix.detail


# -- averages of nothing: the count in the fix is that of the dimensions averaged over -------------------------------


def rows_of_a_class(model: nn.Module, x: Tensor) -> Tensor:
    z, y = model(x), torch.tensor([0, 0, 2, 2, 2])
    return torch.stack([z[y == c].mean(0) for c in range(3)]).square().sum()  # <-- birth


def crop(model: nn.Module, x: Tensor) -> Tensor:
    z = model(x)
    return sum((z[a:b].mean((0, 1)) for a, b in ((0, 2), (3, 3))), start=torch.zeros(()))  # <-- birth


def kept_dimension(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[5:].mean(0, keepdim=True).sum()  # <-- birth


@pytest.mark.parametrize(
    ("loss_of", "written"),
    [
        (rows_of_a_class, "z[y == c].sum(0) / max(z[y == c].shape[0], 1)"),
        (crop, "z[a:b].sum((0, 1)) / max(z[a:b].shape[0] * z[a:b].shape[1], 1)"),
        (kept_dimension, "model(x)[5:].sum(0, keepdim=True) / max(model(x)[5:].shape[0], 1)"),
    ],
)
def test_a_mean_over_no_rows_is_divided_by_the_number_of_rows(loss_of: Callable[..., Tensor], written: str) -> None:
    code, detail = told(faulty(loss_of))
    assert code == "reduction_of_empty" and written in detail


@pytest.mark.parametrize("dim", [0, (0, 1), -1, None])
def test_the_form_that_is_told_gives_the_mean_where_there_is_one(dim: int | tuple[int, int] | None) -> None:
    from nan_detector._remedies import division
    from nan_detector._remedies.call import Call

    x = torch.randn(3, 4)
    args = (x,) if dim is None else (x, dim)
    repaired = division.mean_of_nothing(Call(torch.mean, args, {}))
    expected = torch.mean(*args)
    torch.testing.assert_close(repaired.value, expected)
    torch.testing.assert_close(eval(repaired.words.whole.replace("{0}", "x"), {"x": x, "max": max}), expected)


# -- nanmean -----------------------------------------------------------------------------------------------------------


def nothing_known(model: nn.Module, x: Tensor) -> Tensor:
    err = torch.where(x[:, :1] > 2, model(x).square(), math.nan)
    return err.nanmean()  # <-- birth


def a_row_without_values(model: nn.Module, x: Tensor) -> Tensor:
    known = torch.tensor([[True], [True], [False], [True], [True]])
    return torch.where(known, model(x), math.nan).nanmean(1).square().mean()  # <-- birth


def some_known(model: nn.Module, x: Tensor) -> Tensor:
    known = torch.tensor([True, False, True, False])
    return torch.where(known, model(x), math.nan).nanmean(1).square().mean()


@pytest.mark.parametrize("loss_of", [nothing_known, a_row_without_values])
def test_a_nanmean_of_nothing_but_nan(loss_of: Callable[..., Tensor]) -> None:
    run = faulty(loss_of)
    assert_born(run, loss_of, step=0, phase="loss", layer=None, op="div")
    code, detail = told(run)
    assert code == "reduction_of_empty" and ".nansum(" in detail and ".clamp_min(1)" in detail


def test_a_nanmean_with_something_in_each_row_is_quiet() -> None:
    assert_quiet(faulty(some_known))


def test_a_logsumexp_of_nothing() -> None:
    def no_negatives(model: nn.Module, x: Tensor) -> Tensor:
        z = model(x)[:, 0]
        return torch.logsumexp(z[z > 1e9], 0) - z.mean()  # <-- birth

    event = faulty(no_negatives).event
    assert event is not None and event.cause is not None and event.cause.code == "reduction_of_empty"
    assert "log(0)" in event.cause.evidence[0] and "skip the term" in event.cause.fix


# -- a mask times a number that is infinite ----------------------------------------------------------------------------


def additive(model: nn.Module, x: Tensor) -> Tensor:
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    bias = (1.0 - mask) * float("-inf")  # <-- birth
    return (model(x) + bias).softmax(-1).square().sum()


def number_first(model: nn.Module, x: Tensor) -> Tensor:
    mask = torch.tensor([0, 0, 0, 1])
    return (model(x) + -math.inf * mask).softmax(-1).square().sum()  # <-- birth


def of_bools(model: nn.Module, x: Tensor) -> Tensor:
    hidden = torch.arange(4) == 3
    return (model(x) + torch.mul(hidden, -math.inf)).softmax(-1).square().sum()  # <-- birth


def rewarded(model: nn.Module, x: Tensor) -> Tensor:
    z = model(x)
    return (z - (z > 1e9).float() * math.inf).sum()  # <-- birth


@pytest.mark.parametrize("loss_of", [additive, number_first, of_bools, rewarded])
def test_a_mask_times_an_infinite_number(loss_of: Callable[..., Tensor]) -> None:
    run = faulty(loss_of)
    assert_born(run, loss_of, step=0, phase="loss", layer=None, op="mul")
    code, detail = told(run)
    assert code == "zero_times_inf" and "torch.where(" in detail and "torch.inf" in detail


def test_the_zeros_alone_are_counted() -> None:
    event = faulty(additive).event
    assert event is not None and event.cause is not None
    assert event.cause.evidence[0].startswith("3 of 4 products are 0 · -inf")


def never_zero(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * 0.0 + torch.full((4,), 2.0) * -math.inf).exp().sum() + model(x).square().sum()


def filled(model: nn.Module, x: Tensor) -> Tensor:
    bias = torch.zeros(4).masked_fill(torch.arange(4) == 3, -math.inf)
    return (model(x) + bias).softmax(-1).square().sum()


@pytest.mark.parametrize("loss_of", [never_zero, filled])
def test_an_infinite_number_without_a_zero_is_quiet(loss_of: Callable[..., Tensor]) -> None:
    assert_quiet(faulty(loss_of))


# -- losses of the library with a large number inside ------------------------------------------------------------------


def soft_margin(model: nn.Module, x: Tensor) -> Tensor:
    return F.soft_margin_loss(model(x)[:, 0] * 0 + 200.0 * x[:, 0], torch.full((5,), -1.0))  # <-- birth


def soft_margin_sum(model: nn.Module, x: Tensor) -> Tensor:
    y = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0])
    return F.soft_margin_loss(model(x)[:, 0] + 200.0, y, reduction="sum")  # <-- birth


def counts(model: nn.Module, x: Tensor) -> Tensor:
    return F.poisson_nll_loss(model(x)[:, 0] + 120.0, torch.ones(5), log_input=True)  # <-- birth


@pytest.mark.parametrize(
    ("loss_of", "written"),
    [
        (soft_margin, "F.softplus(-torch.full((5,), -1.0) * "),
        (soft_margin_sum, ").sum()"),
        (counts, ".clamp(max=20), torch.ones(5), log_input=True)"),
    ],
)
def test_an_exponential_inside_a_loss_of_the_library(loss_of: Callable[..., Tensor], written: str) -> None:
    code, detail = told(faulty(loss_of))
    assert code == "exp_overflow" and written in detail


def test_the_other_side_of_the_margin_is_quiet() -> None:
    assert_quiet(faulty(lambda m, x: F.soft_margin_loss(m(x)[:, 0] + 200.0, torch.ones(5)) + m(x).square().sum()))


# -- complex numbers ---------------------------------------------------------------------------------------------------


def spectrum_root(model: nn.Module, x: Tensor) -> Tensor:
    z = torch.fft.rfft(model(x) - model(x).detach())
    return torch.sqrt(z).abs().sum()  # <-- birth


def test_the_root_of_a_complex_zero() -> None:
    run = faulty(spectrum_root)
    code, detail = told(run)
    assert code == "sqrt_gradient_at_zero" and "torch.where(z == 0, 1e-12, z)" in detail
    assert run.event is not None and run.event.cause is not None
    assert run.event.cause.evidence[0].startswith("15 of 15 inputs of sqrt are exactly 0.")


def test_a_complex_number_with_one_part_is_not_zero() -> None:
    from nan_detector import _finite

    z = torch.tensor([0j, 1j, 1.0 + 0j, 1.0 + 1j])
    assert _finite.stats(z).zero_count == 1
    assert _finite.stats_where(z, torch.tensor([False, True, True, True])).zero_count == 0


# -- several calls of one function on a line ---------------------------------------------------------------------------


def square_and_root(model: nn.Module, x: Tensor) -> Tensor:
    z = model(x)
    return ((z - z.detach()) ** 2).sum(1).pow(0.5).sum()  # <-- birth


def ratios(model: nn.Module, x: Tensor) -> Tensor:
    z = model(x).square().mean(0)
    return sum((v / w for v, w in zip(z, [2.0, 1.0, 0.0, 3.0], strict=True)), start=torch.zeros(()))  # <-- birth


@pytest.mark.parametrize(
    ("loss_of", "written"),
    [(square_and_root, ".sum(1).clamp_min(1e-12).pow(0.5)"), (ratios, "v / max(w, 0.01)")],
)
def test_a_sound_call_of_the_same_function_comes_first(loss_of: Callable[..., Tensor], written: str) -> None:
    assert written in told(faulty(loss_of))[1]


# -- roots of what is negative all over --------------------------------------------------------------------------------


def predicted_variance(model: nn.Module, x: Tensor) -> Tensor:
    var = model(x) * 0.01 - 1.0
    return (1.0 / torch.sqrt(var)).sum()  # <-- birth


def test_a_variance_that_is_negative_all_over_is_not_put_down_to_rounding() -> None:
    event = faulty(predicted_variance).event
    assert event is not None and event.cause is not None and event.cause.code == "sqrt_of_negative"
    assert "E[x²]" not in " ".join(event.cause.evidence) and "softplus" in event.cause.fix


# -- optimizers --------------------------------------------------------------------------------------------------------


class InverseRoots(torch.optim.Optimizer):
    """Scales a gradient by an inverse power of its own squares."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    scale = p.grad.square().sum().pow(-0.25)
                    p.sub_(group["lr"] * scale * p.grad)


def stepped(optimizer_of: Callable[..., torch.optim.Optimizer], prepare: Callable[..., None] | None = None) -> NaNEvent:
    """Two steps of a training with a layer whose gradient is 0 all along; the event."""
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "idle": nn.Linear(3, 2)})
    optimizer = optimizer_of(model.parameters())
    if prepare is not None:
        prepare(model, optimizer)
    with NaNDetector(model, verbose=False) as det:
        for _ in range(3):
            optimizer.zero_grad()
            x = torch.ones(4, 3)
            (model["used"](x).square().sum() + 0.0 * model["idle"](x).sum()).backward()
            optimizer.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.cause is not None
    return det.event


def test_a_pole_in_an_optimizer_is_no_square_that_is_too_large() -> None:
    event = stepped(lambda p: InverseRoots(p, 1e-3))
    assert event.cause is not None and event.phase == "optimizer"
    assert event.cause.code == "pow_of_zero" and "exponent is -0.250" in event.cause.evidence[0]
    assert event.location is not None and ".pow(-0.25)" in event.location.source_line
    assert inspect.unwrap(InverseRoots.step).__name__ in event.location.function


def test_an_optimizer_without_an_epsilon_is_told_to_have_one() -> None:
    event = stepped(lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=0.0))
    assert event.cause is not None and event.cause.code == "division_by_zero"
    assert event.cause.fix.startswith("an eps above 0 in the optimizer")


def spoil_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model["used"](torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"].sub_(1e3)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_second_moment_that_is_negative_came_so(kind: Callable[..., torch.optim.Optimizer]) -> None:
    event = stepped(lambda p: kind(p, lr=1e-3), spoil_moments)
    assert event.cause is not None and event.cause.code == "sqrt_of_negative" and event.phase == "optimizer"
    assert "checkpoint" in " ".join(event.cause.evidence) and "centered" not in event.cause.fix
