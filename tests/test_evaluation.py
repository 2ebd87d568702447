"""What is not training: evaluation, batches that the loop drops itself, and code that raises because of a NaN."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from _data_programs import born, line_of
from nan_detector import NaNDetector, NonFiniteError
from nan_detector._records import WarningRecord
from nan_detector._session import session

Tensor = torch.Tensor
NAN, INF = float("nan"), float("inf")


def rows(seed: int, n: int = 6, width: int = 4) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.inp(x)))


def train_step(model: torch.nn.Module, opt: torch.optim.Optimizer, i: int, bad: bool = False) -> None:
    x, y = rows(i), rows(i + 50, width=1)
    if bad:
        x[2] = NAN
    opt.zero_grad()
    F.mse_loss(model(x), y).backward()
    opt.step()


def of_kind(det: NaNDetector, kind: str) -> list[WarningRecord]:
    return [w for w in det.warnings if w.kind == kind]


# -- evaluation ---


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_bad_outputs_of_an_evaluation_are_a_warning_and_the_training_goes_on(
    mode: Any, value: float, watch: str
) -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False, watch=watch) as det:
        for i in range(3):
            det.set_batch(i)
            train_step(model, opt, i)
        model.eval()
        with mode():
            for k in range(5):
                model(torch.full((6, 4), value) if k == 3 else rows(k))
        model.train()
        for i in range(3, 6):
            det.set_batch(i)
            train_step(model, opt, i)
        assert not det.triggered
        assert det.event is None
    (warning,) = of_kind(det, "evaluation")
    assert warning.layer_name == "root"
    assert warning.step == 2
    assert "Net" in warning.message


def test_a_bad_evaluation_at_the_very_end_is_told_at_detach() -> None:
    model = Net()
    with NaNDetector(model, verbose=False) as det, torch.no_grad():
        model(torch.full((6, 4), NAN))
    assert len(of_kind(det, "evaluation")) == 1
    assert det.event is None


def test_finite_and_masked_outputs_of_an_evaluation_are_quiet() -> None:
    class Masks(Net):
        def forward(self, x: Tensor) -> Any:
            return {"logits": super().forward(x).masked_fill(x[:, :1] > 0, -INF), "ids": torch.arange(3), "none": None}

    model = Masks()
    with NaNDetector(model, verbose=False) as det, torch.no_grad():
        for k in range(4):
            model(rows(k))
            model(torch.empty(0, 4))
    assert det.warnings == []


def test_an_evaluation_reads_nothing_to_the_host() -> None:
    model = Net().to("meta")  # on which every read raises
    with NaNDetector(model, verbose=False) as det, torch.no_grad():
        for _ in range(3):
            model(torch.empty(6, 4, device="meta"))
    assert det.event is None


@pytest.mark.parametrize("grad", [False, True])
def test_a_long_evaluation_keeps_neither_its_batches_nor_a_growing_tape(grad: bool) -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    alive: list[weakref.ref[Tensor]] = []
    lengths = []
    with NaNDetector(model, verbose=False) as det:
        train_step(model, opt, 0)
        model.eval()
        with torch.set_grad_enabled(grad):
            total = 0.0
            for k in range(300):
                x = rows(k)
                alive.append(weakref.ref(x))
                out = model(x)
                total += float((out.detach() - 1.0).square().mean())
                lengths.append(len(session().tape.entries))
                del x
        del out
        gc.collect()
        assert max(lengths) < 40, max(lengths)  # a few steps of the loop, however long it runs
        assert sum(r() is not None for r in alive) < 5
        model.train()
        train_step(model, opt, 1)
    assert det.event is None


def test_training_after_a_bad_evaluation_finds_its_own_births() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False) as det:
        for i in range(6):
            det.set_batch(i)
            train_step(model, opt, i, bad=i == 4)
            if det.triggered:
                break
            with torch.no_grad():
                model(torch.full((6, 4), NAN))
    event = det.event
    assert event is not None and event.step == 4 and event.reproduced == "yes"


def test_a_teacher_under_no_grad_is_part_of_the_step_that_uses_it() -> None:
    class Teacher(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(x.amax(1, keepdim=True))  # <-- teacher

    models = {"student": Net(), "teacher": Teacher()}
    opt = torch.optim.SGD(models["student"].parameters(), lr=1e-3)
    with NaNDetector(models, verbose=False) as det:
        for i in range(5):
            det.set_batch(i)
            x = rows(i).abs() + 0.1
            if i == 3:
                x[1] = -1.0
            with torch.no_grad():
                target = models["teacher"](x)
            opt.zero_grad()
            F.mse_loss(models["student"](x), target).backward()
            opt.step()
            if det.triggered:
                break
    born(det, step=3, phase="forward", mark="teacher", layer_name="teacher", op="log")


# -- a loop that looks for itself ---


def drops(kind: str, loss: Tensor) -> bool:
    if kind == "item":
        return not math.isfinite(loss.item())  # <-- the loop looked
    if kind == "isnan":
        return bool(torch.isnan(loss))
    if kind == "isfinite":
        return not torch.isfinite(loss).all()
    return bool((~loss.isfinite()).any())


@pytest.mark.parametrize("kind", ["item", "isnan", "isfinite", "any"])
def test_a_batch_that_the_loop_itself_drops_is_handled(kind: str) -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False) as det:
        for i in range(6):
            det.set_batch(i)
            x, y = rows(i), rows(i + 50, width=1)
            if i in (2, 4):
                x[1] = NAN
            opt.zero_grad()
            loss = F.mse_loss(model(x), y)
            if drops(kind, loss):
                continue
            loss.backward()
            opt.step()
        assert not det.triggered
    assert det.event is None
    handled = of_kind(det, "handled")
    assert [w.step for w in handled] == [2, 4]
    assert handled[0].location is not None and handled[0].location.source_line == "x[1] = NAN"
    if kind == "item":
        assert f"test_evaluation.py:{line_of('the loop looked')}, and did not train on it" in handled[0].message


def test_the_last_batch_dropped_by_the_loop_is_handled_too() -> None:
    model = Net()
    with NaNDetector(model, verbose=False) as det:
        loss = model(torch.full((6, 4), NAN)).mean()
        assert math.isnan(loss.item())
    assert det.event is None
    assert len(of_kind(det, "handled")) == 1


def test_a_loss_that_is_read_and_then_trained_on_is_an_event_and_not_handled() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False) as det:
        for i in range(3):
            det.set_batch(i)
            x = rows(i)
            if i == 1:
                x[1] = NAN
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.item()
            loss.backward()
            opt.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.step == 1
    assert of_kind(det, "handled") == []


def test_finite_reads_record_nothing() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False) as det:
        for i in range(3):
            opt.zero_grad()
            loss = model(rows(i)).square().mean()
            assert torch.isfinite(loss) and not torch.isnan(loss) and loss.item() < 1e9
            loss.backward()
            opt.step()
    assert det.warnings == [] and det.event is None


# -- exceptions and unfinished steps ---


def test_a_block_that_ends_after_the_backward_and_before_the_step() -> None:
    model = Net()
    with NaNDetector(model, verbose=False) as det:
        det.set_batch(7)
        model(rows(0)).sum(1).sub(1e9).log().mean().backward()  # <-- never stepped
    born(det, step=7, phase="loss", mark="never stepped", op="log")


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_assertion_of_the_users_about_the_loss(when: str) -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    det = NaNDetector(model, verbose=False)
    with pytest.raises(AssertionError, match="diverged"), det:
        for i in range(4):
            det.set_batch(i)
            opt.zero_grad()
            out = model(rows(i))
            loss = torch.log(out.sum() * 0 + (1.0 if i < 2 else -1.0))  # <-- asserted
            if when == "before":
                assert torch.isfinite(loss), "diverged"
            loss.backward()
            assert torch.isfinite(loss), "diverged"
            opt.step()
    born(det, step=2, phase="loss", mark="asserted", op="log")


def test_a_matrix_that_cannot_be_decomposed_because_of_a_nan() -> None:
    class Whiten(Net):
        def forward(self, x: Tensor) -> Tensor:
            c = x.T @ x / (5.0 - x.amax()).clamp(min=0) + torch.eye(4)  # <-- division
            return torch.linalg.cholesky(c).sum()

    model = Whiten()
    det = NaNDetector(model, verbose=False)
    with pytest.raises(RuntimeError), det:
        for i in range(3):
            det.set_batch(i)
            x = -rows(i).abs()
            if i == 2:
                x = x * 0 + 5.0
            (model(x) + model.out.bias.sum()).backward()
    born(det, step=2, phase="forward", mark="division", op="div", layer_name="root")


def test_a_decomposition_in_the_loss_that_raises() -> None:
    model = torch.nn.Linear(4, 4)
    det = NaNDetector(model, verbose=False)
    with pytest.raises(RuntimeError), det:
        for i in range(3):
            det.set_batch(i)
            out = model(rows(i))
            spread = out.std(0, keepdim=True) * (1.0 if i < 2 else 0.0)
            z = (out - out.mean(0)) / spread  # <-- standardised
            torch.linalg.cholesky(z.T @ z + torch.eye(4)).sum().backward()
    born(det, step=2, phase="loss", mark="standardised", op="div")


def test_a_distribution_that_refuses_its_parameters() -> None:
    model = Net()
    det = NaNDetector(model, verbose=False)
    with pytest.raises(ValueError), det:
        for i in range(3):
            det.set_batch(i)
            out = model(rows(i))
            scale = torch.sqrt(out.exp() - (0.0 if i < 1 else 100.0))  # <-- scale
            torch.distributions.Normal(out, scale, validate_args=True).log_prob(torch.zeros(6, 1)).mean().backward()
    born(det, step=1, phase="loss", mark="scale", op="sqrt")


def test_an_exception_that_has_nothing_to_do_with_values() -> None:
    model = Net()
    det = NaNDetector(model, verbose=False)
    with pytest.raises(KeyError), det:
        loss = model(rows(0)).mean()
        loss.backward()
        {}["missing"]
    assert det.event is None


def test_an_exception_after_outputs_that_the_loop_cleans() -> None:
    class Logs(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.log(x.amax(1, keepdim=True)).detach()

    model = Logs()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    det = NaNDetector(model, verbose=False)
    with pytest.raises(KeyError), det:
        for _ in range(3):
            opt.zero_grad()
            out = model(-rows(0).abs())
            out = torch.where(out.isfinite(), out, torch.zeros(()))
            out.square().mean().backward()
            opt.step()
        out = torch.nan_to_num(model(-rows(0).abs()))
        loss = out.square().mean()
        {}["missing"]
    assert loss.isfinite()
    assert det.event is None


def test_an_exception_after_an_intended_infinity() -> None:
    model = Net()
    det = NaNDetector(model, verbose=False)
    with pytest.raises(KeyError), det:
        scores = model(rows(0)).T.masked_fill(torch.tensor([True, False] * 3), -INF)
        scores.softmax(-1).sum().backward()
        best = torch.full((), INF)
        torch.minimum(best, scores.max())
        {}["missing"]
    assert det.event is None


def test_an_exception_after_masked_logits_of_the_model() -> None:
    class Masks(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).T.masked_fill(x[:, 0] > 0, -INF)

    model = Masks()
    det = NaNDetector(model, verbose=False)
    with pytest.raises(KeyError), det:
        model(rows(0))
        {}["missing"]
    assert det.event is None


def test_on_nan_raise_is_the_only_exception_and_the_event_is_there() -> None:
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    det = NaNDetector(model, verbose=False, on_nan="raise")
    with pytest.raises(NonFiniteError) as caught, det:
        for i in range(4):
            det.set_batch(i)
            train_step(model, opt, i, bad=i == 1)
    assert caught.value.event == det.event
    assert len(det.all_events) == 1
