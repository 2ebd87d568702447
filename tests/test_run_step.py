"""`run_step`: on a hit the whole step function is called again, with nothing of what it does kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from _steps import Tensor, assert_born, batches, loss_of, picture
from nan_detector import NaNDetector, NaNEvent, NonFiniteError, NotAttachedError, is_replaying

# torch wraps the step function of an optimizer's class when the first one is made.
torch.optim.LBFGS([torch.zeros(1, requires_grad=True)])
# TorchDynamo wraps them again when it is first used.
torch.compile(lambda t: t + 1, backend="eager")(torch.zeros(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sqrt(x)  # <-- birth
        return self.last(self.norm(self.first(h)))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x)


def run(step: Any, model: nn.Module, *, last: int = 5, bad: int = 4, **options: Any) -> NaNDetector:
    """Calls ``step(x, y)`` through run_step until the event."""
    with NaNDetector(model, verbose=False, **options) as det:
        for i, (x, y) in enumerate(batches(last=last, bad=bad)):
            det.set_batch(i)
            det.run_step(step, x, y)
            if det.event is not None:
                break
    return det


def assert_called_again(event: NaNEvent | None, owner: Any, **fields: Any) -> None:
    """The birth is found by calling the step function again, not from the tape."""
    assert_born(event, owner, **fields)
    assert event is not None and not any("called again" in note for note in event.notes), event.notes


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_it_returns_what_the_function_returns_and_passes_every_argument() -> None:
    with NaNDetector(Plain(), verbose=False) as det:
        assert det.run_step(lambda a, *b, c: (a, b, c), 1, 2, 3, c=4) == (1, (2, 3), 4)


def test_it_needs_an_attached_detector() -> None:
    with pytest.raises(NotAttachedError, match="run_step needs an attached detector"):
        NaNDetector(Plain()).run_step(print)


def test_a_birth_in_the_model_and_one_in_the_step_function() -> None:
    model = Net()
    opt = sgd(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        opt.step()
        return loss

    assert_called_again(
        run(step, model).event, Net, step=4, phase="forward", layer_name="root", op="sqrt", weights="clean"
    )

    plain = Plain()
    opt2 = sgd(plain)

    def with_loss(x: Tensor, y: Tensor) -> None:
        opt2.zero_grad()
        loss = (plain(x).mean() - torch.log(x).mean()) ** 2  # <-- birth
        loss.backward()
        opt2.step()

    assert_called_again(run(with_loss, plain).event, with_loss, step=4, phase="loss", layer_name=None, op="log")


def test_the_function_is_called_again_and_can_see_that_it_is_a_replay() -> None:
    model = Net()
    opt = sgd(model)
    calls: list[bool] = []
    told: list[int] = []

    class Writer:
        """Writes to the outside world, unless it is a replay."""

        __slots__ = ()

        def __call__(self, value: int) -> None:
            if is_replaying():
                told_in_replay()
            else:
                told.append(value)

    def told_in_replay() -> None:
        raise AssertionError("never reached: the step function asks first")

    def step(x: Tensor, y: Tensor) -> None:
        calls.append(is_replaying())
        if not is_replaying():
            Writer()(len(told))
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()

    det = run(step, model)
    assert_called_again(det.event, Net)
    # The list is the user's: what the replay appended is taken back.
    assert calls == [False] * 5 and told == [0, 1, 2, 3, 4]


class Exotic(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.log(x)  # <-- birth

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g / x


_apply = Exotic.apply  # taken before any detector patches `Function.apply`


def test_code_that_the_tape_does_not_see_is_searched_too() -> None:
    model = Plain()
    opt = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        hidden = _apply(model(x) - model(x).detach() + x[:, :1] * (x.min() > 0) - 9.0 * (x.min() < 0))
        hidden.mean().backward()
        opt.step()

    assert_called_again(run(step, model).event, Exotic, step=4, op="log", weights="clean")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_loss_is_searched_too() -> None:
    model = Plain()
    opt = sgd(model)

    def loss_function(out: Tensor, x: Tensor) -> Tensor:
        return (out.mean() - torch.log(x).mean()) ** 2  # <-- birth

    compiled = torch.compile(loss_function, backend="eager")

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        compiled(model(x), x).backward()
        opt.step()

    torch._dynamo.reset()
    det = run(step, model)
    torch._dynamo.reset()
    assert_called_again(det.event, loss_function, step=4, op="log", weights="clean")


def test_nothing_has_moved() -> None:
    """Gradients (accumulated ones too), buffers, streams, the optimizer's settings, Python state: all as they were."""
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.9)
    state: dict[str, Any] = {"losses": [], "count": 0}
    total = torch.zeros(())
    before: list[Any] = []
    calls = 0

    def everything() -> Any:
        return picture(model, opt.state, opt.param_groups, vars(schedule), state, total, calls)

    def step(x: Tensor, y: Tensor) -> None:
        nonlocal calls
        calls += 1
        state["count"] += 1
        noise = torch.rand(()) + random.random() + np.random.rand()
        schedule.step()
        opt.param_groups[0]["weight_decay"] += 0.001
        opt.zero_grad()
        loss = loss_of(model, x, y) * noise
        state["losses"].append(loss.detach())
        total.add_(loss.detach())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not is_replaying():
            before[:] = [everything()]
        opt.step()

    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
            for x, y in batches():
                det.run_step(step, x, y)
                after = everything()
    assert_called_again(det.event, Net, step=4, op="sqrt", weights="clean")
    assert before == [after]


