"""State that nobody steps on: weights, buffers and optimizer state, a slice at a gate, all of it in 32 gates.

Loss and gradients are judged before every step. What a stray write, a checkpoint or an optimizer's own arithmetic did
to a value that this step does not use shows in neither of them, and waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._aftermath import BadState
from nan_detector._bad_weights import weights_state
from nan_detector._before import GRAD_NORM_OF
from nan_detector._damage import Harm, harms
from nan_detector._quiet import hidden, quiet
from nan_detector._run import Run
from nan_detector._scrub import Scrub
from nan_detector._scrub_slots import StateSlots
from nan_detector._stepped import Stepped
from nan_detector._trace import Birth, BirthKind

Tensor = torch.Tensor

#: Gates in which all is seen.
GATES = 32
#: Gates from one slice to the next: of a small model a call costs far more than what it reads.
EVERY, EVERY_IF_SMALL, SMALL = 4, GATES, 2**19
_STATE = "optimizer.state["
#: Times the median norm from which a gradient has to do with what became of the state, and norms that make a median.
_OUTSIZE, _LEAST_NORMS = 1e3, 4


class Rounds:
    """Looks at all state of one run in turn.

    Args:
        run: The run.
        steppeds: The optimizers' parameters, by identity.
    """

    def __init__(self, run: Run, steppeds: Mapping[int, Stepped]) -> None:
        self.run = run
        self._steppeds = steppeds
        self._slots = StateSlots(run.models)
        with hidden():
            size = sum(p.numel() for _, p in run.names.parameters())
            self._every = EVERY_IF_SMALL if size <= SMALL else EVERY
            self._scrub = Scrub(self._slots, period=GATES // self._every)
        #: What the last slice looked at: names, and where in a large tensor it began; one per number.
        self.parts: tuple[tuple[str, int], ...] = ()
        self._gates = 0
        self._ended = False
        self._plan = 0
        self._finite_at: dict[tuple[tuple[str, int], ...], int] = {}
        self._told: set[str] = set()
        self._since: dict[str, int | None] = {}  # by name of optimizer state
        with quiet():  # what a buffer held before the run is no news
            self._always = {name for name, b in run.names.buffers() if not _finite.is_finite(b)}

    def met(self, optimizer: Any) -> None:
        """Look at the state of this optimizer, too."""
        self._slots.add(optimizer)

    def due(self) -> Tensor | None:
        """Numbers on the device, to be read with the gate's and given to `judge`; mostly None."""
        self._gates += 1
        if self._gates % self._every:
            return None
        sums = self._scrub.next_slice()
        self.parts = self._scrub.parts_of_last_slice()
        return sums if self.parts else None

    def last(self) -> Iterator[BadState]:
        """A whole round at the end of the watch: what the last gates have not seen, and no further one will.

        Yields:
            What `judge` gives.
        """
        if not self._gates:
            return  # no step was watched: what is there now is not of this run
        self._ended = True
        for _ in range(max(1, self._scrub.calls_per_sweep)):
            sums = self._scrub.next_slice()
            self.parts = self._scrub.parts_of_last_slice()
            if self.parts and (found := self.judge(_finite.read(sums))) is not None:
                yield found

    @property
    def step(self) -> int:
        """The step that is running, or the last one."""
        counted = self.run.told_step is None
        return max(0, self.run.step - 1) if self._ended and counted else self.run.step

    def fine(self) -> None:
        """The gate read the last slice, and it was finite."""
        if self._plan != self._scrub.plans:
            self._plan = self._scrub.plans
            self._finite_at.clear()  # what was looked at in one piece then is not what is looked at now
        self._finite_at[self.parts] = self.step
        if self._told:
            self._told.difference_update(name for name, _ in self.parts)

    def judge(self, sums: list[float]) -> BadState | None:
        """What the gate read of the last slice.

        Returns:
            A trained parameter that is bad: the weights are damaged. State of an optimizer is left to `dated`.
        """
        if all(map(math.isfinite, sums)):
            self.fine()
            return None
        fresh = [n for n in self._scrub.bad_in_last_slice() if n not in self._told and not self._is_known(n)]
        if not fresh:
            return None
        self._told.update(fresh)
        since = {name: self._last_finite(name, start) for name, start in self.parts if name in fresh}
        damaged: BadState | None = None
        for name, p, trained in self._parameters():
            if name not in since or not trained:
                continue
            last = since.pop(name)
            if last is not None or not _only_minus_inf(p):
                damaged = damaged or self._damaged(name, p, last)
        for stepped, harm in self._harms() if since else ():
            name = f"{harm.name[len(_STATE) : -len(f'][{harm.key!r}]')]}.{harm.key}"
            if name in since:
                self._since[harm.name] = since.pop(name)
                stepped.state_seen = None  # its own gate looks at it, before this and each further step
        held = {**dict(self.run.names.buffers()), **dict(self.run.names.parameters())}
        for name, last in since.items():
            if name in held and name not in self._always and (last is not None or not _only_minus_inf(held[name])):
                self._warn(name, last)
        return damaged

    def dated(self, problem: BadState) -> BadState:
        """`problem` of an optimizer's state, with the step since when it may have been there."""
        name = problem.birth.tensor_name
        if name not in self._since:
            return problem
        since = self._since[name]
        earliest = f"the optimizer's state is damaged since step {since or 0}, or a later one"
        notes = (earliest, *self._outsize(name, since or 0), _found(self.step, since))
        # Weights go bad with the state that moves them, and neither may have shown for as long.
        lost = weights_state(self.run.names.parameters(), ()) != "clean"
        return replace(problem, since=(since or 0) if lost else problem.since, notes=notes)

    def _outsize(self, state: str, since: int) -> tuple[str, ...]:
        """The step whose gradient stood out while this state went bad, for a person."""
        name = state.removeprefix(_STATE).partition("]")[0]
        steps, columns = self.run.recorder.columns()
        norms = zip(steps, columns.get(f"{GRAD_NORM_OF}{name}", ()), strict=False)
        seen = sorted((norm, step) for step, norm in norms if since <= step < self.step and math.isfinite(norm))
        if len(seen) < _LEAST_NORMS or seen[-1][0] < _OUTSIZE * seen[len(seen) // 2][0]:
            return ()
        norm, step = seen[-1]
        return (f"the gradient of {name} stood out at step {step}: its norm was {norm:.3g}",)

    def _parameters(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Name and tensor of each parameter, and whether training reaches it."""
        stepped = [(s, o) for s in self._steppeds.values() if s.counted and (o := s.optimizer()) is not None]
        with_state = {id(p) for _, o in stepped for p in o.state}
        for name, p in self.run.names.parameters():
            yield name, p, p.grad is not None or id(p) in with_state
        for s, _ in stepped:
            for name, p in zip(s.names, s.parameters, strict=True):
                if id(p) not in self.run.ours:
                    yield name, p, p.grad is not None or id(p) in with_state

    def _harms(self) -> Iterator[tuple[Stepped, Harm]]:
        for stepped in list(self._steppeds.values()):
            optimizer = stepped.optimizer()
            if optimizer is not None and stepped.counted:
                with quiet():
                    found = list(harms(optimizer, self.run.ours, state=True))
                yield from ((stepped, harm) for harm in found)

    def _is_known(self, name: str) -> bool:
        """True when an event has told of it, as what a bad step left behind, or was traced back to."""
        return any(name == e.tensor_name or any(name in _words(note) for note in e.notes) for e in self.run.book.events)

    def last_finite(self, name: str) -> int | None:
        """The last step before which all of the tensor `name` was seen to be finite; None where none is known."""
        starts = {start for parts in self._finite_at for n, start in parts if n == name}
        seen = [self._last_finite(name, start) for start in starts]
        return min((s for s in seen if s is not None), default=None) if None not in seen else None

    def _last_finite(self, name: str, start: int) -> int | None:
        if self._plan != self._scrub.plans:
            return None
        return max((step for parts, step in self._finite_at.items() if (name, start) in parts), default=None)

    def _damaged(self, name: str, p: Tensor, since: int | None) -> BadState:
        with quiet():
            stats = _finite.stats(p)
        modules = (m for model in self.run.models.values() for m in model.modules())
        owner = next((m for m in modules if any(q is p for q in m._parameters.values())), None)
        birth = Birth(
            number=0,
            kind=BirthKind.PARAMETER.value,
            op="",
            aten="",
            phase="state",
            layer_name=self.run.names.of_module(owner)[0] if owner is not None else None,
            module_type=type(owner).__name__ if owner is not None else None,
            tensor_name=name,
            output=stats,
        )
        bad = stats.bad_count
        message = f"{name} holds {bad} non-finite {'value' if bad == 1 else 'values'} before the step"
        return BadState(message, birth, since or 0, (_found(self.step, since),))

    def _warn(self, name: str, since: int | None) -> None:
        step = self.step
        if since is not None:
            seen = f"it was last seen finite at step {since}"
        elif any(name == n for n, _ in self.run.names.buffers()):
            seen = "it was finite when the watch began"
        else:
            seen = "since when is not known"
        message = f"step {step}: {name} holds non-finite values; {seen}"
        self.run.warn("state", message, step=step, layer_name=name.rpartition(".")[0] or None)


def _found(step: int, since: int | None) -> str:
    seen = "when it was last finite is not known" if since is None else f"it was last seen finite before step {since}"
    return f"found in passing at step {step}, whose loss and gradients do not show it; {seen}"


def _words(note: str) -> Iterable[str]:
    return note.replace(",", " ").split()


def _only_minus_inf(t: Tensor) -> bool:
    with quiet():
        s = _finite.stats(t)
    return s.nan_count == 0 and s.posinf_count == 0
