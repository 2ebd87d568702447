"""A watched training is the same training: weights, optimizer, gradients, random streams, attributes, losses."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from _loops import LOOPS, loading
from _sacred import LEVELS, Run, assert_same, blobs, train
from _trainings import MODELS, dropout_and_batch_norm, mlp, plain


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("make", [*MODELS, *LOOPS], ids=lambda make: make.__name__)
def test_bit_equal(make: Callable[[], Run], watch: str) -> None:
    options = {"check_backward": True} if watch == "layers" else {}
    assert_same(train(make, None), train(make, watch, **options))


def test_workers_of_a_data_loader() -> None:
    assert_same(train(lambda: loading(2), None, 2), train(lambda: loading(2), "step", 2))


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1, "momentum": 0.9, "foreach": False}), ("SGD", {"lr": 0.1, "fused": True}),
    ("Adam", {"lr": 0.01, "fused": True}), ("Adam", {"lr": torch.tensor(0.01), "capturable": False, "foreach": False}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "foreach": True}), ("Adamax", {"lr": 0.01}), ("Adadelta", {"lr": 0.5}),
    ("RAdam", {"lr": 0.01}), ("ASGD", {"lr": 0.05}), ("Rprop", {"lr": 0.01}), ("Adafactor", {"lr": 0.01}),
]  # fmt: skip


@pytest.mark.parametrize("watch", ["step", "ops"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_every_optimizer(name: str, options: dict[str, Any], watch: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")

    def make() -> Run:
        model = mlp(nn.ReLU(), nn.Dropout(0.1))
        return plain(model, getattr(torch.optim, name)(model.parameters(), **options))

    assert_same(train(make, None), train(make, watch))


# -- what the user has switched on -------------------------------------------------------------------------------------


class Counting(TorchFunctionMode):
    """A user's function mode: it must see the calls that it would see without us, and no others."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    """A user's dispatch mode, likewise."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _values(seen: list[str]) -> list[str]:
    return [name for name in seen if not re.search("detach|new_empty_strided|copy_", name)]


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("mode", [Counting, Dispatched])
@pytest.mark.parametrize("where", ["outside", "around", "in the step", "around the forward"])
def test_a_mode_of_the_users_sees_what_it_saw(mode: Any, where: str, watch: str) -> None:
    def make() -> Run:
        model = mlp(nn.ReLU(), nn.Dropout(0.1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        run = plain(model, optimizer)
        inner = run.step

        def in_the_step(i: int) -> float:
            with mode(run.seen):
                return inner(i)

        def around_the_forward(i: int) -> float:
            x, y = blobs(seed=i)
            optimizer.zero_grad()
            with mode(run.seen):
                out = model(x)
            loss = F.cross_entropy(out, y)
            with mode(run.seen):
                loss.backward()
            optimizer.step()
            return loss.item()

        if where in ("outside", "around"):
            setattr(run, where, lambda: mode(run.seen))
        else:
            run.step = in_the_step if where == "in the step" else around_the_forward
        return run

    bare, watched = train(make, None, 4), train(make, watch, 4)
    assert bare["seen"]
    if watch == "ops":
        # The tracer keeps what an operation was given, so autograd copies gradients that it would otherwise take over.
        bare["seen"], watched["seen"] = _values(bare["seen"]), _values(watched["seen"])
    assert_same(bare, watched)


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("where", ["outside", "around", "step"])
def test_with_a_device_around(where: str, watch: str) -> None:
    def make() -> Run:
        model = mlp(nn.ReLU(), nn.Dropout(0.1))
        run = plain(model, torch.optim.Adam(model.parameters(), lr=0.01))
        if where == "step":
            inner = run.step

            def step(i: int) -> float:
                with torch.device("cpu"):
                    return inner(i)

            run.step = step
        else:
            setattr(run, where, lambda: torch.device("cpu"))
        return run

    assert_same(train(make, None), train(make, watch))


@pytest.mark.parametrize("watch", LEVELS)
def test_default_device_set_inside_the_watch(watch: str) -> None:
    def make() -> Run:
        model = mlp()
        run = plain(model, torch.optim.Adam(model.parameters(), lr=0.01))
        inner = run.step

        def step(i: int) -> float:
            if i == 2:
                torch.set_default_device("cpu")
            loss = inner(i)
            run.seen.append(str(torch.empty(0).device))
            if i == 4:
                torch.set_default_device(None)
            return loss

        run.step = step
        return run

    assert_same(train(make, None), train(make, watch))


@pytest.mark.parametrize("watch", LEVELS)
def test_deterministic_algorithms_and_anomaly_mode(watch: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True, check_nan=False):
            warnings.simplefilter("ignore")
            bare = train(dropout_and_batch_norm, None)
            assert_same(bare, train(dropout_and_batch_norm, watch))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("watch", LEVELS)
def test_denormals_stay_what_they_were(flush: bool, watch: str) -> None:
    """Gradients below the normal range: a check that wrote them back would flush them."""

    def make() -> Run:
        model = mlp(nn.Tanh())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)

        def step(i: int) -> float:
            x, y = blobs(seed=i)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) * 1e-38
            loss.backward()
            if torch.set_flush_denormal(flush):
                optimizer.step()
                torch.set_flush_denormal(False)
            return loss.item()

        return Run([model], [optimizer], step)

    assert_same(train(make, None), train(make, watch))
