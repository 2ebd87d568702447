"""Writing the user's calls onto the tape: what is called with what, where, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from nan_detector import _finite
from nan_detector._calls import CallKind, is_in_place, kind_of, public_name
from nan_detector._calls import kinds as _kinds
from nan_detector._entries import Entry, Made, autocast_state, tensors_in, tokens_in
from nan_detector._entry_of_call import ATTRIBUTES, entry_of
from nan_detector._quiet import hidden, quiet
from nan_detector._recorded_backward import begin_backward
from nan_detector._source import Mark, here, here_and_module
from nan_detector._tape import Tensor
from nan_detector._written_weights import is_worked_out, outside_behind, targets_of

if TYPE_CHECKING:
    from nan_detector._session import Session, TapeMode

_compiling = torch.compiler.is_compiling
_function_modes = torch._C._len_torch_function_stack
_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack
_is_grad_enabled = torch.is_grad_enabled

#: Looks at bad values that are remembered between two gates.
MAX_LOOKS = 16


class Look(NamedTuple):
    """The user's code read a bad value, or was told of one."""

    made_by: int  # number of the entry that made the value: the entry itself would keep the batch alive
    mark: Mark | None
    value: float | None
    step: int


class Write(Enum):
    """What becomes of a call that writes in place."""

    RECORDED = "recorded"
    REFUSED = "refused"  # the loop's own update of its weights, in a bad step
    BEFORE_THE_STEP = "before the step"  # nothing of this step has used these weights: it begins with what is written


