"""`on_nan="rollback"`: the bad step is dropped, and the training goes on from its last good state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _rescue import Net, batch, detector, picture, same, seed_all
from nan_detector import NaNEvent

LEVELS = ("step", "layers", "ops")
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}


class Training:
    """The plain loop with a scheduler; `before` has the picture before each optimizer step."""

    def __init__(self, optimizer: str = "adam") -> None:
        seed_all()
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.before: dict[int, dict[str, Any]] = {}
        self.after: dict[int, dict[str, Any]] = {}

    def step(self, i: int, bad: bool = False) -> None:
        x, y = batch(i, bad)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.before[i] = picture(self.model, self.optimizer, self.scheduler)
        self.optimizer.step()
        self.after[i] = picture(self.model, self.optimizer, self.scheduler)
        self.scheduler.step()


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("on_host", [False, True])
def test_everything_is_put_back_and_the_training_goes_on(watch: str, on_host: bool) -> None:
    run = Training()
    with detector(run.model, on_nan="rollback", snapshot_every=4, snapshot_on_host=on_host, watch=watch) as det:
        for i in range(9):
            run.step(i, bad=i == 6)
    event = det.event
    assert event is not None and len(det.all_events) == 1
    assert (event.step, event.action, event.weights) == (6, "rollback", "restored")
    assert any("before step 4" in note for note in event.notes), event.notes
    assert same(run.after[6], run.before[4])
    assert same(run.before[4]["optimizer"]["param_groups"], run.after[6]["optimizer"]["param_groups"])
    assert not same(run.after[8], run.after[6]), "it goes on"
    assert all(bool(t.isfinite().all()) for t in run.model.state_dict().values())
    assert det.skipped_steps == 1


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_with_each_optimizer(optimizer: str) -> None:
    run = Training(optimizer)
    with detector(run.model, on_nan="rollback", snapshot_every=3) as det:
        for i in range(6):
            run.step(i, bad=i == 5)
    assert det.event is not None and det.event.weights == "restored"
    assert same(run.after[5], run.before[3])


def test_the_rest_is_bit_equal_to_a_run_that_went_on_from_there() -> None:
    run = Training()
    with detector(run.model, on_nan="rollback", snapshot_every=4):
        for i in (0, 1, 2, 3, 4, 5, 6, 7, 8):
            run.step(i, bad=i == 6)
    bare = Training()
    for i in (0, 1, 2, 3):
        bare.step(i)
    x, y = batch(4)
    bare.optimizer.zero_grad()
    F.cross_entropy(bare.model(x), y).backward()
    bare.scheduler.step()  # the loop's own, after the step that was dropped
    bare.step(7)
    bare.step(8)
    assert same(picture(run.model, run.optimizer, run.scheduler), picture(bare.model, bare.optimizer, bare.scheduler))


def test_a_bad_step_before_any_snapshot_is_skipped_and_says_so() -> None:
    run = Training()
    with detector(run.model, on_nan="rollback") as det:
        for i in range(3):
            run.step(i, bad=i == 0)
    event = det.event
    assert event is not None and (event.action, event.weights) == ("rollback", "clean")
    assert any("no good state to go back to yet" in note for note in event.notes)
    assert same(run.before[0], run.after[0])


def test_the_second_return_to_a_state_leaves_the_random_streams_alone() -> None:
    run = Training()
    with detector(run.model, on_nan="rollback", snapshot_every=100) as det:
        for i in range(6):
            run.step(i, bad=i in (2, 4))
    first, second = det.all_events
    assert any("before step 0" in note for note in first.notes)
    assert any("return number 2" in note for note in second.notes)
    assert same(run.after[2], run.before[0])
    assert same(run.after[4]["model"], run.before[0]["model"])
    assert same(run.after[4]["torch"], run.before[4]["torch"])
    assert not same(run.after[4]["torch"], run.before[0]["torch"])


def test_draws_that_lead_into_the_failure_do_not_repeat_for_ever() -> None:
    """The batch comes from the stream that is put back: the same draws lead to the same place, but once only."""
    seed_all()
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with detector(model, on_nan="rollback", snapshot_every=1000) as det:
        for _ in range(60):
            x = torch.randn(8, 4)
            x = torch.where(x > 2.6, torch.inf, x)
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step()
    assert len(det.all_events) >= 2
    assert len({e.inputs for e in det.all_events}) > 1 or len(det.all_events) < 20
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_grad_survives_for_the_users_own_logging() -> None:
    run = Training()
    with detector(run.model, on_nan="rollback"):
        run.step(0)
        run.step(1, bad=True)
    assert all(p.grad is not None for p in run.model.parameters())
    assert any(bool(p.grad.isnan().any()) for p in run.model.parameters() if p.grad is not None)


def test_a_loss_scaler_goes_back_as_well() -> None:
    seed_all()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    states: list[Any] = []
    with detector(model, on_nan="rollback", snapshot_every=1000) as det:
        for i in range(6):
            x, y = batch(i, bad=i == 5)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            states.append(scaler.state_dict())
            scaler.step(optimizer)
            if i == 5:
                assert scaler.state_dict() == states[0]
            scaler.update()
    assert states[5]["scale"] > states[0]["scale"]
    assert det.event is not None and det.event.weights == "restored"


@pytest.mark.parametrize("kind", ["plateau", "cosine restarts", "sequential", "lambda"])
def test_schedulers_of_every_kind_are_learned(kind: str) -> None:
    seed_all()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made: dict[str, Callable[[], Any]] = {
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        "cosine restarts": lambda: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
        "sequential": lambda: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            milestones=[2],
        ),
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    }
    scheduler = made[kind]()
    kept: dict[int, Any] = {}
    with detector(model, on_nan="rollback", snapshot_every=3):
        for i in range(6):
            x, y = batch(i, bad=i == 5)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            kept[i] = picture(model, optimizer, scheduler)
            optimizer.step()
            if i == 5:
                now = picture(model, optimizer, scheduler)
            scheduler.step(1.0) if kind == "plateau" else scheduler.step()
    assert same(now["more"], kept[3]["more"]), (now["more"], kept[3]["more"])
    assert same(now["optimizer"], kept[3]["optimizer"])
    assert not same(kept[5]["optimizer"], kept[3]["optimizer"])


def test_a_scheduler_that_steps_once_an_epoch_was_not_seen_before_the_snapshot() -> None:
    seed_all()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with detector(model, on_nan="rollback", snapshot_every=1000):
        for i in range(6):
            x, y = batch(i, bad=i == 5)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if i == 2:
                scheduler.step()
    assert scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.1


def test_several_optimizers_go_back_together() -> None:
    seed_all()
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    first = torch.optim.Adam(generator.parameters(), lr=0.01)
    second = torch.optim.SGD(critic.parameters(), lr=0.01, momentum=0.9)
    kept: list[Any] = []
    with detector({"g": generator, "c": critic}, on_nan="rollback", snapshot_every=1000) as det:
        for i in range(6):
            x = batch(i, bad=i == 4)[0][:, :4]
            second.zero_grad()
            critic(generator(x).detach()).mean().backward()
            if i == 0:
                second.step()
            else:
                kept.append((picture(generator, first), picture(critic, second)))
                second.step()
            if i == 4:
                now = (picture(generator, first), picture(critic, second))
            first.zero_grad()
            (-critic(generator(torch.ones_like(x)))).mean().backward()
            if i == 0:
                kept.append((picture(generator, first), picture(critic, second)))
            first.step()
    assert det.event is not None and det.event.weights == "restored"
    # The state that has both was kept at the first step of the optimizer that came last.
    assert same(now[0]["optimizer"], kept[0][0]["optimizer"]) and same(now[1]["optimizer"], kept[0][1]["optimizer"])
    assert same(now[0]["model"], kept[0][0]["model"]) and same(now[1]["model"], kept[0][1]["model"])


@pytest.mark.parametrize("make", [lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4), OPTIMIZERS["adam"]])
def test_with_a_closure(make: Callable[[Any], Any]) -> None:
    seed_all()
    model = Net(batch_norm=False)
    model.eval()
    optimizer = make(model.parameters())
    kept: dict[int, Any] = {}
    with detector(model, on_nan="rollback", snapshot_every=2) as det:
        for i in range(6):
            x, y = batch(i, bad=i == 5)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)  # noqa: B023  # called within the iteration
                loss.backward()
                return loss

            kept[i] = picture(model, optimizer)
            optimizer.step(closure)
    assert [e.step for e in det.all_events] == [5] and det.all_events[0].weights == "restored"
    assert same(picture(model, optimizer)["model"], kept[4]["model"])
    assert same(picture(model, optimizer)["optimizer"], kept[4]["optimizer"])


def test_a_step_inside_the_backward_is_put_back_when_that_is_over() -> None:
    seed_all()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.5) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)
    with detector(model, on_nan="rollback", snapshot_every=1000) as det:
        for i in range(5):
            x, y = batch(i, bad=i == 3)
            F.cross_entropy(model(x), y).backward()
    assert det.triggered and det.all_events[0].weights == "restored"
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert all(bool(o.state[p]["momentum_buffer"].isfinite().all()) for p, o in optimizers.items())


def test_a_loop_without_an_optimizer() -> None:
    seed_all()
    model = nn.Linear(6, 3)
    first = None
    with detector(model, on_nan="rollback", snapshot_every=1000) as det:
        for i in range(5):
            x, y = batch(i, bad=i == 4)
            F.cross_entropy(model(x), y).backward()
            if first is None:
                first = [p.detach().clone() for p in model.parameters()]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    assert [e.step for e in det.all_events] == [4] and det.all_events[0].weights == "restored"
    assert first is not None and same(first, list(model.parameters()))


def test_a_callable_may_answer_rollback() -> None:
    def decide(event: NaNEvent) -> str:
        return "rollback" if event.verdict == "data" else "stop"

    run = Training()
    with detector(run.model, on_nan=decide, snapshot_every=2) as det:
        for i in range(5):
            run.step(i, bad=i == 3)
    assert det.event is not None and (det.event.action, det.event.weights) == ("rollback", "restored")
    assert same(run.after[3], run.before[2])


def test_a_callable_without_snapshots_gets_a_skip_that_says_so() -> None:
    run = Training()
    with detector(run.model, on_nan=lambda event: "rollback", snapshot_every=None) as det:
        for i in range(5):
            run.step(i, bad=i == 3)
    assert det.event is not None and any("no good state" in n for n in det.event.notes)
    assert same(run.after[3], run.before[3])


class Counting(torch.optim.Optimizer):
    """Keeps its buffers by position and its counter outside of `state`, and knows no None."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.buffers = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for i, p in enumerate(p for g in self.param_groups for p in g["params"]):
            self.buffers[i].mul_(0.9).add_(p.grad)
            p.sub_(self.buffers[i], alpha=0.1)


