"""`hazards()`: what a healthy step came near to, with the line, before it happens."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from _drifts import DRIFTS, Drift
from _programs import marked_line
from nan_detector import Hazard, NaNDetector, NotAttachedError
from nan_detector._hazards import CLOSE, MAX_HAZARDS
from nan_detector._run_step import WholeStep

Tensor = torch.Tensor
NO_NORMS = float("inf")
LEAST = torch.finfo(torch.float32).min


def trained(drift: Drift, steps: int, **options: Any) -> tuple[NaNDetector, list[Hazard]]:
    """The training of `drift`, and what it came near to after its last step."""
    model = drift.model()
    opt = torch.optim.SGD(model.parameters(), lr=drift.lr)
    with NaNDetector(model, verbose=False, grad_norm_warn=NO_NORMS, **options) as det:
        for i in range(steps):
            det.set_batch(i)
            opt.zero_grad()
            drift.loss(model, i).backward()
            opt.step()
            if det.triggered:
                break
        hazards = [] if det.triggered or "hazards_every" in options else det.hazards()
    return det, hazards or det.hazards()


def rank_of(drift: Drift, hazards: list[Hazard]) -> int | None:
    """Place of the guilty line among `hazards`, counted from 1."""
    file, line = marked_line(drift.guilty)
    places = [i for i, h in enumerate(hazards, 1) if h.location and (h.location.file, h.location.line) == (file, line)]
    return places[0] if places else None


@pytest.mark.parametrize("name", DRIFTS)
def test_one_step_before_the_failure_the_guilty_line_is_among_the_first_three(name: str) -> None:
    drift = DRIFTS[name]
    failed, _ = trained(drift, 400)
    assert failed.event is not None and failed.event.step > 2
    file, line = marked_line(drift.guilty)
    assert failed.event.location is not None and (failed.event.location.file, failed.event.location.line) == (
        file,
        line,
    )

    det, after = trained(drift, failed.event.step)
    assert det.event is None, "it is healthy still"
    assert (rank_of(drift, after) or 99) <= 3, [str(h) for h in after]

    # At the gate, with the weights from before the step, it is the nearness alone that tells.
    det, before = trained(drift, failed.event.step, hazards_every=1)
    rank = rank_of(drift, before)
    assert (rank or 99) <= 3, [str(h) for h in before]
    assert before[(rank or 1) - 1].kind in drift.kinds
    hazard = before[(rank or 1) - 1]
    assert hazard.distance < 0.6 or (hazard.forecast_step or 999) <= failed.event.step + 2


def test_two_looks_give_a_forecast_and_what_moves_comes_first() -> None:
    drift = DRIFTS["exp"]
    model = drift.model()
    opt = torch.optim.SGD(model.parameters(), lr=drift.lr)
    forecasts = []
    with NaNDetector(model, verbose=False, grad_norm_warn=NO_NORMS) as det:
        for i in range(100):
            det.set_batch(i)
            opt.zero_grad()
            drift.loss(model, i).backward()
            found = det.hazards()
            forecasts.append({(h.op, h.kind): h.forecast_step for h in found[:3]})
            opt.step()
            if det.triggered:
                break
    assert det.event is not None
    failed = det.event.step
    step = forecasts[failed - 2]["exp", "exp_overflow"]
    assert step is not None and abs(step - failed) <= 2


# -- healthy models ---------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 20)
        self.register_buffer("mask", torch.triu(torch.full((5, 5), float("-inf")), 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), mask=self.mask))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(), nn.Flatten())
        self.head = nn.Linear(8 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Guarded(nn.Module):
    """Each edge is there, and each is guarded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) * 1e-4
        h = h / (h.norm(dim=-1, keepdim=True) + 1e-6)
        weights = torch.exp(h - h.amax(-1, keepdim=True))
        weights = weights / (1.0 + weights.sum(-1, keepdim=True))
        var = ((h - h.mean(-1, keepdim=True)) ** 2).mean(-1, keepdim=True)
        h = h * torch.rsqrt(var * 1e-12 + 1e-5)
        kept = torch.log(torch.sigmoid(h * 100).clamp(1e-6, 1 - 1e-6))
        size = torch.exp(torch.tanh(h * 50))
        return (kept + size + weights + torch.sqrt(torch.relu(h) + 1e-8) + torch.acos(h.clamp(-0.99, 0.99))).mean(-1)


