"""The fix is tried on the step: for each cause a loss that fires it, the form that helps, and forms that cannot."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import _faults as faults
from _programs import Run, train
from nan_detector import NaNDetector
from nan_detector._records import Trial

HALF = torch.float16


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps as small as these take less time than what a replay costs before it begins."""
    monkeypatch.setattr("nan_detector._trial_lab.MAX_RUNS", 500)


def fix_of(run: Run) -> Trial:
    """The trial of the fix of the first event."""
    found = [t for t in run.event.trials if t.name == "fix"]
    assert len(found) == 1, run.event.trials
    return found[0]


CASES = [
    (faults.log_zero, "log_of_zero", "torch.log(p.clamp_min(1e-12))"),
    (faults.entropy_of_targets, "log_of_zero", "torch.xlogy(t, t) in place of t * torch.log(t): loss "),
    (faults.weighted_log, "log_of_zero", "torch.xlogy(2.0 * weight, q) in place of logs * (2.0 * weight): loss "),
    (
        faults.masked_log1p,
        "log_of_zero",
        "torch.special.xlog1py(seen, x - 2.0) in place of seen * torch.log1p(x - 2.0): loss ",
    ),
    (faults.log_without_weight, "log_of_zero", "torch.xlogy(0.0, x - 1.0) in place of 0.0 * torch.log(x - 1.0): loss "),
    # Near misses: the slope at a trained 0 is NaN for xlogy too, a weight that is not 0, no zero, another use.
    (faults.entropy_of_outputs, "log_of_zero", "torch.log(p.clamp_min(1e-12)): loss "),
    (faults.log_with_a_weight, "log_of_zero", "torch.log(t.clamp_min(1e-12)): loss "),
    (faults.weighted_log_of_negative, "log_of_negative", "torch.log((t - 0.5).clamp_min(1e-12)): loss "),
    (faults.log_used_twice, "log_of_zero", "torch.log(t.clamp_min(1e-12)): loss "),
    (faults.log_softmax, "log_of_zero", "F.log_softmax(z, 1) where p is the softmax of z"),
    (faults.log_sigmoid, "log_of_zero", "F.logsigmoid(z) where p is the sigmoid of z"),
    (faults.log_rest_of_sigmoid, "log_of_zero", "F.logsigmoid(-z) where (1 - p) is 1 - torch.sigmoid(z)"),
    (faults.log_negative, "log_of_negative", "torch.log((model(x) - 1.0).clamp_min(1e-12))"),
    (faults.log1p_below, "log_of_negative", "torch.log1p((model(x) - 3.0).clamp_min(-1 + 1e-6))"),
    (faults.logit_of_one, "log_of_zero", "torch.logit((model(x) + 5.0).clamp(max=1.0), eps=1e-6)"),
    (faults.sqrt_negative, "sqrt_of_negative", "torch.sqrt((model(x) - 1.0).clamp_min(1e-12))"),
    (
        faults.cancelled_variance,
        "sqrt_of_negative",
        "torch.sqrt(torch.var(x, -1, correction=0, keepdim=True) + 1e-5)",
    ),
    (faults.pow_negative, "pow_of_negative", "(model(x) - 1.0).clamp_min(1e-12) ** 0.4"),
    (faults.pow_zero, "pow_of_zero", "torch.relu(model(x) - 1.0).clamp_min(1e-12).pow(-0.5)"),
    (faults.acos_beyond, "outside_domain", "torch.acos((model(x) + 0.7).clamp(-1 + 1e-6, 1 - 1e-6))"),
    (faults.atanh_at_one, "boundary_of_domain", ".clamp(-1 + 1e-6, 1 - 1e-6))"),
    (faults.lgamma_at_zero, "boundary_of_domain", "torch.lgamma(torch.relu(model(x) - 1.0).clamp_min(1e-6))"),
    (faults.no_count, "division_by_zero", "(model(x) * mask).sum() / mask.sum().clamp_min(1)"),
    (faults.count_is_number, "division_by_zero", "model(x).sum() / torch.tensor(float(len(kept))).clamp_min(1)"),
    (faults.zero_row, "division_by_zero", "h / h.sum(1, keepdim=True).clamp_min(1e-12)"),
    (faults.rsqrt_zero, "division_by_zero", "torch.rsqrt(h.pow(2).sum(1).clamp_min(1e-12))"),
    (
        faults.underflowed,
        "underflow_to_zero",
        "torch.where(ok, model(x), 1) / torch.where(ok, h, 1), and 0 as the result",
    ),
    (faults.mean_of_nothing, "reduction_of_empty", "h[h > 5].sum() / max(h[h > 5].numel(), 1)"),
    (
        faults.labels_all_ignored,
        "reduction_of_empty",
        "F.cross_entropy(model(x), y, reduction='sum') / (y != -100).sum().clamp_min(1)",
    ),
    pytest.param(
        faults.deviation_of_one,
        "std_of_one",
        "h.var(0, correction=0).clamp_min(1e-12).sqrt()",
        marks=pytest.mark.filterwarnings("ignore:std"),
    ),
    (faults.logdet_negative, "determinant_not_positive", "torch.linalg.slogdet(a).logabsdet"),
    (faults.log_of_det, "log_of_negative", "torch.linalg.slogdet(A).logabsdet"),
    (faults.singular, "singular_matrix", "torch.linalg.inv_ex((h.T @ h) + 1e-6 * torch.eye((h.T @ h).shape[-1]))"),
    (faults.equal_values, "degenerate_decomposition", "torch.linalg.svd(h + 1e-6 * torch.diag(torch.linspace("),
    (faults.exp_large, "exp_overflow", "torch.exp((model(x) * 500.0).clamp(max="),
    (faults.softmax_by_hand, "exp_overflow", ".amax(-1, keepdim=True))"),
    (faults.two_to_the, "exp_overflow", "2.0 ** (model(x) * 500.0).clamp(max="),
    (faults.product_overflows, "overflow", "(h * h).clamp(-1e18, 1e18)"),
    (
        faults.all_masked,
        "softmax_fully_masked",
        "scores.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)",
    ),
    (faults.unreachable, "logsumexp_fully_masked", "torch.logsumexp(scores.masked_fill("),
    (faults.room_below, "mask_value_overflow", "torch.finfo("),
    (faults.smoothed_mask, "masked_logit_in_loss", "F.cross_entropy(logits.nan_to_num(neginf=-10000), "),
    (faults.masked_entropy, "zero_times_inf", "logp.exp() * torch.where(logp.exp() == 0, 0.0, logp)"),
    (faults.infinite_costs, "inf_minus_inf", ".nan_to_num(posinf=10000, neginf=-10000)"),
    (faults.no_alignment, "ctc_no_alignment", "zero_infinity=True)"),
    (faults.sqrt_slope, "sqrt_gradient_at_zero", "(h * h).sum(1).clamp_min(1e-12).sqrt()"),
    (faults.pow_slope, "pow_gradient_at_zero", "(model(x) * 0.0).clamp_min(1e-12) ** 0.5"),
    (faults.acos_slope, "gradient_at_domain_boundary", ".clamp(-1 + 1e-6, 1 - 1e-6))"),
    (faults.dropped_quotient, "unselected_branch", "torch.where(h == 0, 0.0, model(x) / torch.where(h == 0, 1.0, h))"),
    (faults.own_backward, "custom_backward", "torch.where(x == 0, 0.0, g / torch.where(x == 0, 1.0, x))"),
]


