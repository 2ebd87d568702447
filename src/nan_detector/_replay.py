"""Run a kept step again under the op tracer, leaving the user's model, gradients and random streams as they were.

Parameters that are trained are swapped for detached aliases (same memory, own `.grad`), buffers for copies; whatever
else the step writes in memory that is not its own is put back afterwards.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from nan_detector._call_site import Called, caller
from nan_detector._calls import CallKind, kind_of, public_name
from nan_detector._change import Change, Follower
from nan_detector._entries import Entry, Made, Outside, Packed, tensors_in, tokens_in
from nan_detector._errors import ReplayRefused
from nan_detector._lineage import Line, key_of
from nan_detector._loss_terms import Sums
from nan_detector._moment import Moment, Snapshot, is_passive_buffer, restore
from nan_detector._naming import Names, is_made, is_move
from nan_detector._patches import ReplayEnds
from nan_detector._quiet import quiet
from nan_detector._rng import restore_rng, rng_state
from nan_detector._state import replaying
from nan_detector._trace import BirthKind
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor

_functorch_level = torch._C._functorch.peek_interpreter_stack


#: Calls that are walked back from the last one of a step that raised.
MAX_LOOKED_AT = 32


@dataclass
class Replayed:
    """What a replay gave."""

    tracer: OpTracer
    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    same: bool | None = None  # losses equal bit for bit to those of the step; None where there was none to compare
    raised: BaseException | None = None
    notes: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    results_last: list[Tensor] = field(default_factory=list)  # what the last calls gave
    changed: list[Outside] = field(default_factory=list)  # written in place after the step used them
    backward_ends: list[int] = field(default_factory=list)  # operations made when each backward ended
    drew: bool = False  # random numbers were drawn
    written: dict[str, Line] = field(default_factory=dict)  # what a buffer that was written descends from

    def micro_step_of(self, operation: int) -> int:
        """How many backward passes had ended when `operation` ran."""
        # What is done to the gradients after the last of them belongs to it.
        return min(sum(end < operation for end in self.backward_ends), max(0, len(self.backward_ends) - 1))


class _Lost(ReplayRefused):
    """An argument of a recorded call cannot be made again."""


class Step:
    """A replay in progress: decodes tokens, makes the calls, remembers their results."""

    def __init__(
        self,
        entries: list[Entry],
        outside: list[Outside],
        models: dict[str, torch.nn.Module],
        names: Names,
        deadline: float,
        unscaled: bool = False,
        change: Change | None = None,
    ) -> None:
        self.change = change  # what is done differently: such a replay only asks whether the step is finite
        self.unscaled = unscaled or (change is not None and change.unscaled)  # every loss scale is taken to be 1
        self.entries = entries
        self.models = models
        self.names = names
        self.results: dict[Entry, list[Tensor]] = {}
        self.aliases: dict[int, Tensor] = {}
        self.buffer_copies: list[tuple[torch.nn.Module, str, Tensor]] = []
        self.outside = {o.ident: o for o in outside}
        self.locals: dict[int, Tensor] = {}
        tracer = OpTracer if change is None else Follower
        self.tracer: OpTracer = tracer(barrier=make_call.__code__, outside=self._name_of, deadline=deadline)
        self.tracer.protected = self._is_users_memory
        self.tracer.on_leaf = self._stash
        self.replayed = Replayed(self.tracer)
        self.sums = Sums(make_call.__code__)
        self._made_inputs: dict[int, tuple[BirthKind, str]] = {}
        self._own: set[int] = set()
        self._gradients: set[Entry] = set()  # calls that gave gradients, or what was made of gradients alone
        self._asked_for: set[Entry] = set()  # those of them whose gradients came from autograd.grad
        self._own_leaves: set[int] = set()
        self._making: Entry | None = None
        self._rng: tuple[Tensor, ...] = ()  # where the random streams stood when a watched module was last called
        self._afterwards: list[Callable[[], None]] = []  # what is put back after the writes
        self._stashed: dict[int, tuple[Tensor, Tensor | None]] = {}
        if change is not None:
            change.is_replays_own = lambda t: id(t) in self._own_leaves
            change.starts(self)

    def _stash(self, leaf: Tensor) -> None:
        """A leaf that is not the replay's own takes part: its `.grad` is put aside, so that nothing flows into it."""
        if id(leaf) not in self._stashed and id(leaf) not in self._own_leaves:
            self._stashed[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None

    # -- names -------------------------------------------------------------------------------------------------------

    def _name_of(self, t: Tensor) -> tuple[BirthKind, str] | None:
        key = key_of(t)
        return self.names.of_memory(key) or self._made_inputs.get(key)

    def _is_users_memory(self, key: int) -> bool:
        return key not in self._own

    # -- arguments ---------------------------------------------------------------------------------------------------

    def decode(self, value: Any) -> Any:
        """`value` with tokens replaced by the replay's tensors."""
        if isinstance(value, Made):
            made = self.results.get(value.entry)
            if made is None or value.position >= len(made):
                raise _Lost("a tensor that the step used was made before what was kept of it")
            return self._given(made[value.position], value)
        if isinstance(value, Outside):
            return self._given(self._outside_value(value), value)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self.decode(v) for v in value])
        if kind is dict:
            return {k: self.decode(v) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self.decode(v) for v in value])
        if isinstance(value, Packed):
            return value.rebuild(self.decode)
        return value

    def _given(self, t: Tensor, token: Made | Outside) -> Tensor:
        if self.change is None or self._making is None:
            return t
        return self.change.given(t, token, self._making)

    def _outside_value(self, token: Outside) -> Tensor:
        alias = self.aliases.get(token.ident) if token.leaf else None
        if alias is not None:
            return alias
        if token.gone:
            raise _Lost(f"{token.name or 'a tensor'} was let go, and max_hold_bytes did not allow to keep it")
        local = self.locals.get(token.ident)
        if local is None:
            local = token.value
            if token.snapshot is not None:
                local = local.clone()
                self._own.add(key_of(local))
            if self.change is not None:
                local = self.changed(local.detach(), self.change.outside)
            if token.opaque or (token.leaf and token.tensor.requires_grad):
                # Gradients must flow into the replay's own leaf, never into the user's.
                local = local.detach().requires_grad_()
                self._own_leaves.add(id(local))
            if token.opaque:
                self.replayed.opaque.append(token.name or f"a tensor of shape {tuple(local.shape)}")
            self.locals[token.ident] = local
        return local

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> Replayed:
        """Make every entry again."""
        modules = list({id(m): m for model in self.models.values() for m in model.modules()}.values())
        if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
            raise ReplayRefused("a module of TorchScript cannot be run again operation by operation")
        generators = [g for e in self.entries for g, _ in e.generators]
        generators += [g for e in self.entries if isinstance(e.extra, Moment) for g, _ in e.extra.generators]
        snapshot = Snapshot(modules, generators, self.values())
        stance = _eager_stance()
        try:
            with (
                replaying(),
                stance,
                self.change.around() if self.change is not None else contextlib.nullcontext(),
                warnings.catch_warnings(),
                self._swapped(),
                torch.autograd.set_multithreading_enabled(False),
            ):
                warnings.simplefilter("ignore")
                self._name_outside()
                used = {t for e in self.entries for t in tokens_in((e.args, e.kwargs)) if isinstance(t, Outside)}
                self.replayed.changed = [t for t in used if t.changed and t.ident not in self.aliases]
                with self._module_tracking(), _ApiNames(self), self.tracer:
                    self.make_all()
                self.replayed.drew = self._drew()
                self._collect()
        finally:
            with quiet():
                self.tracer.undo_writes()
                for undo in self._afterwards:
                    undo()
            for leaf, grad in self._stashed.values():
                if leaf.grad is not grad:
                    leaf.grad = grad
            snapshot.restore()
        return self.replayed

    def _drew(self) -> bool:
        """True when the step has drawn random numbers from torch's own generators."""
        now = rng_state()
        return any(e.rng is not None for e in self.entries) or any(
            not torch.equal(a, b) for a, b in zip(now, self._rng or now, strict=False)
        )

    def values(self) -> tuple[Any, ...]:
        """Functions and values, beyond the models, whose state the replay may move."""
        return ()

    def make_all(self) -> None:
        """Make the step again."""
        for entry in self.entries:
            if not self._make(entry):
                break
        if self.entries and entry.kind == "call":
            self.replayed.results_last = [*self.replayed.results_last, *self._looked_at(entry)]

    def _looked_at(self, last: Entry) -> list[Tensor]:
        """The values that the last call was about: what an answer like `isfinite(loss).all()` was worked out from."""
        out: list[Tensor] = []
        todo = [last]
        done: set[Entry] = set()
        while todo and len(done) < MAX_LOOKED_AT:
            e = todo.pop()
            done.add(e)
            for t in tokens_in((e.args, e.kwargs)):
                made = self.results.get(t.entry, ()) if isinstance(t, Made) else ()
                if isinstance(t, Made) and t.position < len(made):
                    value = made[t.position]
                    if value.is_floating_point() or value.is_complex():
                        out.append(value)
                    elif t.entry not in done:
                        todo.append(t.entry)
        return out

    def called(self, func: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """A function of the library is called in the replay; `run` makes the call."""
        return run()

    def _make(self, entry: Entry) -> bool:
        """Make one entry again. False ends the replay."""
        tracer = self.tracer
        if entry.kind == "zero_grad":
            for p in entry.extra:
                alias = self.aliases.get(id(p))
                if alias is not None:
                    alias.grad = None
            return True
        tracer.mark = entry.mark
        within = self._module_of(entry)
        tracer.module = self.names.of_module(within) if within is not None else None
        tracer.api = public_name(entry.func) if entry.kind != "root" else None
        tracer.phase = "forward" if within is not None else "backward" if self._edits_gradients(entry) else "loss"
        if entry.rng is not None:
            restore_rng(entry.rng)
        for generator, state in entry.generators:
            generator.set_state(state)
        moment = entry.extra if isinstance(entry.extra, Moment) else None
        if moment is not None:
            self._restore_moment(moment)
            tracer.phase = "forward"
        self._making = entry
        try:
            args, kwargs = self.decode(entry.args), self.decode(entry.kwargs)
        except _Lost:
            if entry.kind == "call":  # perhaps nothing that matters needs it; a backward that does will say so
                return True
            raise
        tracer.api_inputs = args
        if self.unscaled and entry.kind == "scale":
            with quiet():
                args = (args[0], torch.ones_like(args[1]))
        if moment is not None:
            _refuse_iterators(args, kwargs)
        if tracer.api == "register_hook" and _has_hook(args):
            return True  # the alias took over what its parameter had
        if tracer.evidence is not None and entry.kind == "backward":
            tracer.evidence.before_backward(args, kwargs)
        try:
            with modes_of(entry):
                out = make_call(entry.func, args, kwargs)
        except ReplayEnds:
            return False
        except ReplayRefused:
            raise
        except Exception as error:
            self.replayed.raised = error
            return False
        if entry.scalar is not None:
            tracer.number_given((args, kwargs))
        self.results[entry] = list(tensors_in(out))
        self._note_write(entry)
        if tracer.evidence is not None and entry.kind == "root":
            tracer.evidence.root_gave(entry, self.results[entry])
        if tracer.api == "grad" and not any(t.requires_grad for t in self.results[entry]):
            self._gradients.add(entry)  # `p.grad`, or autograd.grad without create_graph
            if getattr(entry.func, "__name__", "") == "grad":
                self._asked_for.add(entry)
        if entry.kind != "backward":
            self.replayed.results_last = self.results[entry]
        if entry.kind == "root":
            self.replayed.outputs.extend(self.results[entry])
        elif entry.kind == "backward":
            roots = args[0] if args else kwargs.get("self", kwargs.get("tensors"))
            self.replayed.losses.extend(t for t in tensors_in(roots) if t.numel() == 1)
            self.replayed.backward_ends.append(tracer.operations)
            self._compare(entry, roots)
        return True

    def _note_write(self, entry: Entry) -> None:
        """A model's own method, called by the loop, may write a buffer; the model is run with a copy of the buffer."""
        target = entry.args[0] if entry.kind == "call" and entry.args else None
        if not isinstance(target, Outside) or target.gone or kind_of(entry.func) is not CallKind.IN_PLACE:
            return
        known = self.names.of_memory(key_of(target.tensor))
        if known is not None and known[0] is BirthKind.BUFFER and self.results[entry]:
            with quiet():
                self.replayed.written[known[1]] = self.tracer.ancestry(self.results[entry][0])

    def _edits_gradients(self, entry: Entry) -> bool:
        """True for a call that is given gradients and no other tensor: scaling and clipping by hand."""
        tokens = list(tokens_in((entry.args, entry.kwargs)))
        found = bool(tokens) and all(isinstance(t, Made) and t.entry in self._gradients for t in tokens)
        if not found:
            return False
        self._gradients.add(entry)
        if all(isinstance(t, Made) and t.entry in self._asked_for for t in tokens):
            # What the loop asked autograd for, and a backward is still to come: the weight of a loss, not an edit.
            self._asked_for.add(entry)
            return not any(e.kind == "backward" and e.number > entry.number for e in self.entries)
        return True

    def _module_of(self, entry: Entry) -> Any:
        """The watched module whose code made a call that was recorded by itself.

        Of a model's own methods only ``forward`` counts: a ``training_step`` also holds the loss.
        """
        owner = entry.owner
        if entry.kind == "root":
            return owner
        if owner is None or entry.kind != "call" or not self.names.is_watched(owner):
            return None
        is_model = any(owner is m for m in self.models.values())
        return owner if not is_model or (entry.mark is not None and entry.mark.code.co_name == "forward") else None

    def _compare(self, entry: Entry, roots: Any) -> None:
        if self.change is not None:
            return
        mine = [t.detach() for t in tensors_in(roots) if t.numel() == 1]
        if len(mine) != len(entry.losses) or (self.unscaled and entry.unscaled):
            return
        with quiet():
            same = all(same_values(a, b) for a, b in zip(mine, entry.losses, strict=True))
        self.replayed.same = same if self.replayed.same is None else self.replayed.same and same

    def _restore_moment(self, moment: Moment) -> None:
        restore(moment)
        self._rng = moment.rng
        for module, name, value in moment.buffers:
            with quiet():  # our copy is no operation of the step
                copy = value.clone()
            self._own.add(key_of(copy))
            self.names.also(key_of(copy), value, module, name)
            module._buffers[name] = copy

    # -- swapping ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _swapped(self) -> Iterator[None]:
        """Aliases for the trained parameters and copies of the buffers, in every watched module."""
        undo: list[tuple[dict[str, Any], str, Any]] = []
        copies: dict[int, Tensor] = {}
        try:
            with quiet():
                for model in self.models.values():
                    for module in model.modules():
                        for name, p in module._parameters.items():
                            if p is None or not p.requires_grad:
                                continue
                            undo.append((module._parameters, name, p))
                            module._parameters[name] = self._alias(p)  # type: ignore[assignment]  # no Parameter: an alias
                        for name, b in module._buffers.items():
                            if b is None:
                                continue
                            undo.append((module._buffers, name, b))
                            if id(b) not in copies:
                                copies[id(b)] = _buffer_copy(module, name, b)
                                self._own.add(key_of(copies[id(b)]))
                                self.names.also(key_of(copies[id(b)]), b, module, name)
                            module._buffers[name] = copies[id(b)]
                            self.buffer_copies.append((module, name, copies[id(b)]))
            yield
        finally:
            for table, name, value in reversed(undo):
                table[name] = value

    def _alias(self, p: Tensor) -> Tensor:
        alias = self.aliases.get(id(p))
        if alias is None:
            token = self.outside.get(id(p))
            if token is not None and token.snapshot is not None and token.stands_for(p):
                # It was written since the step used it, by the user's own code: the copy is what the step used.
                alias = token.snapshot.clone().requires_grad_()
                self._own.add(key_of(alias))
                self.names.alias(key_of(alias), key_of(p))
            else:
                alias = p.detach().requires_grad_()
            for hook in (p._backward_hooks or {}).values():
                alias.register_hook(hook)
            for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
                alias.register_post_accumulate_grad_hook(self._without_steps(hook))
            self.aliases[id(p)] = alias
            self._own_leaves.add(id(alias))
        return alias

    def changed(self, t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """`change` of `t`, as memory of the replay's own where it is other memory."""
        with quiet():
            changed = change(t)
        if changed is not t and key_of(changed) != key_of(t):
            self._own.add(key_of(changed))
        return changed

    def _without_steps(self, hook: Any) -> Any:
        """A hook on a finished gradient, which may scale the gradient, but may not step an optimizer in a replay."""

        def call(alias: Tensor) -> None:
            try:
                hook(alias)
            except ReplayEnds:
                pass
            except Exception as error:  # it looks its optimizer up by the parameter, which the alias is not
                self.replayed.notes.append(
                    f"a hook on a finished gradient could not be run again ({type(error).__name__})"
                )

        return call

    def _name_outside(self) -> None:
        """Names for the tensors of the batch: what goes into root calls is input, the rest are labels."""
        feeding = self._feeding_roots()
        # `x.to(device)` says less of a tensor than the call that uses it: it has the last word, not the first.
        moves = [e for e in self.entries if is_move(e)]
        for entry in [*(e for e in self.entries if not is_move(e)), *moves]:
            for kind, path, token in self.names.arguments(entry):
                if token.gone:
                    continue
                if entry in feeding and not token.opaque:
                    kind = BirthKind.INPUT
                key = key_of(token.value)
                if entry in feeding and entry.kind != "root" and key in self._made_inputs:
                    continue  # the name that the model itself has for it is better
                if token.name is None:
                    token.name = path
                if kind is not BirthKind.INPUT and (token.opaque or is_made(path)):
                    # Made in this step, by code that is not seen: no label, and where it went bad is not known.
                    self._made_inputs.setdefault(key, (BirthKind.OPAQUE, path))
                    continue
                if self.names.of_memory(key) is None and (key not in self._made_inputs or kind is BirthKind.INPUT):
                    self._made_inputs[key] = (kind, path)

    def _feeding_roots(self) -> set[Entry]:
        """Calls of the watched models, and the calls from whose results their arguments were made."""
        feeding: set[Entry] = set()
        todo = [e for e in self.entries if e.kind == "root"]
        while todo:
            entry = todo.pop()
            if entry not in feeding:
                feeding.add(entry)
                todo.extend(
                    t.entry
                    for t in tokens_in((entry.args, entry.kwargs))
                    if isinstance(t, Made) and t.entry.kind == "call"
                )
        return feeding

    @contextlib.contextmanager
    def _module_tracking(self) -> Iterator[None]:
        """Keep the tracer told of the module that is running."""
        import threading

        tracer, names, me = self.tracer, self.names, threading.get_ident()
        patched = _entered_through(self.models)
        call = getattr(torch.nn.Module, patched)

        # Not by hooks: the user's own, which may compute as well, would run outside of the module they belong to.
        def tracked(module: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != me:
                return call(module, *args, **kwargs)
            outer = tracer.module, tracer.phase
            if names.is_watched(module):
                tracer.module, tracer.phase = names.of_module(module), "forward"
            elif tracer.phase != "forward":  # made on the spot within a watched module: its code is that module's
                tracer.module = names.of_module(module)
            try:
                return call(module, *args, **kwargs)
            finally:
                tracer.module, tracer.phase = outer

        setattr(torch.nn.Module, patched, tracked)
        try:
            yield
        finally:
            setattr(torch.nn.Module, patched, call)

    def _collect(self) -> None:
        for name, p in self.names.parameters():
            alias = self.aliases.get(id(p))
            if alias is not None and alias.grad is not None:
                self.replayed.gradients[name] = alias.grad
        for token_id, local in self.locals.items():
            if local.requires_grad and local.is_leaf and local.grad is not None:
                told = self.outside[token_id].name if token_id in self.outside else None
                self.replayed.gradients[told or f"outside {token_id}"] = local.grad
        for leaf, before in self._stashed.values():
            # A parameter that the model keeps a reference to of its own, past the one that was swapped.
            if leaf.grad is not None and leaf.grad is not before:
                known = self.names.of_memory(key_of(leaf))
                self.replayed.gradients[known[1] if known is not None else f"leaf {id(leaf)}"] = leaf.grad
        for leaf, stand_in in self.change.stand_ins.values() if self.change is not None else ():
            if stand_in.grad is not None:
                known = self.names.of_memory(key_of(leaf))
                self.replayed.gradients[known[1] if known is not None else f"leaf {id(leaf)}"] = stand_in.grad
        for module, name, copy in self.buffer_copies:
            now = module._buffers.get(name)  # a forward may put another tensor in its place
            copy = copy if now is None else now
            path = self.names.of_module(module)[0]
            self.replayed.buffers[f"{path}.{name}" if path not in (None, "root") else name] = copy


def _entered_through(models: dict[str, torch.nn.Module]) -> str:
    """The method of `torch.nn.Module` through which every call of a watched module goes.

    Giving the class another ``__call__`` changes a slot of each of its hundreds of subclasses, which takes as long as
    half a step of a small model.
    """
    cls = torch.nn.Module
    if cls.__call__ is not getattr(cls, "_wrapped_call_impl", None):  # somebody else's is in its place
        return "__call__"
    compiled = any(vars(m).get("_compiled_call_impl") is not None for model in models.values() for m in model.modules())
    return "__call__" if compiled else "_call_impl"


def _buffer_copy(module: torch.nn.Module, name: str, b: Tensor) -> Tensor:
    copy = b.detach().clone()
    if module.training and is_passive_buffer(module, name) and copy.is_floating_point():
        # Running statistics were already written by the step that is replayed, and training does not read them: what
        # that step put there must not look as if it had been there before.
        copy.nan_to_num_(0.0, 0.0, 0.0)
    return copy


def same_values(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _has_hook(args: Any) -> bool:
    """True where the arguments of a `register_hook` are a tensor and a hook that it has."""
    return len(args) > 1 and any(hook is args[1] for hook in (args[0]._backward_hooks or {}).values())


def make_call(func: Any, args: Any, kwargs: Any) -> Any:
    """The barrier: frames outside this one are not the replayed call's."""
    return func(*args, **kwargs)


class _ApiNames(TorchFunctionMode):
    """Tells the tracer which function of the library the user's code is calling."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self.step.tracer
        outer = tracer.api, tracer.api_inputs, tracer.transformed, tracer.called
        tracer.api, tracer.api_inputs = public_name(func), args
        tracer.called = Called(func, caller(make_call.__code__) or tracer.mark)
        tracer.transformed = _functorch_level() is not None
        if tracer.evidence is not None and tracer.api in ("backward", "grad"):
            tracer.evidence.before_backward(args, kwargs)
        change = self.step.change
        try:
            given = kwargs or {}
            if change is not None:
                return self.step.called(func, args, given, partial(change.call, func, args, given))
            run = partial(self.step.called, func, args, given, lambda: func(*args, **given))
            return self.step.sums.follow(func, args, given, tracer.mark, run)
        finally:
            tracer.api, tracer.api_inputs, tracer.transformed, tracer.called = outer


@contextlib.contextmanager
def modes_of(entry: Entry) -> Iterator[None]:
    """Grad mode and autocast as they were when the call was recorded."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(entry.grad_enabled))
        if entry.autocast is not None:
            *regions, cache = entry.autocast
            for device, enabled, dtype in regions:
                if enabled:
                    stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        yield


def _eager_stance() -> Any:
    """Compiled code must run eagerly under a dispatch mode, or it is compiled wrongly for ever after."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return set_stance("force_eager") if set_stance is not None else contextlib.nullcontext()


def _refuse_iterators(args: Any, kwargs: Any) -> None:
    for name, value in [*enumerate(args), *kwargs.items()]:
        if hasattr(value, "__next__"):
            raise ReplayRefused(
                f"argument {name!r} of the model is an iterator ({type(value).__name__}), which can be used only once"
            )