def _step(model: nn.Module, x: Tensor, loss_of: Any, **options: Any) -> list[Hazard]:
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False, **options) as det:
        for _ in range(3):
            opt.zero_grad()
            loss_of(model(x)).backward()
            opt.step()
        return det.hazards()


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_healthy_models_are_near_nothing(watch: str) -> None:
    torch.manual_seed(0)
    tokens, images = torch.randint(0, 20, (4, 5)), torch.rand(4, 3, 8, 8)
    assert _step(Transformer(), tokens, lambda y: F.cross_entropy(y.transpose(1, 2), tokens), watch=watch) == []
    assert _step(Convolutions(), images, lambda y: F.cross_entropy(y, tokens[:, 0] % 4), watch=watch) == []
    assert _step(nn.LSTM(6, 8), torch.rand(5, 2, 6), lambda y: (y[0] ** 2).mean(), watch=watch) == []


def test_what_is_guarded_is_no_hazard() -> None:
    torch.manual_seed(0)
    found = _step(Guarded(), torch.rand(5, 6), lambda y: y.mean())
    assert found == [], [str(h) for h in found]


def test_an_ordinary_log_variance_is_named_and_is_not_close() -> None:
    torch.manual_seed(0)
    found = _step(nn.Linear(6, 6), torch.rand(5, 6), lambda y: (torch.exp(0.5 * y) - y).mean())
    assert [h.kind for h in found] == ["exp_overflow"]
    assert found[0].distance > 1.5


# -- single edges -----------------------------------------------------------------------------------------------------