@pytest.mark.parametrize(("loss_of", "code", "text"), CASES, ids=[getattr(c, "values", c)[0].__name__ for c in CASES])
def test_a_form_that_fits_the_cause_makes_the_step_finite(loss_of: object, code: str, text: str) -> None:
    run = train(faults.Net(), [faults.ones()], loss_of)
    assert run.event.cause is not None
    assert run.event.cause.code == code, run.event
    fix = fix_of(run)
    assert fix.finite is True, fix
    assert text in fix.detail
    assert fix.detail.endswith("all gradients finite")
    assert run.finite


IN_HALF = [
    (faults.half_square, "half_overflow", "(model(x) * 1000.0).float().pow(2) in float32 from here on"),
    (faults.half_product, "half_overflow", "h.float() @ h.T.float() in float32 from here on"),
    (faults.half_eps, "eps_underflow", "F.normalize(torch.relu(model(x) - 1.0), dim=1, eps=1e-3)"),
]


@pytest.mark.parametrize(("loss_of", "code", "text"), IN_HALF, ids=[c[0].__name__ for c in IN_HALF])
def test_half_precision(loss_of: object, code: str, text: str) -> None:
    run = train(faults.Net(HALF), [faults.ones(dtype=HALF)], loss_of)
    assert run.event.cause is not None
    assert run.event.cause.code == code
    fix = fix_of(run)
    assert fix.finite is True, fix
    assert text in fix.detail


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        out: Tensor = self.head(self.attn(x, x, x, key_padding_mask=padding)[0])
        return out


def test_a_module_of_the_library_that_calls_the_function_itself() -> None:
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[1] = True
    torch.manual_seed(0)
    run = train(Attention(), [(torch.randn(2, 3, 4), padding)], lambda model, b: model(*b).pow(2).mean())
    fix = fix_of(run)
    assert fix.finite is True, fix
    assert "F.multi_head_attention_forward(..., key_padding_mask=mask & ~mask.all(-1, keepdim=True))" in fix.detail


def test_attention_by_function_with_a_mask_of_its_own() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)[None]
        mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool), -math.inf)
        weights = torch.softmax(h @ h.transpose(1, 2) + mask, -1)
        return (weights @ h).pow(2).mean() + h.mean()

    fix = fix_of(train(faults.Net(), [faults.ones()], loss_of))
    assert fix.finite is True, fix


