"""Calls of modules go through a function for a while, and nothing is left of it."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from nan_detector._module_calls import Call, calls_through

NAME = "_call_impl"


def counting(seen: list[Any]) -> Any:
    def wrapped(call: Call) -> Call:
        def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module).__name__)
            return call(module, *args, **kwargs)

        return counted

    return wrapped


def test_every_call_goes_through_and_gives_the_same() -> None:
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    expected, seen = model(x), list[str]()
    with calls_through(NAME, counting(seen)):
        assert torch.equal(model(x), expected)
    assert seen == ["Sequential", "Linear", "ReLU"]
    model(x)
    assert len(seen) == 3


def test_the_class_is_not_touched() -> None:
    """What Python has cached of the class and of its subclasses stays valid: no attribute is set."""
    method = vars(nn.Module)[NAME]
    with calls_through(NAME, counting([])):
        assert vars(nn.Module)[NAME] is method


def test_one_within_another() -> None:
    outer, inner = list[str](), list[str]()
    relu, x = nn.ReLU(), torch.ones(1)
    with calls_through(NAME, counting(outer)):
        with calls_through(NAME, counting(inner)):
            relu(x)
        assert (outer, inner) == (["ReLU"], ["ReLU"])
        relu(x)
    relu(x)
    assert (outer, inner) == (["ReLU"] * 2, ["ReLU"])


def test_an_exception_leaves_it_as_it_was() -> None:
    code = nn.Module._call_impl.__code__  # type: ignore[attr-defined]  # a function, which the stubs do not say
    with pytest.raises(TypeError), calls_through(NAME, counting([])):
        nn.Linear(2, 2)()
    assert nn.Module._call_impl.__code__ is code  # type: ignore[attr-defined]


def test_threads_that_call_while_it_begins_and_ends() -> None:
    linear, x, stop = nn.Linear(2, 2), torch.ones(1, 2), threading.Event()
    failed: list[BaseException] = []

    def calls() -> None:
        try:
            while not stop.is_set():
                linear(x)
        except BaseException as error:  # the thread must not end in silence
            failed.append(error)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in range(300):
        with calls_through(NAME, counting([])):
            linear(x)
    stop.set()
    for t in threads:
        t.join()
    assert not failed


def test_a_method_that_somebody_else_has_put_there() -> None:
    original, theirs, ours = nn.Module._call_impl, list[str](), list[str]()

    @functools.wraps(original)
    def patched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        theirs.append(type(self).__name__)
        return original(self, *args, **kwargs)

    nn.Module._call_impl = patched  # type: ignore[method-assign]
    try:
        with calls_through(NAME, counting(ours)):
            nn.ReLU()(torch.ones(1))
        assert nn.Module._call_impl is patched
    finally:
        nn.Module._call_impl = original  # type: ignore[method-assign]
    assert theirs == ours == ["ReLU"]
