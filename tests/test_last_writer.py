"""State that the program's own code has spoilt: the line that wrote it last, whatever the call and whenever it ran."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from _programs import marked_line
from nan_detector import NaNDetector
from nan_detector._last_writer import with_writer
from nan_detector._naming import Names, models_of
from nan_detector._records import NaNEvent
from nan_detector._source import here, location_of
from nan_detector._written_weights import MOST, Writers

Tensor = torch.Tensor
#: The iteration in which the write goes wrong.
BAD = 3
ZERO = torch.zeros(())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1, bias=False)
        self.register_buffer("shift", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x - self.shift)))
        return out


def data_replaced(net: Net) -> None:
    net.first.weight.data = net.first.weight.data / ZERO  # <-- birth


def data_divided(net: Net) -> None:
    net.first.weight.data.div_((net.first.weight.data * 0).norm())  # <-- birth


def data_filled_from(net: Net) -> None:
    net.first.weight.data.copy_(torch.log(-net.first.weight.data.abs()))  # <-- birth


def rows_written(net: Net) -> None:
    net.first.weight.data[1:] = net.first.weight.data[1:] / ZERO  # <-- birth


@torch.no_grad()
def by_numbers(net: Net) -> None:
    net.first.weight.mul_(0.0).div_(0.0)  # <-- birth


@torch.no_grad()
def element_set(net: Net) -> None:
    net.first.weight[0] = float("nan")  # <-- birth


@torch.no_grad()
def into_out(net: Net) -> None:
    torch.div(net.first.weight, ZERO, out=net.first.weight)  # <-- birth


@torch.no_grad()
def many_at_once(net: Net) -> None:
    torch._foreach_div_([net.first.weight, net.first.bias], [ZERO, ZERO])  # <-- birth


def made_anew(net: Net) -> None:
    nn.init.normal_(net.first.weight, std=float("inf"))  # <-- birth


def from_numpy(net: Net) -> None:
    net.first.weight.data.copy_(torch.from_numpy(net.first.weight.data.numpy() * float("inf")))  # <-- birth


def loaded(net: Net) -> None:
    checkpoint = {n: torch.full_like(t, float("nan")) for n, t in net.state_dict().items()}
    net.load_state_dict(checkpoint)  # <-- birth


@torch.no_grad()
def of_a_vector(net: Net) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net.parameters()) / ZERO, net.parameters())  # <-- birth


@torch.no_grad()
def in_a_buffer(net: Net) -> None:
    net.shift.add_(float("inf"))  # <-- birth


WRITES: list[Callable[[Net], None]] = [
    *(data_replaced, data_divided, data_filled_from, rows_written, by_numbers, element_set, into_out, many_at_once),
    *(made_anew, from_numpy, of_a_vector, in_a_buffer),
]


def train(write: Callable[[Net], None], moment: str, *, whole: bool = False, numbered: bool = True) -> NaNEvent:
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)

    def step(x: Tensor, i: int) -> None:
        if moment == "before the model" and i == BAD:
            write(net)
        loss = F.mse_loss(net(x), x[:, :1])
        opt.zero_grad()
        loss.backward()
        if moment == "before the optimizer" and i == BAD:
            write(net)
        opt.step()
        if moment == "after the optimizer" and i == BAD:
            write(net)

    with NaNDetector(net, verbose=False) as det:
        for i in range(6):
            if numbered:
                det.set_batch(i)
            x = torch.randn(5, 3, generator=generator)
            if whole:
                det.run_step(step, x, i)
            else:
                step(x, i)
            if det.triggered:
                break
    assert det.event is not None
    return det.event


MOMENTS = ("before the model", "before the optimizer", "after the optimizer")


@pytest.mark.parametrize("whole", [False, True], ids=["loop", "run_step"])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_the_line_and_the_step_of_the_write(write: Callable[[Net], None], moment: str, whole: bool) -> None:
    event = train(write, moment, whole=whole)
    assert event.location is not None
    assert (event.location.file, event.location.line) == (__file__, marked_line(inspect.unwrap(write))[1])
    assert (event.step, event.phase) == (BAD, "state")
    assert event.tensor_name == ("shift" if write is in_a_buffer else "first.weight")
    assert event.layer_name == ("root" if write is in_a_buffer else "first")


@pytest.mark.parametrize("moment", ["before the model", "after the optimizer"])
@pytest.mark.parametrize(
    ("write", "op", "code"),
    [
        (data_replaced, "div", "division_by_zero"),
        (data_divided, "div", "division_by_zero"),
        (data_filled_from, "log", "log_of_negative"),
        (rows_written, "div", "division_by_zero"),
        (of_a_vector, "div", "division_by_zero"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_what_was_worked_out_has_its_operation_and_cause(
    write: Callable[[Net], None], op: str, code: str, moment: str
) -> None:
    event = train(write, moment)
    assert event.cause is not None
    assert (event.op, event.cause.code, event.reproduced) == (op, code, "yes")


def test_steps_that_nobody_numbers_are_dated_to_the_last_that_called_the_model() -> None:
    assert train(by_numbers, "after the optimizer", numbered=False).step == BAD
    assert train(by_numbers, "before the optimizer", numbered=False).step == BAD


def test_a_checkpoint_that_is_bad_is_found_where_it_was_loaded() -> None:
    event = train(loaded, "after the optimizer")
    assert event.location is not None and event.location.line == marked_line(loaded)[1]
    assert event.phase == "state" and event.step == BAD


def test_the_report_says_what_is_known_of_a_write_that_was_not_replayed() -> None:
    text = str(train(element_set, "after the optimizer"))
    assert f"NaN found at step {BAD}, in the program's own write into the model" in text
    assert "first.weight  ·  net.first.weight[0]  ·  tests/test_last_writer.py" in text
    assert f"it was finite in step {BAD}: look at what this line writes, which is the last that wrote it" in text
    assert f"found at step {BAD + 1}, when the loss is nan" in text


class Faulty(torch.optim.Optimizer):
    """An optimizer of the user's own, written in numpy, whose fourth step spoils what it steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self.count = 0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        for p in self.param_groups[0]["params"]:
            p.numpy()[...] -= 0.01 * p.grad.numpy() / (1.0 if self.count <= BAD else 0.0)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_sound_write_of_a_good_step_is_not_blamed_for_what_the_optimizer_did() -> None:
    net = Net()
    opt = Faulty(list(net.parameters()))
    with NaNDetector(net, verbose=False) as det:
        for i in range(8):
            det.set_batch(i)
            for p in net.parameters():
                p.data.clamp_(-1.0, 1.0)  # sound, in each step, before the model is called
            x = torch.randn(5, 3)
            opt.zero_grad()
            F.mse_loss(net(x), x[:, :1]).backward()
            opt.step()
            if det.triggered:
                break
    assert det.event is not None
    assert det.event.location is None or "clamp_" not in det.event.location.source_line


