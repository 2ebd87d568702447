"""A step that the detector drops never happened: bit for bit, with every optimizer, form and kind of loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _rescue import Net, batch, detector, picture, same, seed_all
from _sacred import LEVELS
from nan_detector import NonFiniteError
from nan_detector._session import session

BAD = (0, 3)  # before the state exists, and after
STEPS = 6

_FORMS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True, "maximize": True}],
    "RMSprop": [{}, {"centered": True, "momentum": 0.9}],
    "Adagrad": [{"lr_decay": 0.1}],
    "Adamax": [{}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
}
_FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def _cases() -> list[Any]:
    cases = []
    for name, forms in _FORMS.items():
        for form in forms:
            kernels: list[dict[str, Any]] = [{}, {"foreach": False}, {"foreach": True}]
            for kernel in kernels + ([{"fused": True}] if name in _FUSED else []):
                options = {**form, **kernel}
                cases.append(
                    pytest.param(name, options, id=f"{name}({','.join(f'{k}={v}' for k, v in options.items())})")
                )
    return cases


Make = Callable[[nn.Module], Any]


def plain(model: nn.Module, optimizer: Any, i: int, bad: bool, drop: bool) -> None:
    """One step of the plain loop; with `drop` it leaves a bad batch's step out by itself."""
    x, y = batch(i, bad)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if not (drop and bad):
        optimizer.step()
    if bad:
        assert all(p.grad is not None for p in model.parameters()), "for the user's own logging"
        assert not all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def with_closure(model: nn.Module, optimizer: Any, i: int, bad: bool, drop: bool) -> None:
    x, y = batch(i, bad)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    loss = closure() if drop and bad else optimizer.step(closure)
    assert bool(loss.isnan()) == bad


def train(make: Make, watched: bool, step: Any = plain, **options: Any) -> dict[str, Any]:
    seed_all()
    model = Net(batch_norm=False)
    optimizer = make(model)
    if not watched:
        for i in range(STEPS):
            step(model, optimizer, i, i in BAD, True)
    else:
        with detector(model, on_nan="skip", replay="off", **options) as det:
            for i in range(STEPS):
                step(model, optimizer, i, i in BAD, False)
        assert det.skipped_steps == len(BAD) and det.event is not None and det.event.weights == "clean"
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    return {**picture(model, optimizer), "gradients": [p.grad for p in model.parameters()]}


@pytest.mark.parametrize(("name", "options"), _cases())
def test_torchs_optimizers(name: str, options: dict[str, Any]) -> None:
    def make(model: nn.Module) -> Any:
        return getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)

    assert same(train(make, False), train(make, True))


@pytest.mark.parametrize("name", list(_FORMS))
def test_closures(name: str) -> None:
    def make(model: nn.Module) -> Any:
        return getattr(torch.optim, name)(model.parameters(), lr=0.01)

    assert same(train(make, False, with_closure), train(make, True, with_closure))


@pytest.mark.parametrize("options", [{"max_iter": 4}, {"max_iter": 1}, {"line_search_fn": "strong_wolfe"}])
def test_lbfgs(options: dict[str, Any]) -> None:
    def step(model: nn.Module, optimizer: Any, i: int, bad: bool, drop: bool) -> None:
        x, y = batch(i, bad)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        if drop and bad:
            closure()
        else:
            optimizer.step(closure)

    def make(model: nn.Module) -> Any:
        model.eval()  # a dropout mask drawn anew in each evaluation makes no sense of a line search
        return torch.optim.LBFGS(model.parameters(), lr=0.1, **options)

    assert same(train(make, False, step), train(make, True, step))


@pytest.mark.parametrize("watch", ["layers", "ops"])
def test_other_levels(watch: str) -> None:
    def make(model: nn.Module) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    assert same(train(make, False), train(make, True, watch=watch))


