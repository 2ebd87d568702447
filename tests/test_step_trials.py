"""Trials of an optimizer's own step: what each of them answers yes and no to, and that nothing of it stays."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import _sacred  # noqa: F401  # makes PyTorch wrap its optimizers before a test is held against how they were
from _rescue import detector, seed_all
from nan_detector import NaNDetector, NaNEvent, Trial, _step_trials, _trial_lab, detect_nan
from nan_detector._errors import NonFiniteError
from nan_detector._eventlog import read_log
from nan_detector._summary import rows
from nan_detector._trial_plan import StepFacts, plan_of_step
from nan_detector._verdict import shown_by

NAN, INF = float("nan"), float("inf")


class Scorer(nn.Module):
    """One linear layer whose gradient is the mean of what it is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def noise(i: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(i)).to(dtype)


def constant(i: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same batch in each step: the variance of the gradient is nothing but rounding."""
    return noise(3) * 300 + 900


def zero_column(i: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = noise(i)
    x[:, 2] = 0
    return x.to(dtype)


def huge(i: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((16, 8), 1e25 if i == 3 else 1.0)


def train(
    make: Callable[[Any], Any],
    data: Callable[[int, torch.dtype], Tensor] = noise,
    dtype: torch.dtype = torch.float32,
    before: Callable[[int, Any], None] = lambda i, optimizer: None,
    steps: int = 60,
    **options: Any,
) -> NaNEvent:
    """Train until the event; `before` is called before each step."""
    seed_all()
    model = Scorer(dtype)
    optimizer = make(model.parameters())
    with detector(model, **options) as det:
        for i in range(steps):
            det.set_batch(i)
            optimizer.zero_grad()
            model(data(i, dtype)).mean().backward()
            before(i, optimizer)
            optimizer.step()
            if det.triggered:
                break
    assert det.event is not None
    return det.event


def tried(event: NaNEvent, name: str) -> Trial:
    found = [t for t in event.trials if t.name == name]
    assert len(found) == 1, (event.trials, event.notes)
    return found[0]


def row(event: NaNEvent, label: str) -> str:
    return "\n".join(line for r in rows(event) if r.label == label for line in r.lines)


def at(step: int, key: str, value: Any) -> Callable[[int, Any], None]:
    """A schedule that sets `key` of every group at one step."""

    def schedule(i: int, optimizer: Any) -> None:
        if i == step:
            for group in optimizer.param_groups:
                group[key] = value

    return schedule


PROTECTED = pytest.mark.parametrize("protect", ["gate", "full"])

# -- the optimizer's arithmetic ----------------------------------------------------------------------------------------


@PROTECTED
def test_a_variance_by_cancellation(protect: str) -> None:
    event = train(lambda p: torch.optim.RMSprop(p, lr=1e-6, alpha=0.5, centered=True), constant, protect=protect)
    assert tried(event, "again").finite is False
    assert (tried(event, "fix").finite, tried(event, "fix").detail) == (
        True,
        "centered=False: weights and state are finite",
    )
    assert tried(event, "eps").finite is False, "torch adds it after the root"
    assert event.verdict == "optimizer" and shown_by(event) == tried(event, "fix")
    assert row(event, "fix") == "centered=False      tried on this step: weights and state are finite"
    assert row(event, "tried") == "with a larger eps: not finite"


@PROTECTED
def test_an_eps_that_is_nothing_in_float16(protect: str) -> None:
    event = train(lambda p: torch.optim.Adam(p, lr=1e-3), zero_column, torch.float16, protect=protect)
    assert tried(event, "fix").detail == "eps=1e-4: weights and state are finite"
    assert tried(event, "float32").finite is True
    assert "eps=1e-4" in row(event, "fix") and "in float32: finite" in row(event, "tried")


@PROTECTED
def test_a_second_moment_that_overflows(protect: str) -> None:
    event = train(lambda p: torch.optim.Adam(p, lr=1e-3), huge, protect=protect, steps=4)
    assert event.cause is not None and event.cause.code == "optimizer_state_overflow"
    assert tried(event, "again").finite is False
    fix = tried(event, "fix")
    assert (fix.finite, fix.detail) == (True, "clip_grad_norm_(params, 1.0): weights and state are finite")


class Normalised(torch.optim.Optimizer):
    """Divides by the norm of its gradient, as a user writes it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "eps": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / (p.grad.norm() + group["eps"])


def vanishing(i: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return noise(i) * (i != 3)


def test_a_users_optimizer_and_its_eps() -> None:
    event = train(Normalised, vanishing, protect="full")
    assert event.op == "div" and tried(event, "again").finite is False
    assert (tried(event, "eps").finite, tried(event, "eps").detail) == (True, "eps=1e-8")
    assert tried(event, "clipped").detail == "the gradients have norm 1 already", "that of the bias is left"
    assert event.verdict == "optimizer" and shown_by(event) == tried(event, "eps")
    assert "(tried with a larger eps)" in row(event, "verdict")


class Wild(torch.optim.SGD):
    """Overflows in its fast form only."""

    def step(self, closure: Any = None) -> Any:
        if self.param_groups[0]["foreach"]:
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.mul_(1e38).mul_(1e38)
        return super().step(closure)


def test_a_fast_form_that_does_it_alone() -> None:
    event = train(lambda p: Wild(p, lr=0.1, foreach=True), protect="full")
    assert event.reproduced == "no", "the operation is looked for step by step"
    assert tried(event, "again").finite is False and tried(event, "clipped").finite is False
    assert tried(event, "unfused").finite is True and shown_by(event) == tried(event, "unfused")


# -- settings and state before the step --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.003, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.003),
        lambda p: torch.optim.RMSprop(p, lr=0.003),
    ],
    ids=["sgd", "adam", "rmsprop"],
)
def test_the_last_finite_learning_rate(make: Callable[[Any], Any], bad: float) -> None:
    event = train(make, before=at(4, "lr", bad))
    assert event.cause is not None and event.cause.code == "learning_rate_non_finite"
    assert tried(event, "again").finite is False
    assert (tried(event, "rate").finite, tried(event, "rate").detail) == (True, "lr=0.003")
    assert "with the last finite learning rate: finite (lr=0.003)" in row(event, "tried")
    assert event.weights == "clean" and event.verdict == "optimizer" and shown_by(event) == tried(event, "rate")


