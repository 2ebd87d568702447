"""Early warnings in real loops: what is fed to them, where they go, and that nothing stops for them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nan_detector import NaNDetector

# Torch wraps the step of a class when the first of it is made: not in a test, which would seem to leave it behind.
torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def steps(
    det: NaNDetector, model: nn.Module, opt: Any, n: int, change: Any = lambda i: 1.0, before: Any = lambda i: None
) -> None:
    g = torch.Generator().manual_seed(1)
    for i in range(n):
        x = torch.randn(32, 8, generator=g)
        y = x[:, :4].argmax(1)
        before(i)
        opt.zero_grad()
        (F.cross_entropy(model(x), y) * change(i)).backward()
        opt.step()


def kinds(det: NaNDetector) -> list[str]:
    return [w.kind for w in det.warnings]


# -- each kind ---------------------------------------------------------------------------------------------------------


def test_spike_of_loss_and_gradients() -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        steps(det, model, opt, 200, change=lambda i: 400.0 if i == 150 else 1.0)
    assert det.event is None
    found = [(w.kind, w.step) for w in det.warnings]
    assert ("loss_spike", 150) in found and ("grad_norm_spike", 150) in found
    assert {w.step for w in det.warnings} <= set(range(150, 200))


def test_large_gradients_of_one_step_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-9)
    with caplog.at_level(logging.WARNING, "nan_detector"), NaNDetector(model, verbose=False) as det:
        steps(det, model, opt, 3, change=lambda i: 1e6 if i == 1 else 1.0)
    lines = [r.getMessage() for r in caplog.records if "grad_norm_warn" in r.getMessage()]
    assert [e.batch_idx for e in det.grad_events] == [1] * 4, "one for each parameter"
    largest = max(det.grad_events, key=lambda e: e.grad_norm)
    name = f"{largest.layer_name}.{largest.param_name}"
    assert lines == [
        f"step 1: 4 of 4 gradient norms are above grad_norm_warn=100, the largest {largest.grad_norm:.3g} of {name} "
        f"(told again from {10 * largest.grad_norm:.3g} on)"
    ]


def large(i: int) -> float:
    """From step 2 on all gradients are large; in step 6 they have grown more than tenfold, and then shrink again."""
    return 1.0 if i < 2 else 1e9 if i == 6 else 1e6


def test_large_gradients_that_stay_are_told_once_and_summed_up(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    model = nn.Linear(8, 4, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    with caplog.at_level(logging.WARNING, "nan_detector"), NaNDetector(model, verbose=False, log_dir=tmp_path) as det:
        steps(det, model, opt, 9, change=large)
    norms = {e.batch_idx: e.grad_norm for e in det.grad_events}
    assert list(norms) == [2, 3, 4, 5, 6, 7, 8], "each step keeps its own"
    logged = [json.loads(line) for line in (tmp_path / "events-rank0.jsonl").read_text().splitlines()]
    assert [r["batch_idx"] for r in logged if r["record"] == "grad"] == list(norms)
    assert [r.getMessage() for r in caplog.records if "grad_norm_warn" in r.getMessage()] == [
        f"step {i}: the gradient norm of weight is {norms[i]:.3g}, above grad_norm_warn=100 "
        f"(told again from {10 * norms[i]:.3g} on)"
        for i in (2, 6)
    ] + [
        "gradient norms were above grad_norm_warn=100 in 7 steps, first in step 2 and last in step 8; the largest was "
        f"{norms[6]:.3g}, of weight in step 6"
    ]


def test_nothing_is_summed_up_where_each_step_was_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 4, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    with caplog.at_level(logging.WARNING, "nan_detector"):
        for _ in range(2):  # a second watch begins anew
            with NaNDetector(model, verbose=False) as det:
                steps(det, model, opt, 5, change=lambda i: 1e6 if i == 3 else 1.0)
            assert [e.batch_idx for e in det.grad_events] == [3]
    told = [r.getMessage() for r in caplog.records if "grad_norm_warn" in r.getMessage()]
    assert len(told) == 2 and all(line.startswith("step 3: ") for line in told)


def test_a_check_of_the_norms_is_true_in_the_call_that_recorded_them() -> None:
    """In every such step, however few of them the logger tells; but once a step."""
    model = nn.Linear(8, 4, bias=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    answers: list[tuple[bool, bool, bool]] = []
    with NaNDetector(model, verbose=False) as det:
        for i in range(5):
            det.set_batch(i)
            opt.zero_grad()
            (model(torch.ones(2, 8)).sum() * (1e6 if i in (1, 2, 4) else 1.0)).backward()
            before = det.check_grad_norms(), det.check_grad_norms()
            opt.step()
            answers.append((*before, det.check_grad_norms()))
    assert answers == [(i in (1, 2, 4), False, False) for i in range(5)]
    assert [e.batch_idx for e in det.grad_events] == [1, 2, 4], "once a step"


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_whose_squares_overflow_are_told_with_their_norm(scaled: bool) -> None:
    model = nn.Linear(4, 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    with NaNDetector(model, verbose=False) as det:
        for i in range(5):
            opt.zero_grad()
            scaler.scale(model(torch.full((8, 4), 1e24 if i == 3 else 1.0)).sum()).backward()
            scaler.step(opt)
            scaler.update()
    assert det.event is None
    [event] = det.grad_events
    assert (event.batch_idx, event.param_name) == (3, "weight")
    assert event.grad_norm == pytest.approx(8e24 * 8**0.5)
    assert det.history.values["grad_norm:weight"][3] == pytest.approx(8e24 * 8**0.5)
    assert det.history.values["grad_norm"].max() == pytest.approx(8e24 * 8**0.5)


def test_where_logging_is_not_set_up_a_warning_says_whose_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(logging.getLogger("nan_detector"), "propagate", False)  # pytest listens above it
        with NaNDetector(model, verbose=False) as det:
            steps(det, model, opt, 3, change=lambda i: 1e6 if i == 1 else 1.0)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith("nan_detector: step 1: 4 of 4 gradient norms are above"), said


def test_a_rate_that_jumps() -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)

    def jump(i: int) -> None:
        if i == 120:
            opt.param_groups[0]["lr"] = 0.1

    with NaNDetector(model, verbose=False) as det:
        steps(det, model, opt, 140, before=jump)
    [warning] = [w for w in det.warnings if w.kind == "lr_jump"]
    assert warning.step == 120 and warning.value == 0.1


def test_a_schedule_that_says_so_is_no_jump() -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: 1e-3 if i < 100 else 1.0)
    with NaNDetector(model, verbose=False) as det:
        steps(det, model, opt, 130, before=lambda i: schedule.step() if i else None)
    assert "lr_jump" not in kinds(det)


@pytest.mark.parametrize("group", [0, 1])
def test_a_negative_rate_is_a_warning(group: int) -> None:
    model = mlp()
    opt = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1e-3)
    before = [p.detach().clone() for p in model.parameters()]

    def turn(i: int) -> None:
        if i == 30:
            opt.param_groups[group]["lr"] = -1e-3

    with NaNDetector(model, verbose=False) as det:
        steps(det, model, opt, 40, before=turn)
    assert det.event is None and not det.triggered
    [warning] = det.warnings
    assert warning.kind == "lr_negative" and warning.step == 30 and warning.value == -1e-3
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_negative_rate_hides_no_nan() -> None:
    model = mlp()
    opt = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1e-3)
    opt.param_groups[0]["lr"], opt.param_groups[1]["lr"] = -1e-3, float("nan")
    with NaNDetector(model, verbose=False) as det:
        steps(det, model, opt, 1)
    assert det.event is not None and det.event.tensor_name == "param_groups[1]['lr']"


def test_the_rounding_of_a_cosine_is_not_negative() -> None:
    model = mlp()
    opt = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 30)
    with NaNDetector(model, verbose=False) as det:
        steps(det, model, opt, 31, before=lambda i: schedule.step() if i else None)
        for group in opt.param_groups:
            group["lr"] = -1e-19
        steps(det, model, opt, 5)
    assert det.warnings == []


def test_eps_that_is_zero_in_the_parameters_dtype() -> None:
    model = mlp().half()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    x = torch.randn(4, 8).half()
    with NaNDetector(model, verbose=False) as det:
        for _ in range(3):
            opt.zero_grad()
            model(x).float().square().mean().backward()
            opt.step()
            if det.triggered:
                break
    [warning] = [w for w in det.warnings if w.kind == "eps_underflow"]
    assert warning.step == 0 and "eps=1e-08" in warning.message and "float16" in warning.message


@pytest.mark.parametrize("fused", [False, True])
def test_an_eps_that_is_kept_is_no_warning(fused: bool) -> None:
    model = mlp()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    with NaNDetector(model, verbose=False) as det:
        steps(det, model, opt, 3)
    assert det.warnings == []


@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside another optimizer"])
def test_a_parameter_that_learns_nothing(other: bool) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.dead = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + torch.relu(self.dead(x) - 1e6)

    torch.manual_seed(0)
    model = Half()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    second = mlp()
    opt2 = torch.optim.SGD(second.parameters(), lr=0.01)
    with NaNDetector([model, second] if other else model, verbose=False) as det:
        for _ in range(420):
            steps(det, model, opt, 1)
            if other:
                steps(det, second, opt2, 1)
    [warning] = det.warnings
    assert warning.kind == "dead_parameter" and "dead.weight" in warning.message and "dead.bias" in warning.message
    assert warning.value is not None and warning.value >= 200


def test_headroom_at_layers() -> None:
    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
            self.factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            big = self.gain((x * self.factor).half().to(self.gain.weight.dtype))
            return self.head((big / self.factor).float())

    torch.manual_seed(0)
    model = Grows()
    model.gain.half()
    opt = torch.optim.SGD(model.parameters(), lr=1e-4)
    g = torch.Generator().manual_seed(0)
    with NaNDetector(model, watch="layers", verbose=False) as det:
        for i in range(60):
            model.factor = 1.2**i
            x = torch.randn(32, 8, generator=g)
            opt.zero_grad()
            F.cross_entropy(model(x), x[:, :4].argmax(1)).backward()
            opt.step()
            if det.triggered or det.warnings:
                break
    assert det.event is None, "it warns before it happens"
    [warning] = det.warnings
    assert warning.kind == "headroom" and warning.layer_name == "gain" and "float16" in warning.message
    assert warning.value is not None and 655 < warning.value < 65504


def test_a_loop_without_an_optimizer() -> None:
    model = mlp()
    g = torch.Generator().manual_seed(1)
    with NaNDetector(model, verbose=False) as det:
        for i in range(160):
            x = torch.randn(32, 8, generator=g)
            loss = F.cross_entropy(model(x), x[:, :4].argmax(1)) * (400.0 if i == 150 else 1.0)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad
                    p.grad = None
    assert {w.kind for w in det.warnings} == {"loss_spike", "grad_norm_spike"} and det.event is None


def test_a_line_search_goes_where_no_step_goes() -> None:
    torch.manual_seed(0)
    model = mlp()
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0, line_search_fn="strong_wolfe", max_iter=4)
    x = torch.randn(64, 8)
    y = x[:, :4].argmax(1)
    calls: list[int] = []  # evaluations of each step

    def closure() -> torch.Tensor:
        calls[-1] += 1
        opt.zero_grad()
        # Every evaluation but the first is a far point of the search.
        loss = F.cross_entropy(model(x), y) * (1.0 if calls[-1] == 1 else 1000.0)
        loss.backward()
        return loss

    with NaNDetector(model, verbose=False, grad_norm_warn=1e9) as det:
        for _ in range(150):
            calls.append(0)
            opt.step(closure)
    assert max(calls) > 1 and det.warnings == [] and det.event is None


# -- where they go -----------------------------------------------------------------------------------------------------


def test_told_once_everywhere(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    told: list[Any] = []

    def turn(i: int) -> None:
        if i == 30:
            opt.param_groups[0]["lr"] = -1e-3

    caplog.set_level(logging.WARNING, "nan_detector")
    with NaNDetector(model, verbose=False, on_warning=told.append, log_dir=tmp_path) as det:
        steps(det, model, opt, 60, before=turn)
    assert told == det.warnings and len(told) == 1
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", told[0].message)]
    lines = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert [(x["kind"], x["step"]) for x in lines if x["record"] == "warning"] == [("lr_negative", 30)]


def test_a_callback_that_raises_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    opt.param_groups[0]["lr"] = -1e-3

    def broken(record: object) -> None:
        raise RuntimeError("the pager is out of order")

    with NaNDetector(model, verbose=False, on_warning=broken) as det:
        steps(det, model, opt, 5)
    assert kinds(det) == ["lr_negative"] and any("on_warning raised" in r.getMessage() for r in caplog.records)


def test_each_optimizer_has_its_own_average() -> None:
    """One network's loss is a thousand times the other's: no spike."""
    a, b = mlp(), mlp()
    optimizers = [torch.optim.SGD(a.parameters(), lr=1e-2), torch.optim.SGD(b.parameters(), lr=1e-5)]
    with NaNDetector({"a": a, "b": b}, verbose=False, grad_norm_warn=1e9) as det:
        for _ in range(150):
            steps(det, a, optimizers[0], 1)
            steps(det, b, optimizers[1], 1, change=lambda i: 1000.0)
    assert det.warnings == []
