"""The check that every test ends with would be worthless if it could not see what it is for."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from _footprint import PATCHABLE, footprint, left_behind


class NullFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class NullDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def forward_hook() -> Iterator[None]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *a: None, always_call=True)
    yield
    handle.remove()


@contextmanager
def optimizer_hook() -> Iterator[None]:
    handle = register_optimizer_step_pre_hook(lambda *a: None)
    yield
    handle.remove()


@contextmanager
def other_code() -> Iterator[None]:
    """The function object stays and its code is swapped; where it is no Python, the attribute."""
    found = torch.autograd.Function.__dict__["apply"]
    function = getattr(found, "__func__", None)
    if not isinstance(function, types.FunctionType):
        torch.autograd.Function.apply = classmethod(lambda cls, *args: found.__get__(None, cls)(*args))
        yield
        torch.autograd.Function.apply = found
        return
    code = function.__code__
    function.__code__ = code.replace(co_name="not_apply")
    yield
    function.__code__ = code


@contextmanager
def thread() -> Iterator[None]:
    stop = threading.Event()
    worker = threading.Thread(target=stop.wait, name="nan-detector-left")
    worker.start()
    yield
    stop.set()
    worker.join()


@contextmanager
def log_handler() -> Iterator[None]:
    handler = logging.NullHandler()
    logging.getLogger("nan_detector").addHandler(handler)
    yield
    logging.getLogger("nan_detector").removeHandler(handler)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("leave", "named"),
    [
        (forward_hook, "torch.nn.modules.module._global_forward_hooks_always_called"),
        (optimizer_hook, "torch.optim.optimizer._global_optimizer_pre_hooks"),
        (other_code, "torch.autograd.Function.apply"),
        (thread, "threads"),
        (log_handler, "handlers of the logger"),
        (default_dtype, "default dtype"),
        (NullFunctionMode, "torch function modes on the stack"),
        (NullDispatchMode, "torch dispatch modes on the stack"),
        (torch.no_grad, "grad mode"),
        (torch.inference_mode, "inference mode"),
        (lambda: torch.autograd.set_multithreading_enabled(False), "backward on several threads"),
        (lambda: torch.autograd.set_detect_anomaly(True), "anomaly mode"),
        (lambda: torch.autocast("cpu"), "autocast on the CPU"),
    ],
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_what_is_left_is_named(leave: Callable[[], AbstractContextManager[object]], named: str):
    before = footprint()
    with ExitStack() as stack:
        stack.enter_context(leave())
        sentences = left_behind(before, patience_s=0.05)
        assert any(sentence.startswith(f"{named}: ") for sentence in sentences), sentences
    assert left_behind(before) == []


@pytest.mark.parametrize(("module_name", "path"), PATCHABLE)
def test_every_patch_is_seen(module_name: str, path: str, monkeypatch: pytest.MonkeyPatch):
    __import__(module_name)  # the last entries are of TorchDynamo, which torch imports late
    before = footprint()
    *owners, name = path.split(".")
    owner = sys.modules[module_name]
    for part in owners:
        owner = getattr(owner, part)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, lambda *args: None)
        # Two names may be one object, as clip_grad_norm_ has two homes: only the patched one is reported.
        assert [s.partition(": ")[0] for s in left_behind(before)] == [f"{module_name}.{path}"]
    assert left_behind(before) == []


def test_a_thread_that_is_ending_is_waited_for():
    before = footprint()
    worker = threading.Thread(target=threading.Event().wait, args=(0.1,), name="nan-detector-ending")
    worker.start()
    assert left_behind(before) == []
    worker.join()