def test_an_optimizer_that_keeps_its_state_elsewhere() -> None:
    seed_all()
    model = Net()
    optimizer = Counting(model.parameters())
    with detector(model, on_nan="rollback", snapshot_every=2):
        for i in range(6):
            x, y = batch(i, bad=i == 5)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if i == 4:
                buffers = [b.clone() for b in optimizer.buffers]
            optimizer.step()
    assert optimizer.count == 4
    assert same(buffers, optimizer.buffers)


def test_only_who_rolls_back_pays_for_it() -> None:
    step = torch.optim.lr_scheduler.LRScheduler.step
    run = Training()
    with detector(run.model, on_nan="skip") as det:
        run.step(0)
        assert torch.optim.lr_scheduler.LRScheduler.step is step
        assert det._engine is not None and det._engine.keeper is None
    with detector(run.model, on_nan="rollback"):
        assert torch.optim.lr_scheduler.LRScheduler.step is not step
    assert torch.optim.lr_scheduler.LRScheduler.step is step


def test_a_snapshot_uses_the_memory_of_the_last_one() -> None:
    run = Training()
    with detector(run.model, on_nan="rollback", snapshot_every=1) as det:
        for i in range(3):
            run.step(i)
        keeper = det._engine.keeper
        assert keeper is not None and keeper.state is not None
        used = {k.value.data_ptr() for k in keeper.state.tensors}
        size = keeper.state.nbytes
        run.step(3)
        assert {k.value.data_ptr() for k in keeper.state.tensors} == used
        weights = sum(t.numel() * t.element_size() for t in run.model.state_dict().values())
        assert weights < size <= 4 * weights
    assert keeper.state is None


