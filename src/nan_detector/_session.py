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
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from nan_detector import _finite
from nan_detector._calls import CallKind, kind_of, public_name
from nan_detector._quiet import hidden, quiet
from nan_detector._rng import rng_state
from nan_detector._source import Mark, here, here_and_module
from nan_detector._state import BUG, is_replaying, logger, strict
from nan_detector._tape import Entry, Made, Outside, Tape, Tensor, autocast_state, tensors_in, tokens_in
from nan_detector._written_weights import parameter_behind, weights_behind

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULE_CALL = torch.nn.Module._call_impl.__code__
_compiling = torch.compiler.is_compiling
_function_modes = torch._C._len_torch_function_stack
_pop_from_stack = torch._C._pop_torch_function_stack
_push_on_stack = torch._C._push_on_torch_function_stack
_any_autocast = torch._C._is_any_autocast_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_grad_enabled = torch.is_grad_enabled
_functorch_level = torch._C._functorch.peek_interpreter_stack


_ATTRIBUTES = ("data", "grad")

#: Looks at bad values that are remembered between two gates.
MAX_LOOKS = 16


#: Where a call stands: the user's line, and the module in whose method it is.
Place = tuple[Mark | None, object | None]


class Look(NamedTuple):
    """The user's code read a bad value, or was told of one."""

    made_by: int  # number of the entry that made the value: the entry itself would keep the batch alive
    mark: Mark | None
    value: float | None
    step: int


