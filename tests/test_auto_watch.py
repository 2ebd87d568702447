"""The search for what trains in a script: a failure of ours there must not become the script's."""

from __future__ import annotations

import gc
import logging
import os
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector, NaNEvent
from nan_detector._auto import SETTLED_CALLS, AutoWatch
from nan_detector._eventlog import read_log

# At its first use torch's compiler changes optimizers of PyTorch for good: not within a test, which would be blamed.
torch.compile(nn.Identity(), backend="eager")


def broken(model: nn.Module) -> NaNDetector:
    raise LookupError("a bug of ours")


def steps(count: int) -> nn.Module:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
    return model


def test_a_bug_of_ours_is_logged_once_and_the_script_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("NAN_DETECTOR_STRICT")
    with caplog.at_level(logging.ERROR, "nan_detector"), AutoWatch(broken) as auto:
        model = steps(3)
    assert auto.detector is None and model.weight.isfinite().all()
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is not None


def test_in_tests_it_is_raised():
    with AutoWatch(broken), pytest.raises(LookupError):
        steps(1)


def test_the_keywords_of_the_call_under_way_reach_the_replay():
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(super().forward(x) * 0 + by)

    model = Scaled(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with AutoWatch(lambda m: NaNDetector(m, verbose=False)) as auto:
        model(torch.ones(2, 3), by=torch.tensor(-1.0)).mean().backward()
        optimizer.step()
        assert auto.detector is not None and auto.detector.event is not None
        event = auto.detector.event
    assert (event.step, event.op, event.reproduced) == (0, "sqrt", "yes")


# -- what a script may train -------------------------------------------------------------------------------------------


def watching(**options: Any) -> AutoWatch:
    return AutoWatch(lambda m: NaNDetector(m, verbose=False, on_nan="skip", **options))


def train(model: nn.Module, steps: int, optimizer: Any = None, bad: int = -1, call: Any = None) -> Any:
    """Steps of `model`, whose call of number `bad` is planted with a NaN; gives the optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if optimizer is None else optimizer
    for step in range(steps):
        optimizer.zero_grad()
        out = (call or model)(torch.ones(2, 3))
        loss = torch.log(out - 1e3).mean() if step == bad else out.square().mean()  # the planted line
        loss.backward()
        optimizer.step()
    return optimizer


def planted_events(auto: AutoWatch) -> list[tuple[int, str | None]]:
    assert auto.detector is not None
    return [(e.step, e.op) for e in auto.detector.all_events]


def test_two_models_in_turns():
    gen, disc = nn.Linear(3, 3), nn.Linear(3, 1)
    opt_g, opt_d = torch.optim.Adam(gen.parameters()), torch.optim.Adam(disc.parameters())
    with watching() as auto:
        for step in range(4):
            opt_d.zero_grad()
            disc(gen(torch.ones(2, 3)).detach()).mean().backward()
            opt_d.step()
            opt_g.zero_grad()
            fake = disc(gen(torch.ones(2, 3)))
            (torch.log(fake - 1e3) if step == 2 else fake).mean().backward()
            opt_g.step()
        assert planted_events(auto) == [(5, "log")]
        assert set(auto.detector._models) == {"", "Linear"}


def test_models_that_come_one_after_the_other_are_let_go():
    died = []
    with watching() as auto:
        for fold in range(4):
            model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
            model.itself = [model]  # in a cycle, as many are
            optimizer = torch.optim.Adam(model.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            train(model, 3, optimizer, bad=1 if fold == 3 else -1)
            scheduler.step()
            died.append(weakref.ref(model))
        gc.collect()
        assert [r() is None for r in died] == [True, True, True, False]
        assert planted_events(auto) == [(10, "log")]
        assert auto.skipped_steps == 1


def test_a_model_that_trains_only_later_is_found_although_the_search_had_ended():
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    with watching() as auto:
        optimizer = train(first, SETTLED_CALLS + 3)
        assert not auto._search
        later = train(second, 3)
        assert auto.detector is not None and "Linear" in auto.detector._models
        train(second, 3, later, bad=1)
        # Its first step, by which it was noticed, is not counted.
        assert planted_events(auto) == [(SETTLED_CALLS + 3 + 3, "log")]
    assert optimizer is not None


def test_a_part_that_is_thawed_later():
    body, head = nn.Linear(3, 3), nn.Linear(3, 1)
    body.requires_grad_(False)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
    with watching() as auto:
        train(head, 3, optimizer, call=lambda x: head(body(x)))
        body.requires_grad_(True)
        train(head, 3, optimizer, bad=1, call=lambda x: head(body(x)))
        assert planted_events(auto) == [(4, "log")]
        assert {id(body), id(head)} == {id(m) for m in auto.detector._models.values()}


def test_a_lazy_model():
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    with watching() as auto:
        model(torch.ones(2, 3))  # as such scripts do, to have parameters for the optimizer
        train(model, 3, bad=1)
        assert planted_events(auto) == [(1, "log")]


@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_model_of_torchscript(how: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is on its way out
        plain = nn.Linear(3, 1)
        model = torch.jit.script(plain) if how == "script" else torch.jit.trace(plain, torch.ones(2, 3))
    with watching() as auto:
        train(model, 4, bad=2)
        assert planted_events(auto) == [(2, None)]
        assert "TorchScript" in " ".join(auto.detector.event.notes)
        assert model.weight.isfinite().all()


@pytest.mark.parametrize("how", ["function", "method"])
def test_a_compiled_model(how: str):
    torch._dynamo.reset()
    compiled_graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    with watching() as auto:
        if how == "function":
            model = torch.compile(model, backend=backend)
        else:
            model.compile(backend=backend)
        train(model, 6, bad=4)
        assert planted_events(auto) == [(4, "log")]
    assert len(compiled_graphs) == 1, "watching must not have it compiled again"


def test_training_on_another_thread():
    model = nn.Linear(3, 1)
    with watching() as auto:
        thread = threading.Thread(target=train, args=(model, 4), kwargs={"bad": 2})
        thread.start()
        thread.join()
        assert planted_events(auto) == [(2, "log")]
    assert not model._forward_hooks and torch._C._len_torch_function_stack() == 0


def test_an_evaluation_and_a_loss_module_are_no_models():
    model, evaluated, criterion = nn.Linear(3, 1), nn.Linear(3, 1), nn.MSELoss()
    with watching() as auto:
        with torch.no_grad():
            evaluated(torch.ones(2, 3))
        for _ in range(2):
            criterion(model(torch.ones(2, 3)), torch.ones(2, 1)).backward()
        assert list(auto.detector._models.values()) == [model]


def test_a_call_that_was_interrupted_does_not_hide_what_comes():
    class Interrupted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

    model = nn.Linear(3, 1)
    with watching() as auto:
        with pytest.raises(KeyboardInterrupt):
            Interrupted(3, 1)(torch.ones(2, 3))
        train(model, 4, bad=3)
        assert planted_events(auto) == [(2, "log")]  # the step after it told that the call had ended


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_leaves_the_parents_watch_and_has_its_own(tmp_path: Path):
    model = nn.Linear(3, 1)
    with watching(log_dir=tmp_path / "parent") as auto:
        optimizer = train(model, 2)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 9
            try:
                assert auto.detector is None and torch._C._len_torch_function_stack() == 0
                auto._make = lambda m: NaNDetector(m, verbose=False, on_nan="skip", log_dir=tmp_path / "child")
                train(nn.Linear(3, 1), 3, bad=1)
                os.write(write, repr(planted_events(auto)).encode())
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert os.read(read, 1000) == b"[(1, 'log')]"
        train(model, 3, optimizer, bad=1)
        assert planted_events(auto) == [(3, "log")]
    os.close(read)
    os.close(write)
    rows = [r for r in read_log(tmp_path / "parent") if isinstance(r, NaNEvent)]
    assert {r.step for r in rows} == {3}


def test_the_watch_that_has_ended_does_not_wake_in_a_child():
    with watching() as auto:
        pass
    pid = os.fork()
    if pid == 0:
        os._exit(0 if not auto._search else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_parameters_of_no_module():
    torch.manual_seed(0)
    w, b = torch.randn(3, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=0.01)
    with watching() as auto:
        for step in range(6):
            optimizer.zero_grad()
            out = torch.ones(2, 3) @ w + b
            (torch.sqrt(out - 50) if step == 4 else out.square()).mean().backward()
            optimizer.step()
        assert planted_events(auto) == [(3, "sqrt")]  # the first step showed that no module is trained
        assert w.isfinite().all() and auto.detector.event.reproduced == "yes"


def test_a_model_that_is_never_called_itself():
    body, head = nn.Linear(3, 3), nn.Linear(3, 1)
    model = nn.Sequential(body, head)
    with watching() as auto:
        train(model, 4, bad=2, call=model.forward)
        assert planted_events(auto) == [(2, "log")]


def test_a_compiled_function_around_the_whole_model():
    torch._dynamo.reset()
    model = nn.Linear(3, 1)
    with watching() as auto:
        train(model, 5, bad=3, call=torch.compile(lambda x: model(x), backend="eager"))
        assert planted_events(auto)[0][0] in (2, 3) and model.weight.isfinite().all()
    assert torch.Tensor.backward.__module__ == "torch._tensor"
