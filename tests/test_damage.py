"""Finite gradients went in and non-finite weights came out: the optimizer's step is named, although found later."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from _rescue import Net, batch, detector, line_of, marked, seed_all
from nan_detector import NaNDetector, NaNEvent, NonFiniteError

LEVELS = ("step", "layers", "ops")


class Scorer(nn.Module):
    """One linear layer whose gradient is the mean of what it is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def constant(i: int, dtype: torch.dtype) -> Tensor:
    """The same batch in each step: the variance of the gradient is nothing but rounding."""
    g = torch.Generator().manual_seed(3)
    return (torch.randn(16, 8, generator=g) * 300 + 900).to(dtype)


def zero_column(i: int, dtype: torch.dtype) -> Tensor:
    """A feature that is always 0, as a word that never comes: its gradient is exactly 0."""
    g = torch.Generator().manual_seed(i)
    x = torch.randn(16, 8, generator=g)
    x[:, 2] = 0
    return x.to(dtype)


def huge(i: int, dtype: torch.dtype) -> Tensor:
    return torch.full((16, 8), 1e25 if i == 3 else 1.0, dtype=dtype)


class Ratio(torch.optim.Optimizer):
    """Adam as a user writes it, with the root in the wrong place: inf / inf where the second moment overflows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-6})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            mean = state.setdefault("exp_avg", torch.zeros_like(p)).mul_(0.9).add_(p.grad, alpha=0.1)
            square = state.setdefault("exp_avg_sq", torch.zeros_like(p)).mul_(0.99)
            square.addcmul_(p.grad, p.grad, value=0.01)  # <-- here
            p.sub_(mean * square.sqrt() / (square + 1e-8), alpha=1e-6)


class Kind:
    """One way in which an optimizer spoils weights by itself."""

    def __init__(
        self,
        make: Callable[[Any], Any],
        data: Callable[[int, torch.dtype], Tensor],
        cause: str,
        op: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.make, self.data, self.cause, self.op, self.dtype = make, data, cause, op, dtype


KINDS = {
    "centered rmsprop": Kind(
        lambda p: torch.optim.RMSprop(p, lr=1e-6, alpha=0.5, centered=True), constant, "sqrt_of_negative", "sqrt"
    ),
    "half adam": Kind(
        lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-8), zero_column, "eps_underflow", "addcdiv", torch.float16
    ),
    "second moment": Kind(lambda p: Ratio(p), huge, "optimizer_state_overflow", "addcmul"),
}


def step(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()  # <-- here


def first_damage(kind: Kind) -> int:
    """The step at which the bare training spoils its weights."""
    seed_all()
    model = Scorer(kind.dtype)
    optimizer = kind.make(model.parameters())
    for i in range(60):
        step(model, optimizer, kind.data(i, kind.dtype))
        if not all(bool(p.isfinite().all()) for p in model.parameters()):
            return i
    raise AssertionError("this training stays finite")


def watched(kind: Kind, steps: int, **options: Any) -> tuple[nn.Module, NaNDetector]:
    seed_all()
    model = Scorer(kind.dtype)
    optimizer = kind.make(model.parameters())
    with detector(model, **options) as det:
        for i in range(steps):
            det.set_batch(i)
            step(model, optimizer, kind.data(i, kind.dtype))
            if det.triggered:
                break
    return model, det


def check(event: NaNEvent | None, kind: Kind, at: int) -> None:
    assert event is not None
    assert (event.step, event.phase, event.severity) == (at, "optimizer", "error"), event
    assert event.cause is not None and event.cause.code == kind.cause, event.cause
    assert (event.op or "").strip("_") in kind.op.split()
    assert line_of(event) == marked(
        inspect.unwrap(Ratio.step) if kind.op == "addcmul" else step
    )  # the innermost line of the user's
    assert "head." in (event.tensor_name or "")
    assert event.layer_name is None and event.verdict == "optimizer" and event.reproduced == "yes"


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("name", list(KINDS))
def test_the_next_gate_names_the_step_before_it(name: str, watch: str) -> None:
    kind = KINDS[name]
    at = first_damage(kind)
    _, det = watched(kind, at + 5, watch=watch)
    check(det.event, kind, at)
    assert det.event is not None and det.event.weights == f"damaged since step {at}"
    assert any(f"found at step {at + 1}" in note for note in det.event.notes)
    assert det.last_good_step == at


@pytest.mark.parametrize("name", list(KINDS))
def test_the_end_of_the_watch_names_the_last_step(name: str) -> None:
    kind = KINDS[name]
    at = first_damage(kind)
    _, det = watched(kind, at + 1)
    check(det.event, kind, at)
    assert det.event is not None and det.event.weights == f"damaged since step {at}"


def test_the_end_raises_where_the_policy_does() -> None:
    kind = KINDS["centered rmsprop"]
    at = first_damage(kind)
    with pytest.raises(NonFiniteError, match="in the optimizer") as caught:
        watched(kind, at + 1, on_nan="raise")
    assert caught.value.event is not None and caught.value.event.step == at


def test_rollback_mends_what_the_optimizer_did() -> None:
    kind = KINDS["half adam"]
    at = first_damage(kind)
    model, det = watched(kind, at + 3, on_nan="rollback")
    check(det.event, kind, at)
    assert det.event is not None and det.event.weights == "restored"
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_skip_says_that_it_cannot_help() -> None:
    kind = KINDS["centered rmsprop"]
    _, det = watched(kind, first_damage(kind) + 3, on_nan="skip")
    assert det.event is not None and any("skipping cannot mend" in note for note in det.event.notes)


@pytest.mark.parametrize("form", [{"foreach": True}, {"foreach": False}])
def test_every_form_of_a_torch_optimizer(form: dict[str, Any]) -> None:
    kind = copy.copy(KINDS["centered rmsprop"])
    kind.make = lambda p: torch.optim.RMSprop(p, lr=1e-6, alpha=0.5, centered=True, **form)
    at = first_damage(kind)
    _, det = watched(kind, at + 3)
    check(det.event, kind, at)


class Normalised(torch.optim.Optimizer):
    """Divides by the norm of its gradient, as a user writes it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()  # <-- here


