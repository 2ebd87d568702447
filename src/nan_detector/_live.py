"""The op tracer on the running step itself: the "ops" level, and `detect_nan`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._naming import Names
from nan_detector._state import is_replaying
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor


class Live:
    """A tracer on this thread's dispatch stack, a new one for each step.

    Args:
        names: Names of the watched models; None where there are none.
        outside: Names and kinds of the batch's tensors by memory.
    """

    def __init__(self, names: Names | None, make: Callable[[], OpTracer]) -> None:
        self.names = names
        self.make = make
        self.tracer = make()
        self.on_leave: Callable[[Any, Any], None] | None = None
        self._on = False
        self._thread = threading.get_ident()
        self._stack: list[tuple[Any, str, Any]] = []
        self._handles: list[Any] = []

    def open(self) -> None:
        """Follow modules, and trace from here on."""
        module = torch.nn.modules.module
        self._handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
        ]
        self.resume()

    def close(self) -> None:
        """Stop tracing and take the hooks off."""
        self.pause()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def resume(self) -> None:
        """Put the tracer on the stack."""
        if not self._on and threading.get_ident() == self._thread:
            self.tracer.__enter__()
            self._on = True

    def pause(self) -> bool:
        """Take the tracer off the stack, wherever it stands. True when it was on it."""
        if not self._on or threading.get_ident() != self._thread:
            return False
        self._on = False
        above = []
        while torch._C._len_torch_dispatch_stack():
            depth = torch._C._len_torch_dispatch_stack()
            top = torch._C._get_dispatch_stack_at(depth - 1)
            if top is self.tracer:
                self.tracer.__exit__(None, None, None)
                break
            above.append(torch._C._pop_torch_dispatch_stack(None))
        for mode in reversed(above):
            torch._C._push_on_torch_dispatch_stack(mode)
        return True

    def next_step(self) -> None:
        """Forget the step."""
        was_on = self.pause()
        old = self.tracer
        self.tracer = self.make()
        self.tracer.module, self.tracer.phase = old.module, old.phase
        if was_on:
            self.resume()

    def _enter(self, module: Any, args: Any) -> None:
        if threading.get_ident() != self._thread or torch.compiler.is_compiling() or is_replaying():
            return
        tracer = self.tracer
        self._stack.append((tracer.module, tracer.phase, module))
        if self.names is None:
            tracer.module = (self._path(module), type(module).__name__)
            tracer.phase = "forward"
        else:
            if self.names.is_watched(module):
                tracer.module, tracer.phase = self.names.of_module(module), "forward"
            elif tracer.phase != "forward":  # made on the spot within a watched module: its code is that module's
                tracer.module = self.names.of_module(module)

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or torch.compiler.is_compiling() or is_replaying():
            return
        while self._stack:
            before_module, before_phase, owner = self._stack.pop()
            self.tracer.module, self.tracer.phase = before_module, before_phase
            if owner is module:
                break
        if self.on_leave is not None and output is not None:
            self.on_leave(module, output)

    @property
    def depth(self) -> int:
        """How many modules are running."""
        return len(self._stack)

    def _path(self, module: Any) -> str:
        """The path of `module` within the outermost module that is running: `detect_nan` was told of no model."""
        root = self._stack[0][2]
        for path, m in root.named_modules():
            if m is module:
                return path or "root"
        return type(module).__name__
