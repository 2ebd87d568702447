"""A replay runs the user's code again and leaves no trace of it: whatever the model keeps, counts, draws or writes."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from _steps import Tensor, assert_born, picture, train
from nan_detector import is_replaying


class Base(nn.Module):
    """Two layers; a subclass says what its forward does in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)


class Counts(Base):
    total = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.by_name = collections.Counter[str]()
        self.recent = collections.deque[float](maxlen=2)
        self.nested = {"rows": [[0]], "set": {0}}
        self.table = np.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Counts.total += 1
        self.seen.append(self.calls)
        self.by_name["forward"] += 1
        self.recent.append(float(x.sum()))
        self.nested["rows"][0].append(self.calls)
        self.nested["set"].add(self.calls)
        self.table[self.calls % 3] += 1
        h = torch.sqrt(x) * self.calls  # <-- birth
        return self.last(self.first(h))


class Meter:
    """A metric as users write them: no module, called like a function."""

    def __init__(self) -> None:
        self.sum, self.count, self.history = 0.0, 0, [0.0]

    def __call__(self, value: float) -> None:
        self.sum += value
        self.count += 1
        self.history.append(value)


class Metered(Base):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def forward(self, x: Tensor) -> Tensor:
        self.meter(float(x.mean()))
        return self.last(self.first(torch.sqrt(x)))  # <-- birth


class Remembers(Base):
    """A hidden state that each call replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.h = torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.h = torch.tanh(self.first(torch.sqrt(x)) + self.h.detach())  # <-- birth
        return self.last(self.h)


class CacheInPlace(Base):
    """A cache in a plain tensor attribute that each call writes a column of."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = torch.zeros(8, 3, 4)
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        self.cache[self.at % 8] = x
        self.at += 1
        past = self.cache.sum(0)
        return self.last(self.first(torch.log(x) + 0.01 * past))  # <-- birth


class CacheOfTensors(Base):
    """Keys and values appended to lists in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, list[Tensor]] = {"k": [], "v": []}

    def forward(self, x: Tensor) -> Tensor:
        k = self.first(torch.sqrt(x))  # <-- birth
        self.cache["k"].append(k.detach())
        self.cache["v"].append(x)
        return self.last(k + sum(self.cache["v"]))


class OwnGenerator(Base):
    def __init__(self) -> None:
        super().__init__()
        self.g = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.g)
        return self.last(self.first(torch.sqrt(x) + noise))  # <-- birth


class PythonRandom(Base):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.sqrt(x) * random.random() + float(np.random.rand())  # <-- birth
        return self.last(F.dropout(self.first(h), 0.5))


class OwnRandom(Base):
    """Random objects of the model's own, of Python and of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.np_rng = np.random.default_rng(0)
        self.np_old = np.random.RandomState(0)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.rng.random() + self.np_rng.random() + self.np_old.rand()
        return self.last(self.first(torch.sqrt(x) * factor))  # <-- birth


class Buffers(Base):
    """Buffers that the forward reads and writes, of two dtypes, and batch norm's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("ema", torch.ones(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.ema.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
        self.ema = self.ema / 1.01
        h = self.norm(self.first(torch.sqrt(x) / self.ema / self.steps))  # <-- birth
        return self.last(h)


class IntegerAttribute(Base):
    """A counter that is a tensor but no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros((), dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return self.last(self.first(torch.sqrt(x) * self.steps))  # <-- birth


class WritesInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        h = torch.sqrt(x)  # <-- birth
        return self.last(self.first(h))


class KeepsParameter(Base):
    """It uses a parameter through a reference of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.linear(torch.sqrt(x), self.weights[0]))  # <-- birth


GLOBAL_SCALE = torch.full((4,), 0.5, requires_grad=True)
GLOBAL_LOG: list[int] = []
GLOBAL_CALLS = 0


class UsesGlobals(Base):
    """A global tensor that requires grad, a global list and a global counter."""

    def forward(self, x: Tensor) -> Tensor:
        global GLOBAL_CALLS
        GLOBAL_CALLS += 1
        GLOBAL_LOG.append(GLOBAL_CALLS)
        return self.last(self.first(torch.sqrt(x)) * GLOBAL_SCALE)  # <-- birth


class GlobalThroughView(Base):
    """The global tensor meets only a view first."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(torch.sqrt(x)) * GLOBAL_SCALE.view(1, 4))  # <-- birth


class Tagged(nn.Parameter):
    """A Parameter subclass with an attribute that the forward needs."""

    scale: float


class Adapter(Base):
    """A frozen base weight of a Parameter subclass, and a trained low-rank pair."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Tagged(torch.eye(4), requires_grad=False)
        self.base.scale = 2.0
        self.a = nn.Parameter(torch.full((4, 1), 0.1))
        self.b = nn.Parameter(torch.zeros(1, 4))
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sqrt(x) @ (self.base * self.base.scale + self.a @ self.b)  # <-- birth
        return self.last(self.first(h))


class TaggedTrained(Base):
    """A trained Parameter subclass with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Tagged(torch.eye(4))
        self.w.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(torch.sqrt(x) @ self.w * self.w.scale))  # <-- birth


