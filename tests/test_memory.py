"""What the watch holds on to: nothing that grows, nothing large, nothing beyond the step."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdRef

from _steps import Tensor, batches, loss_of
from nan_detector import NaNDetector
from nan_detector._bench.memory import living_bytes, memory_of
from nan_detector._bench.results import BARE
from nan_detector._bench.timing import Step
from nan_detector._bench.variants import variant
from nan_detector._bench.workloads import Task
from nan_detector._session import session


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def _resident() -> int:
    """Bytes of memory that the system has given to this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
@pytest.mark.parametrize(
    ("watch", "steps"),
    [
        ("step", 1500),
        ("layers", 1500),
        ("ops", 150),
        # Four minutes each.
        pytest.param("step", 200_000, marks=pytest.mark.campaign),
        pytest.param("layers", 200_000, marks=pytest.mark.campaign),
        pytest.param("ops", 20_000, marks=pytest.mark.campaign),
    ],
)
def test_memory_is_flat(watch: str, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects, storages and what the system has given, over steps with everything that is always on."""
    monkeypatch.setattr("nan_detector._engine.OVERHEAD_STEPS", 50)  # a ring that must be full before we count
    model = Net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = batches(bad=-1)
    with NaNDetector(model, verbose=False, watch=watch, history=50, also_watch=nn.Linear(3, 3)) as det:

        def train(count: int) -> None:
            for i in range(count):
                x, y = data[i % 5]
                opt.zero_grad()
                loss_of(model, x.clone(), y).backward()
                if i % 2:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                if i % 100 == 99:  # an evaluation now and then, and a look at the numbers
                    with torch.no_grad():
                        model(x)
                    det.cost()

        train(min(300, steps))  # the rings are full, and every slice has been looked at
        objects, storages, resident, cost = _objects(), living_bytes(), _resident(), det.cost()
        train(steps)
        assert len(session().tape.entries) < 20  # first: what is asked of all living tensors is on the tape as well
        # Far from one a step; up to some hundred come and go with what ran before in the process.
        assert _objects() - objects < 300
        assert living_bytes() - storages < 5_000
        # The allocator of C keeps what it likes: 1 MiB in 1500 steps would be 140 MiB in 200,000.
        assert _resident() - resident < (1 << 20) * (1 if steps < 10_000 else 8)
        now = det.cost()
        assert now.held_bytes == cost.held_bytes < 50_000
        assert now.steps == cost.steps + steps
    assert det.event is None


@pytest.mark.parametrize("optimizers", [1, 2])
def test_batches_losses_and_outputs_are_let_go(optimizers: int) -> None:
    """With two optimizers the tape keeps what still lives; a user's list of losses keeps them for ever."""
    model = Net()
    opts = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model.first, model.last)][:optimizers]
    held: list[Any] = []
    losses = []
    with NaNDetector(model, verbose=False):
        for _ in range(60):
            x, y = torch.rand(3, 4), torch.rand(3, 1)
            for opt in opts:
                opt.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            losses.append(loss)
            for opt in opts:
                opt.step()
            held.append(weakref.ref(x))
            del x, y, loss
        gc.collect()
        alive = [i for i, ref in enumerate(held) if ref() is not None]
        assert all(i >= 60 - 10 for i in alive), alive
        assert len(session().tape.entries) < 200


def test_evaluation_does_not_pile_up() -> None:
    """Neither calls, nor batches, nor what a running sum was made of."""
    model = Net()
    held: list[Any] = []
    with NaNDetector(model, verbose=False), torch.no_grad():
        correct, total = torch.zeros(()), torch.zeros(())
        for _ in range(300):
            x, y = torch.rand(64, 4), torch.rand(64, 1)
            out = model(x)
            correct += (out.round() == y.round()).sum()
            total = total + F.mse_loss(out, y)
            held.append(weakref.ref(x))
        del x
        gc.collect()
        assert sum(ref() is not None for ref in held) <= 10
        assert len(session().tape.entries) <= 100
    assert float(total) > 0


def test_evaluation_within_training_does_not_lose_the_step() -> None:
    """A teacher called without gradients in each step, and an evaluation between two steps."""
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for i, (x, _) in enumerate(batches()):
            opt.zero_grad()
            with torch.no_grad():
                for _ in range(20 if i == 2 else 1):
                    target = torch.log(x).sum(-1, keepdim=True)
                    model(torch.ones(2, 4))
            ((model(x) - target) ** 2).mean().backward()
            opt.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.op == "log" and det.event.reproduced == "yes"


def test_the_list_of_what_a_program_keeps_alive_does_not_grow_with_set_batch() -> None:
    class Sum(nn.Module):
        """Autograd keeps nothing of what it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return x.sum() * self.w

    model = Sum()
    held: list[Any] = []
    outs = []
    with NaNDetector(model, verbose=False) as det:
        for i in range(40):
            det.set_batch(i)
            x = torch.rand(3, 4)
            outs.append(model(x))  # kept, never used
            held.append(weakref.ref(x))
            del x
        gc.collect()
        assert sum(ref() is not None for ref in held) <= 12


class Census(TorchDispatchMode):
    """Bytes of all storages that are alive, after each operation: the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, Tensor):
                self._count(t.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = WeakIdRef(storage)
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        self._known[storage._cdata] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, storage._cdata)
        del key

    def _gone(self, key: int) -> None:
        self.now -= self._known.pop(key, 0)


