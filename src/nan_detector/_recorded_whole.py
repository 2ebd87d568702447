"""Calls that the function mode does not see, or not whole: an `autograd.Function`, a GradScaler's `scale`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from nan_detector._calls import CallKind
from nan_detector._entries import Entry, tensors_in
from nan_detector._entry_of_call import entry_of
from nan_detector._quiet import hidden
from nan_detector._source import here_and_module
from nan_detector._state import is_replaying
from nan_detector._tape import Tensor

if TYPE_CHECKING:
    from nan_detector._session import Session

_compiling = torch.compiler.is_compiling
_functorch_level = torch._C._functorch.peek_interpreter_stack


def custom_function(
    session: Session, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An `autograd.Function.apply`, which does not go through function modes."""
    if (
        session.mode is None
        or session.mode.session is None
        or session.paused
        or session.busy
        or _compiling()
        or is_replaying()
    ):
        return apply(*args, **kwargs)
    if _functorch_level() is not None:
        return apply(*args, **kwargs)
    try:
        entry = entry_of(session, apply, args, kwargs, here_and_module(3), CallKind.PLAIN)
    except Exception as bug:
        session.failed(bug)
        return apply(*args, **kwargs)
    session.paused += 1
    try:
        out = apply(*args, **kwargs)
    except Exception:
        _keep(session, entry, None)
        raise
    finally:
        session.paused -= 1
    _keep(session, entry, out)
    return out


def _keep(session: Session, entry: Entry, out: Any) -> None:
    try:
        with hidden():
            session.tape.add(entry, out)
    except Exception as bug:
        session.failed(bug)


def scaled(session: Session, scaler: Any, outputs: Any, original: Callable[..., Any]) -> Any:
    """`GradScaler.scale` as one entry: the replay must be able to tell its overflow from the training's own."""
    mode = session.mode
    inert = mode is None or mode.session is None or session.paused or session.busy or not scaler.is_enabled()
    if inert or not isinstance(outputs, (Tensor, list, tuple)) or _functorch_level() is not None:
        return original(scaler, outputs)
    place = here_and_module(4)
    session.paused += 1
    try:
        out = original(scaler, outputs)
        # `update` writes the scale in place: the replay needs the one that was used.
        factor = scaler._scale.detach().clone()
    finally:
        session.paused -= 1
    try:
        entry = entry_of(session, scale, (outputs, factor), {}, place, CallKind.PLAIN)
        entry.kind = "scale"
        entry.unscaled = tuple(t.detach() for t in tensors_in(outputs))
        session.tape.add(entry, out)
    except Exception as bug:
        session.failed(bug)
    return out


def scale(outputs: Any, factor: Tensor) -> Any:
    """What a GradScaler's `scale` computes."""
    if isinstance(outputs, Tensor):
        return outputs * factor.to(outputs.device)
    return type(outputs)(scale(o, factor) for o in outputs)