def test_no_rate_is_known_in_the_first_step() -> None:
    event = train(lambda p: torch.optim.SGD(p, lr=0.1), before=at(0, "lr", NAN))
    trial = tried(event, "rate")
    assert (trial.finite, trial.detail) == (None, "no step before had a learning rate that is finite and above 0")


def test_an_option_as_it_was_at_first() -> None:
    event = train(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.02), before=at(2, "weight_decay", NAN))
    assert (tried(event, "option").finite, tried(event, "option").detail) == (True, "weight_decay=0.02")


def test_one_of_two_options_of_a_pair() -> None:
    event = train(lambda p: torch.optim.Adam(p, lr=0.01), before=at(2, "betas", (0.9, NAN)))
    assert (tried(event, "option").finite, tried(event, "option").detail) == (True, "betas=(0.9, 0.999)")


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_that_were_loaded_bad(key: str) -> None:
    def spoil(i: int, optimizer: Any) -> None:
        if i == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][0][key][0, 3] = NAN
            optimizer.load_state_dict(saved)

    event = train(lambda p: torch.optim.Adam(p, lr=0.01), before=spoil)
    assert tried(event, "again").finite is False
    assert tried(event, "fix").detail == "optimizer.state.clear(): weights and state are finite"
    assert tried(event, "finite_state").finite is True
    assert "optimizer.state.clear()" in row(event, "fix")


