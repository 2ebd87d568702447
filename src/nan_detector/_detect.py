"""`detect_nan`: every operation checked, for code that can be run again. No model, no optimizer needed.

A value that the code itself drops (a mask, `nanmean`, an index) is nobody's error, and whether it will be dropped is
not known at its birth. So the error is raised where the harm is done, at the latest when the block ends, and names the
birth: a backward that starts from a bad value, a gradient that comes out bad, a bad value read to the host, an output
of a model without gradients, an exception that the code raises because of it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nan_detector import _finite, _warned_at
from nan_detector._calls import CallKind, kind_of, public_name
from nan_detector._entries import tensors_in
from nan_detector._errors import NonFiniteError
from nan_detector._events import complete, new_event
from nan_detector._finding import Finding
from nan_detector._gate import Suspicion
from nan_detector._lineage import Gen, Line, key_of
from nan_detector._live import Live
from nan_detector._naming import is_made
from nan_detector._origin import trace_of_line
from nan_detector._quiet import quiet
from nan_detector._source import argument_text, here
from nan_detector._state import is_replaying, switched_off
from nan_detector._trace import BirthKind
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor


class detect_nan(contextlib.ContextDecorator):  # a drop-in for torch.autograd.detect_anomaly, named like it
    """Check every operation in this block, and raise `NonFiniteError` with a full report when one does harm.

    A context manager and a decorator. Works in training, under ``no_grad`` and in inference mode, for code in any
    form; slows it down several times.

    Raises:
        NonFiniteError: A NaN or Inf reached a backward, a gradient, the host, a model's output or the end of the
            block. Its `event` names the operation and line where the value was born.
    """

    def __init__(self) -> None:
        self._live: Live | None = None
        self._mode: _Harm | None = None

    def _recreate_cm(self) -> detect_nan:
        return detect_nan()  # as a decorator: each call has a trace of its own

    def __enter__(self) -> detect_nan:
        if switched_off() or torch.compiler.is_compiling() or is_replaying():
            return self
        if self._live is not None:
            raise RuntimeError("this detect_nan() is already open; make another one for a nested block.")
        self._live = live = Live(None, OpTracer)
        self._mode = mode = _Harm(live)
        live.on_leave = mode.left_module
        live.tracer.outside = mode.name_of
        live.open()
        _open_here().append(mode)
        live.tracer.on_scalar = mode.read
        live.tracer.max_described = math.inf  # a block may hold many steps, each with births that come to nothing
        mode.__enter__()  # type: ignore[no-untyped-call]  # as torch ships it
        _warned_at.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        live, mode = self._live, self._mode
        if live is None or mode is None:
            return
        self._live = self._mode = None
        if mode in _open_here():
            _open_here().remove(mode)
        _warned_at.end()
        mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # as torch ships it
        live.close()
        if error is None:
            mode.check_end()
        elif isinstance(error, Exception) and not isinstance(error, NonFiniteError):
            mode.explain(error)


class _Open(threading.local):
    def __init__(self) -> None:
        self.modes: list[_Harm] = []


_open = _Open()


def _open_here() -> list[_Harm]:
    """Blocks that are open on this thread, outermost first."""
    return _open.modes


class _Harm(TorchFunctionMode):
    """Looks for harm at the calls where it can be done."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live
        self._told: set[Gen] = set()
        self._backwards = 0  # that have come to their end

    def name_of(self, t: Tensor) -> tuple[BirthKind, str] | None:
        """What a tensor is that no operation of the block made; None where code that is not seen may have made it."""
        key = key_of(t)
        if self.live.tracer.made(key):
            return None
        root = self.live.root
        if root is not None:
            for kind, pairs in (
                (BirthKind.PARAMETER, root.named_parameters()),
                (BirthKind.BUFFER, root.named_buffers()),
            ):
                for name, known in pairs:
                    if key_of(known) == key:
                        return kind, name
        text = self._text(key)
        if isinstance(t, torch.nn.Parameter):
            return BirthKind.PARAMETER, text or "a parameter"
        if text is not None and is_made(text):
            return None
        return BirthKind.INPUT, text or "a tensor from outside the block"

    def _text(self, key: int) -> str | None:
        """How the user's code writes the argument whose memory is `key`."""
        mark, given = here(2), self.live.tracer.api_inputs
        if mark is None or not isinstance(given, tuple):
            return None
        for i, value in enumerate(given):
            if isinstance(value, Tensor) and key_of(value) == key:
                return argument_text(mark, i, None)
        return None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tracer = self.live.tracer
        outer, tracer.api, tracer.api_inputs = (tracer.api, tracer.api_inputs), public_name(func), args
        try:
            if kind_of(func) is CallKind.BACKWARD:
                return self._backward(func, args, kwargs)
            out = func(*args, **kwargs)
            if func is torch.autograd.grad:
                self.judge(tensors_in(out), "a gradient is not finite", "backward")
            return out
        finally:
            tracer.api, tracer.api_inputs = outer

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        roots = args[0] if args else kwargs.get("self", kwargs.get("tensors"))
        self.judge(tensors_in(roots), "the loss is not finite", "loss")
        out = func(*args, **kwargs)
        leaves = [t for ref in self.live.tracer.leaves.values() if (t := ref()) is not None]
        self.judge((t.grad for t in leaves if t.grad is not None), "a gradient is not finite", "backward")
        self._backwards += 1
        return out

    def left_module(self, module: Any, output: Any) -> None:
        """A module has returned: an output without gradients will see no backward, so it is judged here."""
        if self.live.depth == 0 and not torch.is_grad_enabled():
            self.judge(tensors_in(output), f"the output of {type(module).__name__} is not finite", "forward")

    def read(self, line: Line) -> None:
        """The user's code reads a bad value."""
        if any(not g.intended for g in line):
            self._raise(line, "a value that is not finite was read", "loss")

    def judge(self, tensors: Iterable[Tensor], symptom: str, phase: Any) -> None:
        """Raise if one of `tensors` holds a value that nobody meant to be non-finite."""
        tracer = self.live.tracer
        with quiet():
            for t in tensors:
                line = tracer.ancestry(t)
                if any(not g.intended for g in line):
                    self._raise(line, symptom, phase)
                if line and _finite.stats(t).nan_count:
                    self._raise(line, symptom, phase)

    def check_end(self) -> None:
        """The block ends: values that are still there, and that nothing dropped, count."""
        line = frozenset(g for g in self.live.tracer.births if self._is_left(g))
        if line:
            self._raise(line, "a value is not finite when the block ends", "forward")

    def _is_left(self, gen: Gen) -> bool:
        if gen.intended or gen.ended or gen.last is None or gen in self._told:
            return False
        t = gen.last()
        return t is not None and not _finite.is_finite(t)

    def explain(self, error: Exception) -> None:
        """The code raised: if that was because of a bad value, say so, with the code's own error as the cause."""
        last = self.live.tracer.last
        tensors = [t for t in last.inputs if isinstance(t, Tensor)] if last is not None else []
        with quiet():
            line: Line = frozenset().union(*(self.live.tracer.ancestry(t) for t in tensors))
        if any(not g.intended for g in line):
            raise self._error(line, f"the code raised {type(error).__name__}", "forward") from error

    def _raise(self, line: Line, symptom: str, phase: Any) -> None:
        raise self._error(line, symptom, phase)

    def _error(self, line: Line, symptom: str, phase: Any) -> NonFiniteError:
        with quiet():
            trace = trace_of_line(self.live.tracer, line)
            # Nothing is known here of steps and of weights: backward passes are what can be counted.
            event = new_event(self._backwards, Suspicion(), phase=phase)
            event = replace(event, symptom=symptom, action="raise", weights="")
            event = complete(event, Finding(trace, "yes"), {}, ())
        for mode in _open_here():
            # A block that goes on after this error must not tell the same story when it ends.
            mode._told.update(mode.live.tracer.births)
        return NonFiniteError(str(event), event)