class Prints(Base):
    def forward(self, x: Tensor) -> Tensor:
        if not is_replaying():
            print("forward")
        return self.last(self.first(torch.sqrt(x)))  # <-- birth


class NewAttribute(Base):
    """Attributes that come and go while it runs, and a mode that it changes."""

    def forward(self, x: Tensor) -> Tensor:
        if is_replaying():
            self.only_in_replay = [x]
            self.last.train(False)
        return self.last(self.first(torch.sqrt(x)))  # <-- birth


class Wrapped(Base):
    """Weight and spectral normalisation, whose pre-hooks and buffers move in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(torch.sqrt(x)))  # <-- birth


MODELS = [
    Counts, Metered, Remembers, CacheInPlace, CacheOfTensors, OwnGenerator, PythonRandom, OwnRandom, Buffers,
    IntegerAttribute, WritesInput, KeepsParameter, UsesGlobals, GlobalThroughView, Adapter, TaggedTrained, Prints,
    NewAttribute, Wrapped,
]  # fmt: skip


@pytest.mark.parametrize("kind", MODELS, ids=lambda k: k.__name__)
def test_the_origin_is_found_and_nothing_has_moved(kind: type[Base]) -> None:
    model = kind()
    GLOBAL_SCALE.grad = torch.ones(4)

    def everything() -> Any:
        return picture(model, GLOBAL_SCALE, GLOBAL_LOG, GLOBAL_CALLS, Counts.total)

    det, before, after = train(model, on_nan="skip", stop_on_first=False, around=everything)
    op = "log" if kind is CacheInPlace else "sqrt"
    assert_born(det.event, kind, step=4, phase="forward", layer_name="root", op=op, weights="clean")
    assert before == after


@pytest.mark.parametrize("kind", [Counts, Buffers, CacheInPlace, UsesGlobals], ids=lambda k: k.__name__)
def test_when_it_only_warns_nothing_has_moved_by_the_time_it_is_told(kind: type[Base]) -> None:
    model = kind()
    pictures = []

    def told(event: Any) -> str:
        pictures.append(picture(model, GLOBAL_SCALE, GLOBAL_LOG, GLOBAL_CALLS, Counts.total))
        return "warn"

    det, before, _ = train(
        model, on_nan=told, around=lambda: picture(model, GLOBAL_SCALE, GLOBAL_LOG, GLOBAL_CALLS, Counts.total)
    )
    assert_born(det.event, kind)
    assert pictures == [before]


@pytest.mark.parametrize("kind", MODELS, ids=lambda k: k.__name__)
def test_ordinary_training_is_quiet(kind: type[Base]) -> None:
    from _steps import batches

    det, _, _ = train(kind(), batches(bad=-1, last=6))
    assert det.event is None and not det.warnings


class OnlyThroughReference(Base):
    """A bad gradient that arrives at no parameter which the replay has swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        keep = (x.min() > 0).float()
        return self.last(x.abs()) + torch.sqrt((self.weights[0] * keep).abs()).sum()  # <-- birth


def test_a_gradient_of_a_parameter_that_the_model_reaches_by_itself() -> None:
    model = OnlyThroughReference()
    det, before, after = train(model, on_nan="skip", stop_on_first=False, around=lambda: picture(model))
    assert_born(det.event, OnlyThroughReference, phase="backward", op="sqrt", weights="clean")
    assert before == after


def test_code_of_the_users_can_ask_whether_it_is_a_replay(capsys: pytest.CaptureFixture[str]) -> None:
    train(Prints())
    assert capsys.readouterr().out.count("forward") == 5
