"""Hooks on the entry points of the watched models: a Moment when one is called, an entry on the tape when it returns.

Entry points are the models themselves. A model that is only called through its children (the halves of a GAN,
``model.encode``) shows as a backward without a Moment; then its children are armed too.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nan_detector._contained import Contained
from nan_detector._entries import Entry, Outside, autocast_state, tokens_in
from nan_detector._errors import NonFiniteError
from nan_detector._moment import Habits, Moment
from nan_detector._patched_compile import see_compiled
from nan_detector._quiet import quiet
from nan_detector._rng import rng_state
from nan_detector._session import Session, session, sessions
from nan_detector._source import here
from nan_detector._state import local, pickled_hook

_clock = time.perf_counter
_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack

_Parameter = torch.nn.Parameter
#: Frames from a hook of a module to the caller of the module, where nothing stands between: PyTorch's own three.
_TO_CALLER = 1 + 3
#: Stands for a parameter in whose place there is something else.
_SWAPPED = object()

#: Containers that are never called themselves.
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


class Roots:
    """The hooks of one detector.

    Args:
        models: Watched modules.
        on_enter: Called before a root call; may raise to end the user's run.
        contained: Where work of ours is done.
    """

    def __init__(
        self,
        models: list[torch.nn.Module],
        on_enter: Callable[[Session, bool], None],
        on_leave: Callable[[Session, Any, Any], None],
        contained: Contained,
    ) -> None:
        self.models = models
        self.on_enter = on_enter
        self.on_leave = on_leave
        self.contained = contained
        self.habits: dict[int, Habits] = {}
        self.armed = False
        self._handles: dict[int, list[Any]] = {}
        self._identity: dict[int, tuple[str, weakref.ref[Any]] | None] = {}
        for model in models:
            self._hook(model)

    def arm_children(self) -> None:
        """Treat every part of the models as a possible entry point."""
        if self.armed:
            return
        self.armed = True
        for model in self.models:
            for module in model.modules():
                if id(module) not in self._handles and not isinstance(module, _CONTAINERS):
                    self._hook(module)

    def add(self, model: torch.nn.Module) -> None:
        """Hook one more model."""
        self.models.append(model)
        if id(model) not in self._handles:
            self._hook(model)

    def watches(self, module: torch.nn.Module) -> bool:
        """True for a module whose calls are kept."""
        return id(module) in self._handles

    def remove(self) -> None:
        """Take every hook off."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def _hook(self, module: torch.nn.Module) -> None:
        see_compiled(module)
        enter, leave = EnterHook(self, module), LeaveHook(self, module)
        base = torch.nn.Module  # TorchScript's modules run such hooks, and refuse to take them
        self._handles[id(module)] = [
            base.register_forward_pre_hook(module, enter, prepend=True, with_kwargs=True),
            base.register_forward_hook(module, leave, with_kwargs=True, always_call=True),
        ]

    # -- called by the hooks -------------------------------------------------------------------------------------------

    def enter(self, module: torch.nn.Module, args: Any, kwargs: Any, depth: int = 1) -> None:
        """A watched module is about to run.

        Args:
            module: The module.
            args: What it is called with.
            kwargs: Likewise.
            depth: Frames from the caller of this to one that is the user's or on the way to it.
        """
        if local.replaying:
            return
        current = sessions.current or session()
        roots = current.roots
        running = len(roots)
        if not running:
            self.on_enter(current, _is_grad_enabled())
        contained = self.contained
        if not contained.down:
            started = _clock()
            try:
                self._enter(current, module, args, kwargs, depth + 2)
            except NonFiniteError:
                raise
            except Exception:
                contained.failed()
            finally:
                contained.spent += _clock() - started
        if len(roots) == running:
            roots.append(None)  # it failed: its end must not be taken for that of another detector's root

    def _enter(self, current: Session, module: torch.nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        if current.roots and any(m is module for m in self.models):
            current.forget_lost_roots(1)
        if (
            current.roots
            or current.busy
            or current.broken
            or current.paused > len(current.stepping)
            or (first := self._first_parameter(module)) is _SWAPPED
            or _functorch_level() is not None
        ):
            # Inside another root, another call's handler, or the user's own functional_call (whose parameters are made
            # by recorded calls): its operations are recorded one by one, or belong to the outer call. What a transform
            # of torch.func hands in does not outlive it.
            current.roots.append(None)
            return
        if current.stepping:
            current.recover()
        habits = self.habits.get(id(module))
        if habits is None:
            habits = self.habits[id(module)] = Habits(module)
        popped = current.pop()
        current.refused = None
        tape = current.tape
        tape.unbounded = True
        mark, grad_enabled = here(depth), _is_grad_enabled()
        quietly = quiet() if _function_modes() or _dispatch_modes() else None
        if quietly is not None:
            quietly.__enter__()
        try:
            moment = Moment(module, rng_state()) if habits.settled else habits.start(module)
            entry = Entry(module, tape.encode_call(args), tape.encode(kwargs) if kwargs else {}, mark, grad_enabled)
            entry.kind = "root"
            entry.extra = moment
            entry.owner = module
            if _any_autocast():
                entry.autocast = autocast_state()
            if first is not None and not first.is_inference():
                # For whether the weights are still those that the call used.
                moment.versions = ((first, first._version),)
            if habits.writes_inputs:
                self._save_inputs(entry)
        except BaseException:
            if popped:
                current.push()
            raise
        finally:
            tape.unbounded = False
            if quietly is not None:
                quietly.__exit__(None, None, None)
        current.roots.append((module, entry, popped))
        current.paused += 1

    def leave(self, module: torch.nn.Module, output: Any) -> None:
        """A watched module has returned, or raised."""
        if local.replaying:
            return
        current = sessions.current or session()
        roots = current.roots
        if not roots:
            return
        # No call in here: an interrupt cannot come between the two marks of the call that ends.
        top = roots[-1]
        del roots[-1]
        if top is None:
            return
        current.paused -= 1
        owner, entry, popped = top
        if owner is not module:  # an inner call that raised before its hook ran: not ours to account for
            roots.clear()
        contained = self.contained
        if not contained.down:
            quietly = quiet() if _function_modes() or _dispatch_modes() else None
            if quietly is not None:
                quietly.__enter__()
            started = _clock()
            try:
                if not self.habits[id(entry.owner)].settled:
                    self._learn(entry)
                entry.extra.raised = output is None
                current.tape.add(entry, output)
                self.on_leave(current, entry, output)
            except NonFiniteError:
                raise
            except Exception:
                contained.failed()
            finally:
                contained.spent += _clock() - started
                if quietly is not None:
                    quietly.__exit__(None, None, None)
        if popped or current.home:
            current.push()

    def _learn(self, entry: Entry) -> None:
        moment: Moment = entry.extra
        habits = self.habits[id(moment.module)]
        habits.finish(moment)
        if habits.learning and not habits.writes_inputs:
            habits.writes_inputs = any(
                isinstance(t, Outside) and t.changed for t in tokens_in((entry.args, entry.kwargs))
            )

    def _save_inputs(self, entry: Entry) -> None:
        for token in tokens_in((entry.args, entry.kwargs)):
            if isinstance(token, Outside) and token.snapshot is None:
                token.snapshot = token.tensor.detach().clone()

    def _first_parameter(self, module: torch.nn.Module) -> Any:
        """The first parameter; None where there is none.

        `_SWAPPED` inside a `functional_call` of the user's, where another tensor stands in its place.
        """
        try:
            found = self._identity[id(module)]
        except KeyError:
            found = self._identity[id(module)] = _place_of_first(module)
        if found is None or (owner := found[1]()) is None:
            return None
        p = owner._parameters.get(found[0])
        return p if type(p) is _Parameter or isinstance(p, _Parameter) else _SWAPPED


def _place_of_first(module: torch.nn.Module) -> tuple[str, weakref.ref[Any]] | None:
    for m in module.modules():
        if not isinstance(m._parameters, dict):  # TorchScript's: nobody can put another tensor there
            continue
        for name, p in m._parameters.items():
            if isinstance(p, torch.nn.Parameter) and not is_lazy(p):
                return name, weakref.ref(m)
    return None


class RootHook:
    """A forward (pre-)hook that dies in copies: a deep copy or a pickle of a watched model is not watched."""

    __slots__ = ("__weakref__", "module", "roots")

    def __init__(self, roots: Roots | None, module: torch.nn.Module | None) -> None:
        self.roots = roots
        self.module = None if module is None else weakref.ref(module)

    def __deepcopy__(self, memo: Any) -> RootHook:
        return type(self)(None, None)

    def __copy__(self) -> RootHook:
        return type(self)(None, None)

    def __reduce__(self) -> Any:
        return pickled_hook()


class EnterHook(RootHook):
    """That of the beginning."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if _compiling():
            return
        roots = self.roots
        # DataParallel's replicas share the hooks of the module they were copied from.
        if roots is not None and self.module is not None and self.module() is module:
            roots.enter(module, args, kwargs, _TO_CALLER)


class LeaveHook(RootHook):
    """That of the end."""

    __slots__ = ()

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        if _compiling():
            return
        roots = self.roots
        if roots is not None and self.module is not None and self.module() is module:
            roots.leave(module, output)