def test_a_bad_parameter_is_no_good_state() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 2), "unused": nn.Linear(2, 2)})
    nn.init.constant_(model["unused"].weight, float("nan"))
    optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.1)
    model.forward = lambda x: model["a"](x)
    with detector(model, on_nan="rollback") as det:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()
    assert [w.kind for w in det.warnings if w.kind == "snapshot"] == ["snapshot"]
    assert "unused.weight" in det.warnings[0].message


# -- what comes again --------------------------------------------------------------------------------------------------

LOADER = "a data loader goes on with its next batch, not with this one again"
DRAWN = f"{LOADER}; batches that the loop draws at random come again, as the random streams went back"


class Leaping(Training):
    """A learning rate that leaps at step 6 by a scheduler, by hand, or not at all."""

    def __init__(self, how: str, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.how = how
        self.used: list[float] = []
        rates = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda i: 10.0 if i >= 6 else 1.0)
        self.scheduler: Any = rates
        if how == "uncopied":
            rates.lock = _Uncopied()

    def step(self, i: int, bad: bool = False) -> None:
        if self.how == "by hand":
            self.optimizer.param_groups[0]["lr"] = 0.5 if i >= 6 else 0.05
        x, y = batch(i, bad)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()
        self.used.append(float(self.optimizer.param_groups[0]["lr"]))
        self.optimizer.step()
        if self.how in ("scheduler", "uncopied"):
            self.scheduler.step()