def _added(p: Tensor, move: Tensor) -> None:
    p.add_(move)


def _added_into(p: Tensor, move: Tensor) -> None:
    torch.add(p, move, out=p)


@pytest.mark.parametrize("move_by", [_added, _added_into])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_weights_that_are_moved_to_and_fro_within_a_step(
    optimizer: Callable[..., torch.optim.Optimizer], move_by: Callable[[Tensor, Tensor], None]
) -> None:
    net = Net()
    opt = optimizer(net.parameters(), lr=1e-2)

    def climb(rho: float) -> list[Tensor]:
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None]).norm()
            moves = [p.grad * (rho / norm) for p in net.parameters() if p.grad is not None]  # <-- birth
            for p, move in zip(net.parameters(), moves, strict=True):
                move_by(p, move)
        return moves

    with NaNDetector(net, verbose=False) as det:
        for i in range(6):
            det.set_batch(i)
            x = torch.randn(5, 3)
            opt.zero_grad()
            (F.mse_loss(net(x), x[:, :1]) * (i != BAD)).backward()
            moves = climb(0.05)
            opt.zero_grad()
            F.mse_loss(net(x), x[:, :1]).backward()
            with torch.no_grad():
                for p, move in zip(net.parameters(), moves, strict=True):
                    move_by(p, -move)
            opt.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and event.location is not None and event.cause is not None
    assert event.location.line == marked_line(climb)[1]
    assert (event.step, event.cause.code, event.reproduced) == (BAD, "division_by_zero", "yes")


@pytest.mark.parametrize("numbered", [True, False])
def test_a_write_into_what_was_bad_already_is_not_blamed(numbered: bool) -> None:
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    with NaNDetector(net, verbose=False) as det:
        for i in range(6):
            if numbered:
                det.set_batch(i)
            if i == BAD:
                net.shift.numpy()[1] = float("nan")  # nobody sees it
            with torch.no_grad():
                net.shift.mul_(0.9)
            x = torch.randn(5, 3)
            opt.zero_grad()
            F.mse_loss(net(x), x[:, :1]).backward()
            opt.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.tensor_name, event.location) == (BAD, "shift", None)


@torch.no_grad()
def _project(net: Net) -> None:
    for p in net.parameters():
        p.data = p.data / p.data.norm().clamp_min(1.0)
        torch.clamp(p, -0.9, 0.9, out=p)


