"""Kinds that nobody had tried: settings and state that spoil a step, misleading names, what no replay can show."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import fmean

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import _faults as faults
from _programs import Run, assert_born, assert_quiet, marked_line, train
from nan_detector import NaNDetector
from nan_detector._records import NaNEvent


def code_of(event: NaNEvent) -> str | None:
    return event.cause.code if event.cause is not None else None


def evidence_of(event: NaNEvent) -> str:
    assert event.cause is not None
    return " ".join(event.cause.evidence)


def faulty(loss_of: Callable[..., Tensor], model: nn.Module | None = None, **options: str) -> Run:
    return train(model or faults.Net(), [faults.ones()], loss_of, **options)


# -- what is called a scale --------------------------------------------------------------------------------------------


def stretched(model: nn.Module, x: Tensor) -> Tensor:
    rest = 1 - torch.linspace(1.0, 1.0, 1)
    scale = rest[-1] / 0.9
    return (model(x) * (1 - rest / scale)).mean()  # <-- birth


class Range:
    def scale(self, y: Tensor) -> Tensor:
        return y.amax() - y.amin()


NORMALISER = Range()


def by_a_normaliser(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).square().mean() + 1e-3) / NORMALISER.scale(x)  # <-- birth


def unscaled_by_hand(model: nn.Module, x: Tensor) -> Tensor:
    scale = torch.zeros(())
    loss = model(x).mean()
    return loss / scale  # <-- birth


@pytest.mark.parametrize("loss_of", [stretched, by_a_normaliser])
def test_not_each_scale_is_that_of_the_loss(loss_of: Callable[..., Tensor]) -> None:
    event = assert_born(faulty(loss_of), loss_of, step=0, phase="loss", layer=None, op="div")
    assert code_of(event) == "division_by_zero"
    assert "loss scale" not in str(event)
    assert "F.normalize" not in str(event)  # a normaliser is no norm


def test_a_loss_divided_by_a_scale_of_zero_is() -> None:
    event = assert_born(faulty(unscaled_by_hand), unscaled_by_hand, step=0, phase="loss", layer=None, op="div")
    assert code_of(event) == "loss_scale_zero"


# -- functions that grow like an exponential ---------------------------------------------------------------------------


def concentrated(model: nn.Module, x: Tensor) -> Tensor:
    kappa = model(x) * 500
    return torch.log(torch.special.i0(kappa)).mean()  # <-- birth


def concentrated_scaled(model: nn.Module, x: Tensor) -> Tensor:
    kappa = model(x) * 500
    return (torch.log(torch.special.i0e(kappa)) + kappa.abs()).mean()


def test_a_bessel_function_overflows_as_an_exponential_does() -> None:
    event = assert_born(faulty(concentrated), concentrated, step=0, phase="loss", layer=None, op={"i0", "special_i0"})
    assert code_of(event) == "exp_overflow"
    assert "above 91.9, where i0 leaves float32 (greatest 200)" in evidence_of(event)
    assert event.cause is not None and "torch.special.i0e(x)" in event.cause.fix


def test_the_scaled_bessel_function_is_quiet() -> None:
    assert_quiet(faulty(concentrated_scaled))


# -- running statistics that no training makes -------------------------------------------------------------------------


class Frozen(nn.Module):
    def __init__(self, least: float, *, frozen: bool = True) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.bn.running_var[1] = least
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        self.bn.train(not self.frozen)
        out: Tensor = self.bn(self.fc(x))  # <-- birth
        return out


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def test_a_running_variance_below_zero() -> None:
    run = faulty(squared, Frozen(-0.5))
    event = assert_born(run, Frozen.forward, step=0, phase="forward", layer="bn", op="native_batch_norm")
    assert code_of(event) == "sqrt_of_negative"
    assert "1 of 4 values of bn.running_var is below 0 (least -0.500)" in evidence_of(event)


@pytest.mark.parametrize("model", [Frozen(0.0), Frozen(-0.5, frozen=False)], ids=["zero", "training"])
def test_a_variance_of_zero_or_one_that_is_not_used_is_quiet(model: Frozen) -> None:
    assert_quiet(faulty(squared, model))


# -- infinities that a buffer holds ------------------------------------------------------------------------------------


class Weighted(nn.Module):
    """Levels in dB plus the weight of each frequency, which is log(0) at 0 Hz."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("weight", torch.log10(torch.arange(3.0)).expand(shape).clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.weight


