"""What the op tracer of a replay is told of the call that is under way: the module, and the function of the library."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nan_detector._call_site import Called, caller
from nan_detector._calls import public_name
from nan_detector._change import Change
from nan_detector._loss_terms import Sums
from nan_detector._module_calls import Call, calls_through
from nan_detector._naming import Names
from nan_detector._remade import make_call
from nan_detector._tracer import OpTracer

_functorch_level = torch._C._functorch.peek_interpreter_stack


class ApiNames(TorchFunctionMode):
    """Tells `tracer` which function of the library the user's code is calling.

    Args:
        tracer: Who is told.
        sums: What follows the terms of a loss.
        called: Makes the call, given the function, its arguments and how to run it.
        change: What is done differently.
    """

    def __init__(self, tracer: OpTracer, sums: Sums, called: Callable[..., Any], change: Change | None) -> None:
        super().__init__()
        self.tracer = tracer
        self.sums = sums
        self.called = called
        self.change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self.tracer
        outer = tracer.api, tracer.api_inputs, tracer.transformed, tracer.called
        tracer.api, tracer.api_inputs = public_name(func), args
        tracer.called = Called(func, caller(make_call.__code__) or tracer.mark)
        tracer.transformed = _functorch_level() is not None
        if tracer.evidence is not None and tracer.api in ("backward", "grad"):
            tracer.evidence.before_backward(args, kwargs)
        try:
            given = kwargs or {}
            if self.change is not None:
                return self.called(func, args, given, partial(self.change.call, func, args, given))
            run = partial(self.called, func, args, given, lambda: func(*args, **given))
            return self.sums.follow(func, args, given, tracer.mark, run)
        finally:
            tracer.api, tracer.api_inputs, tracer.transformed, tracer.called = outer


@contextlib.contextmanager
def module_tracking(tracer: OpTracer, names: Names, models: dict[str, torch.nn.Module]) -> Iterator[None]:
    """Keep the tracer told of the module that is running."""
    me = threading.get_ident()

    # Not by hooks: the user's own, which may compute as well, would run outside of the module they belong to.
    def through(call: Call) -> Call:
        def tracked(module: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != me:
                return call(module, *args, **kwargs)
            outer = tracer.module, tracer.phase
            if names.is_watched(module):
                tracer.module, tracer.phase = names.of_module(module), "forward"
            elif tracer.phase != "forward":  # made on the spot within a watched module: its code is that module's
                tracer.module = names.of_module(module)
            try:
                return call(module, *args, **kwargs)
            finally:
                tracer.module, tracer.phase = outer

        return tracked

    with calls_through(_entered_through(models), through):
        yield


def _entered_through(models: dict[str, torch.nn.Module]) -> str:
    """The method of `torch.nn.Module` through which every call of a watched module goes.

    Giving the class another ``__call__`` changes a slot of each of its hundreds of subclasses, which takes as long as
    half a step of a small model.
    """
    cls = torch.nn.Module
    if cls.__call__ is not getattr(cls, "_wrapped_call_impl", None):  # somebody else's is in its place
        return "__call__"
    compiled = any(vars(m).get("_compiled_call_impl") is not None for model in models.values() for m in model.modules())
    return "__call__" if compiled else "_call_impl"