class Kept(torch.optim.SGD):
    """Needs its state: it is made with the optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for p in self.param_groups[0]["params"]:
            self.state[p]["exp_avg"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["exp_avg"].mul_(0.9).add_(p.grad), alpha=0.1)


def test_a_users_optimizer_that_cannot_do_without_its_state() -> None:
    def spoil(i: int, optimizer: Any) -> None:
        if i == 3:
            saved = copy.deepcopy(optimizer.state_dict())
            saved["state"][0]["exp_avg"][0, 3] = NAN
            optimizer.load_state_dict(saved)

    event = train(Kept, before=spoil)
    fix = tried(event, "fix")
    assert (fix.finite, fix.detail) == (None, "the step raised KeyError: 'exp_avg'")
    assert tried(event, "finite_state").finite is True


class Closing(torch.optim.SGD):
    """Cannot step without a closure."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


def test_a_step_that_needs_its_closure() -> None:
    seed_all()
    model = Scorer()
    optimizer = Closing(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(noise(0)).mean()
        loss.backward()
        return loss

    with detector(model) as det:
        optimizer.step(closure)
        optimizer.param_groups[0]["lr"] = NAN
        optimizer.step(closure)
    assert det.event is not None
    trial = tried(det.event, "rate")
    assert trial.finite is None and trial.detail.startswith("the step raised TypeError")


# -- when nothing can be tried -----------------------------------------------------------------------------------------


def test_no_replay_no_trials() -> None:
    event = train(lambda p: torch.optim.SGD(p, lr=0.1), before=at(2, "lr", NAN), replay="off")
    assert event.trials == () and event.verdict == "optimizer"


def test_a_bug_in_a_trial_costs_the_trials_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(lab: Any, planned: Any) -> Trial:
        raise RuntimeError("a bug")

    monkeypatch.setenv("NAN_DETECTOR_STRICT", "0")
    monkeypatch.setattr(_step_trials, "RUNNERS", {**_step_trials.RUNNERS, "rate": fails})
    event = train(lambda p: torch.optim.SGD(p, lr=0.1), before=at(2, "lr", NAN))
    assert (event.weights, event.trials) == ("clean", ())
    assert "the trials failed: RuntimeError: a bug" in event.notes


def test_a_spent_budget_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        """A clock on which every look takes one second."""

        now = 0.0

        def perf_counter(self) -> float:
            self.now += 1.0
            return self.now

    clock = Clock()
    for module in (_step_trials, _trial_lab):
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "MAX_RUNS", 2)
    event = train(lambda p: torch.optim.SGD(p, lr=0.1), before=at(2, "lr", NAN))
    assert tried(event, "rate").detail == "the budget of 2 steps was spent"


def test_the_event_is_in_the_log_before_its_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[NaNEvent] = []
    original = _step_trials._run_all

    def looked_at(lab: Any) -> tuple[Trial, ...]:
        (file,) = tmp_path.glob("*.jsonl")
        before.extend(r for r in read_log(file) if isinstance(r, NaNEvent))
        return original(lab)

    monkeypatch.setattr(_step_trials, "_run_all", looked_at)
    event = train(lambda p: torch.optim.SGD(p, lr=0.1), before=at(2, "lr", NAN), log_dir=str(tmp_path))
    assert before[-1].event_id == event.event_id and before[-1].cause == event.cause is not None
    assert before[-1].trials == () and event.trials


def test_the_same_story_is_tried_three_times_in_a_run() -> None:
    seed_all()
    model = Scorer()
    optimizer = torch.optim.SGD(model.parameters(), lr=NAN)
    with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
        for i in range(5):
            optimizer.zero_grad()
            model(noise(i)).mean().backward()
            optimizer.step()
    assert [bool(e.trials) for e in det.all_events] == [True] * 3 + [False] * 2
    assert "not tried: the same was tried 3 times in this run" in det.all_events[-1].notes


def test_what_detect_nan_finds_is_not_tried_and_the_report_has_no_row_for_it() -> None:
    with pytest.raises(NonFiniteError) as caught, detect_nan():
        torch.sqrt(torch.tensor([-1.0], requires_grad=True)).sum().backward()
    event = caught.value.event
    assert event is not None and event.trials == () and row(event, "tried") == ""
    assert "tried" not in row(event, "fix")


# -- nothing of it stays -----------------------------------------------------------------------------------------------


