"""`run_step`: a step that is one function call, so that a replay can call the function again.

What the tape cannot see (compiled losses, extensions, kernels) is then replayed with the rest, as the user wrote it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from nan_detector._calls import CallKind, kind_of
from nan_detector._entries import Entry, Outside, Packed, autocast_state, tensors_in, tokens_in
from nan_detector._errors import ReplayRefused
from nan_detector._lineage import key_of
from nan_detector._moment import Habits, Moment
from nan_detector._op_values import set_version
from nan_detector._patches import ReplayEnds
from nan_detector._python_state import PythonState, is_iterator
from nan_detector._quiet import hidden, quiet
from nan_detector._remade import make_call, modes_of
from nan_detector._replay import Step, losses_in
from nan_detector._replayed import same_values
from nan_detector._session import Session
from nan_detector._state import replay_may_step
from nan_detector._tape import Tape, Tensor
from nan_detector._trace import BirthKind


class Call:
    """One running call of a step function, with what is needed to make it again."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        models: dict[str, torch.nn.Module],
        habits: dict[int, Habits],
        current: Session,
    ) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.habits = habits
        self.session = current
        self.moments: list[Moment] = []
        self.grad_enabled = torch.is_grad_enabled()
        self.autocast = autocast_state()
        with hidden():
            for model in models.values():
                if id(model) not in habits:
                    habits[id(model)] = Habits(model)
                self.moments.append(habits[id(model)].start(model))
            self.versions = [(t, _version(t)) for t in tensors_in((args, kwargs))]
        tape = current.tape
        self.first = tape.entries[-1].number + 1 if tape.entries else tape.boundary
        self.backwards_before = tape.backwards  # micro-batches of the same step, each of them a call
        self.steps_before = current.steps
        self.raised = False

    def ended(self) -> None:
        """The call has returned or raised: learn from it what such a call changes."""
        with hidden():
            for moment in self.moments:
                self.habits[id(moment.module)].finish(moment)

    @property
    def whole(self) -> bool:
        """True while no optimizer has stepped since the call began: what it started from is still there."""
        return self.session.steps - self.steps_before <= 1

    def losses(self) -> list[Tensor]:
        """What its backward passes started from."""
        entries = self.session.tape.entries
        return [loss for e in entries if e.kind == "backward" and e.number >= self.first for loss in e.losses]

    def refuse_iterators(self) -> None:
        """Raise `ReplayRefused` where the function would take further items from an iterator of the user's."""
        names = _names_of_arguments(self.function, self.args)
        for name, value in [*zip(names, self.args, strict=False), *self.kwargs.items()]:
            if is_iterator(value):
                raise ReplayRefused(
                    f"argument {name!r} of the step function is an iterator ({type(value).__name__}), which can be "
                    "used only once: take the batch from it outside, and give the step function the batch"
                )
        for name, value in PythonState([self.function, self.args, self.kwargs]).iterators:
            raise ReplayRefused(
                f"the step function uses {name!r}, an iterator ({type(value).__name__}), which can be used only once: "
                "give the step function the batch instead"
            )


