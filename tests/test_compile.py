"""torch.compile under the watch: nothing more is compiled, nothing breaks, and a NaN in compiled code is an event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from _sacred import LEVELS, assert_same, blobs, marked_line
from nan_detector import NaNDetector

# Of torch's compiler about its own doings, watched or not.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

BAD = 5


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


class Rooted(nn.Module):
    """Has no square root for a poisoned batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sqrt(100.0 + x.mean())  # <-- root
        return self.second(torch.tanh(self.first(x)) * scale / 10.0)


@dataclass
class Result:
    losses: list[float]
    weights: list[Tensor]
    frames: int
    breaks: int
    recompiles: int
    det: NaNDetector | None


class Compiled:
    """A training of a model of which some parts are compiled."""

    def __init__(
        self,
        backend: str = "eager",
        *,
        loss: bool = False,
        step: bool = False,
        fullgraph: bool = True,
        bad: int | None = None,
        model: Callable[[], nn.Module] = Rooted,
    ) -> None:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        self.counter = CompileCounterWithBackend(backend)
        self.fullgraph, self.bad = fullgraph, bad
        self.inner = model()
        self.optimizer = torch.optim.Adam(self.inner.parameters(), lr=0.01)
        self.loss: Any = F.cross_entropy
        if loss:
            self.loss = torch.compile(
                lambda out, y: F.cross_entropy(out, y).square(), backend=self.counter, fullgraph=fullgraph
            )
        # torch's own step breaks the graph by itself: that is not counted against anybody.
        own_step = self.optimizer.step
        self.step: Any = torch.compile(lambda: self.optimizer.step(), backend=self.counter) if step else own_step
        self.model: Any = None
        self.losses: list[float] = []

    def compile(self) -> Any:
        self.model = torch.compile(self.inner, backend=self.counter, fullgraph=self.fullgraph)
        return self.model

    def train(self, steps: int) -> None:
        for _ in range(steps):
            i = len(self.losses)
            x, y = blobs(seed=i)
            x = x - 1e4 if i == self.bad else x
            self.optimizer.zero_grad()
            loss = self.loss(self.model(x), y)
            loss.backward()
            self.step()
            self.losses.append(loss.item())

    def result(self, det: NaNDetector | None = None) -> Result:
        return Result(
            self.losses,
            [p.detach().clone() for p in self.inner.parameters()],
            self.counter.frame_count,
            sum(counters["graph_break"].values()),
            sum(counters["recompiles"].values()) if "recompiles" in counters else 0,
            det,
        )


def bare(**options: Any) -> Result:
    run = Compiled(**options)
    run.compile()
    run.train(8)
    return run.result()


def watched(when: str, given: str, watch: str, **options: Any) -> Result:
    run = Compiled(**options)
    if when != "compiled after":
        run.compile()
    if when == "attached after warm-up":
        run.train(3)
    det = NaNDetector(run.model if given == "wrapper" else run.inner, watch=watch, on_nan="skip", verbose=False)
    with det:
        if run.model is None:
            run.compile()
        run.train(8 - len(run.losses))
    return run.result(det)


def same(a: Result, b: Result) -> None:
    assert_same({"losses": a.losses, "weights": a.weights}, {"losses": b.losses, "weights": b.weights})
    assert (b.frames, b.breaks, b.recompiles) == (a.frames, a.breaks, a.recompiles)


WAYS = [
    ("attached", "wrapper"), ("attached", "inner"), ("compiled after", "inner"),
    ("attached after warm-up", "wrapper"), ("attached after warm-up", "inner"),
]  # fmt: skip


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize(("when", "given"), WAYS)
def test_a_compiled_model_is_compiled_once_and_whole(when: str, given: str, watch: str) -> None:
    result = watched(when, given, watch)
    assert result.det is not None and result.det.event is None
    same(bare(), result)
    assert result.frames == 1


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize(("when", "given"), WAYS)
def test_a_nan_in_compiled_code_is_found(when: str, given: str, watch: str) -> None:
    result = watched(when, given, watch, bad=BAD)
    assert result.det is not None
    event = result.det.event
    assert event is not None and len(result.det.all_events) == 1
    assert (event.step, event.phase, event.layer_name, event.op) == (
        BAD - (3 if when == "attached after warm-up" else 0), "forward", "root", "sqrt",
    )  # fmt: skip
    assert event.location is not None and event.location.line == marked_line(Rooted, "root")
    assert (event.reproduced, event.weights) == ("yes", "clean")
    assert all(w.isfinite().all() for w in result.weights)
    # The replay ran eagerly, and the compiled code is what it was.
    assert (result.frames, result.breaks, result.recompiles) == (1, 0, 0)