def test_healthy_steps_are_bit_equal() -> None:
    def trained(watched: bool) -> Any:
        model = Net()
        opt = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: Tensor, y: Tensor) -> None:
            opt.zero_grad()
            loss_of(model, torch.dropout(x, 0.5, True), y).backward()
            opt.step()

        torch.manual_seed(7)
        if watched:
            assert run(step, model, bad=-1).event is None
        else:
            for x, y in batches(bad=-1):
                step(x, y)
        return [p.tolist() for p in model.state_dict().values()], torch.rand(3).tolist()

    assert trained(True) == trained(False)


def test_gradients_that_were_accumulated_before_are_put_aside() -> None:
    model = Net()
    opt = sgd(model)

    def backward_only(x: Tensor, y: Tensor) -> None:
        loss_of(model, x, y).backward()

    def and_step(x: Tensor, y: Tensor) -> None:
        loss_of(model, x, y).backward()
        grads[:] = [p.grad.clone() for p in model.parameters() if p.grad is not None] if not is_replaying() else grads
        opt.step()

    grads: list[Tensor] = []
    with NaNDetector(model, verbose=False, on_nan="skip", stop_on_first=False) as det:
        data = batches()
        det.run_step(and_step, *data[1])
        opt.zero_grad()
        det.run_step(backward_only, *data[0])
        det.run_step(and_step, *data[4])
    assert_called_again(det.event, Net, op="sqrt", micro_step=1)
    for p, g in zip(model.parameters(), grads, strict=True):
        assert torch.equal(p.grad, g) or torch.equal(p.grad.isnan(), g.isnan())


def test_parameters_taken_from_elsewhere_show_the_replayed_gradients() -> None:
    """A list of parameters made before the loop, read and clipped by hand between backward and step."""
    model = Net()
    opt = sgd(model)
    weights = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        loss_of(model, x, y).backward()
        for p in weights:
            assert p.grad is not None
            p.grad.clamp_(-1.0, 1.0)
        opt.step()

    assert_called_again(run(step, model).event, Net, op="sqrt", weights="clean")


def test_an_argument_written_in_place_holds_its_earlier_values_in_the_replay() -> None:
    model = Net()
    opt = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        x.mul_(2.0).sub_(0.1)
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()

    data = batches()[4]
    with NaNDetector(model, verbose=False) as det:
        det.run_step(step, *data)
    assert_called_again(det.event, Net, op="sqrt")
    assert torch.equal(data[0], batches()[4][0] * 2.0 - 0.1)


