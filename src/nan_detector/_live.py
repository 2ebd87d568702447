"""The op tracer on the running step itself: the "ops" level, and `detect_nan`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nan_detector._naming import Names
from nan_detector._session import Session, session
from nan_detector._state import is_replaying
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor


#: Attributes in which PyTorch keeps what it needs to take a mode off the stack.
_OF_THE_MODE = frozenset(vars(TorchDispatchMode()))


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
        self._was_paused = False
        self._session: Session | None = None
        self._thread = threading.get_ident()
        self._stack: list[tuple[Any, str, Any]] = []
        self._handles: list[Any] = []

    def open(self) -> None:
        """Follow modules, and trace from here on."""
        self._session = session()
        self._session.lives.append(self)
        self._follow()
        self.resume()

    def close(self) -> None:
        """Stop tracing and take the hooks off."""
        if self._session is not None and self in self._session.lives:
            self._session.lives.remove(self)
        self._leave_stack()
        self._unfollow()

    def step_aside(self) -> bool:
        """Compiled code is about to run, which neither compiles nor runs under a dispatch mode: not even a quiet one.

        True when the tracer was on the stack; then `step_back` must follow.
        """
        if not self._on or threading.get_ident() != self._thread:
            return False
        self._was_paused = self.tracer.paused
        self._leave_stack()
        self._unfollow()
        return True

    def step_back(self) -> None:
        """Compiled code has run."""
        self._follow()
        self.resume()
        self.tracer.paused = self._was_paused

    def _follow(self) -> None:
        module = torch.nn.modules.module
        self._handles = [
            module.register_module_forward_pre_hook(self._enter),
            module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _unfollow(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def resume(self) -> None:
        """Trace on."""
        if threading.get_ident() != self._thread:
            return
        self.tracer.paused = False
        if not self._on:
            self.tracer.__enter__()
            self._on = True

    def pause(self) -> None:
        """Trace nothing, and leave the stack alone: other modes may stand above, or a backward may be running."""
        if threading.get_ident() == self._thread:
            self.tracer.paused = True

    def _leave_stack(self) -> None:
        """Take the tracer off the stack, wherever it stands; on another thread's it stays, and does nothing."""
        self.tracer.paused = True
        if not self._on or threading.get_ident() != self._thread:
            return
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

    def next_step(self) -> None:
        """Forget the step.

        The tracer stays the same object: modes entered above it must not change places with it, and when a backward
        ends (an optimizer may step inside one) autograd puts back the stack that it found.
        """
        fresh, tracer = self.make(), self.tracer
        fresh.module, fresh.phase, fresh.paused = tracer.module, tracer.phase, tracer.paused
        vars(tracer).update((k, v) for k, v in vars(fresh).items() if k not in _OF_THE_MODE)

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
    def root(self) -> Any:
        """The outermost module that is running, or None."""
        return self._stack[0][2] if self._stack else None

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
