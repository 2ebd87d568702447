"""Several threads and several detectors: each reports its own training, and none disturbs another."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _footprint import footprint, left_behind
from _sacred import LEVELS, blobs, marked_line
from nan_detector import NaNDetector
from nan_detector._session import all_sessions

BAD = 3


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * torch.sqrt(100.0 + x.mean())  # <-- first


class Second(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) * torch.log(100.0 + x.mean())  # <-- second


def steps(model: nn.Module, *, bad: int | None, n: int = 6, pause: Callable[[], Any] = lambda: None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(n):
        x, y = blobs(seed=i)
        optimizer.zero_grad()
        out = model(x - 1e4 if i == bad else x)
        pause()
        F.cross_entropy(out, y).backward()
        pause()
        optimizer.step()


def at(det: NaNDetector, model: type, marker: str) -> None:
    event = det.event
    assert event is not None and len(det.all_events) == 1
    assert (event.step, event.phase, event.op) == (BAD, "forward", {"first": "sqrt", "second": "log"}[marker])
    assert event.location is not None and event.location.line == marked_line(model, marker)
    assert (event.reproduced, event.weights) == ("yes", "clean")


def in_thread(work: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        except BaseException:
            failures.append(traceback.format_exc())

    failures: list[str] = []
    thread = threading.Thread(target=run)
    thread.failures = failures
    thread.start()
    return thread


def join(*threads: threading.Thread) -> None:
    end = time.monotonic() + 60
    while any(t.is_alive() for t in threads) and time.monotonic() < end:
        # One that has failed leaves the others waiting for it at a barrier: its own error is the news.
        assert not any(t.failures for t in threads), [t.failures for t in threads]
        time.sleep(0.01)
    assert not any(t.failures for t in threads), [t.failures for t in threads]
    assert not any(t.is_alive() for t in threads)


@pytest.mark.parametrize("watch", LEVELS)
def test_two_trainings_in_two_threads_do_not_mix(watch: str) -> None:
    """In step with each other at every call, so that what one records is there while the other is judged."""
    torch.manual_seed(0)
    models: tuple[nn.Module, nn.Module] = (First(), Second())
    barrier = threading.Barrier(2, timeout=60)
    detectors: dict[int, NaNDetector] = {}

    def work(k: int) -> None:
        with NaNDetector(models[k], watch=watch, on_nan="skip", verbose=False) as det:
            detectors[k] = det
            barrier.wait()
            steps(models[k], bad=BAD, pause=barrier.wait)
            barrier.wait()

    join(*[in_thread(lambda k=k: work(k)) for k in (0, 1)])
    at(detectors[0], First, "first")
    at(detectors[1], Second, "second")


def test_one_goes_bad_and_the_other_stays_quiet() -> None:
    barrier = threading.Barrier(2, timeout=60)
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        model = First()
        with NaNDetector(model, on_nan="skip", verbose=False) as det:
            steps(model, bad=BAD if k == 0 else None, pause=barrier.wait)
            barrier.wait()
        found[k] = det.event

    join(*[in_thread(lambda k=k: work(k)) for k in (0, 1)])
    assert found[0] is not None and found[1] is None


@pytest.mark.parametrize("watch", LEVELS)
def test_two_detectors_in_one_thread_report_their_own(watch: str) -> None:
    torch.manual_seed(0)
    first, second = First(), Second()
    with (
        NaNDetector(first, watch=watch, on_nan="skip", verbose=False) as a,
        NaNDetector(second, watch=watch, on_nan="skip", verbose=False) as b,
    ):
        steps(first, bad=None)
        assert a.event is None and b.event is None
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (first, second)]
        for i in range(4):  # interleaved: both forwards, both backwards, both steps
            x, y = blobs(seed=i)
            losses = [F.cross_entropy(m(x - 1e4 if i == 2 and m is second else x), y) for m in (first, second)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            for loss in losses:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
    assert a.event is None, str(a.event)
    event = b.event
    assert event is not None and (event.step, event.op, event.weights) == (2, "log", "clean")
    assert event.location is not None and event.location.line == marked_line(Second, "second")


@pytest.mark.parametrize("watch", LEVELS)
def test_inference_in_other_threads_beside_the_training(watch: str) -> None:
    torch.manual_seed(0)
    model = First()
    stop = threading.Event()
    calls = []

    def serve() -> None:
        x, _ = blobs(seed=99)
        with torch.no_grad():
            while not stop.is_set():
                calls.append(model(x - 1e4 if len(calls) % 3 == 0 else x).shape)

    with NaNDetector(model, watch=watch, on_nan="skip", verbose=False) as det:
        threads = [in_thread(serve) for _ in range(3)]
        steps(model, bad=BAD, n=10)
        stop.set()
        join(*threads)
    assert calls
    at(det, First, "first")


def test_replicas_as_data_parallel_makes_them() -> None:
    """Shallow copies of a module share its hooks, run in threads, and are not the module."""
    model = First()
    with NaNDetector(model, verbose=False) as det:
        replicas = []
        for _ in range(3):
            replica = model._replicate_for_data_parallel()
            replica._parameters = dict(model._parameters)
            for name, child in model._modules.items():
                copy = child._replicate_for_data_parallel()
                copy._parameters = {k: v * 1.0 for k, v in child._parameters.items()}
                replica._modules[name] = copy
            replicas.append(replica)
        outputs: list[Tensor] = []
        x, _ = blobs()
        join(*[in_thread(lambda r=r: outputs.append(r(x))) for r in replicas])
        torch.cat(outputs).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert det.event is None
    assert model.lin.weight.grad is not None


def test_a_training_in_a_thread_that_did_not_attach() -> None:
    """Its calls outside the model are not recorded, but no step is taken that would poison the weights."""
    model = First()
    with NaNDetector(model, on_nan="skip", verbose=False) as det:
        join(in_thread(lambda: steps(model, bad=BAD)))
    event = det.event
    assert event is not None and event.step == BAD and event.weights == "clean"
    assert all(p.isfinite().all() for p in model.parameters())
    if event.op is None:
        assert event.reproduced != "yes"
    else:
        at(det, First, "first")


@pytest.mark.parametrize("watch", LEVELS)
def test_detach_in_another_thread(watch: str) -> None:
    torch.manual_seed(0)
    model, after = First(), []
    before = footprint()

    def owner() -> None:
        det = NaNDetector(model, watch=watch, on_nan="skip", verbose=False).attach()
        steps(model, bad=None, n=3)
        join(in_thread(det.detach))
        steps(model, bad=BAD)  # nobody watches any more
        after.append(det.event)
        assert torch.ones(3).add(1).sum().item() == 6.0

    join(in_thread(owner))
    assert after == [None]
    assert not left_behind(before)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_nothing_is_kept_of_any_thread_after_detach() -> None:
    model = First()
    waiting, done = threading.Event(), threading.Event()

    def other() -> None:
        out = model(blobs()[0])
        waiting.set()
        done.wait(60)
        del out

    with NaNDetector(model, verbose=False):
        thread = in_thread(other)
        assert waiting.wait(60)
        steps(model, bad=None, n=2)
    kept = [len(s.tape.entries) for s in all_sessions()]
    done.set()
    join(thread)
    assert not any(kept)