@pytest.mark.parametrize("stop_on_first", [True, False])
def test_parameter_groups_and_a_parameter_that_has_no_gradient(stop_on_first: bool) -> None:
    def make(model: nn.Module) -> Any:
        groups = [
            {"params": list(model.first.parameters()), "lr": 0.1},
            {"params": [*model.second.parameters(), nn.Parameter(torch.ones(2))], "betas": (0.5, 0.9)},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    assert same(train(make, False), train(make, True, stop_on_first=stop_on_first))


class NoNoneCheck(torch.optim.Optimizer):
    """As users write them: every parameter has a gradient, the counter is a number, and the gradient is written to."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad)
                p.sub_(mean, alpha=group["lr"])
        return loss


@pytest.mark.parametrize("step", [plain, with_closure])
def test_a_users_optimizer_without_any_check(step: Any) -> None:
    def make(model: nn.Module) -> Any:
        return NoNoneCheck(model.parameters())

    assert same(train(make, False, step), train(make, True, step))


class SometimesRaises(NoNoneCheck):
    """Raises before it has done anything, where it is told to."""

    angry = False

    def step(self, closure: Any = None) -> Any:
        if self.angry:
            raise RuntimeError("not today")
        return super().step(closure)


@pytest.mark.parametrize("raises_at", [1, 3])
def test_when_step_raises(raises_at: int) -> None:
    """In a healthy step, and in a bad one that is refused anyway: the next steps are judged and taken as ever."""

    def step(model: nn.Module, optimizer: Any, i: int, bad: bool, drop: bool) -> None:
        optimizer.angry = i == raises_at
        try:
            plain(model, optimizer, i, bad, drop)
        except RuntimeError as error:
            assert str(error) == "not today"
        finally:
            optimizer.angry = False

    def make(model: nn.Module) -> Any:
        return SometimesRaises(model.parameters())

    assert same(train(make, False, step), train(make, True, step))


def test_a_step_tried_again_after_it_raised_is_judged() -> None:
    seed_all()
    model = Net(batch_norm=False)
    optimizer = SometimesRaises(model.parameters())
    with detector(model, on_nan="skip", replay="off") as det:
        for i in range(4):
            optimizer.zero_grad()
            F.cross_entropy(model(batch(i)[0]), batch(i)[1]).backward()
            optimizer.angry = i == 2
            try:
                optimizer.step()
            except RuntimeError:
                optimizer.angry = False
                for p in model.parameters():
                    p.grad = torch.full_like(p, float("nan"))
                optimizer.step()
    assert det.event is not None and det.event.step == 2 and det.skipped_steps == 1
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop"])
def test_raise_leaves_everything_as_it_was(name: str) -> None:
    def make(model: nn.Module) -> Any:
        return getattr(torch.optim, name)(model.parameters(), lr=0.01)

    bare = train(make, False)
    seed_all()
    model = Net(batch_norm=False)
    optimizer = make(model)
    raised = []
    with detector(model, on_nan="raise", replay="off"):
        for i in range(STEPS):
            try:
                plain(model, optimizer, i, i in BAD, False)
            except NonFiniteError:
                raised.append(i)
    assert raised == list(BAD)
    assert same(bare, {**picture(model, optimizer), "gradients": [p.grad for p in model.parameters()]})


def test_of_two_optimizers_only_the_bad_one_is_stopped() -> None:
    def run(watched: bool) -> Any:
        seed_all()
        first, second = nn.Linear(6, 4), nn.Linear(6, 4)
        optimizers = [torch.optim.Adam(first.parameters(), lr=0.01), torch.optim.NAdam(second.parameters(), lr=0.01)]
        det = detector([first, second], on_nan="skip", replay="off") if watched else None
        if det is not None:
            det.attach()
        for i in range(STEPS):
            for which, (model, optimizer) in enumerate(zip((first, second), optimizers, strict=True)):
                bad = which == 1 and i in BAD
                optimizer.zero_grad()
                model(batch(i, bad)[0]).square().mean().backward()
                if watched or not bad:
                    optimizer.step()
        if det is not None:
            det.detach()
            assert det.skipped_steps == len(BAD)
        return [picture(m, o) for m, o in zip((first, second), optimizers, strict=True)]

    assert same(run(False), run(True))


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer within its own step, and follows it with slow weights."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        for p, slow in zip((p for g in self.param_groups for p in g["params"]), self.slow, strict=True):
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)


@pytest.mark.parametrize("options", [{}, {"protect": "full"}])
def test_an_optimizer_around_another_one_is_one_step(options: dict[str, Any]) -> None:
    def run(watched: bool) -> Any:
        seed_all()
        model = Net(batch_norm=False)
        optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))
        det = detector(model, on_nan="skip", stop_on_first=False, replay="off", **options)
        if watched:
            det.attach()
        for i in range(STEPS):
            plain(model, optimizer, i, i in BAD, not watched)
        det.detach()
        if watched:
            assert [e.step for e in det.all_events] == list(BAD) and det.skipped_steps == len(BAD)
        return picture(model, optimizer.base), optimizer.slow

    assert same(run(False), run(True))


@pytest.mark.parametrize("watch", LEVELS)
def test_what_an_optimizer_does_after_the_one_within_it_is_not_recorded(watch: str) -> None:
    model = Net(batch_norm=False)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.01))
    with detector(model, watch=watch):
        for i in range(4):
            plain(model, optimizer, i, False, False)
            current = session()
            assert not [e for e in current.tape.entries if e.writes] and (current.paused, current.stepping) == (0, [])
            assert current.mode is not None and current.step_record is None


class Sharpness(torch.optim.Optimizer):
    """Climbs, evaluates the closure there, and comes back before another optimizer steps (SAM)."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        closure = torch.enable_grad()(closure)
        closure()
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        steps = [0.05 * p.grad for p in parameters]
        torch._foreach_add_(parameters, steps)
        self.zero_grad()
        closure()
        torch._foreach_sub_(parameters, steps)
        self.base.step()


def test_gradients_dropped_within_a_step_do_not_end_it() -> None:
    seed_all()
    model = Net(batch_norm=False)
    optimizer = Sharpness(torch.optim.SGD(model.parameters(), lr=0.01))
    with detector(model) as det:
        for i in range(STEPS):
            x, y = batch(i, False)

            def closure(x: Any = x, y: Any = y) -> Any:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
            optimizer.zero_grad()
    # Two evaluations and the step itself were looked at, and the step was counted once.
    assert det.history.steps.tolist() == [i for i in range(STEPS) for _ in range(3)]


def test_a_subclass_that_calls_super_is_one_step() -> None:
    """PyTorch's hooks fire twice in such a step, once a class that has been instantiated by itself."""
    torch.optim.Adam([torch.zeros(1)])

    class Clamped(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p.data.clamp_(-5, 5)
            return super().step(closure)

    seed_all()
    model = Net(batch_norm=False)
    optimizer = Clamped(model.parameters(), lr=0.01)
    with detector(model, on_nan="skip", stop_on_first=False, replay="off") as det:
        for i in range(STEPS):
            plain(model, optimizer, i, i in BAD, False)
    assert [e.step for e in det.all_events] == list(BAD) and det.skipped_steps == len(BAD)
    assert len(det.history.steps) == STEPS
