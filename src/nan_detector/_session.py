"""One thread's recording: the tape, and the function mode that writes the user's calls onto it.

The mode stands on the thread's stack from `open` to `close`, and is taken off around everything that need not be
recorded call by call: a watched module's own call, `zero_grad`, an optimizer's step, compiled code. It is only ever
pushed or popped when it is on top, and never from inside a handler: modes nest, and swapping the order of somebody
else's modes would lose them theirs.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from nan_detector._recording import Look, torch_function
from nan_detector._source import Mark
from nan_detector._state import BUG, logger, strict
from nan_detector._tape import Tape, Tensor
from nan_detector._written_weights import Writers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MODULE_CALL = torch.nn.Module._call_impl.__code__
#: Where the function is that runs the hooks around an optimizer's step.
_OPTIMIZER_FILE = torch.optim.Optimizer.profile_hook_step.__code__.co_filename
_function_modes = torch._C._len_torch_function_stack
_pop_from_stack = torch._C._pop_torch_function_stack
_push_on_stack = torch._C._push_on_torch_function_stack


class TapeMode(TorchFunctionMode):
    """Hands each call the user makes to the session; inert once the session is closed."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session: Session | None = session

    __torch_function__ = torch_function


class Session:
    """The recording of one thread. `users` counts the attached detectors that want it."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.users = 0
        self.lives: list[Any] = []  # op tracers on this thread's dispatch stack
        self.aside: list[Any] = []  # those that stepped aside for the compiled code about to be entered
        self.broken = False  # the recording failed: a bug of ours
        self.told = False  # and has been told
        self.paused = 0  # > 0: calls are not recorded although the mode may be on the stack
        self.busy = 0  # > 0: inside one of our handlers; the stack must not be touched
        self.mode: TapeMode | None = None
        self._spare: TapeMode | None = None  # the mode, on the stack or off it; None while nothing is recorded
        self.step_record: Any = None  # the profiler's record around an optimizer's step, which took the mode off
        self.home = False  # the thread that attached: the mode stays on between steps
        self.roots: list[Any] = []  # watched modules that are running, outermost first
        self.evaluating = 0  # > 0: in a closure, so that the step around it goes on
        self.stepping: list[Any] = []  # optimizers whose step is running
        self.steps = 0  # optimizer steps, of anybody
        self.gates = 0  # optimizer steps that reached a pre-hook
        self.scaler: Any = None  # the GradScaler whose `step` is running
        self.step: int | None = None  # that of the last call of a watched module; None before the first
        self.told_step: int | None = None  # that which the loop has named last
        self.looks: list[Look] = []
        self.writers = Writers()  # who wrote last into weights and buffers, outside of an optimizer's step
        self.gradient_scale: Tensor | None = None  # what the gradients are multiplied by until they are unscaled
        #: Of each engine: called with parameters that are written while a backward waits to be judged; True refuses.
        self.before_update: list[Callable[[list[Tensor]], bool]] = []
        self.refused: Mark | None = None  # the statement whose update was refused
        self.compiled_after = -1  # number of the last entry when compiled code was entered
        self.compiled: list[list[Any]] = []  # calls of compiled code: frame, whether the mode was on before, entered

    # -- the mode --------------------------------------------------------------------------------------------------

    def push(self) -> None:
        """Put the mode on the stack, if it is not there and this is a place where that is allowed.

        Whoever calls it has made sure that nothing is being compiled: asking again would cost as much as the push.
        """
        if self.mode is None and not self.busy:
            mode = self._spare or self._make()
            if mode is not None:
                self.mode = mode
                _push_on_stack(mode)

    def _make(self) -> TapeMode | None:
        """The mode, which is made once; None where nothing is to be recorded."""
        if self.users and not self.broken:
            self._spare = TapeMode(self)
        return self._spare

    def pop(self) -> bool:
        """Take the mode off the stack if it is on top. True when it was."""
        mode = self.mode
        if mode is None or self.busy:
            return False
        if not _function_modes():
            return False
        top = _pop_from_stack()
        if top is not mode:
            _push_on_stack(top)
            return False
        self.mode = None
        return True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing in here is recorded, at no cost per call where the mode can be taken off the stack."""
        popped = self.pop()
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1
            if popped:
                self.push()

    def mark_compiled(self) -> None:
        """The call of a watched module that has begun runs compiled code."""
        if self.roots and self.roots[-1] is not None:
            self.roots[-1][1].compiled = True

    def pause_again(self) -> None:
        """A closure has run within an optimizer's step: back to not recording."""
        self.pop()
        self.paused += 1

    def recording_closure(self, call: tuple[Any, Any]) -> tuple[Any, Any]:
        """The arguments of `step(closure)` with a closure that is recorded although the step around it is not."""
        args, kwargs = call
        inner = args[1] if len(args) > 1 else kwargs["closure"]

        def closure(*a: Any, **k: Any) -> Any:
            self.paused -= 1
            self.push()
            depth = self.paused
            self.evaluating += 1
            try:
                return inner(*a, **k)
            finally:
                self.evaluating -= 1
                if self.paused == depth:  # it raised before its verdict
                    self.pause_again()

        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    def forget_lost_roots(self, running: int) -> None:
        """A KeyboardInterrupt leaves a module without running its hooks: its call is on our list and not on the stack.

        Args:
            running: Module calls on the stack that are not of the list.
        """
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _MODULE_CALL:
                running -= 1
                if running < 0:
                    return
            frame = frame.f_back
        self.paused = max(0, self.paused - sum(root is not None for root in self.roots))
        self.roots.clear()

    def recover(self, running: Sequence[Any] = ()) -> None:
        """Undo the marks of an optimizer step or root call that raised and so never told us that it ended.

        Args:
            running: Optimizers whose step is known to be running: their marks stay.
        """
        if self.roots:
            self.forget_lost_roots(0)
        if self.stepping and not self.busy and not self.evaluating:
            kept = [o for o in self.stepping if any(o is r for r in running)]
            self.paused = max(0, self.paused - len(self.stepping) + len(kept))
            self.stepping[:] = kept
        if self.mode is not None and not _function_modes():
            self.mode = None  # an interrupt came just when it had been taken off
        if self.mode is None and self.home and not self.paused and not self.roots:
            self.push()

    def close(self) -> None:
        """Forget the step and leave the stack; where others stand above the mode it is taken out from under them."""
        self.tape.clear()
        self.roots.clear()
        self.stepping.clear()
        self.compiled.clear()
        self.looks.clear()
        self.writers.clear()
        self.step = self.told_step = None
        self.paused = 0
        self.broken = self.told = False
        mode = self.mode
        self._let_go()
        if mode is None or self.pop():
            return
        self.mode = None
        above = []
        for _ in range(_function_modes()):
            top = _pop_from_stack()
            if top is mode:
                break
            above.append(top)
        for other in reversed(above):
            _push_on_stack(other)

    def _let_go(self) -> None:
        if self._spare is not None:
            self._spare.session = None  # inert where it stands, and for whoever has kept it
            self._spare = None

    def failed(self, bug: Exception) -> None:
        """A bug of ours in the recording: it is told once, and this thread records no more until it is watched anew."""
        self.broken = True
        self._let_go()
        self.tape.clear()
        if strict():
            raise bug
        self.tell(BUG)

    def tell(self, message: str) -> None:
        """Log the exception that is being handled, once a watch: what is broken mostly fails in several places."""
        if not self.told:
            self.told = True
            logger.exception(message)


class _Local(threading.local):
    current: Session | None = None  # in the class: asking for it costs less than `getattr` with a default


#: Hooks that run in every step look into it themselves, and ask `session` where there is none yet.
sessions = _Local()
_all_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def session() -> Session:
    """The calling thread's session."""
    found = sessions.current
    if found is None:
        found = sessions.current = Session()
        _all_sessions.add(found)
    return found


def all_sessions() -> list[Session]:
    """Sessions of every thread that has one."""
    return list(_all_sessions)


def steps_running() -> list[Any]:
    """Optimizers whose step is on the stack, innermost first: a session's marks do not tell, as a step may raise."""
    found: list[Any] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _OPTIMIZER_FILE:
            found.append(frame.f_locals.get("self"))
        frame = frame.f_back
    return found
