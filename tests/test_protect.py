"""`protect="full"`: what an optimizer's own arithmetic did is undone right after the step, under every policy."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _rescue import Net, batch, detector, line_of, marked, picture, same, seed_all
from nan_detector import NaNEvent, NonFiniteError

LEVELS = ("step", "layers", "ops")
POLICIES = ("stop", "warn", "skip", "rollback", lambda event: "skip")


class Fussy(torch.optim.SGD):
    """SGD with momentum that divides by 0 when it meets the gradient it waits for, after it has moved everything."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.spoil = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        if self.spoil:
            for p in self.param_groups[0]["params"]:
                p.div_(p.grad - p.grad)  # <-- here
        return loss


class Training:
    def __init__(self, make: Callable[[Any], Any] = Fussy) -> None:
        seed_all()
        self.model = Net()
        self.optimizer = make(self.model.parameters())
        self.before: dict[int, Any] = {}
        self.after: dict[int, Any] = {}

    def step(self, i: int, spoil: bool = False) -> None:
        x, y = batch(i)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.before[i] = picture(self.model, self.optimizer)
        self.optimizer.spoil = spoil
        try:
            self.optimizer.step()
        finally:
            self.optimizer.spoil = False
            self.after[i] = picture(self.model, self.optimizer)


def check(event: NaNEvent | None, step: int) -> None:
    assert event is not None
    assert (event.step, event.phase, event.weights, event.reproduced) == (step, "optimizer", "restored", "yes")
    assert event.op == "div" and line_of(event) == marked(inspect.unwrap(Fussy.step))
    assert event.cause is not None and event.cause.code == "division_by_zero"
    assert event.tensor_name == "first.weight"


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("on_nan", POLICIES)
def test_the_step_is_undone_and_the_training_goes_on(on_nan: Any, watch: str) -> None:
    run = Training()
    with detector(run.model, protect="full", on_nan=on_nan, snapshot_every=1, watch=watch) as det:
        for i in range(7):
            run.step(i, spoil=i == 3)
            assert det.triggered == (i >= 3), "it is seen at once"
    assert len(det.all_events) == 1
    check(det.event, 3)
    assert same(run.after[3], run.before[3])
    assert not same(run.after[6], run.before[3])
    assert all(bool(t.isfinite().all()) for t in run.model.state_dict().values()), "no statistic was spoilt either"
    if on_nan != "rollback":
        bare = Training()
        for i in range(7):
            if i == 3:  # the loop without that step
                bare.optimizer.zero_grad()
                F.cross_entropy(bare.model(batch(i)[0]), batch(i)[1]).backward()
            else:
                bare.step(i)
        assert same(picture(run.model, run.optimizer), picture(bare.model, bare.optimizer))


def test_raise_comes_out_of_the_step_with_the_weights_restored() -> None:
    run = Training()
    with detector(run.model, protect="full", on_nan="raise") as det:
        for i in range(4):
            if i < 3:
                run.step(i)
                continue
            with pytest.raises(NonFiniteError, match="in the optimizer") as caught:
                run.step(i, spoil=True)
            run.step(i + 1)
    check(caught.value.event, 3)
    assert same(run.after[3], run.before[3]) and len(det.all_events) == 1
    assert not same(run.after[4], run.before[3])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-8),
        lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-8, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-8, foreach=False),
    ],
)
def test_the_first_step_of_half_precision_adam(make: Callable[[Any], Any]) -> None:
    """The state that the step made is gone as well: the next one begins where this one did."""
    seed_all()
    model = nn.Linear(8, 1, dtype=torch.float16)
    optimizer = make(model.parameters())
    x = torch.randn(16, 8).half()
    x[:, 2] = 0
    before = [p.detach().clone() for p in model.parameters()]
    with detector(model, protect="full", on_nan="skip", stop_on_first=False) as det:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).mean().backward()
            optimizer.step()
    assert [e.step for e in det.all_events] == [0, 1, 2]
    assert all(e.cause is not None and e.cause.code == "eps_underflow" for e in det.all_events)
    assert all(e.weights == "restored" and e.reproduced == "yes" for e in det.all_events)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state and det.skipped_steps == 3