class Shadow:
    """An average of the weights that a user's optimizer keeps in an object of its own."""

    def __init__(self) -> None:
        self.updates = 0
        self.weights: list[Tensor] = []

    @torch.no_grad()
    def update(self, parameters: list[Tensor]) -> None:
        self.updates += 1
        if not self.weights:
            self.weights = [p.clone() for p in parameters]
        for mean, p in zip(self.weights, parameters, strict=True):
            mean.lerp_(p, 0.1)


class Noisy(torch.optim.Optimizer):
    """Draws random numbers of both kinds, counts, and updates an object that a copy of it shares."""

    calls = 0

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.shadow = Shadow()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        Noisy.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean = state.setdefault("exp_avg", torch.zeros_like(p)).mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(mean + 0.01 * torch.randn_like(p) + 0.01 * random.random(), alpha=group["lr"])
        self.shadow.update([p for group in self.param_groups for p in group["params"]])


MAKERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05, centered=True),
    "users": Noisy,
}


def everything_after(make: Callable[[Any], Any], watch: str, **options: Any) -> tuple[list[Any], NaNEvent | None]:
    """Train on six batches; the learning rate of the fourth is NaN, and its step is never taken.

    A step that is refused still calls the code of a user's optimizer, on a stand-in: what that draws, counts and writes
    elsewhere, it does with trials and without. `watch` says with which: "trials", "no trials", or "none" at all.
    """
    watched = watch != "none"
    seed_all()
    Noisy.calls = 0
    model = Scorer()
    optimizer = make(model.parameters())
    det = NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False, **options)
    if watched:
        det.attach()
    try:
        for i in range(6):
            optimizer.zero_grad()
            model(noise(i)).mean().backward()
            for group in optimizer.param_groups:
                group["lr"] = NAN if i == 3 else 0.05
            if watched or i != 3:
                optimizer.step()
    finally:
        det.detach()
    held = [t for p in model.parameters() for t in [p.detach(), p.grad, *optimizer.state[p].values()]]
    if isinstance(optimizer, Noisy):
        held += [*optimizer.shadow.weights, optimizer.shadow.updates, optimizer.calls, Noisy.calls]
    return [*held, torch.get_rng_state(), torch.tensor(random.getstate()[1])], det.event


@PROTECTED
@pytest.mark.parametrize("name", list(MAKERS))
def test_after_the_trials_the_training_goes_on_bit_for_bit(name: str, protect: str) -> None:
    if name == "users":
        expected, _ = everything_after(MAKERS[name], "no trials", protect=protect, replay="off")
    else:
        expected, _ = everything_after(MAKERS[name], "none")
    got, event = everything_after(MAKERS[name], "trials", protect=protect)
    assert event is not None and [t.finite for t in event.trials] == [False, True], event
    for a, b in zip(expected, got, strict=True):
        assert torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0)) if isinstance(a, Tensor) else a == b


def test_what_the_step_prints_and_warns_of_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    class Talking(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            print("a step")
            return super().step(closure)

    event = train(lambda p: Talking(p, lr=0.1), before=at(2, "lr", NAN))
    assert tried(event, "rate").finite is True
    assert capsys.readouterr().out.count("a step") == 3, "the refused step is called on a stand-in"


# -- the plan ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "names"),
    [
        (StepFacts(option="lr", rate=0.1, half=True, fast=True), "again rate"),
        (StepFacts(option="eps"), "again option"),
        (StepFacts("optimizer_state_non_finite", state=True, fixable=True), "again fix finite_state"),
        (StepFacts("eps_underflow", fixable=True, eps=True, half=True), "again fix float32"),
        (StepFacts("sqrt_of_negative", fixable=True, eps=True), "again fix eps"),
        (StepFacts("optimizer_state_overflow", fixable=True, half=True), "again fix float32"),
        (StepFacts("division_by_zero", eps=True, fast=True), "again eps clipped unfused"),
        (StepFacts(), "again clipped"),
    ],
)
def test_what_is_planned(facts: StepFacts, names: str) -> None:
    assert " ".join(p.name for p in plan_of_step(facts)) == names
