"""Find the models of a script that nobody changed, and watch them: a model is what is called outermost and trains."""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nan_detector._compiled_calls import CompiledCalls
from nan_detector._detector import NaNDetector
from nan_detector._errors import NonFiniteError
from nan_detector._loose import Parameters, at_next_backward
from nan_detector._state import BUG, is_replaying, logger, strict, switched_off

#: Training calls without a new model after which the search ends until an optimizer is met that steps another one.
SETTLED_CALLS = 200


class _Depth(threading.local):
    value = 0


class AutoWatch:
    """Watches whatever trains in this process, on the first thread that does, with one detector at a time.

    Models are added to the detector as they are met. When every optimizer it knew is gone and another model comes (the
    next fold, the next trial of a search), it ends, so that it does not keep the old models alive, and another one goes
    on counting where it stopped.

    Args:
        make: Makes a detector for the first model found.

    Attributes:
        detector: The one at work, or the last one; None before the first.
    """

    def __init__(self, make: Callable[[torch.nn.Module], NaNDetector]) -> None:
        self._make = make
        self.detector: NaNDetector | None = None
        self._thread: int | None = None
        self._depth = _Depth()
        self._met: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._steppers: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers whose parameters are accounted for
        self._sought: weakref.WeakSet[Any] = weakref.WeakSet()  # those that a search was begun for
        self._quiet_calls = 0
        self._skipped_before = self._steps_before = 0
        self._search: list[Any] = []
        self._hooks: list[Callable[[], None]] = []  # what takes them off
        self._compiled = CompiledCalls(self._around_compiled)
        self._open = False

    def __enter__(self) -> AutoWatch:
        if not switched_off():
            self._open = True
            self._hooks = [register_optimizer_step_pre_hook(self._before_step).remove]
            self._compiled.open()
            self._start_searching()
            _in_forked_children(self)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stand_down()
        try:
            if self.detector is not None:
                self.detector.__exit__(kind, error, trace)
        finally:
            self._compiled.close()

    @property
    def in_vain(self) -> bool:
        """True when nothing was found, although it was looked for."""
        return self.detector is None and not switched_off()

    @property
    def skipped_steps(self) -> int:
        """Steps that were not taken, so far."""
        return self._skipped_before + (self.detector.skipped_steps if self.detector is not None else 0)

    def _stand_down(self) -> None:
        self._open = False
        self._stop_searching()
        for remove in self._hooks:
            remove()
        self._hooks.clear()

    def _start_searching(self) -> None:
        self._quiet_calls = 0
        self._search_on()

    def _search_on(self) -> None:
        module = torch.nn.modules.module
        if not self._search:
            self._search = [
                module.register_module_forward_pre_hook(self._enter),
                module.register_module_forward_hook(self._leave, always_call=True),
            ]

    def _stop_searching(self) -> None:
        for handle in self._search:
            handle.remove()
        self._search.clear()

    def _elsewhere(self) -> bool:
        return (
            torch.compiler.is_compiling()
            or is_replaying()
            or (self._thread is not None and threading.get_ident() != self._thread)
        )

    # -- the search ----------------------------------------------------------------------------------------------------

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if self._elsewhere():
            return
        self._depth.value += 1
        if self._depth.value > 1 or not torch.is_grad_enabled():
            return
        if self._is_new(module):
            self._contain(self._watch, module, args, _keywords_of_call())

    def _is_new(self, module: torch.nn.Module) -> bool:
        """True for a model that trains and is not watched yet."""
        if module in self._met:
            self._quiet_calls += 1
            if self._quiet_calls > SETTLED_CALLS:
                self._stop_searching()
            return False
        parameters = list(module.parameters())
        if not any(p.requires_grad for p in parameters) or any(map(torch.nn.parameter.is_lazy, parameters)):
            return False  # a loss function; or it is frozen, or not yet made, and may train later
        self._met.add(module)
        self._quiet_calls = 0
        return True

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._elsewhere():
            self._depth.value = max(0, self._depth.value - 1)

    def _around_compiled(self, call: Callable[[], Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._search or self._elsewhere():
            return call()
        outermost = self._depth.value == 0 and torch.is_grad_enabled()
        found = outermost and self._is_new(module)
        if found:
            self._contain(self._watch, module, args, kwargs)
        searching = bool(self._search)
        self._stop_searching()
        out = None
        try:
            out = call()
            return out
        finally:
            engine = self.detector._engine if self.detector is not None else None
            if found and engine is not None:
                engine.roots.leave(module, out)  # its hooks do not run in compiled code
            if searching and self._open:
                self._search_on()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in self._steppers or self._elsewhere():
            return
        self._depth.value = 0  # an interrupted call has not told that it ended
        known = _known(self.detector, optimizer)
        if all(known):
            self._steppers.add(optimizer)
        elif not self._search:
            if optimizer in self._sought:  # that search has ended as well
                self._steppers.add(optimizer)
            self._sought.add(optimizer)
            self._start_searching()
        elif not any(known):
            self._steppers.add(optimizer)
            then = functools.partial(self._contain, self._watch_loose, weakref.ref(optimizer))
            self._hooks.append(at_next_backward(then))

    def _watch_loose(self, known: weakref.ref[Any]) -> None:
        """Watch what an optimizer steps by itself: no module that owns it is called."""
        optimizer = known()
        if optimizer is None or not self._open or self._elsewhere() or any(_known(self.detector, optimizer)):
            return
        self._end_of_the_last()
        self._take(Parameters(optimizer))

    # -- the watch -----------------------------------------------------------------------------------------------------

    def _watch(self, module: torch.nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        self._end_of_the_last()
        self._take(module)
        # This very call began before the module was hooked.
        if self.detector is not None:
            self.detector.enter_call(module, args, keywords)

    def _take(self, module: torch.nn.Module) -> None:
        if self.detector is None or self._thread is None:
            self._skipped_before = self.skipped_steps
            self.detector, self._thread = self._make(module), threading.get_ident()
            self.detector.attach()
            if self.detector._engine is not None:
                self.detector._engine.run.go_on_from(self._steps_before)
        else:
            self.detector._add_model(module)

    def _end_of_the_last(self) -> None:
        """The detector at work ends when all that it watched training is over and done with."""
        engine = self.detector._engine if self.detector is not None else None
        if self.detector is None or engine is None or not engine.optimizers.any_stepped:
            return
        if engine.optimizers.alive():
            gc.collect()  # an optimizer and its scheduler hold each other
        if not engine.optimizers.alive():
            self._steps_before = engine.run.steps
            self.detector.detach()
            self._thread = None

    def _contain(self, work: Callable[..., None], *args: Any) -> None:
        try:
            work(*args)
        except NonFiniteError:
            raise
        except Exception:
            if strict():
                raise
            logger.exception(BUG)
            self._stand_down()

    def _forked(self) -> None:
        """This is a child process now: what the parent watches is none of its business, what it trains itself is."""
        if not self._open:
            return
        if self.detector is not None:
            _forget(self.detector)
        self.detector, self._thread = None, None
        self._depth, self._met = _Depth(), weakref.WeakSet()
        self._steppers, self._sought = weakref.WeakSet(), weakref.WeakSet()
        self._start_searching()


def _in_forked_children(watch: AutoWatch) -> None:
    """Have `watch` begin anew in each child; a callback of this kind cannot be taken back, so it holds nothing."""
    known = weakref.WeakMethod(watch._forked)

    def forked() -> None:
        method = known()
        if method is not None:
            method()

    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=forked)


def _known(detector: NaNDetector | None, optimizer: Any) -> list[bool]:
    """Of each parameter that `optimizer` trains: whether it is part of a watched model."""
    engine = detector._engine if detector is not None else None
    ours = engine.run.ours if engine is not None else {}
    return [id(p) in ours for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _forget(detector: NaNDetector) -> None:
    """Leave a detector that a forked child has inherited: nothing is judged, and the parent's log is the parent's."""
    engine, book = detector._engine, detector._book
    if book is not None and book.log is not None:
        book.log.abandon()
    if engine is not None:
        engine.standing_down = True
        detector.detach()


def _keywords_of_call() -> dict[str, Any]:
    """Keyword arguments of the module call whose global pre-hook is running: torch does not hand them to it."""
    frame: Any = sys._getframe(2)  # that of the module's call
    found = frame.f_locals.get("kwargs")
    return found if isinstance(found, dict) else {}
