"""What is kept of a model's call, what is learned from its first calls, and how Python state is put back."""

from __future__ import annotations

import collections
import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from nan_detector._errors import ReplayRefused
from nan_detector._moment import LEARNING_CALLS, Habits, Snapshot, restore
from nan_detector._python_state import PythonState

Tensor = torch.Tensor


class Model(nn.Module):
    def __init__(self, work: Any) -> None:
        super().__init__()
        self.register_buffer("ema", torch.zeros(2))
        self.norm = nn.BatchNorm1d(2)
        self.count = 0
        self.cache = torch.zeros(2)
        self.nested: dict[str, list[int]] = {"a": [0]}
        self.generator = torch.Generator()
        self.work = [work]

    def forward(self, x: Tensor) -> Tensor:
        self.work[0](self)
        return x


def learned(work: Any) -> tuple[Model, Habits]:
    model = Model(work)
    habits = Habits(model)
    for _ in range(LEARNING_CALLS):
        moment = habits.start(model)
        model(torch.ones(2))
        habits.finish(moment)
    return model, habits


def _count(m: Any) -> None:
    m.count += 1


def _ema(m: Any) -> None:
    m.ema.add_(1.0)


def _cache(m: Any) -> None:
    m.cache.add_(1.0)


def _nested(m: Any) -> None:
    m.nested["a"].append(1)


def _python(m: Any) -> None:
    random.random()


def _numpy(m: Any) -> None:
    np.random.rand()


def _norm(m: Any) -> None:
    m.norm(torch.rand(3, 2))


def _nothing(m: Any) -> None:
    pass


def test_a_model_that_changes_nothing_costs_nothing_once_learned() -> None:
    model, habits = learned(_nothing)
    moment = habits.start(model)
    assert not habits.learning
    assert (moment.buffers, moment.attributes, moment.state) == ((), (), None)
    assert moment.python_rng is None and moment.numpy_rng is None


@pytest.mark.parametrize(("work", "attribute"), [(_count, "count"), (_cache, "cache"), (_nested, "nested")])
def test_what_the_first_calls_changed_is_kept_of_later_ones(work: Any, attribute: str) -> None:
    model, habits = learned(work)
    assert [n for _, n in habits.attributes] == [attribute]
    before = str(getattr(model, attribute))
    moment = habits.start(model)
    model(torch.ones(2))
    assert str(getattr(model, attribute)) != before
    for _ in range(2):  # a second replay starts from the same
        restore(moment)
        assert str(getattr(model, attribute)) == before
        model(torch.ones(2))


def test_a_buffer_that_the_forward_writes_is_copied_and_batch_norms_own_are_not() -> None:
    model, habits = learned(_ema)
    moment = habits.start(model)
    model(torch.ones(2))
    ((module, name, value),) = moment.buffers
    assert module is model and name == "ema" and value.tolist() == [3.0, 3.0]
    _, habits = learned(_norm)
    assert not habits.buffers


@pytest.mark.parametrize(
    ("work", "draw"), [(_python, random.random), (_numpy, np.random.rand), (_nothing, lambda: float(torch.rand(())))]
)
def test_random_streams_are_kept_where_the_model_moves_them(work: Any, draw: Any) -> None:
    model, habits = learned(work)
    moment = habits.start(model)
    assert (moment.python_rng is not None, moment.numpy_rng is not None) == (work is _python, work is _numpy)
    first = draw()
    restore(moment)
    assert draw() == first


def test_a_moment_keeps_no_graph() -> None:
    def work(m: Any) -> None:
        m.h = torch.ones(2, requires_grad=True) * 2
        m.nested["h"] = [m.h]

    model, habits = learned(work)
    moment = habits.start(model)
    assert all(v.grad_fn is None for _, _, v in moment.attributes if isinstance(v, Tensor))
    restore(moment)
    assert model.nested["h"][0].grad_fn is None


class Thing:
    total = 0

    def __init__(self) -> None:
        self.values, self.n = [1], 0


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


COUNTER = 0
TABLE: dict[str, int] = {"a": 1}


def _bump() -> None:
    global COUNTER
    COUNTER += 1
    TABLE["b"] = COUNTER


def test_a_picture_puts_everything_back_in_place() -> None:
    thing, slotted = Thing(), Slotted()
    values: dict[str, Any] = {
        "list": [1, [2]], "dict": {"k": {"deep": 1}}, "set": {1}, "deque": collections.deque([1], maxlen=3),
        "counter": collections.Counter("aab"), "ordered": collections.OrderedDict(a=1, b=2), "array": np.zeros(2),
        "thing": thing, "slotted": slotted, "random": random.Random(0), "numpy": np.random.default_rng(0),
        "generator": torch.Generator().manual_seed(0),
    }  # fmt: skip
    calls = 0

    def nonlocal_counter() -> None:
        nonlocal calls
        calls += 1

    state = PythonState([values, nonlocal_counter, functools.partial(_bump)])
    inner = values["list"][1]
    drawn = values["random"].random(), values["numpy"].random(), float(torch.rand((), generator=values["generator"]))
    inner.append(3)
    values["list"].append(4)
    values["dict"]["k"]["deep"] = 2
    values["set"].add(2)
    values["deque"].append(2)
    values["counter"]["z"] += 1
    values["ordered"].move_to_end("a")
    values["array"][0] = 7.0
    thing.values.append(2)
    thing.n, slotted.n, Thing.total = 1, 1, 1
    thing.new = 1
    nonlocal_counter()
    _bump()
    assert state.changed()
    state.restore()
    assert not state.changed()
    assert values["list"] == [1, [2]] and values["list"][1] is inner
    assert values["dict"] == {"k": {"deep": 1}} and values["set"] == {1} and list(values["deque"]) == [1]
    assert values["counter"] == collections.Counter("aab") and list(values["ordered"]) == ["a", "b"]
    assert values["array"].tolist() == [0.0, 0.0]
    assert vars(thing) == {"values": [1], "n": 0} and slotted.n == 0 and Thing.total == 0
    assert calls == 0 and COUNTER == 0 and TABLE == {"a": 1}
    again = values["random"].random(), values["numpy"].random(), float(torch.rand((), generator=values["generator"]))
    assert again == drawn


def test_a_picture_of_a_circle_ends() -> None:
    a: list[Any] = [1]
    a.append(a)
    state = PythonState([a])
    a.append(2)
    state.restore()
    assert len(a) == 2


def test_iterators_are_named_and_files_are_not(tmp_path: Any) -> None:
    with open(tmp_path / "log.txt", "w", encoding="utf-8") as file:

        class Holder:
            def __init__(self) -> None:
                self.source, self.log = iter([1]), file

        assert [name for name, _ in PythonState([Holder()]).iterators] == ["source"]


def test_a_snapshot_puts_back_modules_modes_and_attributes_that_came_and_went() -> None:
    model = Model(_nothing)
    iterator = iter([1, 2])
    model.source = iterator
    snapshot = Snapshot([model, model.norm], [model.generator])
    with pytest.raises(ReplayRefused, match="'source' of Model is an iterator"):
        next(model.source)
    model.new = 1
    del model.cache
    model.count = 5
    model.eval()
    torch.rand((), generator=model.generator)
    state = torch.Generator().get_state()
    snapshot.restore()
    assert not hasattr(model, "new") and model.count == 0 and model.cache.tolist() == [0.0, 0.0]
    assert model.training and model.norm.training
    assert model.source is iterator and next(iterator) == 1
    assert torch.equal(model.generator.get_state(), state)