def between(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), model(2 * x).detach())  # <-- birth


def test_a_vector_with_infinities_is_state_that_was_bad() -> None:
    event = faulty(between, Weighted((3,))).event
    assert (event.phase, event.tensor_name, code_of(event)) == ("state", "weight", "buffer_non_finite")
    assert event.cause is not None and "__init__" in event.cause.fix
    assert "running statistic" not in event.cause.explanation


def test_a_table_with_infinities_may_be_a_mask_and_is_named() -> None:
    event = assert_born(faulty(between, Weighted((5, 3))), between, step=0, phase="loss", layer=None, op="mse_loss")
    assert code_of(event) == "inf_minus_inf"
    assert "the infinities come from the buffer weight" in event.notes


def decibels(model: nn.Module, x: Tensor) -> Tensor:
    return torch.pow(10.0, model(x)).mean()


@pytest.mark.parametrize("shape", [(3,), (5, 3)])
def test_infinities_that_become_weights_of_zero_are_quiet(shape: tuple[int, ...]) -> None:
    assert_quiet(faulty(decibels, Weighted(shape)))


# -- a norm to clip to that is not a number ----------------------------------------------------------------------------


def test_clipping_to_nan() -> None:
    model, norms = faults.Net(), deque[float](maxlen=9)
    opt = torch.optim.SGD(model.parameters(), lr=1e-2)
    with NaNDetector(model, verbose=False) as det:
        for _ in range(2):
            opt.zero_grad()
            model(faults.ones()).square().mean().backward()
            limit = 1.5 * fmean(norms) if norms else math.nan
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
            opt.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and event.location is not None and event.phase == "backward"
    assert "clip_grad_norm_" in event.location.source_line
    assert code_of(event) == "hyperparameter_non_finite"
    assert "the norm to clip to is not a finite number: max_norm is nan" in str(event)
    assert event.weights == "clean"


# -- roots in an optimizer ---------------------------------------------------------------------------------------------


class Langevin(torch.optim.Optimizer):
    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate = torch.tensor(group["lr"])
            for p in group["params"]:
                p.add_(torch.sqrt(2 * rate) * torch.ones_like(p) - rate * p.grad)
            group["lr"] -= 0.01


def test_the_root_of_a_rate_below_zero_is_no_variance_that_cancelled() -> None:
    model = faults.Net()
    batches = [faults.ones()] * 5
    event = train(model, batches, squared, optimizer=Langevin(list(model.parameters()), 0.015)).event
    assert (event.step, event.phase, code_of(event)) == (2, "optimizer", "sqrt_of_negative")
    assert event.location is not None and "torch.sqrt(2 * rate)" in event.location.source_line
    assert "E[g²]" not in str(event)


# -- what the recorder does not see ------------------------------------------------------------------------------------


class Metres(torch.Tensor):
    """Leaves the recorder's sight by `as_subclass`, which no function mode is told of."""


def of_a_subclass(model: nn.Module, x: Tensor) -> Tensor:
    root = torch.sqrt(model(x).as_subclass(Metres) - 9)  # <-- birth
    return root.mean().as_subclass(torch.Tensor)


def of_a_transform(model: nn.Module, x: Tensor) -> Tensor:
    weight = dict(model.named_parameters())["fc.weight"]
    slope = torch.func.grad(lambda w: (w - weight.detach()).square().sum().sqrt())(weight)  # <-- birth
    return (model(x) - slope.sum()).mean()


