"""Births in the forward pass and in the loss, wherever a program may have put the guilty line."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _programs import assert_born, assert_quiet, train

BAD = 2  # the step whose batch brings the guilty numbers


def batches(bad: bool = True, n: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Inputs [6, 4] and targets [6, 3] > 0; those of step `BAD` have a row of zeros in the input and in the target."""
    g = torch.Generator().manual_seed(0)
    out = []
    for i in range(n):
        x, y = torch.rand(6, 4, generator=g) + 0.5, torch.rand(6, 3, generator=g) + 0.5
        if bad and i == BAD:
            x[1], y[4] = 0.0, 0.0
        out.append((x, y))
    return out


class Normalise(nn.Module):
    """Divides by the norm of each row, which may be zero."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)  # <-- birth


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Normalise()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.norm(x))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(OrderedDict(body=Block()))])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


def mse(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def test_in_a_nested_module() -> None:
    run = train(Nested(), batches(), mse)
    assert_born(run, Normalise, step=BAD, phase="forward", layer="stages.0.body.norm", op="div")
    assert_quiet(train(Nested(), batches(bad=False), mse))


class Shared(nn.Module):
    """One normalisation under two names, called before and after a layer: the second call is the guilty one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Normalise()
        self.lin = nn.Linear(4, 4)
        self.relu = nn.ReLU()
        self.again = self.first
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + 1.0)
        x = self.lin(x)
        x = x * (x.detach() > 1e3)
        return self.head(self.again(x))


def test_a_shared_module_has_its_first_path() -> None:
    run = train(Shared(), batches(), mse)
    event = assert_born(run, Normalise, step=0, phase="forward", layer="first", op="div")
    assert event.spread[0].layer_name == "first"