class WholeStep(Step):
    """A replay that calls the step function."""

    def __init__(self, call: Call, entries: list[Entry], *args: Any) -> None:
        super().__init__(entries, *args)
        self.call = call
        self.aliases.on_alias = self._mirrored

    def values(self) -> tuple[Any, ...]:
        return self.call.function, self.call.args, self.call.kwargs

    def make_all(self) -> None:
        """Call the step function up to its first optimizer step."""
        call, tracer = self.call, self.tracer
        call.refuse_iterators()
        self._name_arguments()
        for moment in call.moments:
            self._restore_moment(moment)
        tracer.mark, tracer.module, tracer.api, tracer.phase = None, None, None, "loss"
        like = Entry(call.function, (), {}, None, call.grad_enabled, call.autocast)
        self._arguments_as_they_were()
        with _schedulers_at_rest(), replay_may_step(self._is_own_optimizer):
            try:
                with modes_of(like):
                    out = make_call(call.function, *self._arguments())
                self.replayed.results_last = list(tensors_in(out))
            except ReplayEnds:
                pass
            except ReplayRefused:
                raise
            except Exception as error:
                self.replayed.raised = error
        self._compare_all()

    def _arguments(self) -> tuple[Any, Any]:
        """What the function is given: its own arguments, or, where the replay changes them, copies around others."""
        call, change = self.call, self.change
        if change is None:
            return call.args, call.kwargs
        given = self.arguments.changed
        tape = Tape()
        tape.unbounded = True
        with quiet():
            args, kwargs = tape.encode(call.args), tape.encode(call.kwargs)
            tokens = list(tokens_in((args, kwargs)))
            values = {id(t): t.tensor for t in tokens if isinstance(t, Outside)}
            changed = {i: given(given(t, change.outside), change.argument) for i, t in values.items()}
        if all(changed[i] is t for i, t in values.items()):
            return call.args, call.kwargs
        return _filled(args, changed), _filled(kwargs, changed)

    def called(self, func: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """A function of the library is called: a backward pass shows the loss."""
        if kind_of(func) is not CallKind.BACKWARD:
            return run()
        losses, known = losses_in(args, kwargs), len(self.replayed.losses)
        if self.at_the_loss is not None:
            self.at_the_loss(self.replayed, losses, self.call.losses()[known : known + len(losses)])
        self.replayed.losses.extend(losses)
        out = run()
        self.replayed.backward_ends.append(self.tracer.operations)
        return out

    def _compare_all(self) -> None:
        if self.change is not None:
            return
        theirs, mine = self.call.losses(), [t.detach() for t in self.replayed.losses]
        if (self.replayed.raised is not None) is not self.call.raised or (theirs and not mine):
            self.replayed.same = False
        elif theirs:
            with quiet():
                self.replayed.same = all(same_values(a, b) for a, b in zip(mine, theirs, strict=False))

    def _mirrored(self, p: Tensor, alias: Tensor) -> None:
        # Code that took its parameters from elsewhere than the model (an optimizer's groups, a list) finds the replayed
        # gradients on the parameters themselves; their own are put aside.
        self._stashed[id(p)] = (p, p.grad)
        p.grad = None

        def mirror(a: Tensor) -> None:
            p.grad = a.grad if a.grad is None or a.dtype == p.dtype else a.grad.to(p.dtype)

        alias.register_post_accumulate_grad_hook(mirror)

    def _is_own_optimizer(self, optimizer: Any) -> bool:
        """True for an optimizer of tensors that the step made itself (an inner loop): its steps belong to the step."""
        return all(self.tracer.made(key_of(p)) for group in optimizer.param_groups for p in group["params"])

    def _name_arguments(self) -> None:
        names = _names_of_arguments(self.call.function, self.call.args)
        for name, value in [*zip(names, self.call.args, strict=False), *self.call.kwargs.items()]:
            if isinstance(value, torch.nn.Module):
                continue
            for path, t in _paths(value, name):
                key = key_of(t)
                if self.names.of_memory(key) is None:
                    self._made_inputs.setdefault(key, (BirthKind.LABEL, path))

    def _arguments_as_they_were(self) -> None:
        """Arguments that the step has written in place hold their earlier values for as long as it runs again."""
        with quiet():
            for t, version in self.call.versions:
                token = self.outside.get(id(t))
                if version < 0 or t._version == version or id(t) in self.aliases.of:
                    continue
                if token is not None and token.snapshot is not None and token.stands_for(t):
                    self._afterwards.append(partial(_put, t, t.detach().clone(), t._version))
                    t.detach().copy_(token.snapshot)


def _filled(value: Any, tensors: Mapping[int, Tensor]) -> Any:
    """An encoded value with a tensor in the place of each token."""
    if isinstance(value, Outside):
        return tensors[id(value)]
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_filled(v, tensors) for v in value])
    if kind is dict:
        return {k: _filled(v, tensors) for k, v in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_filled(v, tensors) for v in value])
    return value.rebuild(lambda v: _filled(v, tensors)) if isinstance(value, Packed) else value


def _put(t: Tensor, value: Tensor, version: int) -> None:
    t.detach().copy_(value)
    set_version(t, version)


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _names_of_arguments(function: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            break
        names.append(p.name)
    return names[: len(args)] + [f"args[{i}]" for i in range(len(names), len(args))]


def _paths(value: Any, path: str, depth: int = 5) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif depth and isinstance(value, (list, tuple)):
        for i, v in enumerate(value):
            yield from _paths(v, f"{path}[{i}]", depth - 1)
    elif depth and isinstance(value, dict):
        for k, v in value.items():
            yield from _paths(v, f'{path}["{k}"]' if isinstance(k, str) else f"{path}[{k!r}]", depth - 1)


@contextlib.contextmanager
def _schedulers_at_rest() -> Iterator[None]:
    """No learning rate moves in a replay."""
    module = sys.modules.get("torch.optim.lr_scheduler")
    undo: list[tuple[type, Any]] = []
    for cls in vars(module).values() if module is not None else ():
        if isinstance(cls, type) and "step" in vars(cls) and cls.__module__ == "torch.optim.lr_scheduler":
            undo.append((cls, vars(cls)["step"]))
            setattr(cls, "step", _no_step)  # noqa: B010  # an assignment would have to be to a known class
    try:
        yield
    finally:
        for cls, step in undo:
            setattr(cls, "step", step)  # noqa: B010  # as above


def _no_step(*args: Any, **kwargs: Any) -> None:
    return None