def test_a_users_optimizer_whose_gradient_vanishes() -> None:
    seed_all()
    model = Scorer()
    optimizer = Normalised(model.parameters())
    with detector(model) as det:
        for i in range(4):
            x = torch.randn(16, 8)
            optimizer.zero_grad()
            (model(x) * (0.0 if i == 2 else 1.0)).mean().backward()
            optimizer.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.phase) == (2, "optimizer")
    assert event.op == "div" and event.cause is not None and event.cause.code == "division_by_zero"
    assert line_of(event) == marked(inspect.unwrap(Normalised.step))


class Belief(torch.optim.Optimizer):
    """Keeps E[g] and E[g²] under names of its own, over windows of two lengths: their difference is no variance."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            slow = state.setdefault("slow", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            square = state.setdefault("square", torch.zeros_like(p)).lerp_(p.grad * p.grad, 0.05)
            p.sub_(1e-3 * slow / ((square - slow * slow).sqrt() + 1e-8))  # <-- here


def test_a_users_optimizer_is_taken_again_with_the_running_mean_that_it_keeps() -> None:
    seed_all()
    model = Scorer()
    optimizer = Belief(model.parameters())
    with detector(model) as det:
        for i in range(60):
            step(model, optimizer, constant(i, torch.float32))
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.phase, event.op, event.reproduced) == ("optimizer", "sqrt", "yes")
    assert line_of(event) == marked(inspect.unwrap(Belief.step))
    assert event.cause is not None and event.cause.code == "sqrt_of_negative"
    assert event.cause.fix == "x.clamp_min(0).sqrt() in the optimizer's step"
    assert event.weights == f"damaged since step {event.step}"


def test_a_step_that_cannot_be_taken_again_is_still_named() -> None:
    """Plain SGD keeps nothing to take the step from again: which operation it was is not known, and said so."""
    seed_all()
    model = Scorer()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
    with detector(model) as det:
        for i in range(3):
            step(model, optimizer, torch.full((16, 8), 1e10 if i == 1 else 1e-35))
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.phase, event.op) == (1, "optimizer", "step")
    assert event.reproduced == "no" and line_of(event) == marked(step)
    assert any("is not known" in note for note in event.notes)


def test_so_it_is_where_another_optimizer_steps_after_it() -> None:
    """Its row of the history, which has the norms of other gradients, is of the same step."""
    seed_all()
    model = Scorer()
    optimizers = [torch.optim.SGD([model.head.weight], lr=1e30), torch.optim.SGD([model.head.bias], lr=1e-3)]
    with detector(model) as det:
        for i in range(3):
            for o in optimizers:
                o.zero_grad()
            model(torch.full((16, 8), 1e10 if i == 1 else 1e-35)).mean().backward()
            for o in optimizers:
                o.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.phase, event.op) == (1, "optimizer", "step"), event.notes


class Counting(torch.optim.Optimizer):
    """Spoils a weight in its fourth step, by what it keeps outside of its state: no copy of it does that again."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})
        self.taken = [0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            p.sub_(p.grad, alpha=1e-3)
            if self.taken[0] == 3:
                p.view(-1)[0] = float("inf")
        self.taken[0] += 1


@pytest.mark.parametrize("options", [{}, {"on_nan": "skip"}, {"on_nan": "warn"}, {"replay": "off"}], ids=str)
def test_damage_that_nothing_explains_is_dated_to_the_step_that_did_it(options: dict[str, str]) -> None:
    """Not to the one that met it: a checkpoint from in between is damaged as well."""
    seed_all()
    model = Scorer()
    optimizer = Counting(model.parameters())
    with detector(model, **options) as det:
        for i in range(6):
            step(model, optimizer, constant(i, torch.float32))
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.weights) == (4, "damaged since step 3")
    assert det.last_good_step == 3
    if not options:
        assert "weights are damaged since step 3: head.weight was not finite before step 4 began" in str(event)


