"""From attach to detach, and every way in which a run may leave it out: each has one defined outcome."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _footprint import footprint, left_behind
from _sacred import LEVELS, assert_same, blobs, picture, seed_all
from _trainings import dropout_and_batch_norm, every_random_stream
from nan_detector import NaNDetector, NonFiniteError, _glance, _recording
from nan_detector._engine import Engine
from nan_detector._glance import Glance
from nan_detector._judge import Judge
from nan_detector._optimizers import Optimizers
from nan_detector._roots import Roots
from nan_detector._tape import Tape

BAD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))) * torch.sqrt(100.0 + x.mean())


def train(model: nn.Module, *, n: int = 5, bad: int | None = None, optimizer: Any = None) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(n):
        x, y = blobs(seed=i)
        optimizer.zero_grad()
        F.cross_entropy(model(x - 1e4 if i == bad else x), y).backward()
        optimizer.step()
    return optimizer


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("watch", LEVELS)
def test_attach_twice_starts_afresh(watch: str) -> None:
    model = Net()
    det = NaNDetector(model, watch=watch, on_nan="skip", verbose=False)
    assert det.attach() is det
    train(model, bad=BAD)
    assert det.triggered
    once = hooks(model)
    assert det.attach() is det
    assert hooks(model) == once
    assert det.event is None and det.all_events == [] and not det.triggered
    train(model, bad=BAD)
    assert [e.step for e in det.all_events] == [BAD]
    det.detach()
    assert hooks(model) == 0


def test_detach_twice_and_detach_before_attach() -> None:
    before = footprint()
    det = NaNDetector(Net(), verbose=False)
    det.detach()
    det.attach()
    det.detach()
    assert not left_behind(before)
    det.detach()
    assert not left_behind(before)


def test_attach_again_after_detach() -> None:
    model = Net()
    det = NaNDetector(model, on_nan="skip", verbose=False)
    for _ in range(3):
        with det:
            train(model, bad=BAD)
        assert [e.step for e in det.all_events] == [BAD]  # events stay readable after the block


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("where", ["forward", "backward", "step", "loop"])
def test_an_exception_in_the_loop_passes_and_nothing_stays(where: str, watch: str) -> None:
    before = footprint()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fail(*_: Any) -> None:
        raise KeyError(where)

    handle: Any = None
    with pytest.raises(KeyError, match=where), NaNDetector(model, watch=watch, verbose=False) as det:
        train(model, n=2, optimizer=optimizer)
        if where == "forward":
            handle = model.body.register_forward_hook(fail)
        elif where == "backward":
            handle = model.head.weight.register_hook(fail)
        elif where == "step":
            handle = optimizer.register_step_pre_hook(fail)
        else:
            fail()
        train(model, optimizer=optimizer)
    if handle is not None:
        handle.remove()
    assert not left_behind(before)
    assert det.event is None


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_exception_that_the_loop_survives_leaves_the_watch_awake(where: str) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fail(*_: Any) -> None:
        raise KeyError(where)

    with NaNDetector(model, on_nan="skip", verbose=False) as det:
        train(model, n=2, optimizer=optimizer)
        for _ in range(3):
            if where == "forward":
                handle: Any = model.body.register_forward_hook(fail)
            elif where == "backward":
                handle = model.head.weight.register_hook(fail)
            else:
                handle = optimizer.register_step_pre_hook(fail)
            with pytest.raises(KeyError):
                train(model, n=1, optimizer=optimizer)
            handle.remove()
        train(model, n=4, optimizer=optimizer)
        assert det.event is None
        train(model, bad=BAD, optimizer=optimizer)
    event = det.event
    assert event is not None and (event.op, event.reproduced, event.weights) == ("sqrt", "yes", "clean"), event


@pytest.mark.parametrize("watch", LEVELS)
def test_nested_detectors_on_parent_and_child(watch: str) -> None:
    parent = nn.Sequential(Net(), nn.Identity())
    child = parent[0]
    with (
        NaNDetector(parent, watch=watch, on_nan="skip", verbose=False) as outer,
        NaNDetector(child, watch=watch, on_nan="skip", verbose=False) as inner,
    ):
        train(parent)
        assert outer.event is None and inner.event is None
        train(parent, bad=BAD)
    assert all(p.isfinite().all() for p in parent.parameters())
    events = outer.event, inner.event
    assert all(e is not None and e.weights == "clean" for e in events), events
    assert events[0] is not None and (events[0].op, events[0].layer_name, events[0].reproduced) == ("sqrt", "0", "yes")
    assert events[1] is not None and events[1].step == events[0].step


@pytest.mark.parametrize("watch", LEVELS)
@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "save"])
def test_a_copy_of_a_watched_model_is_not_watched(make_copy: Any, watch: str) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with NaNDetector(model, watch=watch, check_backward=True, on_nan="skip", verbose=False) as det:
        train(model, n=2, optimizer=optimizer)
        if make_copy == "save":
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            copied = torch.load(buffer, weights_only=False)
        else:
            copied = make_copy(model)
        assert det.event is None
        train(copied, bad=BAD)  # nobody's business, even when it goes bad
        assert det.event is None, str(det.event)
        assert not all(p.isfinite().all() for p in copied.parameters())
        train(model, bad=BAD, optimizer=optimizer)
        assert det.event is not None
        assert list(copied.state_dict()) == list(model.state_dict())
    # It can be watched itself.
    fresh = copy.deepcopy(model)
    with NaNDetector(fresh, watch=watch, on_nan="skip", verbose=False) as again:
        train(fresh, bad=BAD)
    assert again.event is not None and again.event.op == "sqrt"


@pytest.mark.parametrize("watch", LEVELS)
def test_checkpoints_of_a_watched_training(watch: str) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with NaNDetector(model, watch=watch, verbose=False) as det:
        train(model, n=2, optimizer=optimizer)
        buffer = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
        train(model, n=2, optimizer=optimizer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        train(model, n=2, optimizer=optimizer)
    assert det.event is None
    plain = Net()
    assert list(plain.state_dict()) == list(saved["model"])


def test_copies_of_the_detector_are_refused() -> None:
    det = NaNDetector(Net(), verbose=False)
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(det)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(det)


@pytest.mark.parametrize("value", ["off", "OFF", "0", "false"])
def test_switched_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NAN_DETECTOR", value)
    before = footprint()
    model = Net()
    with NaNDetector(model, on_nan="raise", verbose=False) as det:
        det.set_batch(3)
        assert not left_behind(before) and hooks(model) == 0
        train(model, bad=BAD)
        assert det.check_grad_norms() is False
        assert det.run_step(lambda: 7) == 7
    assert (det.event, det.triggered, det.all_events, det.overhead_ms) == (None, False, [], 0.0)


@pytest.mark.parametrize("watch", LEVELS)
def test_a_detector_that_nobody_detached_leaves_with_its_last_reference(watch: str) -> None:
    before = footprint()
    model = Net()
    det = NaNDetector(model, watch=watch, verbose=False).attach()
    train(model, n=2)
    gone = weakref.ref(det)
    del det
    gc.collect()
    assert gone() is None
    assert not left_behind(before)
    assert hooks(model) == 0
    train(model)
    collected = weakref.ref(model)
    del model
    gc.collect()
    assert collected() is None


def _forgets_its_detector(model: nn.Module) -> None:
    NaNDetector(model, verbose=False).attach()


def test_a_detector_attached_and_forgotten_in_one_line() -> None:
    before = footprint()
    model = Net()
    _forgets_its_detector(model)
    gc.collect()
    assert not left_behind(before)


def test_the_model_is_not_kept_after_detach() -> None:
    model = Net()
    det = NaNDetector(model, on_nan="skip", verbose=False)
    with det:
        train(model, bad=BAD)
    found, gone = det.all_events, weakref.ref(model)
    del det, model
    gc.collect()
    assert gone() is None and found


# -- bugs of ours ------------------------------------------------------------------------------------------------------


def _broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a bug of ours")


#: The step from which on they are broken: the first ones of a run go another way than those after them.
INNARDS: list[tuple[Any, str, int]] = [
    (Engine, "_judge", 0),
    (Engine, "_gate", 0),
    (Optimizers, "of", 0),
    (Engine, "_is_ordinary", 2),
    (Engine, "_count_step", 2),
    (Judge, "judge", 0),
    (Glance, "passes", 2),
    (_glance, "_measured", 2),
    (Roots, "_enter", 2),
    (Roots, "_learn", 0),
    (Tape, "encode_call", 2),
    (Tape, "add", 2),
    (Tape, "append", 2),
    (Tape, "forget_step", 2),
    (Tape, "made_token", 2),
    (_recording, "here_and_module", 2),
]


@pytest.mark.parametrize(("owner", "name", "since"), INNARDS, ids=lambda v: getattr(v, "__name__", str(v)))
@pytest.mark.parametrize("make", [dropout_and_batch_norm, every_random_stream], ids=lambda m: m.__name__)
def test_a_bug_of_ours_never_stops_the_training(
    make: Callable[[], Any],
    owner: Any,
    name: str,
    since: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    seed_all()
    run = make()
    bare = {"losses": [run.step(i) for i in range(6)], **picture(run)}

    monkeypatch.delenv("NAN_DETECTOR_STRICT")
    before = footprint()
    seed_all()
    run = make()
    losses = []
    with caplog.at_level(logging.ERROR, "nan_detector"), NaNDetector(run.models, verbose=False) as det:
        for i in range(6):
            if i == since:
                monkeypatch.setattr(owner, name, _broken)
            losses.append(run.step(i))
    monkeypatch.undo()
    assert det.event is None
    assert_same(bare, {"losses": losses, **picture(run)})
    assert not left_behind(before)
    told = [r for r in caplog.records if "stands down" in r.getMessage()]
    assert len(told) == 1, [r.getMessage() for r in caplog.records]
    assert told[0].exc_info is not None and "a bug of ours" in str(told[0].exc_info[1])


def test_a_bug_of_ours_is_raised_in_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_judge", _broken)
    with pytest.raises(RuntimeError, match="a bug of ours"), NaNDetector(Net(), verbose=False) as det:
        train(det._models[next(iter(det._models))])
    monkeypatch.undo()


def test_a_bug_in_the_search_still_protects_the_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NAN_DETECTOR_STRICT")
    monkeypatch.setattr("nan_detector._search.investigate", _broken)
    model = Net()
    with NaNDetector(model, on_nan="skip", verbose=False) as det:
        train(model, bad=BAD)
    event = det.event
    assert event is not None and (event.step, event.status, event.weights) == (BAD, "final", "clean")
    assert all(p.isfinite().all() for p in model.parameters())
    assert (event.op, event.location) == (None, None)


def test_a_bug_in_the_telling_still_protects_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NAN_DETECTOR_STRICT")
    monkeypatch.setattr("nan_detector._render.terminal.print_report", _broken)
    model = Net()
    with NaNDetector(model, on_nan="stop") as det:
        train(model, n=BAD + 1, bad=BAD)
    assert det.triggered
    assert all(p.isfinite().all() for p in model.parameters())


def test_raise_inside_the_block_is_not_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    with pytest.raises(NonFiniteError), NaNDetector(model, on_nan="raise", verbose=False):
        train(model, bad=BAD)
    assert not [r for r in caplog.records if "stands down" in r.getMessage()]
    assert hooks(model) == 0


_WITHOUT_US = """
import sys
import torch

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "nan_detector":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
model = torch.load(sys.argv[1], weights_only=False)
x = torch.ones(3, 8, requires_grad=True)
for _ in range(2):
    out = model(x)
    out.sum().backward()
torch.save(model, sys.argv[1])
torch.save(model(x).detach(), sys.argv[2])
assert "nan_detector" not in sys.modules
"""


def test_a_model_saved_whole_while_it_is_watched_needs_nothing_of_ours(tmp_path: Path) -> None:
    saved, result = tmp_path / "model.pt", tmp_path / "result.pt"
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).eval()
    for watch in LEVELS:
        with NaNDetector(model, watch=watch, check_backward=True, verbose=False) as det:
            model(torch.ones(3, 8)).sum().backward()
            torch.save(model, saved)
            expected = model(torch.ones(3, 8))
        assert det.event is None
        assert b"nan_detector" not in saved.read_bytes()
        subprocess.run([sys.executable, "-c", _WITHOUT_US, str(saved), str(result)], check=True, timeout=120)
        assert torch.equal(torch.load(result, weights_only=True), expected)
        # Once saved and loaded again it is an ordinary model, which can be watched.
        again = torch.load(saved, weights_only=False)
        with NaNDetector(again, watch=watch, verbose=False) as det:
            again(torch.full((3, 8), float("nan"))).sum().backward()
        assert det.triggered