@pytest.mark.parametrize(
    ("loss_of", "code"), [(of_a_subclass, "sqrt_of_negative"), (of_a_transform, "sqrt_gradient_at_zero")]
)
def test_the_ops_level_has_seen_what_a_replay_cannot_show(loss_of: Callable[..., Tensor], code: str) -> None:
    seen = faulty(loss_of, watch="ops").event
    assert seen.location is not None and seen.location.line == marked_line(loss_of)[1]
    assert (seen.op, code_of(seen), seen.weights) == ("sqrt", code, "clean")
    assert "seen by watch='ops' as the step ran; a replay did not show it" in seen.notes
    blind = faulty(loss_of).event
    assert (blind.op, blind.location) == (None, None)
    assert any("run_step" in note for note in (*blind.notes, *(t.detail for t in blind.trials)))


class Rooted(nn.Module):
    """A score whose directional derivative is worked out along with it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        def score(rows: Tensor) -> Tensor:
            return torch.exp(-self.w * rows.square().sum(-1).sqrt())  # <-- birth

        _, tangent = torch.func.jvp(score, (x,), (torch.ones_like(x),))
        return tangent


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")  # PyTorch's own use of it, in jvp
def test_the_tangent_of_a_root_at_zero() -> None:
    run = train(Rooted(), [torch.zeros(2, 3)], lambda m, x: m(x).sum())
    event = assert_born(run, Rooted.forward, step=0, phase="forward", layer="root", op="div")
    assert code_of(event) == "sqrt_gradient_at_zero"
    assert "divides by twice the root" in evidence_of(event)


def test_a_quotient_beside_a_root_is_a_division() -> None:
    def quotient(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) / (x - 1).sum().square().sqrt()).mean()  # <-- birth

    event = assert_born(faulty(quotient), quotient, step=0, phase="loss", layer=None, op="div")
    assert code_of(event) == "division_by_zero"


# -- values for the log ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early", [False, True], ids=["after-the-backward", "before-it"])
def test_a_perplexity_that_overflows_in_the_log_is_no_loss_that_was_dropped(early: bool) -> None:
    model, seen = faults.Net(), []
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    with NaNDetector(model, verbose=False, grad_norm_warn=math.inf) as det:
        for _ in range(3):
            opt.zero_grad()
            loss = (model(faults.ones()) * 1000).mean()
            perplexity = torch.exp(loss)
            if early:
                seen.append(perplexity.item())
            loss.backward()
            if not early:
                seen.append(perplexity.item())
            opt.step()
    assert seen == [math.inf] * 3
    assert det.event is None and not [w for w in det.warnings if w.kind == "handled"]


def test_a_term_that_the_loop_leaves_out_is_told() -> None:
    model = faults.Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-6)
    with NaNDetector(model, verbose=False) as det:
        for _ in range(2):
            opt.zero_grad()
            out = model(faults.ones())
            extra = torch.log(torch.relu(out - 1)).mean()
            loss = out.mean() + (extra if math.isfinite(extra.item()) else 0.0)
            loss.backward()
            opt.step()
    assert det.event is None
    assert ["log" in w.message for w in det.warnings if w.kind == "handled"][:1] == [True]


# -- a row that no step looks up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 5])
def test_a_row_that_no_step_looks_up_is_dated_to_the_first_step_that_may_have_spoilt_it(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 2), nn.Flatten(), nn.Linear(4, 1))
    opt = torch.optim.Adadelta(model.parameters(), eps=0.0)
    with NaNDetector(model, verbose=False) as det:
        for i in range(steps):
            det.set_batch(i)
            opt.zero_grad()
            model(torch.tensor([[0, 1], [2, 1]])).square().mean().backward()
            opt.step()
    event = det.event
    assert event is not None and (event.step, event.phase, event.tensor_name) == (0, "optimizer", "0.weight")
    assert (code_of(event), event.weights) == ("division_by_zero", "damaged since step 0")
    assert any("or a later one" in note for note in event.notes) is (steps > 1)