class Head(nn.Module):
    """A language model's end: few features, many classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(2000, 8)
        self.head = nn.Linear(8, 2000, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def _peak(watched: bool) -> int:
    model = Head()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = torch.randint(2000, (4, 128), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        opt.zero_grad()
        logits = model(ids)
        # As they are usually written: each intermediate is let go as soon as nothing needs it.
        loss = (
            F.cross_entropy(logits.float().view(-1, 2000), ids.view(-1)) + 1e-4 * logits.logsumexp(-1).square().mean()
        )
        del logits
        loss.backward()
        opt.step()

    def measured() -> int:
        for _ in range(3):
            step()
        with Census() as census:
            step()
            step()
        return census.peak

    if not watched:
        return measured()
    with NaNDetector(model, verbose=False) as det:
        peak = measured()
    assert det.event is None
    return peak


def test_a_head_with_large_logits_needs_no_more_memory_at_its_peak() -> None:
    logits = 4 * 128 * 2000 * 4
    bare, ours = _peak(False), _peak(True)
    assert bare > 2 * logits  # the census sees the logits
    assert ours - bare < 0.05 * logits, (bare, ours)


HOLD = 1 << 18
BOUND = HOLD + (2 << 20)  # what is promised, beside the inputs of the steps that are kept


class LetsGo(nn.Module):
    """Its intermediates are needed by nobody once the next one is there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 256), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for _ in range(4):
            h = h + 1.0
        return self.last(h)


class Keeps(nn.Module):
    """Autograd keeps its intermediates until the backward, and no longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Heavy(nn.Module):
    """More parameters than anything else: at the peak an optimizer works on them, and no gradient is left over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 512), nn.Linear(512, 10)
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.layers:
            h = h + torch.relu(layer(h))
        return self.last(h)


class NewBatches(Task):
    """Each step has a batch of its own, which the program lets go of."""

    def step(self) -> float:
        self.x = self.x.clone()
        return super().step()


def training(kind: type[nn.Module], foreach: bool) -> Task:
    torch.manual_seed(0)
    rows = 32 if kind is Heavy else 4096
    task = NewBatches(kind(), torch.randn(rows, 8), torch.randint(0, 10, (rows,)))
    task.optimizer = torch.optim.Adam(task.model.parameters(), lr=1e-4, foreach=foreach)
    return task


@pytest.mark.parametrize(("kind", "foreach"), [(LetsGo, False), (Keeps, True), (Heavy, False), (Heavy, True)])
def test_the_peak_is_not_above_the_bare_one_by_more_than_is_promised(kind: type[nn.Module], foreach: bool) -> None:
    """In bytes that the allocator gave out, at each level."""
    bare = memory_of(variant(BARE).watch, training(kind, foreach))
    inputs = training(kind, foreach).x.nbytes
    large = 5 * 512 * 512 * 4 if kind is Heavy else 4096 * 256 * 4
    assert large > inputs + 1.5 * BOUND, "one intermediate, or all gradients, that is kept would be seen"
    for level in ("step", "layers", "ops"):

        @contextmanager
        def watched(task: Task, level: str = level) -> Iterator[Step]:
            with NaNDetector(task.model, watch=level, verbose=False, max_hold_bytes=HOLD) as det:
                yield task.step
            assert det.event is None

        ours = memory_of(watched, training(kind, foreach))
        assert ours.peak - bare.peak < inputs + BOUND, level
        assert ours.steady - bare.steady < inputs + BOUND, level


def test_large_tensors_from_outside_are_not_kept_and_the_event_says_so() -> None:
    """Beyond max_hold_bytes they live as long as the program keeps them."""
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    refs = []

    def step(x: Tensor, y: Tensor) -> None:
        opt.zero_grad()
        weight = torch.from_numpy(y.numpy().repeat(5000, 1))
        refs.append(weakref.ref(weight))
        loss = ((model(x) - y) ** 2 * torch.sqrt(weight - 1.0 * (x.min() < 0)).detach().mean()).mean()
        del weight
        loss.backward()
        opt.step()

    with NaNDetector(model, verbose=False, max_hold_bytes=10_000) as det:
        for x, y in batches():
            step(x, y)
            if det.triggered:
                break
    event = det.event
    assert event is not None
    assert refs[-1]() is None
    assert event.reproduced == "not_tried" and event.op is None and event.location is None
    assert any("max_hold_bytes=10000" in n for n in event.notes), event.notes

    with NaNDetector(model, verbose=False) as det:
        step(*batches()[4])
    assert det.event is not None and det.event.reproduced == "yes" and det.event.op == "sqrt"


def test_inputs_of_the_model_are_kept_whatever_their_size() -> None:
    model = nn.Linear(4, 1)
    x = torch.full((5000, 4), -1.0)
    x[3, 1] = float("nan")
    batch = [x]
    del x
    with NaNDetector(model, verbose=False, max_hold_bytes=1) as det:
        model(batch.pop()).mean().backward()
    event = det.event
    assert event is not None and event.reproduced == "yes" and event.phase == "data" and event.sample_index == (3,)


def test_more_calls_than_are_kept_are_dropped_and_the_event_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nan_detector._tape.MAX_ENTRIES", 60)
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = batches()[4]
    with NaNDetector(model, verbose=False) as det:
        opt.zero_grad()
        z = torch.sqrt(x)
        for _ in range(200):
            z = z * 1.0
        ((model(x.abs()) - y).square() * z.mean()).mean().backward()
        opt.step()
    event = det.event
    assert event is not None and event.reproduced != "yes"
    assert event.op is None and event.location is None
    assert any("before what was kept" in n or "dropped" in n for n in event.notes), event.notes


def test_the_detector_keeps_no_model_alive() -> None:
    model = Net()
    with NaNDetector(model, verbose=False) as det:
        for x, y in batches(bad=-1):
            loss_of(model, x, y).backward()
    ref = weakref.ref(model)
    del model, det, x, y
    gc.collect()
    assert ref() is None
