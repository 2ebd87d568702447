"""What is changed in PyTorch while at least one detector is attached, and put back when the last one leaves.

Everything here is process-wide, so it asks the registered watchers and the calling thread's session what to do, and
does nothing for threads and modules that nobody watches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from nan_detector import _warned_at
from nan_detector._errors import ReplayRefused
from nan_detector._patched import Watcher, compiling, lock, to_undo, watchers, wrap
from nan_detector._patched_apply import wrap_apply
from nan_detector._patched_compile import wrap_compile_in_place, wrap_compiled_calls, wrap_compiled_modules
from nan_detector._recorded_whole import scaled
from nan_detector._recording import backward
from nan_detector._session import Session, all_sessions, session, sessions, steps_running
from nan_detector._skip import closure_of
from nan_detector._state import is_replaying, local, steps_in_replay

#: How PyTorch names the profiler's record around an optimizer's step.
_STEP_RECORD = "Optimizer.step#"


class ReplayEnds(BaseException):
    """Internal: a replayed step reached its first optimizer step. A BaseException, so that no user code swallows it."""


def register(watcher: Watcher) -> None:
    """Serve `watcher`; installs the patches with the first one."""
    with lock:
        if not watchers:
            _install()
        watchers.append(watcher)


def unregister(watcher: Watcher) -> None:
    """Stop serving `watcher`; removes the patches with the last one."""
    with lock:
        if watcher in watchers:
            watchers.remove(watcher)
            if not watchers:
                _uninstall()


def _install() -> None:
    for handle in (register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)):
        to_undo.append(handle.remove)
    # The mode would see it as well; but a backward's way through a function mode costs as much as recording it.
    wrap(torch.Tensor, "backward", _backward)
    if "handle_torch_function" not in torch.autograd.backward.__code__.co_names:  # it passes older PyTorch's modes by
        wrap(torch.autograd, "backward", _backward)
    wrap(torch.optim.Optimizer, "zero_grad", _zero_grad)
    wrap(torch.nn.Module, "zero_grad", _zero_grad)
    wrap(torch.amp.GradScaler, "scale", _scaler_scale)
    wrap(torch.amp.GradScaler, "step", _scaler_step)
    wrap(torch.amp.GradScaler, "update", _quiet)
    wrap(torch.amp.GradScaler, "unscale_", _unscale)
    wrap(torch.utils.data.dataloader._BaseDataLoaderIter, "__next__", _next_batch)
    # Every optimizer step opens one. Its operation takes a slow way through PyTorch when a function mode is there.
    _wrap_record(torch.autograd.profiler.record_function)
    _warned_at.begin()
    to_undo.append(_warned_at.end)
    wrap_apply()
    wrap_compiled_calls()
    wrap_compiled_modules()
    wrap_compile_in_place()


def _uninstall() -> None:
    while to_undo:
        to_undo.pop()()
    _forget_threads()


def _forget_threads() -> None:
    """Threads that called a watched model without having attached to it keep nothing of it either."""
    for known in all_sessions():
        if not known.users:
            known.tape.clear()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if compiling():
        return None
    if local.replaying:
        if steps_in_replay(optimizer):
            return None
        closure = closure_of(args, kwargs)
        if closure is not None:  # the gradients of such a step are made within it
            closure()
        raise ReplayEnds
    current = sessions.current or session()
    current.steps += 1
    if current.mode is not None:
        current.pop()
    current.paused += 1
    replaced = None
    try:
        for watcher in [*watchers]:
            answer = watcher.before_step(optimizer, args, kwargs, current)
            if answer is not None:
                replaced = answer
    except BaseException:
        current.paused -= 1
        raise
    current.stepping.append(optimizer)
    return replaced


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if compiling() or local.replaying:
        return
    current = sessions.current or session()
    # A step that raised never came here; its marks are cleared with those above it.
    stepping = current.stepping
    while stepping:
        top = stepping[-1]
        del stepping[-1]  # `pop` would be a call, after which an interrupt may come
        if current.paused:
            current.paused -= 1
        if top is optimizer:
            break
    for watcher in [*watchers]:
        watcher.after_step(optimizer, current)
    if current.home and current.step_record is None:
        current.push()


def _backward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    current = sessions.current
    if current is None or current.paused or not current.pop():
        return original(*args, **kwargs)
    try:
        return backward(current, original, args, kwargs)
    finally:
        current.push()


def _zero_grad(original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    if local.replaying:
        if isinstance(owner, torch.optim.Optimizer) and steps_in_replay(owner):
            return original(owner, *args, **kwargs)
        return None
    current = sessions.current
    if current is None or not current.users:
        return original(owner, *args, **kwargs)
    current.recover(steps_running() if current.stepping else ())
    for watcher in [*watchers]:
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


def _wrap_record(cls: Any) -> None:
    """Take the mode off around the profiler's records; the one around an optimizer's step leaves it off.

    An ordinary step opens two of them, and TorchDynamo never traces it: no function stands in between, and nothing is
    asked that need not be.
    """
    begins, ends = cls.__enter__, cls.__exit__

    @functools.wraps(begins)
    def record_begins(record: Any) -> Any:
        current = sessions.current
        if current is None or current.mode is None:
            return begins(record)
        popped = current.pop()
        try:
            return begins(record)
        finally:
            if popped and record.name.startswith(_STEP_RECORD):
                current.step_record = record  # the step's hooks would take it off next
            elif popped:
                current.push()

    @functools.wraps(ends)
    def record_ends(record: Any, *error: Any) -> Any:
        current = sessions.current
        if current is None or (current.mode is None and current.step_record is None):
            return ends(record, *error)
        ends_step = current.step_record is record  # not that of an optimizer which another one steps
        popped = current.pop()
        try:
            return ends(record, *error)
        finally:
            if ends_step:
                current.step_record = None
                current.recover()
            elif popped:
                current.push()

    cls.__enter__, cls.__exit__ = record_begins, record_ends
    to_undo.append(lambda: setattr(cls, "__enter__", begins))
    to_undo.append(lambda: setattr(cls, "__exit__", ends))


def _scaler_scale(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    current = session()
    if is_replaying() or not current.users:
        return original(scaler, outputs)
    return scaled(current, scaler, outputs, original)


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
        for watcher in list(watchers):
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
                for watcher in list(watchers):
                    watcher.scaler_skipped(scaler, optimizer, current)
        return out
    finally:
        current.scaler = current.gradient_scale = None