def test_a_fault_that_is_repeated_in_the_function_is_repaired_in_all_its_places() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(model(x) - 1.0)
        a = torch.log(h[:, 0]).mean()
        b = torch.log(h[:, 1]).mean()
        return a * b

    fix = fix_of(train(faults.Net(), [faults.ones()], loss_of))
    assert fix.finite is True, fix
    assert "(so too at the other calls of log there)" in fix.detail


def test_a_loop_is_repaired_in_every_round() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for column in torch.relu(model(x) - 1.0).unbind(1):
            total = total + torch.log(column).mean()
        return total

    fix = fix_of(train(faults.Net(), [faults.ones()], loss_of))
    assert fix.finite is True, fix


def test_another_fault_in_the_same_step_is_no_success() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        h = model(x)
        return torch.log(torch.relu(h - 1.0)).mean() + torch.linalg.vector_norm(h / (h - h), dim=1).sum()

    fix = fix_of(train(faults.Net(), [faults.ones()], loss_of))
    assert fix.finite is False
    assert fix.detail.endswith("the loss is not finite")


def test_a_growing_loss_is_not_mended_by_another_form_of_one_call() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) ** 2).mean()

    model = faults.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    run = train(model, [faults.ones()] * 40, loss_of, optimizer=optimizer)
    fix = fix_of(run)
    assert fix.finite is None
    assert "in the steps to come" in fix.detail


def test_a_bad_batch_has_no_guilty_call() -> None:
    x = faults.ones()
    x[1, 1] = math.nan
    run = train(faults.Net(), [x], lambda model, b: model(b).mean())
    assert not [t for t in run.event.trials if t.name == "fix"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_computes_the_repaired_form_again(reentrant: bool) -> None:
    def segment(h: Tensor) -> Tensor:
        return torch.sqrt(h * 0.0)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(segment, model(x), use_reentrant=reentrant)
        return out.mean()

    fix = fix_of(train(faults.Net(), [faults.ones()], loss_of))
    assert fix.finite is True, fix
    assert "torch.sqrt((h * 0.0).clamp_min(1e-12))" in fix.detail


def test_calls_in_place_and_into_a_given_tensor() -> None:
    def in_place(model: nn.Module, x: Tensor) -> Tensor:
        h = torch.relu(model(x) - 1.0) * 1.0
        return h.log_().mean()

    def given(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = torch.zeros(5, 4)
            torch.log(torch.relu(model(x) - 1.0), out=out)
        return (model(x) * out).mean()

    for loss_of in (in_place, given):
        fix = fix_of(train(faults.Net(), [faults.ones()], loss_of))
        assert fix.finite is True, fix


def test_operators_whose_number_stands_on_the_left() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return (1.0 / (model(x) * 0.0 - 0.0)).mean()

    fix = fix_of(train(faults.Net(), [faults.ones()], loss_of))
    assert fix.finite is True, fix
    assert ", 0.0, 1.0 / torch.where(" in fix.detail


def test_a_step_function_is_called_again_whole() -> None:
    model = faults.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = torch.log(torch.relu(model(x) - 1.0)).mean()
        loss.backward()
        optimizer.step()
        return loss

    with NaNDetector(model, verbose=False) as det:
        det.run_step(step, faults.ones())
    assert det.event is not None
    fix = next(t for t in det.event.trials if t.name == "fix")
    assert fix.finite is True, fix
    assert "torch.log(torch.relu(model(x) - 1.0).clamp_min(1e-12)): loss" in fix.detail


def test_a_trial_changes_nothing_for_the_training() -> None:
    def losses(skipping: bool) -> list[float]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        out = []

        def one(x: Tensor, bad: bool) -> None:
            optimizer.zero_grad()
            h = model(x).abs() * (0.0 if bad else 1.0)
            loss = torch.log(h).mean()
            loss.backward()
            if not (bad and not skipping):
                optimizer.step()
            out.append(float(loss.detach()))

        watch = NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) if skipping else None
        if watch is not None:
            watch.attach()
        for i in range(4):
            one(torch.randn(6, 3), bad=i == 1)
        if watch is not None:
            watch.detach()
            assert watch.event is not None
            assert any(t.name == "fix" and t.finite for t in watch.event.trials)
        return out

    assert losses(skipping=True) == losses(skipping=False)


def test_a_second_derivative_of_a_norm_at_zero() -> None:
    run = train(faults.Net(), [faults.ones()], faults.distance_to_itself)
    fix = fix_of(run)
    assert fix.finite is True, fix
    assert ".pow(2).sum(1).clamp_min(1e-24).sqrt()" in fix.detail


def test_transformer_with_a_row_of_padding() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    padding = torch.zeros(2, 3, dtype=torch.bool)
    padding[0] = True
    run = train(
        model, [torch.randn(2, 3, 4)], lambda m, x: F.mse_loss(m(x, src_key_padding_mask=padding), torch.zeros(2, 3, 4))
    )
    if run.events:  # releases whose attention gives 0 for such rows have nothing to mend
        assert fix_of(run).finite is True, fix_of(run)