class Between(nn.Module):
    """Functional code between two modules, in the root's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 3)

    def forward(self, x: Tensor, *, log: bool = True) -> Tensor:
        h = self.inner(x)
        if log:
            h = h * torch.log(x.sum(-1, keepdim=True))  # <-- birth
        return self.outer(h)


def test_between_modules_is_root() -> None:
    run = train(Between(), batches(), lambda m, b: F.mse_loss(m(b[0], log=True), b[1]))
    assert_born(run, Between, step=BAD, phase="forward", layer="root", op="log")
    assert_quiet(train(Between(), batches(), lambda m, b: F.mse_loss(m(b[0], log=False), b[1])))


class KeywordOnly(Between):
    def forward(self, *, pixels: Tensor, extra: dict[str, Tensor] | None = None) -> Tensor:
        assert extra is not None
        h = self.inner(pixels)
        return self.outer(h / extra["scale"])  # <-- birth


def test_keyword_only_arguments() -> None:
    def loss_of(model: Any, batch: Any) -> Tensor:
        out = model(pixels=batch[0], extra={"scale": batch[0].sum(-1, keepdim=True)})
        return F.mse_loss(out, batch[1])

    assert_born(
        train(KeywordOnly(), batches(), loss_of), KeywordOnly, step=BAD, phase="forward", layer="root", op="div"
    )


# -- between the model's output and the loss ---------------------------------------------------------------------------


class Point(NamedTuple):
    mean: Tensor
    spread: Tensor


@dataclass
class Output:
    mean: Tensor
    spread: Tensor
    hidden: tuple[Tensor, ...] = ()


@dataclass
class DictOutput(OrderedDict[str, Tensor]):
    """As the output classes of a well-known library: a dataclass that is a dictionary of its fields."""

    mean: Tensor | None = None
    spread: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "spread"):
            self[name] = getattr(self, name)


class TwoHeads(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.mean, self.spread = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)

    def forward(self, x: Tensor) -> Any:
        mean, spread = self.mean(x), self.spread(x) ** 2
        if self.form == "dict":
            return {"mean": mean, "more": {"spread": spread}}
        if self.form == "tuple":
            return mean, [spread]
        if self.form == "named":
            return Point(mean, spread)
        if self.form == "dataclass":
            return Output(mean, spread, (mean, spread))
        return DictOutput(mean=mean, spread=spread)


def likelihood(out: Any, y: Tensor) -> Tensor:
    if type(out) is dict:
        mean, spread = out["mean"], out["more"]["spread"]
    elif type(out) is tuple:
        mean, (spread,) = out
    elif isinstance(out, DictOutput):
        mean, spread = out["mean"], out.spread
        assert spread is not None
    else:
        mean, spread = out.mean, out.spread
    error = (mean - y) ** 2
    return (error / spread).mean() + (spread + 1).log().mean()  # <-- birth


@pytest.mark.parametrize("form", ["dict", "tuple", "named", "dataclass", "dict dataclass"])
def test_root_output_in_any_shape(form: str) -> None:
    run = train(TwoHeads(form), batches(), lambda m, b: likelihood(m(b[0]), b[1]))
    assert_born(run, likelihood, step=BAD, phase="loss", layer=None, op="div")
    assert_quiet(train(TwoHeads(form), batches(bad=False), lambda m, b: likelihood(m(b[0]), b[1])))


class LogLoss(nn.Module):
    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        weights = y / y.sum(-1, keepdim=True)  # <-- birth
        return (weights * (out - y) ** 2).sum()


def test_a_loss_module_of_the_users_is_no_layer() -> None:
    criterion = LogLoss()
    run = train(nn.Linear(4, 3), batches(), lambda m, b: criterion(m(b[0]), b[1]))
    assert_born(run, LogLoss, step=BAD, phase="loss", layer=None, op="div")


def several(model: Any, batch: Any) -> Tensor:
    x, y = batch
    out = model(x)
    plain = nn.MSELoss()(out, y)
    relative = nn.L1Loss()(out / y, torch.ones_like(y))  # <-- birth
    smooth = F.smooth_l1_loss(out, y)
    return plain + 0.1 * relative + smooth


def test_one_of_several_losses() -> None:
    assert_born(train(nn.Linear(4, 3), batches(), several), several, step=BAD, phase="loss", layer=None, op="div")


def test_cross_entropy_with_every_target_ignored() -> None:
    criterion = nn.CrossEntropyLoss(ignore_index=-100)

    def loss_of(model: Any, batch: Any) -> Tensor:
        target = torch.where(batch[1].sum(-1) == 0, -100, 1)
        if (target == -100).any():
            target = torch.full_like(target, -100)
        return criterion(model(batch[0]), target)  # <-- birth

    run = train(nn.Linear(4, 3), batches(), loss_of)
    assert_born(run, loss_of, step=BAD, phase="loss", layer=None, op={"cross_entropy", "nll_loss_forward"})


def before_the_call(model: Any, batch: Any) -> Tensor:
    x, y = batch
    target = y / y.sum(-1, keepdim=True)  # <-- birth
    return F.mse_loss(model(x), target)


def test_targets_made_before_the_model_is_called() -> None:
    run = train(nn.Linear(4, 3), batches(), before_the_call)
    assert_born(run, before_the_call, step=BAD, phase="loss", layer=None, op="div")


def augmented(model: Any, batch: Any) -> Tensor:
    x, y = batch
    with torch.no_grad():
        x = (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)  # <-- birth
    return F.mse_loss(model(x), y)


def test_augmentation_before_the_model_is_called() -> None:
    run = train(nn.Linear(4, 3), batches(), augmented)
    assert_born(run, augmented, step=BAD, phase="loss", layer=None, op="div")


def siamese(model: Any, batch: Any) -> Tensor:
    x, y = batch
    left, right = model(x), model(x.flip(0)) + 1
    third = model(x * 2)
    scale = left.detach().abs() * y
    return ((left - right) / scale).pow(2).mean() + third.mean()  # <-- birth


def test_several_calls_of_the_model_in_one_step() -> None:
    assert_born(train(nn.Linear(4, 3), batches(), siamese), siamese, step=BAD, phase="loss", layer=None, op="div")


def siamese_inside(model: Any, batch: Any) -> Tensor:
    left, right = model(batch[0].clamp(min=0.1)), model(batch[0])
    return (left - right).pow(2).mean()


def test_the_second_call_of_the_model_is_the_guilty_one() -> None:
    run = train(Nested(), batches(), siamese_inside)
    assert_born(run, Normalise, step=BAD, phase="forward", layer="stages.0.body.norm", op="div")


def with_item(model: Any, batch: Any) -> Tensor:
    x, y = batch
    out = model(x)
    scale = y.min().item()
    weight = float(out.detach().abs().sum() / y.min())  # <-- birth
    return F.mse_loss(out, y) * weight + scale


def test_a_python_number_on_the_way_to_the_loss() -> None:
    run = train(nn.Linear(4, 3), batches(), with_item)
    assert_born(run, with_item, step=BAD, phase="loss", layer=None, op="div")


def with_tolist(model: Any, batch: Any) -> Tensor:
    x, y = batch
    weight = (1.0 / y.min()).tolist()  # <-- birth
    return F.mse_loss(model(x), y) * weight


def with_a_tensor_of_numbers(model: Any, batch: Any) -> Tensor:
    x, y = batch
    mean = y.amin() / y.amin()  # <-- birth
    weight = torch.full((2,), mean.item())
    return F.mse_loss(model(x), y) * weight.sum()


@pytest.mark.parametrize("loss_of", [with_tolist, with_a_tensor_of_numbers], ids=lambda f: f.__name__)
@pytest.mark.parametrize("watch", ["step", "ops"])
def test_a_number_read_from_a_tensor_keeps_its_birth(loss_of: Any, watch: str) -> None:
    run = train(nn.Linear(4, 3), batches(), loss_of, watch=watch)
    assert_born(run, loss_of, step=BAD, phase="loss", layer=None, op={"div", "reciprocal"})