class Given(nn.Module):
    """Hands on what it is given, with a weight that stays 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w.to(x.dtype)


def _near(x: Any, function: Any, op: str | None = None) -> Hazard:
    """The nearest hazard of ``function(x)``, or that of `op`."""
    model = Given()
    with NaNDetector(model, verbose=False, grad_norm_warn=NO_NORMS) as det:
        function(model(torch.as_tensor(x))).float().sum().backward()
        found = det.hazards()
    assert found and det.event is None, det.event
    assert len({(h.op, h.location) for h in found}) == len(found) <= MAX_HAZARDS
    return next((h for h in found[:3] if op in (None, h.op)), found[0])


@pytest.mark.parametrize(
    ("x", "function", "kind", "op", "most"),
    [
        ([80.0, 1.0], lambda t: torch.exp(t), "exp_overflow", "exp", 0.05),
        ([1e-30, 1.0], lambda t: torch.log(t), "log_zero", "log", 0.2),
        ([-1 + 1e-6, 1.0], lambda t: torch.log1p(t), "log_zero", "log1p", 1.3),
        ([1e-6, 1.0], lambda t: torch.sqrt(t), "sqrt_zero", "sqrt", 1.3),
        ([1e-6, 1.0], lambda t: t**0.5, "sqrt_zero", "pow", 1.3),
        ([1e-6, 1.0], lambda t: torch.rsqrt(t), "small_denominator", "rsqrt", 1.3),
        ([1e-6, 1.0], lambda t: 1.0 / t, "small_denominator", "reciprocal", 1.3),
        ([-1e-6, 1.0], lambda t: torch.ones(2) / t, "small_denominator", "div", 1.3),
        ([1 - 1e-6, 0.1], lambda t: torch.acos(t), "domain_edge", "acos", 1.1),
        ([1e-6 - 1, 0.1], lambda t: torch.atanh(t), "domain_edge", "atanh", 1.1),
        ([1e19, 1.0], lambda t: t**2, "overflow", "pow", 0.3),
        ([1e36, 1.0], lambda t: torch.lgamma(t), "overflow", "lgamma", 0.7),
        ([1e3, 1e3], lambda t: t.half() * 60, "overflow", "mul", 0.1),
        ([0.0, 1.0], lambda t: (t.half() + 1e-8) * 2, "eps_lost", "add", 0.1),
        ([[-1.0, -1], [0, 1]], lambda t: t.masked_fill(t < 0, LEAST).softmax(-1), "masked_row", "softmax", 1.0),
        ([1000.0, 1001.0], lambda t: torch.sqrt((t * t).mean() - t.mean() ** 2), "cancellation", "sqrt", 0.5),
    ],
)  # fmt: skip
def test_an_edge_is_named_with_its_distance(x: Any, function: Any, kind: str, op: str, most: float) -> None:
    hazard = _near(x, function, op)
    assert (hazard.kind, hazard.op) == (kind, op), str(hazard)
    assert 0.0 <= hazard.distance <= most
    assert hazard.count >= 1 and hazard.value is not None and hazard.message
    assert hazard.location is not None and hazard.location.file == __file__


def test_equal_eigenvalues() -> None:
    m = torch.diag(torch.tensor([1.0, 1.0 + 2e-6, 3.0]))
    hazard = _near(m, lambda t: torch.linalg.eigh(t)[0])
    assert (hazard.kind, hazard.op) == ("equal_eigenvalues", "linalg_eigh")


def test_what_overflows_and_is_absorbed_comes_first() -> None:
    hazard = _near([100.0, 60.0], lambda t: torch.tanh(torch.exp(t.detach())) + t)
    assert (hazard.kind, hazard.op, hazard.distance) == ("absorbed", "exp", 0.0)


def test_what_a_mask_drops_is_named_and_not_at_the_edge() -> None:
    hazard = _near([0.0, 1.0], lambda t: t * torch.where(t > 0, torch.log(t.detach()), 0.0))
    assert (hazard.kind, hazard.op) == ("dropped", "log") and hazard.distance > CLOSE


def test_the_place_of_a_hazard_within_a_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Softplus())
    model.append(DRIFTS["exp"].model())
    model[2].energy = nn.Linear(3, 4)
    with NaNDetector({"net": model}, verbose=False) as det:
        model(torch.rand(2, 3)).sum().backward()
        hazard = next(h for h in det.hazards() if h.op == "exp")
    assert (hazard.layer_name, hazard.module_type, hazard.phase) == ("net.2", "Boltzmann", "forward")
    assert hazard.location is not None
    assert (hazard.location.file, hazard.location.line) == marked_line(DRIFTS["exp"].guilty)
    assert Hazard.from_dict(hazard.to_dict()) == hazard


# -- when it may be called --------------------------------------------------------------------------------------------


def test_training_is_bit_for_bit_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(ask: bool) -> tuple[list[Tensor], Tensor]:
        torch.manual_seed(3)
        model = Convolutions()
        opt = torch.optim.Adam(model.parameters())
        with NaNDetector(model, verbose=False, hazards_every=2 if ask else None) as det:
            for _ in range(4):
                loss = model(torch.rand(4, 3, 8, 8)).square().mean()
                if ask:
                    det.hazards()
                opt.zero_grad()
                loss.backward()
                if ask:
                    det.hazards()
                opt.step()
                if ask:
                    det.hazards()
        assert det.event is None
        return [t.clone() for t in model.state_dict().values()], torch.get_rng_state()

    (a, ra), (b, rb) = run(False), run(True)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and torch.equal(ra, rb)


def test_before_the_first_step_the_next_one_is_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    drift = DRIFTS["exp"]
    model = drift.model()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    with NaNDetector(model, verbose=False) as det:
        assert det.hazards() == []
        assert "no step is at hand" in caplog.text
        drift.loss(model, 0).backward()
        opt.step()
        model(torch.rand(2, 6))
    assert [h.op for h in det.hazards()] == ["exp"], "after the watch: what was found last"


def test_a_detector_that_was_never_attached_says_so() -> None:
    with pytest.raises(NotAttachedError, match="hazards needs a step"):
        NaNDetector(nn.Linear(1, 1)).hazards()


def test_the_step_function_is_replayed_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    drift = DRIFTS["exp"]
    model = drift.model()
    opt = torch.optim.SGD(model.parameters(), lr=1.0)

    def step(i: int) -> Tensor:
        opt.zero_grad()
        loss = drift.loss(model, i)
        loss.backward()
        opt.step()
        return loss

    whole: list[str] = []
    make_all = WholeStep.make_all
    monkeypatch.setattr(WholeStep, "make_all", lambda self: (whole.append("made"), make_all(self))[1])
    with NaNDetector(model, verbose=False) as det:
        for i in range(3):
            det.run_step(step, i)
        before = copy.deepcopy(model.state_dict())
        found = det.hazards()
    assert whole == ["made"]
    assert rank_of(drift, found) == 1
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_hazards_every_warns_once_of_what_is_close() -> None:
    det, _ = trained(DRIFTS["survival"], 8, hazards_every=1)
    told = [w for w in det.warnings if w.kind == "hazard"]
    assert len(told) == 1
    assert told[0].location is not None and told[0].location.line == marked_line(DRIFTS["survival"].guilty)[1]


def test_the_last_batch_is_let_go_when_the_next_forward_begins() -> None:
    model = nn.Linear(4, 1)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False):
        x = torch.rand(3, 4)
        model(x).mean().backward()
        opt.step()
        held = weakref.ref(x)
        del x
        loss = model(torch.rand(3, 4)).mean()
        gc.collect()
        assert held() is None
        del loss


def test_a_refused_replay_is_told_and_gives_nothing() -> None:
    class Reader(nn.Linear):
        def forward(self, rows: Any) -> Tensor:
            return super().forward(torch.stack(list(rows)))

    model = Reader(3, 1)
    with NaNDetector(model, verbose=False) as det:
        model(iter(torch.rand(2, 3))).sum().backward()
        assert det.hazards() == []
    assert any(w.kind == "hazards" and "iterator" in w.message for w in det.warnings)
