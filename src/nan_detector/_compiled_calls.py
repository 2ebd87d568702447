"""Calls of compiled modules, while the models of a script are looked for.

A hook on all modules does not run inside compiled code, would be compiled into it, and makes ``torch.compile`` warn of
it. So the calls of compiled modules are seen from outside, and the hooks are taken off for as long as they run.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._on_import import on_import

#: Gets the call to make, the module, and its arguments; gives what the call gave.
Around = Callable[[Callable[[], Any], torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]

_HOME = "torch._dynamo.eval_frame"


class CompiledCalls:
    """From `open` to `close`, hands each call of a compiled module to `around`.

    Patches of the detector come on top of these and leave before them.
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self._undo: list[Callable[[], object]] = []

    def open(self) -> None:
        """Patch PyTorch; the part of it that compiles as soon as the script has it loaded."""
        self._undo.append(on_import(_HOME, self._see_wrapped))
        self._see_in_place()

    def close(self) -> None:
        """Undo it."""
        while self._undo:
            self._undo.pop()()

    def _see_wrapped(self) -> None:
        """``torch.compile(module)``."""
        cls: Any = getattr(sys.modules[_HOME], "OptimizedModule", None)
        if cls is None:
            return
        inherited, original, around = "__call__" not in vars(cls), cls.__call__, self._around

        @functools.wraps(original)
        def call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
            return around(lambda: original(compiled, *args, **kwargs), compiled._orig_mod, args, kwargs)

        cls.__call__ = call
        self._undo.append(
            lambda: delattr(cls, "__call__") if inherited else setattr(cls, "__call__", original)
        )  # fmt: skip

    def _see_in_place(self) -> None:
        """``module.compile()``."""
        original, around, undo = torch.nn.Module.compile, self._around, self._undo

        @functools.wraps(original)
        def compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            undo.append(_see_instance(module, around))

        setattr(torch.nn.Module, "compile", compile)  # noqa: B010  # an assignment would have to be of the same type
        undo.append(lambda: setattr(torch.nn.Module, "compile", original))


def _see_instance(module: torch.nn.Module, around: Around) -> Callable[[], None]:
    compiled, known = vars(module)["_compiled_call_impl"], weakref.ref(module)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        called = known()  # it is there: it is being called
        assert called is not None
        return around(lambda: compiled(*args, **kwargs), called, args, kwargs)

    def undo() -> None:
        left = known()
        if left is not None and vars(left).get("_compiled_call_impl") is call:
            left._compiled_call_impl = compiled

    module._compiled_call_impl = call
    return undo
