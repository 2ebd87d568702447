"""Kinds that the rest of the suite lacks, each trained for real: what is said, and what is tried on the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import _faults as faults
from _programs import Run, assert_born, assert_quiet, train
from nan_detector import NaNDetector, NonFiniteError
from nan_detector._records import NaNEvent
from nan_detector._summary_title import where


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as small as these take less time than what a replay costs before it begins."""
    monkeypatch.setattr("nan_detector._trial_lab.MAX_RUNS", 500)
    torch.manual_seed(0)


def code_of(event: NaNEvent) -> str | None:
    return event.cause.code if event.cause is not None else None


def fix_of(event: NaNEvent) -> str:
    """What the trial of the fix says; it must have ended finite."""
    (fix,) = (t for t in event.trials if t.name == "fix")
    assert fix.finite is True, fix
    return fix.detail


def faulty(loss_of: Callable[..., Tensor], model: nn.Module | None = None) -> Run:
    return train(model or faults.Net(), [faults.ones()], loss_of)


# -- losses over masked classes, written by hand -----------------------------------------------------------------------


def smoothed(model: nn.Module, x: Tensor) -> Tensor:
    lp = model(x).masked_fill(torch.arange(4) == 3, -math.inf).log_softmax(-1)
    q = torch.full_like(lp, 0.25)
    return -(q * lp).sum() / len(x)  # <-- birth


def smoothed_over_allowed(model: nn.Module, x: Tensor) -> Tensor:
    lp = model(x).masked_fill(torch.arange(4) == 3, -math.inf).log_softmax(-1)
    return -(torch.where(lp == -math.inf, 0.0, lp) / 3).sum() / len(x)


def test_label_smoothing_by_hand_counts_a_masked_class() -> None:
    event = assert_born(faulty(smoothed), smoothed, step=0, phase="loss", layer=None, op="sum")
    assert code_of(event) == "masked_logit_in_loss"
    assert "(q * lp).masked_fill((q * lp) == -torch.inf, 0.0).sum()" in fix_of(event)
    assert any("written at" in note and "through log_softmax" in note for note in event.notes)


def test_smoothing_over_the_allowed_classes_is_quiet() -> None:
    assert_quiet(faulty(smoothed_over_allowed))


def never_written(model: nn.Module, x: Tensor) -> Tensor:
    least = torch.full((4,), math.inf)
    least[:3] = 1.0
    return (model(x) + least).sum()  # <-- birth


def test_an_infinity_that_no_softmax_weighed_is_a_number_of_the_programs_own() -> None:
    assert code_of(faulty(never_written).event) == "literal_nan"


# -- norm layers without an epsilon ------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return self.norm(h * (x[:, :1] - 1.0))  # <-- birth


@pytest.mark.parametrize(
    ("layer", "op"), [(nn.LayerNorm, "native_layer_norm"), (nn.GroupNorm, "native_group_norm")], ids=["layer", "group"]
)
def test_a_norm_layer_without_an_epsilon(layer: Callable[..., nn.Module], op: str) -> None:
    made = layer(4, eps=0.0) if layer is nn.LayerNorm else layer(1, 4, eps=0.0)
    event = assert_born(
        faulty(lambda m, x: m(x).square().sum(), Normed(made)),
        Normed.forward,
        step=0,
        phase="forward",
        layer="norm",
        op=op,
    )
    assert code_of(event) == "division_by_zero"
    assert event.cause is not None and "spread is 0" in event.cause.evidence[0]
    assert "eps=1e-6" in fix_of(event)


def test_the_same_layer_with_its_own_epsilon_is_quiet() -> None:
    assert_quiet(faulty(lambda m, x: m(x).square().sum(), Normed(nn.LayerNorm(4))))


# -- denominators that are no counts -----------------------------------------------------------------------------------


def angle(model: nn.Module, x: Tensor) -> Tensor:
    theta = torch.tensor([0.0, math.pi / 2, math.pi / 2, math.pi / 2])
    return (model(x) / torch.sin(theta)).mean()


def determinant(model: nn.Module, x: Tensor) -> Tensor:
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])
    return (model(x).mean() * (1.0 / (a * b))).sum()


def annealed(model: nn.Module, x: Tensor) -> Tensor:
    tau = max(0.0, 1.0 - 1.0)
    return F.cross_entropy(model(x) * torch.arange(4.0) / tau, torch.zeros(5, dtype=torch.long))


def neighbours(model: nn.Module, x: Tensor) -> Tensor:
    deg = torch.tensor([0.0, 1.0, 1.0, 1.0])
    return (model(x) / deg).mean()


