"""Compiled code under the watch: it must not be traced with our mode on, and its hooks do not run."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._patched import compiling, to_undo, watchers
from nan_detector._patched_apply import FUNCTION_APPLY
from nan_detector._remade import frame_setter
from nan_detector._session import all_sessions, session, sessions
from nan_detector._state import is_replaying


def wrap_compiled_calls() -> None:
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
        _wrap_calls_without_stances(frame)
        return

    def skips_guards() -> Any:
        # An op tracer has to leave before the wrapper notes the dispatch keys that the compiled code will run with.
        current = session()
        if current.lives and not is_replaying() and sys._getframe(1).f_code.co_name == "compile_wrapper":
            current.aside = [live for live in current.lives if live.step_aside()]
        return guards()

    def callback_from_stance(callback: Any) -> Any:
        current = sessions.current or session()
        if callback is None and not current.aside:  # as around an optimizer's step, in every step
            return original(callback)
        aside, current.aside = current.aside, []
        if callback is None or is_replaying():
            for live in reversed(aside):
                live.step_back()
        else:
            current.compiled.append([sys._getframe(1), current.pop(), False, aside])
            current.compiled_after = current.tape.entries[-1].number if current.tape.entries else -1
            FUNCTION_APPLY[0].leave()
        return original(callback)

    def maybe_set_eval_frame(callback: Any) -> Any:
        current = sessions.current
        inside = current.compiled if current is not None else None
        if not inside or inside[-1][0] is not sys._getframe(1):
            return set_frame(callback)
        if not inside[-1][2]:
            inside[-1][2] = True
            return set_frame(callback)
        return _leave(inside, set_frame, callback)

    frame._callback_from_stance = callback_from_stance
    to_undo.append(lambda: setattr(frame, "_callback_from_stance", original))
    if guards is not None:
        frame._is_skip_guard_eval_unsafe_stance = skips_guards
        to_undo.append(lambda: setattr(frame, "_is_skip_guard_eval_unsafe_stance", guards))
    frame._maybe_set_eval_frame = maybe_set_eval_frame
    to_undo.append(lambda: setattr(frame, "_maybe_set_eval_frame", set_frame))
    to_undo.append(_forget_compiled)


def _wrap_calls_without_stances(frame: Any) -> None:
    """The same before PyTorch 2.6: its call wrapper calls one function as it enters and as it leaves.

    So does that of what `torch.compiler.disable` decorates, which leaves with the callback that it found: an entry is
    told by the callback's being the wrapper's own.
    """
    name = frame_setter(frame)
    if name is None:
        return
    set_frame = getattr(frame, name)

    def set_eval_frame(callback: Any) -> Any:
        current = sessions.current
        inside = current.compiled if current is not None else None
        if inside and inside[-1][0] is sys._getframe(1):
            return _leave(inside, set_frame, callback)
        if callable(callback) and not is_replaying() and sys._getframe(1).f_locals.get("callback") is callback:
            current = current or session()
            aside = [live for live in current.lives if live.step_aside()]
            current.compiled.append([sys._getframe(1), current.pop(), True, aside])
            current.compiled_after = current.tape.entries[-1].number if current.tape.entries else -1
            FUNCTION_APPLY[0].leave()
        return set_frame(callback)

    setattr(frame, name, set_eval_frame)
    to_undo.append(lambda: setattr(frame, name, set_frame))
    to_undo.append(_forget_compiled)


def _leave(inside: list[list[Any]], set_frame: Callable[[Any], Any], callback: Any) -> Any:
    """The innermost compiled code has come to its end: what stood aside for it comes back."""
    _, popped, _, aside = inside.pop()
    before = set_frame(callback)
    for live in reversed(aside):
        live.step_back()
    if not any(s.compiled for s in all_sessions()):
        FUNCTION_APPLY[0].see()
    if popped:
        session().push()
    return before


def _forget_compiled() -> None:
    for known in all_sessions():
        known.compiled.clear()


def wrap_compiled_modules() -> None:
    """See calls of what `torch.compile` made of a watched module."""
    cls = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    if cls is None:
        return
    inherited = "__call__" not in cls.__dict__
    original = cls.__call__

    @functools.wraps(original)
    def call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
        return _compiled_module(functools.partial(original, compiled), compiled._orig_mod, args, kwargs)

    cls.__call__ = call
    to_undo.append(lambda: delattr(cls, "__call__") if inherited else setattr(cls, "__call__", original))


def _compiled_module(compiled: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """`torch.compile` of a watched module: compiled code does not run its hooks, so they are called around it."""
    if compiling() or is_replaying():
        return compiled(*args, **kwargs)
    watching = [w.roots for w in list(watchers) if w.roots.watches(module)]
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


def wrap_compile_in_place() -> None:
    """See modules that are compiled in place while they are watched."""
    original = torch.nn.Module.compile

    @functools.wraps(original)
    def compile(module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        if any(w.roots.watches(module) for w in list(watchers)):
            see_compiled(module)

    setattr(torch.nn.Module, "compile", compile)  # noqa: B010  # an assignment would have to be of the same type
    to_undo.append(lambda: setattr(torch.nn.Module, "compile", original))


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
    to_undo.append(undo)


#: What stands in the place of compiled calls.
_in_place: list[Any] = []