def test_a_training_that_notices_the_bad_weights_itself() -> None:
    kind = KINDS["centered rmsprop"]
    at = first_damage(kind)
    seed_all()
    model = Scorer()
    optimizer = kind.make(model.parameters())
    det = detector(model)
    with pytest.raises(ValueError, match="the loss"), det:
        for i in range(at + 3):
            loss = model(constant(i, torch.float32)).mean()
            if not bool(loss.isfinite()):
                raise ValueError("the loss is bad")
            step(model, optimizer, constant(i, torch.float32))
    check(det.event, kind, at)
    assert det.event is not None and det.event.weights == f"damaged since step {at}"


# ------------------------------------------------------------------------------------------------------- state


def poisoned(key: str, value: float = float("nan")) -> tuple[Scorer, Any]:
    """A model and an optimizer that has loaded a checkpoint with a bad value."""
    seed_all()
    model = Scorer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    step(model, optimizer, torch.randn(16, 8))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0][key][0, 3] = value
    optimizer.load_state_dict(saved)
    return model, optimizer


@pytest.mark.parametrize(
    ("key", "value", "cause"),
    [
        ("exp_avg", float("nan"), "optimizer_state_non_finite"),
        ("exp_avg", float("inf"), "optimizer_state_non_finite"),
        ("exp_avg_sq", float("inf"), "optimizer_state_overflow"),
        ("exp_avg_sq", float("nan"), "optimizer_state_non_finite"),
    ],
)
@pytest.mark.parametrize("watch", LEVELS)
def test_a_checkpoint_with_bad_moments_is_seen_before_the_first_step(
    watch: str, key: str, value: float, cause: str
) -> None:
    model, optimizer = poisoned(key, value)
    before = [p.detach().clone() for p in model.parameters()]
    with detector(model, watch=watch) as det:
        step(model, optimizer, torch.randn(16, 8))
        event = det.event
    assert event is not None and (event.step, event.phase, event.weights) == (0, "optimizer", "clean")
    assert event.cause is not None and event.cause.code == cause
    assert event.tensor_name == f"optimizer.state[head.weight][{key!r}]"
    assert event.output is not None and event.output.bad_count == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_checkpoint_that_is_loaded_while_the_watch_is_on() -> None:
    model, bad = poisoned("exp_avg")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with detector(model, on_nan="skip", stop_on_first=False) as det:
        for i in range(5):
            if i == 3:
                optimizer.load_state_dict(bad.state_dict())
            step(model, optimizer, torch.randn(16, 8))
    assert [e.step for e in det.all_events] == [3, 4], "as long as the state is bad, no step is taken with it"
    assert all(e.phase == "optimizer" for e in det.all_events)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_state_that_is_spoilt_in_place_is_blamed_for_the_weights() -> None:
    seed_all()
    model = Scorer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with detector(model) as det:
        for i in range(5):
            step(model, optimizer, torch.randn(16, 8))
            if i == 0:  # before the look in passing, every fourth step
                optimizer.state[model.head.weight]["exp_avg"].view(-1)[1] = float("nan")
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.phase) == (1, "optimizer")
    assert event.tensor_name == "optimizer.state[head.weight]['exp_avg']"
    assert event.cause is not None and event.cause.code == "optimizer_state_non_finite"
    assert event.weights == "damaged since step 1"


