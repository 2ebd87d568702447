"""Weights that the program rewrites after the optimizer's step: projected, averaged, revived. One write is bad."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from _programs import marked_line
from nan_detector import NaNDetector
from nan_detector._records import NaNEvent

Tensor = torch.Tensor
#: The step after which the write goes wrong.
BAD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


def scale_of(net: Net, bad: bool) -> Tensor:
    """The length of each row of the first weight; one is 0 when it is `bad`."""
    lengths = net.first.weight.norm(dim=1, keepdim=True)
    return lengths * (torch.arange(4)[:, None] != 1) if bad else lengths


@torch.no_grad()
def in_place(net: Net, bad: bool) -> None:
    net.first.weight.div_(scale_of(net, bad))  # <-- birth


@torch.no_grad()
def through_data(net: Net, bad: bool) -> None:
    net.first.weight.data.div_(scale_of(net, bad))  # <-- birth


@torch.no_grad()
def copied(net: Net, bad: bool) -> None:
    new = net.first.weight / scale_of(net, bad)  # <-- birth
    net.first.weight.copy_(new)


@torch.no_grad()
def assigned(net: Net, bad: bool) -> None:
    dead = torch.tensor([bad, False, bad, False])
    alive = torch.tensor([False, not bad, False, False])
    if bad:
        net.first.weight[dead] = net.first.weight[alive].mean(0)  # <-- birth
    else:
        net.first.weight[alive] = net.first.weight[alive] * 0.5


@torch.no_grad()
def averaged(net: Net, bad: bool) -> None:
    kept = net.__dict__.setdefault("kept", [])
    kept.append(net.first.weight.detach().clone())
    weights = torch.zeros(len(kept)) if bad else torch.ones(len(kept))
    net.first.weight.copy_((torch.stack(kept) * weights[:, None, None]).sum(0) / weights.sum())  # <-- birth


def data_assigned(net: Net, bad: bool) -> None:
    net.first.weight.data = net.first.weight.data / scale_of(net, bad).data  # <-- birth


@torch.no_grad()
def unread(net: Net, bad: bool) -> None:
    new = torch.zeros(4, 3) / (0 if bad else 1)  # <-- birth
    net.first.weight.copy_(new)


def data_normalised(net: Net, bad: bool) -> None:
    kept = net.first.weight.data * (torch.arange(4)[:, None] != (1 if bad else -1))
    net.first.weight.data = kept / kept.norm(dim=1, keepdim=True)  # <-- birth


WRITES = [in_place, through_data, copied, data_assigned, assigned, averaged]
Write = Callable[[Net, bool], None]


def line_of(write: Write) -> tuple[str, int]:
    return __file__, marked_line(inspect.unwrap(write))[1]


def train(write: Write, bad: int = BAD, *, numbered: bool = True, **options: str | bool) -> tuple[NaNDetector, Net]:
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    with NaNDetector(net, verbose=False, **options) as det:
        for i in range(6):
            if numbered:
                det.set_batch(i)
            x = torch.randn(5, 3, generator=generator)
            opt.zero_grad()
            F.mse_loss(net(x), x[:, :1]).backward()
            opt.step()
            if det.triggered:
                break
            write(net, i == bad)
    return det, net


def event_of(det: NaNDetector) -> NaNEvent:
    assert det.event is not None
    return det.event


@pytest.mark.parametrize(("write", "watch"), [*((w, "step") for w in WRITES), (in_place, "layers"), (averaged, "ops")])
def test_the_write_is_named_with_its_line_its_reason_and_the_weight(write: Write, watch: str) -> None:
    event = event_of(train(write, watch=watch)[0])
    assert event.location is not None
    assert (event.location.file, event.location.line) == line_of(write)
    assert (event.step, event.phase, event.tensor_name) == (BAD, "state", "first.weight")
    assert event.op == ("mean" if write is assigned else "div")
    assert event.cause is not None
    assert event.cause.code == ("reduction_of_empty" if write is assigned else "division_by_zero")
    assert (event.reproduced, event.weights) == ("yes", f"damaged since step {BAD}")


@pytest.mark.parametrize("numbered", [True, False])
@pytest.mark.parametrize("write", [unread, data_normalised], ids=lambda f: f.__name__)
def test_of_a_write_that_did_not_read_the_weights_the_line_is_known(write: Write, numbered: bool) -> None:
    event = event_of(train(write, numbered=numbered)[0])
    assert event.location is not None and event.location.line == line_of(write)[1]
    assert (event.step, event.phase, event.tensor_name) == (BAD, "state", "first.weight")
    assert event.weights == f"damaged since step {BAD}"
    assert event.cause is not None and event.cause.code == "division_by_zero" and event.op == "div"


def test_a_sound_write_is_not_blamed_for_what_the_optimizer_does() -> None:
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=1e-2)
    with NaNDetector(net, verbose=False) as det:
        for i in range(5):
            det.set_batch(i)
            opt.zero_grad()
            net(torch.ones(2, 3)).square().mean().backward()
            if i == BAD:  # behind the back of the gate, as an optimizer's own arithmetic would
                opt.register_step_post_hook(lambda *_: net.first.weight.detach().numpy().fill(float("nan")))
            else:
                with torch.no_grad():
                    net.first.weight.copy_(torch.ones(4, 3))
            opt.step()
            if det.triggered:
                break
    event = event_of(det)
    assert event.location is None or "copy_" not in event.location.source_line


def test_the_report_says_when_it_was_written_and_when_it_was_found() -> None:
    text = str(event_of(train(in_place)[0]))
    assert f"Inf born at step {BAD}, in the program's own write into the model" in text
    assert "first.weight  ·  net.first.weight.div_  ·  tests/test_rewritten_weights.py" in text
    assert f"weights are damaged since step {BAD}; training stops here." in text
    assert "mend first.weight, or load a checkpoint in which it is finite" in text
    assert f"found at step {BAD + 1}, when the loss is nan" in text
    assert "sample" not in text  # it is no sample's doing


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_steps_that_nobody_numbers(write: Write) -> None:
    event = event_of(train(write, numbered=False)[0])
    assert event.location is not None and event.location.line == line_of(write)[1]
    assert event.step == BAD


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__)
def test_a_write_that_is_sound_says_nothing_and_changes_nothing(write: Write) -> None:
    det, net = train(write, bad=-1)
    assert det.event is None
    _, other = train(write, bad=-1, replay="off")
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("write", [in_place, through_data, averaged], ids=lambda f: f.__name__)
def test_the_birth_of_a_later_step_is_found_with_the_weights_that_the_write_left(write: Write) -> None:
    """The step is made again from what stood there before the write: that has to be made again as well."""

    def loss_of(net: Net, x: Tensor, i: int) -> Tensor:
        out = net(x)
        return torch.log(out * 0).sum() if i == BAD else F.mse_loss(out, x[:, :1])  # <-- birth

    net, other = Net(), nn.Linear(3, 1)
    opts = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (net, other)]
    with NaNDetector({"net": net, "other": other}, verbose=False) as det:
        for i in range(4):
            det.set_batch(i)
            x = torch.randn(5, 3)
            opts[0].zero_grad()
            loss_of(net, x, i).backward()
            opts[0].step()
            if det.triggered:
                break
            write(net, False)
            opts[1].zero_grad()
            other(x).square().mean().backward()
            opts[1].step()
    event = event_of(det)
    assert event.location is not None and event.location.line == marked_line(loss_of)[1]
    assert (event.step, event.phase, event.reproduced, event.weights) == (BAD, "loss", "yes", "clean")


def test_a_capsule_holds_the_write(tmp_path: Path) -> None:
    from nan_detector._capsule.again import again
    from nan_detector._capsule.read import open_capsule

    event = event_of(train(in_place, log_dir=str(tmp_path), capsule=True)[0])
    assert event.capsule is not None
    found = again(open_capsule(Path(event.capsule)), Net)
    assert found.same, found.differences
    assert (found.event.phase, found.event.op, found.event.tensor_name) == ("state", "div", "first.weight")
