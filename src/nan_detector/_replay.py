"""Run a kept step again under the op tracer, leaving the user's model, gradients and random streams as they were.

Parameters that are trained are swapped for detached aliases (same memory, own `.grad`), buffers for copies; whatever
else the step writes in memory that is not its own is put back afterwards.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._aliases import Aliases
from nan_detector._arguments import Arguments, Lost
from nan_detector._at_the_loss import AtTheLoss
from nan_detector._calls import CallKind, kind_of, public_name
from nan_detector._change import Change, Follower
from nan_detector._entries import Entry, Outside, tensors_in, tokens_in
from nan_detector._errors import ReplayRefused
from nan_detector._gradient_calls import GradientCalls
from nan_detector._input_names import named_inputs
from nan_detector._lineage import EMPTY, key_of
from nan_detector._loss_terms import Sums
from nan_detector._moment import Moment, Snapshot, restore
from nan_detector._naming import Names
from nan_detector._patches import ReplayEnds
from nan_detector._quiet import quiet
from nan_detector._remade import eager_stance, has_hook, make_call, modes_of, refuse_iterators
from nan_detector._replayed import Replayed, same_values
from nan_detector._rng import restore_rng, rng_state
from nan_detector._state import replaying
from nan_detector._trace import BirthKind
from nan_detector._tracer import OpTracer
from nan_detector._under_way import ApiNames, module_tracking

Tensor = torch.Tensor


class Step:
    """A replay in progress: makes the calls, and remembers what the step is judged by."""

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
        self.outside = {o.ident: o for o in outside}
        tracer = OpTracer if change is None else Follower
        self.tracer: OpTracer = tracer(barrier=make_call.__code__, outside=self._name_of, deadline=deadline)
        self.tracer.journal.protected = self._is_users_memory
        self.tracer.on_leaf = self._stash
        self.replayed = Replayed(self.tracer)
        self.aliases = Aliases(names, self.outside, self.replayed.notes)
        self.arguments = Arguments(self.aliases, self.replayed.opaque, change)
        self.results = self.arguments.results
        self.sums = Sums(make_call.__code__)
        self._made_inputs: dict[int, tuple[BirthKind, str]] = {}
        self._gradient_calls = GradientCalls(entries)
        self._rng: tuple[Tensor, ...] = ()  # where the random streams stood when a watched module was last called
        self._afterwards: list[Callable[[], None]] = []  # what is put back after the writes
        self._stashed: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.at_the_loss: AtTheLoss | None = None
        if change is not None:
            change.is_replays_own = lambda t: id(t) in self.aliases.own_leaves
            change.starts(self)

    def _stash(self, leaf: Tensor) -> None:
        """A leaf that is not the replay's own takes part: its `.grad` is put aside, so that nothing flows into it."""
        if id(leaf) not in self._stashed and id(leaf) not in self.aliases.own_leaves:
            self._stashed[id(leaf)] = (leaf, leaf.grad)
            leaf.grad = None

    # -- names -------------------------------------------------------------------------------------------------------

    def _name_of(self, t: Tensor) -> tuple[BirthKind, str] | None:
        key = key_of(t)
        return self.names.of_memory(key) or self._made_inputs.get(key)

    def _is_users_memory(self, key: int) -> bool:
        return key not in self.aliases.own

    # -- the run -------------------------------------------------------------------------------------------------------

    def run(self) -> Replayed:
        """Make every entry again."""
        modules = list({id(m): m for model in self.models.values() for m in model.modules()}.values())
        if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
            raise ReplayRefused("a module of TorchScript cannot be run again operation by operation")
        generators = [g for e in self.entries for g, _ in e.generators]
        generators += [g for e in self.entries if isinstance(e.extra, Moment) for g, _ in e.extra.generators]
        snapshot = Snapshot(modules, generators, self.values())
        stance = eager_stance()
        try:
            with (
                replaying(),
                stance,
                self.change.around() if self.change is not None else contextlib.nullcontext(),
                warnings.catch_warnings(),
                self.aliases.swapped(self.models),
                torch.autograd.set_multithreading_enabled(False),
            ):
                warnings.simplefilter("ignore")
                self._made_inputs = named_inputs(self.entries, self.names)
                used = {t for e in self.entries for t in tokens_in((e.args, e.kwargs)) if isinstance(t, Outside)}
                self.replayed.changed = [t for t in used if t.changed and t.ident not in self.aliases.of]
                with module_tracking(self.tracer, self.names, self.models), self.api_names(), self.tracer:
                    self.make_all()
                self.replayed.drew = self._drew()
                self._collect()
        finally:
            with quiet():
                self.tracer.journal.undo()
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
            self.replayed.results_last = [*self.replayed.results_last, *self.arguments.looked_at(entry)]

    def api_names(self) -> ApiNames:
        """A mode that tells the tracer which function of the library is being called."""
        return ApiNames(self.tracer, self.sums, self.called, self.change)

    def called(self, func: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """A function of the library is called in the replay; `run` makes the call."""
        return run()

    def _make(self, entry: Entry) -> bool:
        """Make one entry again. False ends the replay."""
        tracer = self.tracer
        if entry.kind == "zero_grad":
            for p in entry.extra:
                alias = self.aliases.of.get(id(p))
                if alias is not None:
                    alias.grad = None
            return True
        tracer.mark = entry.mark
        within = self._module_of(entry)
        tracer.module = self.names.of_module(within) if within is not None else None
        tracer.api = public_name(entry.func) if entry.kind != "root" else None
        tracer.phase = "forward" if within is not None else "backward" if self._gradient_calls.edits(entry) else "loss"
        if entry.rewrites and entry.kind == "call":
            tracer.phase = "state"
        if entry.rng is not None:
            restore_rng(entry.rng)
        for generator, state in entry.generators:
            generator.set_state(state)
        moment = entry.extra if isinstance(entry.extra, Moment) else None
        if moment is not None:
            self._restore_moment(moment)
            tracer.phase = "forward"
        self.arguments.making = entry
        try:
            args, kwargs = self.arguments.decode(entry.args), self.arguments.decode(entry.kwargs)
        except Lost:
            if entry.kind == "call":  # perhaps nothing that matters needs it; a backward that does will say so
                return True
            raise
        tracer.api_inputs = args
        if self.unscaled and entry.kind == "scale":
            with quiet():
                args = (args[0], torch.ones_like(args[1]))
        if moment is not None:
            refuse_iterators(args, kwargs)
        if tracer.api == "register_hook" and has_hook(args):
            return True  # the alias took over what its parameter had
        if entry.kind == "backward":
            if tracer.evidence is not None:
                tracer.evidence.before_backward(args, kwargs)
            if self.at_the_loss is not None:
                recorded = () if self._is_unscaled(entry) else entry.losses
                self.at_the_loss(self.replayed, losses_in(args, kwargs), recorded)
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
        if tracer.api == "grad":
            self._gradient_calls.gave(entry, self.results[entry])
        if entry.kind != "backward":
            self.replayed.results_last = self.results[entry]
        if entry.kind == "root":
            self.replayed.outputs.extend(self.results[entry])
        elif entry.kind == "backward":
            losses = losses_in(args, kwargs)
            self.replayed.losses.extend(losses)
            self.replayed.backward_ends.append(tracer.operations)
            self._compare(entry, losses)
        return True

    def _is_unscaled(self, entry: Entry) -> bool:
        return self.unscaled and bool(entry.unscaled)

    def _note_write(self, entry: Entry) -> None:
        """A model's own method, called by the loop, may write a buffer; the model is run with a copy of the buffer."""
        target = entry.args[0] if entry.kind == "call" and entry.args else None
        if not isinstance(target, Outside) or target.gone or kind_of(entry.func) is not CallKind.IN_PLACE:
            return
        known = self.names.of_memory(key_of(target.tensor))
        if known is not None and known[0] is BirthKind.BUFFER and self.results[entry]:
            with quiet():
                self.replayed.written[known[1]] = self.tracer.ancestry(self.results[entry][0])

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

    def _compare(self, entry: Entry, losses: list[Tensor]) -> None:
        if self.change is not None or len(losses) != len(entry.losses) or self._is_unscaled(entry):
            return
        with quiet():
            same = all(same_values(a, b) for a, b in zip(losses, entry.losses, strict=True))
        self.replayed.same = same if self.replayed.same is None else self.replayed.same and same

    def _restore_moment(self, moment: Moment) -> None:
        restore(moment)
        self._rng = moment.rng
        for module, name, value in moment.buffers:
            with quiet():  # our copy is no operation of the step
                copy = value.clone()
            self.aliases.stands_for(copy, value, module, name)
            module._buffers[name] = copy

    def _collect(self) -> None:
        for name, p in self.names.parameters():
            alias = self.aliases.of.get(id(p))
            if alias is None:
                continue
            if alias.grad is not None:
                self.replayed.gradients[name] = alias.grad
            with quiet():
                line = self.tracer.ancestry(alias) if self.change is None else EMPTY
            if line:
                self.replayed.weights[name] = line
        for token_id, local in self.arguments.locals.items():
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
        for module, name, copy in self.aliases.buffer_copies:
            now = module._buffers.get(name)  # a forward may put another tensor in its place
            copy = copy if now is None else now
            path = self.names.of_module(module)[0]
            self.replayed.buffers[f"{path}.{name}" if path not in (None, "root") else name] = copy


def losses_in(args: Any, kwargs: Any) -> list[Tensor]:
    """What a backward begins at, by its arguments: the tensors with one element."""
    roots = args[0] if args else kwargs.get("self", kwargs.get("tensors"))
    return [t for t in tensors_in(roots) if t.numel() == 1]