class Extremes(torch.optim.SGD):
    """Remembers the least gradient seen, which begins at infinity: meant to be so."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                least = self.state[p].setdefault("least", torch.full_like(p, float("inf")))
                torch.minimum(least, p.detach(), out=least) if p.sum() > 1e9 else None
        return super().step(closure)


@pytest.mark.parametrize("protect", ["gate", "full"])
def test_infinities_that_a_users_optimizer_means(protect: str) -> None:
    seed_all()
    model = Scorer()
    optimizer = Extremes(model.parameters(), lr=0.01)
    step(model, optimizer, torch.randn(16, 8))
    with detector(model, protect=protect) as det:
        for _ in range(3):
            step(model, optimizer, torch.randn(16, 8))
    assert det.event is None


# ---------------------------------------------------------------------------------------------- not the optimizer's


def test_weights_that_were_bad_before_the_run() -> None:
    seed_all()
    model = Scorer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.no_grad():
        model.head.weight[0, 1] = float("nan")
    with detector(model) as det:
        step(model, optimizer, torch.randn(16, 8))
    assert det.event is not None and (det.event.phase, det.event.step) == ("state", 0)


def test_a_row_that_was_bad_long_before_it_was_used() -> None:
    """Nothing says that the last step did it: an embedding's other rows are not looked at by any step."""
    seed_all()
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with torch.no_grad():
        model[0].weight[7] = float("nan")
    with detector(model) as det:
        for i in range(5):
            step(model, optimizer, torch.tensor([1, 2, 3 if i < 3 else 7]))
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.phase) == (3, "state")
    assert event.tensor_name == "0.weight"


def test_a_refused_step_is_not_blamed_for_what_comes_later() -> None:
    """The weights were seen to be finite when the bad batch came; what is bad afterwards was not made by a step."""
    seed_all()
    model = Net(batch_norm=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with detector(model, on_nan="skip", stop_on_first=False) as det:
        for i in range(5):
            x, y = batch(i, bad=i == 2)
            if i == 3:
                model.second.weight.detach().numpy()[0, 0] = float("nan")
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert [(e.step, e.phase) for e in det.all_events[:2]] == [(2, "data"), (3, "state")]


def test_an_ordinary_run_ends_without_a_word() -> None:
    seed_all()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with detector(model) as det:
        for i in range(6):
            x, y = batch(i)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert det.event is None and det.skipped_steps == 0 and det.last_good_step == 5