@pytest.mark.parametrize(
    ("loss_of", "tried"),
    [
        (angle, "model(x) / torch.where(torch.sin(theta) == 0, 1.0, torch.sin(theta))"),
        (determinant, "1.0 / torch.where((a * b) == 0, 1.0, a * b)"),
        (annealed, "/ max(tau, 0.01)"),
        (neighbours, "model(x) / deg.clamp_min(1)"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_only_what_counts_is_taken_for_one_where_it_is_zero(loss_of: Callable[..., Tensor], tried: str) -> None:
    event = faulty(loss_of).event
    assert code_of(event) == "division_by_zero"
    assert tried in fix_of(event)


def test_a_function_of_the_library_is_named_where_it_lives() -> None:
    class Pooled(faults.Net):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.fc(torch.full((5, 3), -math.inf) + 0 * x)
            return out

    model = Pooled()
    with torch.no_grad():
        model.fc.weight[:, 1] = -0.1
    event = faulty(lambda m, x: m(x).sum(), model).event
    assert code_of(event) == "inf_minus_inf"
    assert "F.linear(x.nan_to_num(" in fix_of(event)


# -- distributions -----------------------------------------------------------------------------------------------------


def collapsed(model: nn.Module, x: Tensor) -> Tensor:
    mu = model(x)
    dist = torch.distributions.Normal(mu, torch.exp(mu - 150.0), validate_args=False)
    return -dist.log_prob(torch.zeros(4)).mean()  # <-- birth


def test_a_scale_that_underflowed_is_not_a_matter_of_the_format() -> None:
    event = assert_born(faulty(collapsed), collapsed, step=0, phase="loss", layer=None, op="log")
    assert event.cause is not None and (event.cause.fix or "").startswith("keep the distribution away from its edge")
    assert event.verdict == "formula"
    assert any(t.name == "float64" and t.detail.endswith("beyond float32") for t in event.trials)


def edge_of_support(model: nn.Module, x: Tensor) -> Tensor:
    a = F.softplus(model(x)) + 1.5
    dist = torch.distributions.Beta(a[:, 0], a[:, 1])
    return -dist.log_prob(torch.tensor([0.5, 1.0, 0.5, 0.5, 0.5])).mean()  # <-- birth


def test_a_value_at_the_edge_of_the_support() -> None:
    event = assert_born(faulty(edge_of_support), edge_of_support, step=0, phase="loss", layer=None, op="xlogy")
    assert (
        event.cause is not None and event.cause.fix == "keep the value inside the support: value.clamp(1e-6, 1 - 1e-6)"
    )


# -- the user's own code in and after the backward ---------------------------------------------------------------------


def unit(grad: Tensor) -> Tensor:
    return grad / grad.norm()  # <-- birth


def test_a_gradient_hook_is_no_derivative() -> None:
    model = faults.Net()
    model.fc.weight.register_hook(unit)
    event = assert_born(
        faulty(lambda m, x: (m(x) * 0.0).sum(), model), unit, step=0, phase="backward", layer=None, op="div"
    )
    assert event.derivative is False
    assert where(event).startswith("grad / grad.norm()  ·  ")


def test_a_root_at_zero_is_a_derivative() -> None:
    event = faulty(lambda m, x: (m(x) * 0.0).sqrt().sum()).event
    assert (event.phase, event.derivative) == ("backward", True)
    assert "derivative of" in where(event)


def test_a_birth_in_the_forward_is_neither() -> None:
    assert faulty(faults.log_zero).event.derivative is None


# -- a stop in the middle of an iteration ------------------------------------------------------------------------------


class Pair:
    """A discriminator and a generator that are stepped in turn; the discriminator's loss is bad."""

    def __init__(self) -> None:
        self.models = {"d": faults.Net(), "g": faults.Net()}
        self.d, self.g = (torch.optim.SGD(m.parameters(), lr=1e-3) for m in self.models.values())

    def step(self, bad: bool = True) -> None:
        for name, optimizer in (("d", self.d), ("g", self.g)):
            optimizer.zero_grad()
            out = self.models[name](faults.ones())
            loss = torch.log(torch.relu(out - (10.0 if bad and name == "d" else -10.0))).mean()
            loss.backward()
            optimizer.step()


@pytest.mark.parametrize("numbered", [True, False])
def test_the_rest_of_an_iteration_may_call_a_model_again(numbered: bool) -> None:
    pair = Pair()
    with NaNDetector(pair.models, verbose=False) as det:
        for i in range(3):
            if numbered:
                det.set_batch(i)
            pair.step(bad=i == 1)
            if det.triggered:
                break
    assert det.event is not None and det.event.step == (1 if numbered else 2)  # else each optimizer's steps count
    assert len(det.all_events) == 1


@pytest.mark.parametrize("numbered", [True, False])
def test_a_stop_is_not_overlooked_in_the_next_iteration(numbered: bool) -> None:
    pair = Pair()
    with NaNDetector(pair.models, verbose=False) as det:
        pair.step(bad=False)
        with pytest.raises(NonFiniteError, match="Training went on"):
            for i in range(1, 4):
                if numbered:
                    det.set_batch(i)
                pair.step()
        assert i == 2


def test_a_loop_that_numbers_its_batches_once_is_still_stopped() -> None:
    model = faults.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    done: list[Any] = []
    with NaNDetector(model, verbose=False) as det:
        det.set_batch(0)
        with pytest.raises(NonFiniteError, match="Training went on"):
            for i in range(40):
                faults.log_zero(model, faults.ones()).backward()
                optimizer.step()
                done.append(i)
    assert done == [0]  # with one optimizer, the next forward begins another step


# -- what a name and a second fault make of a fix ----------------------------------------------------------------------


def balanced(model: nn.Module, x: Tensor) -> Tensor:
    main, before = model(x).mean(), torch.zeros(())
    scale = main.detach() / before  # <-- birth
    return main * scale


def test_a_quotient_called_scale_is_no_loss_scale() -> None:
    event = assert_born(faulty(balanced), balanced, step=0, phase="loss", layer=None, op="div")
    assert code_of(event) == "division_by_zero"
    assert event.verdict == "formula"


def by_its_length(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x) * torch.tensor([[0.0], [1.0], [1.0], [1.0], [1.0]])
    n = h.pow(2).sum(-1, keepdim=True) ** 0.5
    return (h / n).sum()


def test_a_row_divided_by_its_own_norm_has_the_library_s_form_tried() -> None:
    event = faulty(by_its_length).event
    assert code_of(event) == "division_by_zero"
    assert "F.normalize(h, dim=-1)" in fix_of(event)


def by_another_length(model: nn.Module, x: Tensor) -> Tensor:
    h = model(x) * torch.tensor([[0.0], [1.0], [1.0], [1.0], [1.0]])
    n = h.pow(2).sum(-1, keepdim=True) ** 0.5
    return (h / (2 * n)).sum()


def test_a_row_divided_by_something_else_has_not() -> None:
    assert not any("F.normalize" in t.detail for t in faulty(by_another_length).event.trials)


def counts_without_eps(model: nn.Module, x: Tensor) -> Tensor:
    return F.poisson_nll_loss(torch.relu(model(x) - 9.0), torch.ones(5, 4), log_input=False, eps=0.0)  # <-- birth


def test_a_loss_of_the_library_gets_its_epsilon_back() -> None:
    event = assert_born(faulty(counts_without_eps), counts_without_eps, step=0, phase="loss", layer=None, op="log")
    assert code_of(event) == "log_of_zero"
    assert event.cause is not None and (event.cause.fix or "").startswith("F.poisson_nll_loss(..., eps=1e-8)")
    assert "eps=1e-6" in fix_of(event)


def pairwise(model: nn.Module, x: Tensor) -> Tensor:
    z = model(x)
    out: Tensor = torch.vmap(lambda a, b: ((a - b) ** 2).sum().sqrt())(z, z)
    return out.mean()


def test_what_was_not_recorded_is_not_called_irreproducible() -> None:
    event = faulty(pairwise).event
    assert (event.reproduced, event.verdict, event.op) == ("no", "undecided", None)
    assert any("det.run_step" in note for note in event.notes)


# -- weights that are moved for a second backward ----------------------------------------------------------------------


def _moved(model: faults.Net, x: Tensor, weight: float, base: torch.optim.Optimizer) -> None:
    base.zero_grad()
    (weight * model(x).square().mean()).backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        steps = [0.05 * p.grad / norm for p in model.parameters() if p.grad is not None]
        for p, e in zip(model.parameters(), steps, strict=True):
            p.add_(e)
    base.zero_grad()
    (weight * model(x).square().mean()).backward()
    with torch.no_grad():
        for p, e in zip(model.parameters(), steps, strict=True):
            p.sub_(e)
    base.step()


def test_weights_moved_by_the_loop_are_not_laid_at_the_optimizer_s_door() -> None:
    model = faults.Net()
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for i, weight in enumerate((1.0, 1.0, 0.0, 1.0)):
            det.set_batch(i)
            _moved(model, faults.ones(), weight, base)
            if det.triggered:
                break
    event = det.event
    assert event is not None and event.cause is not None and event.location is not None
    assert event.location.source_line.startswith("steps = [0.05 * p.grad / norm")
    assert (event.step, event.op, event.cause.code, event.reproduced) == (2, "div", "division_by_zero", "yes")
    assert event.weights == "damaged since step 2"


def test_weights_moved_where_nobody_sees_it_are_not_laid_at_the_optimizer_s_door() -> None:
    model = faults.Net()
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for i in range(4):
            det.set_batch(i)
            base.zero_grad()
            model(faults.ones()).square().mean().backward()
            move = float("nan") if i == 2 else 0.0
            with torch.no_grad(), torch._C.DisableTorchFunction():
                torch._foreach_add_(list(model.parameters()), move)
            model(faults.ones()).square().mean().backward()
            with torch.no_grad(), torch._C.DisableTorchFunction():
                torch._foreach_sub_(list(model.parameters()), move)
            base.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.op, event.cause) == (2, None, None)
    assert event.weights == "damaged since step 2"
    assert any(
        "overwritten with non-finite values by code that no gate sees (an update by hand" in n for n in event.notes
    )


def test_weights_moved_by_a_finite_amount_are_quiet() -> None:
    model = faults.Net()
    base = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for i in range(4):
            det.set_batch(i)
            _moved(model, faults.ones(), 1.0, base)
    assert det.event is None