def torch_function(
    mode: TapeMode,
    func: Callable[..., Any],
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """The function mode's handler: run one call of the user's and write it down.

    What nearly all calls are is written here, as a further function for it would cost as much as what it does.
    """
    session = mode.session
    if session is None or _compiling() or session.paused:
        return func(*args, **(kwargs or {}))
    try:
        kind = _kinds.get(func) or kind_of(func)
    except TypeError:  # an unhashable callable
        kind = CallKind.PLAIN
    if kind is not CallKind.PLAIN or (kwargs and "out" in kwargs):
        return call(session, func, args, kwargs or {}, kind)
    if _functorch_level() is not None:
        return func(*args, **(kwargs or {}))
    session.busy += 1
    try:
        out = func(*args, **kwargs) if kwargs else func(*args)
    except Exception:
        _failed(session, None, func, args, kwargs or {}, kind)
        raise
    finally:
        session.busy -= 1
    if type(out) is not Tensor or _function_modes() or _dispatch_modes():
        return _note(session, func, args, kwargs or {}, kind, None, out)
    try:
        tape = session.tape
        begun = tape.begun
        mark, owner = here_and_module(2)
        encoded = tape.encode_call(args)
        entry = Entry(func, encoded, tape.encode(kwargs) if kwargs else {}, mark, _is_grad_enabled())
        if _any_autocast():
            entry.autocast = autocast_state()
        if tape.begun is not begun and getattr(getattr(func, "__self__", None), "__name__", "") in ATTRIBUTES:
            tape.begun = False  # reading an attribute uses no weight
        if owner is not None:
            entry.owner = owner
        tape.append(entry, out)
    except Exception as bug:
        session.failed(bug)
    return out


def call(
    session: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: CallKind
) -> Any:
    """Run one call of the user's, of any kind, and write it down."""
    if kind is CallKind.IGNORE or _functorch_level() is not None:
        return func(*args, **kwargs)
    if kind is CallKind.IMPORT:
        if args and _is_data(args[0]):
            return func(*args, **kwargs)  # numbers of the batch, as if the loader had made a tensor of them
        kind = CallKind.PLAIN
    entry = None
    if kind is CallKind.IN_PLACE or "out" in kwargs or (kind is CallKind.RANDOM and is_in_place(func.__name__)):
        with hidden():
            write = _write(session, func, args, kwargs, kind)
        if write is Write.REFUSED:
            return args[0] if getattr(func, "__name__", "") != "__set__" else None
        if write is Write.BEFORE_THE_STEP:
            return func(*args, **kwargs)
        if kind is CallKind.PLAIN:
            kind = CallKind.IN_PLACE
    if kind is not CallKind.PLAIN:
        try:
            place = (here(3), None) if kind is CallKind.BACKWARD else here_and_module(3)
            entry = entry_of(session, func, args, kwargs, place, kind)
            if kind is CallKind.BACKWARD:
                begin_backward(session, entry, args, kwargs)
        except Exception as bug:
            session.failed(bug)
            return func(*args, **kwargs)
    session.busy += 1
    try:
        out = func(*args, **kwargs)
    except Exception:
        _failed(session, entry, func, args, kwargs, kind)
        raise
    finally:
        session.busy -= 1
    return _note(session, func, args, kwargs, kind, entry, out)


def _failed(
    session: Session,
    entry: Entry | None,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: CallKind,
) -> None:
    """The call that failed because of the bad value is the end of the story: keep it for the replay."""
    try:
        failed = entry or entry_of(session, func, args, kwargs, here_and_module(3), kind)
        failed.raised = True
        if kind is not CallKind.BACKWARD:
            session.tape.add(failed, None)
    except Exception as bug:
        session.failed(bug)


def _note(
    session: Session,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    kind: CallKind,
    entry: Entry | None,
    out: Any,
) -> Any:
    """A call has given `out`."""
    try:
        if entry is None:
            if isinstance(out, float):
                if out == out and out not in (float("inf"), float("-inf")):
                    return out
            elif not isinstance(out, Tensor) and not _holds_tensor(out):
                if isinstance(out, bool):
                    _answered(session, args, out)
                return out
            entry = entry_of(session, func, args, kwargs, here_and_module(3), kind)
            if isinstance(out, float):
                entry.scalar = out
                _looked(session, args, out, entry.mark)
        if kind is not CallKind.BACKWARD:
            if _function_modes() or _dispatch_modes():
                with quiet():
                    session.tape.add(entry, out)
            else:
                session.tape.add(entry, out)
    except Exception as bug:
        session.failed(bug)
    return out


def backward(session: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a `Tensor.backward` of the user's and write it down. The mode is off the stack meanwhile."""
    loss, tape = args[0] if args else None, session.tape
    if (
        kwargs
        or len(args) != 1
        or type(loss) is not Tensor
        or _function_modes()
        or _dispatch_modes()
        or _functorch_level() is not None
    ):
        return call(session, func, args, kwargs, CallKind.BACKWARD)
    try:
        token = tape.made_token(loss)
        if token is None or token.entry.kind == "scale":
            entry = None
        else:  # ``loss.backward()`` of what a recorded call made, as nearly all are
            entry = Entry(func, (token,), {}, here(3), _is_grad_enabled())
            entry.kind = "backward"
            if _any_autocast():
                entry.autocast = autocast_state()
            if loss.numel() == 1:
                entry.losses = (loss.detach(),)
            tape.begun = True
            tape.backwards += 1
            tape.append(entry, None)
    except Exception as bug:
        session.failed(bug)
        return func(*args)
    if entry is None:
        return call(session, func, args, kwargs, CallKind.BACKWARD)
    session.busy += 1
    try:
        return func(loss)
    except Exception:
        entry.raised = True
        raise
    finally:
        session.busy -= 1


def _write(
    session: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], kind: CallKind
) -> Write:
    """What to make of a call that writes into its arguments; who writes is remembered."""
    tape = session.tape
    targets = [outside_behind(tape, t) for t in targets_of(func, args, kwargs)]
    weights: list[Tensor] = [p for p in targets if isinstance(p, torch.nn.Parameter)]
    of_weights = bool(weights) and len(weights) == len(targets) and kind is not CallKind.RANDOM
    if of_weights and not _may_write(session, weights, args, kwargs):
        return Write.REFUSED
    outside = [t for t in targets if t is not None]
    if outside:
        session.writers.note(outside, func, here(4), session.told_step, session.step)
    if of_weights and not tape.begun and not is_worked_out(tape, args, kwargs):
        return Write.BEFORE_THE_STEP
    return Write.RECORDED


def _may_write(session: Session, weights: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A loop that has no optimizer updates its weights itself: False when that update was judged and refused."""
    mark = here(5)
    if session.tape.backwards:
        session.refused = None
        if any([judge(weights) for judge in session.before_update]):
            session.refused = mark
    if session.refused is None:
        return True
    if mark is not None and (mark.code, mark.lineno) == (session.refused.code, session.refused.lineno):
        return False  # the same statement, for the next parameter
    with quiet():
        sources = [t for t in tensors_in((args[1:], kwargs)) if _finite.checkable(t)]
        return all(_finite.is_finite(t) for t in sources)


def _looked(session: Session, args: tuple[Any, ...], value: float | None, mark: Mark | None) -> None:
    """The user's code knows of a bad value that could be trained on."""
    t = args[0] if args else None
    maker = session.tape.made_by(t) if isinstance(t, Tensor) and t.requires_grad else None
    if maker is not None and len(session.looks) < MAX_LOOKS:
        session.looks.append(Look(maker.number, mark, value, session.step or 0))


def _answered(session: Session, args: tuple[Any, ...], answer: bool) -> None:
    """The user's code asked a question: was it whether a value is finite, and the answer no?"""
    t = args[0] if args else None
    maker = session.tape.made_by(t) if isinstance(t, Tensor) else None
    while maker is not None:
        token = next(tokens_in(maker.args), None)
        if not isinstance(token, Made):
            return
        name = public_name(maker.func)
        if name in ("isnan", "isinf", "isfinite"):
            source = token.entry.made[token.position]()
            if source is not None and source.requires_grad and answer is (name != "isfinite"):
                _looked(session, (source,), None, here(4))
            return
        if name in ("logical_not", "invert", "bitwise_not"):
            answer = not answer
        elif name not in ("any", "all", "detach", "cpu", "item"):
            return
        maker = token.entry


def _is_data(value: Any) -> bool:
    """True for a numpy array, or a list of numbers that is not written out tensor by tensor."""
    if isinstance(value, (list, tuple)):
        return len(value) > 1 and next(tensors_in(value), None) is None
    return not isinstance(value, Tensor) and hasattr(value, "__array_interface__")


def _holds_tensor(out: Any) -> bool:
    return isinstance(out, (tuple, list, dict)) and next(tensors_in(out), None) is not None