class TapeMode(TorchFunctionMode):
    """Hands each call the user makes to the session; inert once the session is closed."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session: Session | None = session

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        session = self.session
        if session is None or _compiling() or session.paused:
            return func(*args, **(kwargs or {}))
        return session.call(func, args, kwargs or {})


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
        self._spare: TapeMode | None = None  # the mode while it is off the stack: to be put back, not made anew
        self.in_step_record = False  # in the profiler's record around an optimizer's step
        self.home = False  # the thread that attached: the mode stays on between steps
        self.roots: list[Any] = []  # watched modules that are running, outermost first
        self.evaluating = 0  # > 0: in a closure, so that the step around it goes on
        self.stepping: list[Any] = []  # optimizers whose step is running
        self.steps = 0  # optimizer steps, of anybody
        self.gates = 0  # optimizer steps that reached a pre-hook
        self.scaler: Any = None  # the GradScaler whose `step` is running
        self.step = 0  # that of the last call of a watched module
        self.looks: list[Look] = []
        self.gradient_scale: Tensor | None = None  # what the gradients are multiplied by until they are unscaled
        #: Of each engine: called with parameters that are written while a backward waits to be judged; True refuses.
        self.before_update: list[Callable[[list[Tensor]], bool]] = []
        self.refused: Mark | None = None  # the statement whose update was refused
        self.spent = 0.0  # seconds in recording since the last gate
        self.compiled_after = -1  # number of the last entry when compiled code was entered
        self.compiled: list[list[Any]] = []  # calls of compiled code: frame, whether the mode was on before, entered

    # -- the mode --------------------------------------------------------------------------------------------------

    def push(self) -> None:
        """Put the mode on the stack, if it is not there and this is a place where that is allowed.

        Whoever calls it has made sure that nothing is being compiled: asking again would cost as much as the push.
        """
        if self.mode is None and not self.busy and self.users and not self.broken:
            mode = self._spare or TapeMode(self)
            self._spare = None
            mode.session = self
            self.mode = mode
            _push_on_stack(mode)

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
        mode.session = None
        self.mode = None
        self._spare = mode
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

    def take_spent(self) -> float:
        """Seconds spent recording since this was last asked."""
        spent, self.spent = self.spent, 0.0
        return spent

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

    def recover(self) -> None:
        """Undo the marks of an optimizer step or root call that raised and so never told us that it ended."""
        if self.roots:
            self.forget_lost_roots(0)
        if self.stepping and not self.busy and not self.evaluating:
            self.paused = max(0, self.paused - len(self.stepping))
            self.stepping.clear()
        if self.mode is None and self.home and not self.paused and not self.roots:
            self.push()

    def close(self) -> None:
        """Forget the step and leave the stack; where others stand above the mode it is taken out from under them."""
        self.tape.clear()
        self.roots.clear()
        self.stepping.clear()
        self.compiled.clear()
        self.looks.clear()
        self.paused = 0
        self.broken = self.told = False
        mode = self.mode
        if mode is None or self.pop():
            return
        mode.session = None
        self.mode = None
        above = []
        for _ in range(_function_modes()):
            top = _pop_from_stack()
            if top is mode:
                break
            above.append(top)
        for other in reversed(above):
            _push_on_stack(other)

    # -- recording -------------------------------------------------------------------------------------------------

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call of the user's and write it down."""
        kind = kind_of(func)
        if kind is CallKind.IGNORE or _functorch_level() is not None:
            return func(*args, **kwargs)
        if kind is CallKind.IMPORT:
            if args and _is_data(args[0]):
                return func(*args, **kwargs)  # numbers of the batch, as if the loader had made a tensor of them
            kind = CallKind.PLAIN
        entry = None
        if kind is CallKind.IN_PLACE:
            with hidden():
                weights = weights_behind(self.tape, func, args, kwargs)
            if weights and not self._may_write(weights, args, kwargs):
                return args[0] if getattr(func, "__name__", "") != "__set__" else None
            if weights and not self.tape.begun:
                return func(*args, **kwargs)  # nothing of this step has used them: it begins with what is written now
        if kind is not CallKind.PLAIN:
            try:
                place = (here(3), None) if kind is CallKind.BACKWARD else here_and_module(3)
                entry = self._entry(func, args, kwargs, place, kind)
                if kind is CallKind.BACKWARD:
                    self._begin_backward(entry, args, kwargs)
            except Exception as bug:
                self.failed(bug)
                return func(*args, **kwargs)
        self.busy += 1
        try:
            out = func(*args, **kwargs)
        except Exception:
            # The call that failed because of the bad value is the end of the story: keep it for the replay.
            try:
                failed = entry or self._entry(func, args, kwargs, here_and_module(3), kind)
                failed.raised = True
                if kind is not CallKind.BACKWARD:
                    self.tape.add(failed, None)
            except Exception as bug:
                self.failed(bug)
            raise
        finally:
            self.busy -= 1
        try:
            if entry is None:
                if type(out) is Tensor and not (_function_modes() or _dispatch_modes()):
                    self._write(func, args, kwargs, out)
                    return out
                if isinstance(out, float):
                    if out == out and out not in (float("inf"), float("-inf")):
                        return out
                elif not isinstance(out, Tensor) and not _holds_tensor(out):
                    if isinstance(out, bool):
                        self._answered(args, out)
                    return out
                entry = self._entry(func, args, kwargs, here_and_module(3), kind)
                if isinstance(out, float):
                    entry.scalar = out
                    self._looked(args, out, entry.mark)
            if kind is not CallKind.BACKWARD:
                if _function_modes() or _dispatch_modes():
                    with quiet():
                        self.tape.add(entry, out)
                else:
                    self.tape.add(entry, out)
        except Exception as bug:
            self.failed(bug)
        return out

    def backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a `Tensor.backward` of the user's and write it down. The mode is off the stack meanwhile."""
        try:
            entry = None if kwargs or len(args) != 1 else self._plain_backward(func, args)
        except Exception as bug:
            self.failed(bug)
            return func(*args, **kwargs)
        if entry is None:
            return self.call(func, args, kwargs)
        self.busy += 1
        try:
            return func(*args)
        except Exception:
            entry.raised = True
            raise
        finally:
            self.busy -= 1

    def _plain_backward(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Entry | None:
        """``loss.backward()`` of what a recorded call made, written down; None for anything more."""
        loss, tape = args[0], self.tape
        if type(loss) is not Tensor or _function_modes() or _dispatch_modes() or _functorch_level() is not None:
            return None
        token = tape.made_token(loss)
        if token is None or token.entry.kind == "scale":
            return None
        entry = Entry(func, (token,), {}, here(4), _is_grad_enabled())
        entry.kind = "backward"
        if _any_autocast():
            entry.autocast = autocast_state()
        if loss.numel() == 1:
            entry.losses = (loss.detach(),)
        return tape.add(entry, None)

    def _begin_backward(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """On the tape before it runs: an optimizer that steps inside (in a hook) is judged with it."""
        with hidden():
            roots = [t for t in _roots_of_backward(args, kwargs) if t.numel() == 1]
            entry.losses = tuple([t.detach() for t in roots])
            self._before_scaling(entry, roots)
        self.tape.add(entry, None)

    def _may_write(self, weights: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A loop that has no optimizer updates its weights itself: False when that update was judged and refused."""
        mark = here(4)
        if self.tape.backwards:
            self.refused = None
            if any([judge(weights) for judge in self.before_update]):
                self.refused = mark
        if self.refused is None:
            return True
        if mark is not None and (mark.code, mark.lineno) == (self.refused.code, self.refused.lineno):
            return False  # the same statement, for the next parameter
        with quiet():
            sources = [t for t in tensors_in((args[1:], kwargs)) if _finite.checkable(t)]
            return all(_finite.is_finite(t) for t in sources)

    def failed(self, bug: Exception) -> None:
        """A bug of ours in the recording: it is told once, and this thread records no more until it is watched anew."""
        self.broken = True
        if self.mode is not None:
            self.mode.session = None
        self.tape.clear()
        if strict():
            raise bug
        self.tell(BUG)

    def tell(self, message: str) -> None:
        """Log the exception that is being handled, once a watch: what is broken mostly fails in several places."""
        if not self.told:
            self.told = True
            logger.exception(message)

    def _write(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """A plain call has given a tensor, and no mode would see what is done here: what nearly all calls are."""
        tape = self.tape
        begun = tape.begun
        mark, owner = here_and_module(4)
        entry = Entry(func, tape.encode_call(args), tape.encode(kwargs) if kwargs else kwargs, mark, _is_grad_enabled())
        if _any_autocast():
            entry.autocast = autocast_state()
        if tape.begun is not begun and getattr(getattr(func, "__self__", None), "__name__", "") in _ATTRIBUTES:
            tape.begun = False  # reading an attribute uses no weight
        if "out" in kwargs:
            entry.writes = True
        if owner is not None:
            entry.owner = owner
        tape.add(entry, out)

    def _entry(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, kind: CallKind
    ) -> Entry:
        if _function_modes() or _dispatch_modes():
            grad_enabled = torch.is_grad_enabled()
            with quiet():
                entry = self._new_entry(func, args, kwargs, place, kind)
            entry.grad_enabled = grad_enabled
            return entry
        return self._new_entry(func, args, kwargs, place, kind)

    def _new_entry(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], place: Place, kind: CallKind
    ) -> Entry:
        tape = self.tape
        if kind is CallKind.IN_PLACE:
            self._save_target(args, kwargs)
        begun = tape.begun
        entry = Entry(
            func, tape.encode(args), tape.encode(kwargs) if kwargs else kwargs, place[0], torch.is_grad_enabled()
        )
        if _any_autocast():
            entry.autocast = autocast_state()
        if begun is False and tape.begun and getattr(getattr(func, "__self__", None), "__name__", "") in _ATTRIBUTES:
            tape.begun = False  # reading an attribute uses no weight
        if kind is CallKind.IN_PLACE or kind is CallKind.STATE or "out" in kwargs:
            entry.writes = True
        if place[1] is not None:
            entry.owner = place[1]
        if kind is CallKind.BACKWARD:
            entry.kind = "backward"
        elif kind is CallKind.RANDOM:
            entry.rng = rng_state()
            gens = [v for v in kwargs.values() if isinstance(v, torch.Generator)]
            entry.generators = tuple((g, g.get_state()) for g in gens)
        return entry

    def _looked(self, args: tuple[Any, ...], value: float | None, mark: Mark | None) -> None:
        """The user's code knows of a bad value that could be trained on."""
        t = args[0] if args else None
        maker = self.tape.made_by(t) if isinstance(t, Tensor) and t.requires_grad else None
        if maker is not None and len(self.looks) < MAX_LOOKS:
            self.looks.append(Look(maker.number, mark, value, self.step))

    def _answered(self, args: tuple[Any, ...], answer: bool) -> None:
        """The user's code asked a question: was it whether a value is finite, and the answer no?"""
        t = args[0] if args else None
        maker = self.tape.made_by(t) if isinstance(t, Tensor) else None
        while maker is not None:
            token = next(tokens_in(maker.args), None)
            if not isinstance(token, Made):
                return
            name = public_name(maker.func)
            if name in ("isnan", "isinf", "isfinite"):
                source = token.entry.made[token.position]()
                if source is not None and source.requires_grad and answer is (name != "isfinite"):
                    self._looked((source,), None, here(4))
                return
            if name in ("logical_not", "invert", "bitwise_not"):
                answer = not answer
            elif name not in ("any", "all", "detach", "cpu", "item"):
                return
            maker = token.entry

    def _before_scaling(self, entry: Entry, roots: list[Tensor]) -> None:
        """Of a backward from what a GradScaler scaled: the losses themselves, which alone are the training's."""
        makers = [self.tape.made_by(t) for t in roots]
        if "scale" not in [m.kind for m in makers if m is not None]:
            return
        before = []
        for t, maker in zip(roots, makers, strict=True):
            if maker is not None and maker.kind == "scale":
                position = next(i for i, ref in enumerate(maker.made) if ref() is t)
                before.append(maker.unscaled[position])
                self.gradient_scale = maker.args[1].tensor
            else:
                before.append(t.detach())
        entry.unscaled = tuple(before)

    def scaled(self, scaler: Any, outputs: Any, original: Callable[..., Any]) -> Any:
        """`GradScaler.scale` as one entry: the replay must be able to tell its overflow from the training's own."""
        mode = self.mode
        inert = mode is None or mode.session is None or self.paused or self.busy or not scaler.is_enabled()
        if inert or not isinstance(outputs, (Tensor, list, tuple)) or _functorch_level() is not None:
            return original(scaler, outputs)
        place = here_and_module(4)
        self.paused += 1
        try:
            out = original(scaler, outputs)
            # `update` writes the scale in place: the replay needs the one that was used.
            factor = scaler._scale.detach().clone()
        finally:
            self.paused -= 1
        try:
            entry = self._entry(scale, (outputs, factor), {}, place, CallKind.PLAIN)
            entry.kind = "scale"
            entry.unscaled = tuple(t.detach() for t in tensors_in(outputs))
            self.tape.add(entry, out)
        except Exception as bug:
            self.failed(bug)
        return out

    def _save_target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a write in place: keep a copy of what stood there, when it came from outside the step."""
        targets = list(tensors_in(args[:1]))
        targets.extend(tensors_in(kwargs.get("out")))
        for t in targets:
            base = t._base if t._is_view() and t._base is not None else t
            for candidate in (t, base, parameter_behind(self.tape, t)):
                if candidate is not None and self.tape.made_by(candidate) is None:
                    outside = self.tape.token(candidate)
                    if isinstance(outside, Outside):
                        self.tape.keep_earlier(outside)

    def custom_function(
        self, cls: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An `autograd.Function.apply`, which does not go through function modes."""
        if self.mode is None or self.mode.session is None or self.paused or self.busy or _compiling() or is_replaying():
            return apply(*args, **kwargs)
        if _functorch_level() is not None:
            return apply(*args, **kwargs)
        try:
            entry = self._entry(apply, args, kwargs, here_and_module(3), CallKind.PLAIN)
        except Exception as bug:
            self.failed(bug)
            return apply(*args, **kwargs)
        self.paused += 1
        try:
            out = apply(*args, **kwargs)
        except Exception:
            self._keep(entry, None)
            raise
        finally:
            self.paused -= 1
        self._keep(entry, out)
        return out

    def _keep(self, entry: Entry, out: Any) -> None:
        try:
            with hidden():
                self.tape.add(entry, out)
        except Exception as bug:
            self.failed(bug)


def scale(outputs: Any, factor: Tensor) -> Any:
    """What a GradScaler's `scale` computes."""
    if isinstance(outputs, Tensor):
        return outputs * factor.to(outputs.device)
    return type(outputs)(scale(o, factor) for o in outputs)


def _is_data(value: Any) -> bool:
    """True for a numpy array, or a list of numbers that is not written out tensor by tensor."""
    if isinstance(value, (list, tuple)):
        return len(value) > 1 and next(tensors_in(value), None) is None
    return not isinstance(value, Tensor) and hasattr(value, "__array_interface__")


def _holds_tensor(out: Any) -> bool:
    return isinstance(out, (tuple, list, dict)) and next(tensors_in(out), None) is not None


def _roots_of_backward(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    if args and isinstance(args[0], Tensor):
        return (args[0],)
    if args:
        return tensors_in(args[0])
    return tensors_in(kwargs.get("self", kwargs.get("tensors")))


class _Local(threading.local):
    current: Session | None = None  # in the class: asking for it costs less than `getattr` with a default


_sessions = _Local()
_all_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def session() -> Session:
    """The calling thread's session."""
    found = _sessions.current
    if found is None:
        found = _sessions.current = Session()
        _all_sessions.add(found)
    return found


def all_sessions() -> list[Session]:
    """Sessions of every thread that has one."""
    return list(_all_sessions)