def test_a_step_with_a_closure() -> None:
    model = Net()
    opt = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=2)

    def step(x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            return loss

        opt.step(closure)

    assert_called_again(run(step, model).event, Net, op="sqrt", weights="clean")


def test_inner_optimizers_step_in_the_replay_too() -> None:
    """An attack on the batch, with an optimizer of its own, before the model's step."""
    model = Plain()
    opt = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        delta = torch.zeros_like(x, requires_grad=True)
        inner = torch.optim.Adam([delta], lr=1.0)
        for _ in range(3):
            inner.zero_grad()
            (-loss_of(model, x + delta, y)).backward()
            inner.step()
        assert float(delta.detach().abs().sum()) > 0
        opt.zero_grad()
        shifted = model(x) * torch.log(x + 10 * (delta.detach() ** 2 > 0)).mean()  # <-- birth
        (shifted - y).square().mean().backward()
        opt.step()

    det = run(lambda x, y: step(x - 20 * (x < 0), y), model)
    assert_called_again(det.event, step, op="log")


def test_a_scaler_by_hand_and_torchs_own() -> None:
    model = Net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()

    assert_called_again(run(step, model).event, Net, op="sqrt")

    by_hand = Net()
    opt2 = sgd(by_hand)

    def hand(x: Tensor, y: Tensor) -> None:
        opt2.zero_grad()
        (loss_of(by_hand, x, y) * 8.0).backward()
        for p in by_hand.parameters():
            p.grad.div_(8.0)
        opt2.step()

    assert_called_again(run(hand, by_hand).event, Net, op="sqrt", weights="clean")


def test_two_optimizers_in_one_step_function() -> None:
    """At the second one's gate the first has stepped: the tape, which knows what came after it, is replayed."""
    one, two = Plain(), Net()
    first, second = sgd(one), sgd(two)

    def step(x: Tensor, y: Tensor) -> None:
        first.zero_grad()
        loss_of(one, x, y).backward()
        first.step()
        second.zero_grad()
        loss_of(two, x, y).backward()
        second.step()

    with NaNDetector({"one": one, "two": two}, verbose=False) as det:
        for x, y in batches():
            det.run_step(step, x, y)
            if det.event is not None:
                break
    assert_born(det.event, Net, layer_name="two", op="sqrt", weights="clean")


class Counting:
    """An iterator of batches that counts what was taken."""

    def __init__(self, data: list[Any]) -> None:
        self.data, self.taken = data, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.taken += 1
        return self.data[self.taken - 1]


@pytest.mark.parametrize("how", ["argument", "closure", "loader", "attribute"])
def test_an_iterator_is_refused_by_name_and_nothing_is_taken_from_it(how: str) -> None:
    model = Net()
    opt = sgd(model)
    it = Counting(batches() * 2)
    loader = iter(DataLoader(batches() * 2, batch_size=None))

    def learn(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()

    class Trainer:
        def __init__(self) -> None:
            self.it = it

        def step(self) -> None:
            learn(*next(self.it))

    step, args = {
        "argument": (lambda source: learn(*next(source)), (it,)),
        "closure": (lambda: learn(*next(it)), ()),
        "loader": (lambda: learn(*next(loader)), ()),
        "attribute": (Trainer().step, ()),
    }[how]
    with NaNDetector(model, verbose=False) as det:
        while det.event is None:
            det.run_step(step, *args)
    event = det.event
    # The tape knows the batch, so the birth is found all the same.
    assert_born(event, Net, step=4, op="sqrt")
    name = {"argument": "'source'", "closure": "'it'", "loader": "'loader'", "attribute": "'it'"}[how]
    assert any(name in n and "iterator" in n for n in event.notes), event.notes
    if how != "loader":
        assert it.taken == 5


def test_a_step_that_is_not_the_same_twice_shows_no_finding() -> None:
    model = Plain()
    opt = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        factor = 0.5 if is_replaying() else 1.0
        loss = (loss_of(model, x, y) * factor).sum()
        (loss * torch.sqrt(x).mean().detach().nan_to_num(1.0)).backward()
        if not is_replaying() and bool((x < 0).any()):
            for p in model.parameters():
                p.grad.fill_(float("nan"))
        opt.step()

    event = run(step, model).event
    assert event is not None and event.op != "sqrt"
    if event.reproduced != "yes":
        assert event.op is None and event.location is None and event.notes


def test_an_exception_leaves_the_function_as_it_was_raised_and_the_event_is_there() -> None:
    model = Net()
    opt = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        out = model(x)
        if torch.isnan(out).any():
            raise ValueError("bad output")
        (out - y).square().mean().backward()
        opt.step()

    with pytest.raises(ValueError, match="bad output"), NaNDetector(model, verbose=False) as det:
        for x, y in batches():
            det.run_step(step, x, y)
    assert_called_again(det.event, Net, op="sqrt")


def test_raise_leaves_run_step() -> None:
    model = Net()
    opt = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()

    with pytest.raises(NonFiniteError) as error:
        run(step, model, on_nan="raise")
    assert_called_again(error.value.event, Net, op="sqrt")


def test_it_holds_nothing_after_the_call() -> None:
    import gc
    import weakref

    model = Plain()
    opt = sgd(model)

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        loss_of(model, x, y).backward()
        opt.step()

    kept = []
    with NaNDetector(model, verbose=False) as det:
        for x, y in itertools.islice(batches(bad=-1), 3):
            det.run_step(step, x, y)
            kept.append(weakref.ref(x))
        del x, y
        gc.collect()
        # The last batch stays until the next call of the model: `hazards()` may be asked about it.
        assert [r() for r in kept[:2]] == [None] * 2
    gc.collect()
    assert kept[2]() is None
