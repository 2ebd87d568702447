"""What is changed in PyTorch while at least one detector is attached, and put back when the last one leaves.

Everything here is process-wide, so it asks the registered watchers and the calling thread's session what to do, and
does nothing for threads and modules that nobody watches.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nan_detector._errors import ReplayRefused
from nan_detector._session import Session, all_sessions, session
from nan_detector._skip import closure_of
from nan_detector._state import is_replaying, steps_in_replay

_compiling = torch.compiler.is_compiling


class ReplayEnds(BaseException):
    """Internal: a replayed step reached its first optimizer step. A BaseException, so that no user code swallows it."""


class Watcher(Protocol):
    """What an attached detector must answer."""

    roots: Any  # its `Roots`

    def before_step(self, optimizer: Any, args: Any, kwargs: Any, session: Session) -> tuple[Any, Any] | None:
        """An optimizer is about to step: None to let it, or the replaced call."""

    def after_step(self, optimizer: Any, session: Session) -> None:
        """The step was taken (or its stand-in ran)."""

    def gradients_dropped(self, owner: Any, session: Session) -> None:
        """`zero_grad` of an optimizer or module is about to run."""

    def scaler_skipped(self, scaler: Any, optimizer: Any, session: Session) -> None:
        """A GradScaler decided not to step."""

    def unscaling(self, scaler: Any, optimizer: Any, session: Session) -> None:
        """Gradients that carry a loss scale are about to lose it."""


_lock = threading.RLock()
_watchers: list[Watcher] = []
_undo: list[Callable[[], object]] = []


def register(watcher: Watcher) -> None:
    """Serve `watcher`; installs the patches with the first one."""
    with _lock:
        if not _watchers:
            _install()
        _watchers.append(watcher)


def unregister(watcher: Watcher) -> None:
    """Stop serving `watcher`; removes the patches with the last one."""
    with _lock:
        if watcher in _watchers:
            _watchers.remove(watcher)
            if not _watchers:
                _uninstall()


def _install() -> None:
    for handle in (register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)):
        _undo.append(handle.remove)
    # The mode would see it as well; but a backward's way through a function mode costs as much as recording it.
    _wrap(torch.Tensor, "backward", _backward)
    _wrap(torch.optim.Optimizer, "zero_grad", _zero_grad)
    _wrap(torch.nn.Module, "zero_grad", _zero_grad)
    _wrap(torch.amp.GradScaler, "scale", _scaler_scale)
    _wrap(torch.amp.GradScaler, "step", _scaler_step)
    _wrap(torch.amp.GradScaler, "update", _quiet)
    _wrap(torch.amp.GradScaler, "unscale_", _unscale)
    _wrap(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", _next_batch)
    # Every optimizer step opens one. Its operation takes a slow way through PyTorch when a function mode is there.
    _wrap(torch.autograd.profiler.record_function, "__enter__", _record_begins)
    _wrap(torch.autograd.profiler.record_function, "__exit__", _record_ends)
    _wrap_apply()
    _wrap_compiled_calls()
    _wrap_compiled_modules()
    _wrap_compile_in_place()


def _uninstall() -> None:
    while _undo:
        _undo.pop()()
    _forget_threads()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = owner.__dict__[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _compiling():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    _undo.append(lambda: setattr(owner, name, original))


class _Apply:
    """`autograd.Function.apply` with its code exchanged, so that every call is seen.

    A method bound before (``fn = MyFunction.apply``) holds the function itself and would pass by a patched attribute;
    and TorchDynamo, which compares the attribute with the bound method, would refuse to compile. So the function object
    stays and its code is exchanged. TorchDynamo also guards on the code: while compiled code runs, which is not
    recorded call by call anyway, the original is in place.
    """

    def __init__(self) -> None:
        self.function = torch.autograd.Function.__dict__["apply"].__func__
        f = self.function
        self.code: types.CodeType = f.__code__
        self.bare = types.FunctionType(self.code, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
        # Under PyTorch's file name: its frames are never compiled, and never taken for the user's.
        self.seeing: types.CodeType = _seeing_apply(None).__code__.replace(
            co_filename=self.code.co_filename, co_firstlineno=self.code.co_firstlineno
        )

    def see(self) -> None:
        """Hand each call to the session."""
        if self.code.co_freevars == self.seeing.co_freevars:  # else a PyTorch whose apply is of another kind
            self.function.__code__ = self.seeing

    def leave(self) -> None:
        """Back to the original."""
        self.function.__code__ = self.code

    def call(self, cls: Any, args: Any, kwargs: Any) -> Any:
        """What a call does while it is seen."""
        bare = types.MethodType(self.bare, cls)
        if torch.compiler.is_compiling():
            return bare(*args, **kwargs)
        return session().custom_function(cls, bare, args, kwargs)


#: Kept for the life of the process: the code that sees must be the same object at each attach, or guards fail anew.
_apply: list[_Apply] = []


def _wrap_apply() -> None:
    if not _apply:
        _apply.append(_Apply())
    _apply[0].see()
    _undo.append(_apply[0].leave)


def _seeing_apply(__class__: Any) -> Any:  # the one cell of the original, which calls `super()`
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from nan_detector._patches import _apply  # the globals of this code are PyTorch's

        __class__  # noqa: B018  # so that the code closes over it, as the original's does
        return _apply[0].call(cls, args, kwargs)

    return apply


def _wrap_compiled_calls() -> None:
    """Take the mode off around compiled code.

    TorchDynamo guards on the stack of function modes: with ours on it in one call and off in the next, a compiled
    function would be compiled twice. Its call wrapper looks both functions up by name: the first when it enters
    compiled code (handing it a callback), the second right after that and again when it leaves. A call of what
    `torch.compiler.disable` decorates (checkpointing) has no callback: it runs eagerly and is recorded like any other.
    """
    frame: Any = importlib.import_module("torch._dynamo.eval_frame")  # an optimizer step imports it anyway
    original = getattr(frame, "_callback_from_stance", None)
    set_frame = getattr(frame, "_maybe_set_eval_frame", None)
    guards: Any = getattr(frame, "_is_skip_guard_eval_unsafe_stance", None)
    if original is None or set_frame is None:
        return

    def skips_guards() -> Any:
        # An op tracer has to leave before the wrapper notes the dispatch keys that the compiled code will run with.
        current = session()
        if current.lives and not is_replaying() and sys._getframe(1).f_code.co_name == "compile_wrapper":
            current.aside = [live for live in current.lives if live.step_aside()]
        return guards()

    def callback_from_stance(callback: Any) -> Any:
        current = session()
        aside, current.aside = current.aside, []
        if callback is None or is_replaying():
            for live in reversed(aside):
                live.step_back()
        else:
            current.compiled.append([sys._getframe(1), current.pop(), False, aside])
            current.compiled_after = current.tape.entries[-1].number if current.tape.entries else -1
            _apply[0].leave()
        return original(callback)

    def maybe_set_eval_frame(callback: Any) -> Any:
        inside = session().compiled
        if not inside or inside[-1][0] is not sys._getframe(1):
            return set_frame(callback)
        if not inside[-1][2]:
            inside[-1][2] = True
            return set_frame(callback)
        _, popped, _, aside = inside.pop()
        before = set_frame(callback)
        for live in reversed(aside):
            live.step_back()
        if not any(s.compiled for s in all_sessions()):
            _apply[0].see()
        if popped:
            session().push()
        return before

    frame._callback_from_stance = callback_from_stance
    _undo.append(lambda: setattr(frame, "_callback_from_stance", original))
    if guards is not None:
        frame._is_skip_guard_eval_unsafe_stance = skips_guards
        _undo.append(lambda: setattr(frame, "_is_skip_guard_eval_unsafe_stance", guards))
    frame._maybe_set_eval_frame = maybe_set_eval_frame
    _undo.append(lambda: setattr(frame, "_maybe_set_eval_frame", set_frame))
    _undo.append(_forget_compiled)


def _forget_threads() -> None:
    """Threads that called a watched model without having attached to it keep nothing of it either."""
    for known in all_sessions():
        if not known.users:
            known.tape.clear()


def _forget_compiled() -> None:
    for known in all_sessions():
        known.compiled.clear()


def _wrap_compiled_modules() -> None:
    cls = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if cls is None:
        return
    inherited = "__call__" not in cls.__dict__
    original = cls.__call__

    @functools.wraps(original)
    def call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        return _compiled_module(functools.partial(original, compiled), compiled._orig_mod, args, kwargs)

    cls.__call__ = call
    _undo.append(lambda: delattr(cls, "__call__") if inherited else setattr(cls, "__call__", original))


def _compiled_module(compiled: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """`torch.compile` of a watched module: compiled code does not run its hooks, so they are called around it."""
    if torch.compiler.is_compiling() or is_replaying():
        return compiled(*args, **kwargs)
    watching = [w.roots for w in list(_watchers) if w.roots.watches(module)]
    aside = [live for live in session().lives if live.step_aside()]
    out = None
    try:
        for roots in watching:
            roots.enter(module, args, kwargs)
        session().mark_compiled()
        try:
            out = compiled(*args, **kwargs)
        finally:
            for roots in reversed(watching):
                roots.leave(module, out)
    finally:
        for live in reversed(aside):
            live.step_back()
    return out


def _wrap_compile_in_place() -> None:
    original = torch.nn.Module.compile

    @functools.wraps(original)
    def compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        if any(w.roots.watches(module) for w in list(_watchers)):
            see_compiled(module)

    setattr(torch.nn.Module, "compile", compile)  # noqa: B010  # an assignment would have to be of the same type
    _undo.append(lambda: setattr(torch.nn.Module, "compile", original))


def see_compiled(module: torch.nn.Module) -> None:
    """See the calls of a module that ``module.compile()`` compiled in place."""
    compiled = vars(module).get("_compiled_call_impl")
    if compiled is None or compiled in _in_place:
        return

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _compiled_module(compiled, module, args, kwargs)

    def undo() -> None:
        _in_place.remove(call)
        if vars(module).get("_compiled_call_impl") is call:
            module._compiled_call_impl = compiled

    _in_place.append(call)
    module._compiled_call_impl = call
    _undo.append(undo)


#: What stands in the place of compiled calls.
_in_place: list[Any] = []


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if _compiling():
        return None
    if is_replaying():
        if steps_in_replay(optimizer):
            return None
        closure = closure_of(args, kwargs)
        if closure is not None:  # the gradients of such a step are made within it
            closure()
        raise ReplayEnds
    current = session()
    current.steps += 1
    if current.mode is not None:
        current.pop()
    current.paused += 1
    replaced = None
    try:
        for watcher in list(_watchers):
            answer = watcher.before_step(optimizer, args, kwargs, current)
            if answer is not None:
                replaced = answer
    except BaseException:
        current.paused -= 1
        raise
    current.stepping.append(optimizer)
    return replaced


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _compiling() or is_replaying():
        return
    current = session()
    # A step that raised never came here; its marks are cleared with those above it.
    while current.stepping:
        top = current.stepping.pop()
        current.paused = max(0, current.paused - 1)
        if top is optimizer or not current.stepping:
            break
    for watcher in list(_watchers):
        watcher.after_step(optimizer, current)
    if current.home and not current.in_step_record:
        current.push()


def _backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    current = session()
    if current.paused or not current.pop():
        return original(*args, **kwargs)
    try:
        return current.backward(original, args, kwargs)
    finally:
        current.push()


def _zero_grad(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    if is_replaying():
        if isinstance(owner, torch.optim.Optimizer) and steps_in_replay(owner):
            return original(owner, *args, **kwargs)
        return None
    current = session()
    if not current.users:
        return original(owner, *args, **kwargs)
    current.recover()
    for watcher in list(_watchers):
        watcher.gradients_dropped(owner, current)
    popped = current.pop()
    current.paused += 1
    try:
        return original(owner, *args, **kwargs)
    finally:
        current.paused -= 1
        if popped:
            current.push()


def _next_batch(original: Callable[..., Any], iterator: Any) -> Any:
    if is_replaying():
        raise ReplayRefused("the step takes its batch from a data loader, which a replay would take one more from")
    return _quiet(original, iterator)


def _quiet(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if is_replaying():
        return None
    current = session()
    if not current.users:
        return original(*args, **kwargs)
    with current.off():
        return original(*args, **kwargs)


def _record_begins(original: Callable[..., Any], record: Any) -> Any:
    current = session()
    if current.mode is None:
        return original(record)
    popped = current.pop()
    try:
        return original(record)
    finally:
        if popped and record.name.startswith("Optimizer.step#"):
            current.in_step_record = True  # the step's hooks would take it off next
        elif popped:
            current.push()


def _record_ends(original: Callable[..., Any], record: Any, *error: Any) -> Any:
    current = session()
    if current.mode is None and not current.in_step_record:
        return original(record, *error)
    ends_step = current.in_step_record and record.name.startswith("Optimizer.step#")
    popped = current.pop()
    try:
        return original(record, *error)
    finally:
        if ends_step:
            current.in_step_record = False
            current.recover()
        elif popped:
            current.push()


def _scaler_scale(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    current = session()
    if is_replaying() or not current.users:
        return original(scaler, outputs)
    return current.scaled(scaler, outputs, original)


def _unscale(original: Callable[..., Any], scaler: Any, optimizer: Any) -> Any:
    if is_replaying():
        return None
    current = session()
    if current.gradient_scale is not None:
        _before_unscaling(scaler, optimizer, current)
    if not current.users or current.paused or current.busy or current.mode is None:
        return original(scaler, optimizer)
    # The division by the scale is part of the step's arithmetic, but the scaler's own bookkeeping cannot run twice.
    with current.off():
        return original(scaler, optimizer)


def _before_unscaling(scaler: Any, optimizer: Any, current: Session) -> None:
    current.gradient_scale = None
    with current.off():
        for watcher in list(_watchers):
            watcher.unscaling(scaler, optimizer, current)


def _scaler_step(original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    if is_replaying():
        raise ReplayEnds
    current = session()
    if not current.users:
        return original(scaler, optimizer, *args, **kwargs)
    if current.gradient_scale is not None:  # an optimizer that unscales by itself is never unscaled before
        _before_unscaling(scaler, optimizer, current)
    gates_before = current.gates
    current.scaler = scaler
    try:
        with current.off():
            out = original(scaler, optimizer, *args, **kwargs)
            if current.gates == gates_before:
                for watcher in list(_watchers):
                    watcher.scaler_skipped(scaler, optimizer, current)
        return out
    finally:
        current.scaler = current.gradient_scale = None