@pytest.mark.parametrize("watch", ["step", "layers"])
def test_aot_eager(watch: str) -> None:
    same(bare(backend="aot_eager"), watched("attached", "inner", watch, backend="aot_eager"))
    event = watched("attached", "inner", watch, backend="aot_eager", bad=BAD).det.event
    assert event is not None and (event.op, event.reproduced) == ("sqrt", "yes")


@pytest.mark.parametrize("watch", LEVELS)
def test_compiled_loss_and_step(watch: str) -> None:
    options = {"loss": True, "step": True}
    result = watched("attached", "wrapper", watch, **options)
    assert result.det is not None and result.det.event is None
    same(bare(**options), result)


def test_a_compiled_loss_is_never_guessed_about() -> None:
    """The bad value comes from compiled code outside the model, which nobody recorded."""
    result = watched("attached", "inner", "step", loss=True, bad=BAD)
    assert result.det is not None
    event = result.det.event
    assert event is not None and (event.step, event.weights) == (BAD, "clean")
    assert (event.reproduced, event.op, event.location, event.tensor_name) == ("no", None, None, None)
    assert any("compiled function" in n and "run_step" in n for n in event.notes)
    # What is known for certain is said: the model's own output was bad before the loss saw it.
    line = marked_line(Rooted, "root")
    assert any("sqrt" in n and n.endswith(f":{line}") and "already not finite" in n for n in event.notes)


def test_weights_that_a_compiled_step_poisoned_are_not_taken_for_the_origin() -> None:
    """A compiled step runs no hook: it cannot be refused, and afterwards the step cannot be replayed."""
    result = watched("attached", "inner", "step", step=True, bad=BAD)
    assert result.det is not None
    event = result.det.event
    assert event is not None and event.step == BAD
    assert event.weights == f"damaged since step {BAD}"
    assert (event.reproduced, event.op, event.tensor_name) == ("not_tried", None, None)
    assert any("compiled optimizer step" in n for n in event.notes)


class Dropping(nn.Module):
    """Compiled dropout draws other numbers than eager dropout (in Inductor), so a replay need not reproduce it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(torch.relu(self.first(x)), 0.5))


@pytest.mark.parametrize("watch", LEVELS)
def test_a_module_compiled_in_place(watch: str) -> None:
    def run(on: bool) -> Result:
        run = Compiled(model=Dropping)
        run.inner.compile(backend=run.counter, fullgraph=True)
        run.model = run.inner
        if not on:
            run.train(6)
            return run.result()
        with NaNDetector(run.inner, watch=watch, verbose=False) as det:
            run.train(6)
        assert det.event is None
        return run.result()

    same(run(False), run(True))


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("first", ["compile", "attach"])
def test_a_nan_in_a_module_compiled_in_place_is_found(first: str, watch: str) -> None:
    run = Compiled(bad=BAD)
    run.model = run.inner
    if first == "compile":
        run.inner.compile(backend=run.counter)
    with NaNDetector(run.inner, watch=watch, on_nan="skip", verbose=False) as det:
        if first == "attach":
            run.inner.compile(backend=run.counter)
        run.train(8)
    event = det.event
    assert event is not None and (event.step, event.op, event.reproduced) == (BAD, "sqrt", "yes")
    assert event.location is not None and event.location.line == marked_line(Rooted, "root")
    assert event.weights == "clean"


def test_evaluation_with_a_compiled_model() -> None:
    run = Compiled(fullgraph=False)
    run.compile()
    with NaNDetector(run.inner, verbose=False) as det:
        for _ in range(3):
            run.train(1)
            with torch.no_grad():
                run.model(blobs()[0])
    assert det.event is None
    assert run.counter.frame_count <= 2  # training and evaluation


def test_detached_compiled_code_is_left_as_it_was() -> None:
    run = Compiled()
    run.compile()
    with NaNDetector(run.inner, verbose=False):
        run.train(3)
    run.train(5)
    same(bare(), run.result())