class _Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


@pytest.mark.parametrize(
    ("how", "bad", "kept", "said"),
    [
        (
            "scheduler",
            7,
            4,
            "the learning rate is 0.05 again, as before step 4, not 0.5; its scheduler went back as well, so it comes "
            "to 0.5 again unless that is changed",
        ),
        (
            "by hand",
            7,
            4,
            "the learning rate is 0.05 again, as before step 4, not 0.5; no scheduler was seen, and a loop that sets "
            "the rate by itself is not taken back",
        ),
        (
            "uncopied",
            7,
            5,
            "the learning rate is 0.05 again, as before step 5, not 0.5, until its scheduler steps, which could not be "
            "taken back and goes on from where it was",
        ),
        ("scheduler", 10, 8, "the learning rate was the same then, 0.5"),
        ("constant", 7, 4, "the learning rate was the same then, 0.05"),
    ],
)
def test_the_event_says_which_learning_rate_comes_again(how: str, bad: int, kept: int, said: str) -> None:
    run = Leaping(how)
    with detector(run.model, on_nan="rollback", snapshot_every=4) as det:
        for i in range(14):
            run.step(i, bad=i == bad)
    event = det.event
    assert event is not None and event.weights == "restored"
    back = f"parameters, buffers, optimizers, schedulers and random streams are those before step {kept}"
    assert event.notes[-3:] == (back, said, DRAWN)
    # ... and so it is: the scheduler leaps a second time; a loop that sets the rate itself does not go back.
    rates = {"scheduler": [0.05, 0.5], "constant": [0.05, 0.05]}.get(how, [0.5, 0.5])
    assert run.used[8:10] == (rates if bad == 7 else [0.5, 0.5])


def test_the_second_return_does_not_repeat_draws_and_a_tensor_rate_is_read() -> None:
    run = Leaping("scheduler", "tensor rate")
    with detector(run.model, on_nan="rollback", snapshot_every=100) as det:
        for i in range(10):
            run.step(i, bad=i in (6, 8))
    first, second = det.all_events
    assert first.notes[-2:] == (
        "the learning rate is 0.01 again, as before step 0, not 0.1; its scheduler went back as well, so it comes "
        "to 0.1 again unless that is changed",
        DRAWN,
    )
    assert second.notes[-1] == LOADER and "return number 2" in second.notes[-3]