def test_a_second_moment_that_overflows_is_undone_although_the_weights_are_finite() -> None:
    """0.1 g / sqrt(inf) is 0: the weight would never move again, and nothing would show it."""
    seed_all()
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with detector(model, protect="full", on_nan="skip") as det:
        for i in range(4):
            optimizer.zero_grad()
            model(torch.full((16, 8), 1e25 if i == 2 else 1.0)).mean().backward()
            optimizer.step()
    event = det.event
    assert event is not None and (event.step, event.weights, event.reproduced) == (2, "restored", "yes")
    assert event.tensor_name == "optimizer.state[weight]['exp_avg_sq']"
    assert event.cause is not None and event.cause.code == "optimizer_state_overflow"
    assert bool(optimizer.state[model.weight]["exp_avg_sq"].isfinite().all())


def test_with_a_closure() -> None:
    class Spoilt(torch.optim.Adam):
        spoil = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            if self.spoil:
                self.param_groups[0]["params"][0].div_(0.0)
            return loss

    seed_all()
    model = Net(batch_norm=False)
    optimizer = Spoilt(model.parameters(), lr=0.01)
    with detector(model, protect="full", on_nan="skip") as det:
        for i in range(4):
            x, y = batch(i)

            def closure() -> Tensor:
                optimizer.zero_grad()
                with torch.enable_grad():
                    loss = F.cross_entropy(model(x), y)  # noqa: B023  # called within the iteration
                    loss.backward()
                return loss

            if i == 2:
                before = picture(model, optimizer)
            optimizer.spoil = i == 2
            optimizer.step(closure)
            if i == 2:
                after = picture(model, optimizer)
    assert det.event is not None and (det.event.step, det.event.weights) == (2, "restored")
    assert same(after["model"], before["model"]) and same(after["optimizer"], before["optimizer"])
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_step_that_raises_half_way_is_undone_where_it_has_done_damage() -> None:
    class Breaks(torch.optim.SGD):
        broken = False

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            if self.broken:
                self.param_groups[0]["params"][0].div_(0.0)
                raise RuntimeError("half way")

    seed_all()
    model = Net(batch_norm=False)
    optimizer = Breaks(model.parameters(), lr=0.05)
    with detector(model, protect="full", on_nan="skip") as det:
        for i in range(5):
            x, y = batch(i)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            assert bool(loss.isfinite()), "found before the weights are used again"
            loss.backward()
            optimizer.broken = i == 2
            if i == 2:
                before = picture(model, optimizer)
                with pytest.raises(RuntimeError, match="half way"):
                    optimizer.step()
            else:
                optimizer.step()
            if i == 3:
                assert not same(picture(model, optimizer)["model"], before["model"]), "it goes on from there"
    assert det.event is not None and (det.event.step, det.event.weights) == (2, "restored")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_bad_batches_are_refused_as_ever() -> None:
    seed_all()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with detector(model, protect="full", on_nan="skip") as det:
        for i in range(5):
            x, y = batch(i, bad=i == 2)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert det.event is not None and (det.event.step, det.event.phase, det.event.weights) == (2, "data", "clean")
    assert len(det.all_events) == 1


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "LBFGS"])
def test_a_healthy_training_is_bit_equal(name: str) -> None:
    def train(watched: bool) -> Any:
        seed_all()
        model = Net()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        det = detector(model, protect="full") if watched else None
        if det is not None:
            det.attach()
        for i in range(5):
            x, y = batch(i)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)  # noqa: B023  # called within the iteration
                loss.backward()
                return loss

            if name == "LBFGS":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
        if det is not None:
            det.detach()
            assert det.event is None and not det.warnings
        return picture(model, optimizer)

    assert same(train(False), train(True))


def test_the_memory_of_the_copy_is_used_again_and_given_back() -> None:
    run = Training(lambda p: torch.optim.Adam(p, lr=0.01))
    with detector(run.model, protect="full") as det:
        run.step(0)
        run.step(1)
        aftermath = det._engine.aftermath
        (shadow,) = aftermath._shadows.values()
        used = {k.value.data_ptr() for k in shadow.tensors}
        run.step(2)
        (shadow,) = aftermath._shadows.values()
        assert {k.value.data_ptr() for k in shadow.tensors} == used
        weights = sum(p.numel() * p.element_size() for p in run.model.parameters())
        assert shadow.nbytes < 3.2 * weights
    assert not aftermath._shadows


def test_without_it_nothing_is_copied() -> None:
    run = Training(lambda p: torch.optim.Adam(p, lr=0.01))
    with detector(run.model) as det:
        run.step(0)
        assert not det._engine.aftermath._shadows