def test_sound_writes_are_quiet_and_change_no_training() -> None:
    def trained(watched: bool) -> list[Tensor]:
        net = Net()
        opt = torch.optim.Adam(net.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(1)
        det = NaNDetector(net, verbose=False)
        if watched:
            det.attach()
        for _ in range(12):
            x = torch.randn(5, 3, generator=generator)
            opt.zero_grad()
            F.mse_loss(net(x), x[:, :1]).backward()
            opt.step()
            _project(net)
        if watched:
            det.detach()
            assert det.event is None
        return [p.detach().clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def _state_event(step: int = 5, **more: Any) -> NaNEvent:
    return NaNEvent(
        event_id="e", status="final", step=step, phase="state", severity="error", tensor_name="first.weight",
        symptom="the loss is nan", **more,
    )  # fmt: skip


def _written(net: Net, told: int | None, called: int | None) -> Writers:
    writers = Writers()
    writers.note([net.first.weight], torch.Tensor.mul_, here(), told, called)
    return writers


@pytest.mark.parametrize(
    ("told", "called", "last_good", "step"),
    [
        (5, 4, 4, 5),  # before the model was called in the bad step
        (4, 4, 4, 4),  # after the good one
        (None, 4, 4, 4),
        (None, None, None, 0),  # nothing was ever good
        (0, None, None, 0),
        (3, 3, None, 3),
        (4, 3, 4, None),  # before the good step: it was run with it
        (3, 3, 4, None),
        (5, 5, 4, None),  # after the model was called in the bad step
    ],
)
def test_which_writes_are_told(told: int | None, called: int | None, last_good: int | None, step: int | None) -> None:
    net = Net()
    event = with_writer(_state_event(), Names(models_of(net)), _written(net, told, called), last_good, {})
    if step is None:
        assert event == _state_event()
        return
    assert event.location is not None and event.location.function == "_written"
    assert (event.step, event.op) == (step, "mul")
    assert event.notes == (() if step == 5 else ("found at step 5, when the loss is nan",))


def test_what_was_worked_out_keeps_its_place_and_is_dated() -> None:
    net, line = Net(), location_of(here() or pytest.fail("no line"))
    known = _state_event(location=line, op="log")
    for writers in (_written(net, 4, 4), Writers()):  # of a write that nobody noted: after the last good step
        event = with_writer(known, Names(models_of(net)), writers, 4, {})
        assert (event.location, event.op, event.step) == (line, "log", 4)


def test_other_events_are_left_as_they_are() -> None:
    net = Net()
    event = dataclasses.replace(_state_event(), phase="forward")
    assert with_writer(event, Names(models_of(net)), _written(net, 5, 4), 4, {}) is event


def test_a_bad_weight_of_the_first_step_has_the_line_that_wrote_it() -> None:
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    with NaNDetector(net, verbose=False) as det:
        element_set(net)
        F.mse_loss(net(torch.ones(5, 3)), torch.ones(5, 1)).backward()
        opt.step()
    event = det.event
    assert event is not None and event.location is not None and event.step == 0
    assert event.location.line == marked_line(inspect.unwrap(element_set))[1]


def test_an_earlier_value_does_not_come_back_in_the_replay_of_a_later_step() -> None:
    net = Net()
    opts = [torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in (net.first, net.last)]
    kept = []
    with NaNDetector(net, verbose=False) as det:
        for i in range(6):
            x = torch.randn(5, 3)
            for opt in opts:
                opt.zero_grad()
            loss = F.mse_loss(net(x), x[:, :1])
            kept.append(net.first.weight.square().sum())  # lives on, and was made of the weight
            # Its gradient is bad and it is not, so that another loss of the replay would show.
            (loss + torch.sqrt(loss * 0) if i == BAD else loss).backward()
            with torch.no_grad():
                net.first.weight.mul_(0.5)
            for opt in opts:
                opt.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.op, event.reproduced, event.step) == ("sqrt", "yes", BAD)


def test_writers_are_forgotten_with_their_tensors() -> None:
    writers = Writers()
    kept = torch.zeros(2)
    writers.note([kept], torch.Tensor.add_, None, None, 7)
    for i in range(2 * MOST):
        writers.note([torch.zeros(1)], torch.Tensor.mul_, None, i, i)
    assert len(writers._last) <= MOST + 1
    found = writers.of(kept)
    assert found is not None and (found.name, found.step, found.before) == ("add", 7, False)
    assert writers.of(torch.zeros(2)) is None


def test_a_write_before_the_model_belongs_to_the_step_that_was_named() -> None:
    writers, t = Writers(), torch.zeros(2)
    writers.note([t], torch.Tensor.add_, None, 5, 4)
    found = writers.of(t)
    assert found is not None and (found.step, found.before) == (5, True)
