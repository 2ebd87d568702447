"""What optimizers made of weights and state although every gradient was finite: when it is looked for, what is said.

No check before a step can stop an optimizer's own arithmetic. With ``protect="full"`` it is looked at right after the
step, and undone; else it is seen at the next gate that trips, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._before import GRAD_NORM_OF, LEARNING_RATE
from nan_detector._damage import (
    Harm,
    LastStep,
    birth_in_state,
    birth_in_step,
    birth_unknown,
    harms,
    retake_with_state,
)
from nan_detector._good_state import GoodState, was_finite
from nan_detector._put_back import put_back
from nan_detector._quiet import quiet
from nan_detector._records import Reproduced
from nan_detector._retake import Retake
from nan_detector._run import Run
from nan_detector._snapshot import keep_optimizer
from nan_detector._source import here
from nan_detector._stepped import Stepped
from nan_detector._trace import Birth, Trace

Tensor = torch.Tensor

#: Rows of the flight recorder in which the last step is looked for.
ROWS = 50
#: Share of a dtype's range from which on a step's size alone (rate times norm of the gradient) can overflow it.
_COULD_OVERFLOW = 1e-3
#: Operations that use some elements of a parameter and leave others alone: a bad one may have been there for long.
_SELECT = (
    *("embedding", "embedding_bag", "index", "index_select", "gather", "select", "slice", "take", "narrow", "where"),
    *("masked_select", "take_along_dim", "unbind", "split", "chunk", "getitem"),
)
_SELECTIVE = (torch.nn.Embedding, torch.nn.EmbeddingBag)


@dataclass(frozen=True, slots=True)
class Damage:
    """What a step did.

    Attributes:
        step: Its number.
        birth: What is known of it.
        reproduced: Whether taking the step again did the same.
        restored: It was undone.
        retake: How the step is taken again, to try things on it; None where that does not do what the step did.
    """

    step: int
    birth: Birth
    reproduced: Reproduced
    restored: bool = False
    retake: Retake | None = field(default=None, compare=False, repr=False)

    @property
    def trace(self) -> Trace:
        """The birth as a trace of its own."""
        return Trace(birth=self.birth, reached=("parameter",))


@dataclass(frozen=True, slots=True)
class BadState:
    """State that is not finite before a step: what `HyperProblem` is for a learning rate.

    Attributes:
        message: What it is, for a person.
        birth: The tensor.
        since: The weights may be damaged since that step; None where they are not known to be.
        notes: Where it may come from.
    """

    message: str
    birth: Birth
    since: int | None = None
    notes: tuple[str, ...] = ("the state was found so before the first step with it: look at where it was loaded",)


class Aftermath:
    """Looks at what steps have made.

    Args:
        run: The run.
        steppeds: The optimizers' parameters, by identity.
        full: Whether damage is undone.
    """

    def __init__(self, run: Run, steppeds: Mapping[int, Stepped], full: bool) -> None:
        self.run = run
        self.full = full
        self._steppeds = steppeds
        #: The last step before which all of a parameter, by its name, was seen to be finite.
        self.last_finite: Callable[[str], int | None] = lambda name: None
        self._shadows: dict[int, GoodState] = {}
        #: Optimizers whose step has begun and was not looked at afterwards: it is running, or it raised.
        self.unchecked: set[int] = set()

    @property
    def optimizers(self) -> int:
        """How many optimizers the loop has; 0 where it writes its updates itself."""
        return len(self._steppeds)

    @property
    def nbytes(self) -> int:
        """Memory of the copies that `protect="full"` keeps, in bytes."""
        return sum(shadow.nbytes for shadow in self._shadows.values())

    # -- before a step -------------------------------------------------------------------------------------------------

    def shadow(self, optimizer: Any) -> None:
        """Copy what the step that is about to be taken may damage."""
        key = id(optimizer)
        self._shadows[key] = keep_optimizer(self.run.step, optimizer, self._shadows.pop(key, None))
        self.unchecked.add(key)

    def bad_state(self, stepped: Stepped, optimizer: Any) -> BadState | None:
        """Non-finite values in state that was loaded since the last look; exact, with reads to the host."""
        if optimizer is None:
            return None
        with quiet():
            harm = next(harms(optimizer, self.run.ours, state=True), None)
        if harm is None:
            stepped.state_seen = id(optimizer.state)
            return None
        bad = _finite.stats(harm.tensor).bad_count
        message = f"{harm.name} holds {bad} non-finite {'value' if bad == 1 else 'values'} before the step"
        return BadState(message, birth_in_state(optimizer, harm, here()))

    # -- after it ------------------------------------------------------------------------------------------------------

    def undone(self, stepped: Stepped) -> Damage | None:
        """`protect="full"`: what the step just taken has damaged; parameters and state are those before it again."""
        optimizer, last = stepped.optimizer(), stepped.last
        shadow = self._shadows.get(id(optimizer))
        self.unchecked.discard(id(optimizer))
        if optimizer is None or last is None or shadow is None:
            return None
        with quiet():
            harm = self._new_harm(optimizer, stepped, shadow)
            if harm is None:
                return None
            stepped.last = None
            harm = replace(harm, tensor=harm.tensor.detach().clone())
        put_back(shadow)
        found = birth_in_step(optimizer, harm, last.mark, exact=True)
        if found is None:
            return Damage(last.step, birth_unknown(optimizer, harm, last.mark), "no", True, Retake(optimizer))
        birth, retake = found
        return Damage(last.step, birth, "yes", True, retake)

    def _new_harm(self, optimizer: Any, stepped: Stepped, shadow: GoodState) -> Harm | None:
        tensors = stepped.parameters[:]
        for p in stepped.parameters:
            state = optimizer.state.get(p) if p in optimizer.state else None
            if isinstance(state, dict):
                tensors.extend(v for v in state.values() if isinstance(v, Tensor) and v.dim())
        if torch.isfinite(_finite.norms(tensors).sum()).item():
            return None
        torchs = type(optimizer).__module__.startswith("torch.optim.")
        for state_too in (False, True):
            for harm in harms(optimizer, self.run.ours, state=state_too):
                # Of a user's optimizer, state that is new may be meant to be so; torch's begins with zeros.
                before = was_finite(shadow, harm.tensor)
                if before or (before is None and torchs):
                    return harm
        return None

    def stepped(self, optimizer: Any) -> Stepped | None:
        """What is known of an optimizer."""
        return self._steppeds.get(id(optimizer)) if optimizer is not None else None

    def sound(self) -> None:
        """All weights were seen to be finite: what is bad later on was not made by a step until now."""
        for stepped in self._steppeds.values():
            stepped.last = None

    def forget(self) -> None:
        """Keep no copies."""
        self._shadows.clear()
        self.unchecked.clear()

    # -- one gate later ------------------------------------------------------------------------------------------------

    def found(self, birth: Birth | None) -> Damage | None:
        """The step that damaged what a bad step is traced back to.

        Args:
            birth: What the replay found: a parameter that was bad before the step. None where there is no replay.
        """
        recent = sorted(self._steppeds.values(), key=lambda s: s.last.position if s.last is not None else -1)
        for stepped in reversed(recent):
            optimizer, last = stepped.optimizer(), stepped.last
            if optimizer is None or last is None:
                continue
            stepped.last = None  # looked at: what is bad later on comes from elsewhere
            wanted = birth.tensor_name if birth is not None else None
            with quiet():
                bad = list(harms(optimizer, self.run.ours))
            harm = next((h for h in bad if h.name == wanted), None if wanted else next(iter(bad), None))
            if harm is not None:
                damage = self._explained(optimizer, harm, last, birth, gradients=False)
                if damage is not None:
                    return damage
        return None

    def left_behind(self) -> Damage | None:
        """At the end of the watch: damage of each optimizer's last step, which no gate has followed."""
        for stepped in list(self._steppeds.values()):
            optimizer, last = stepped.optimizer(), stepped.last
            if optimizer is None or last is None:
                continue
            stepped.last = None
            with quiet():
                told = {e.tensor_name for e in self.run.book.events}  # found in passing, and not by this step's doing
                harm = next((h for h in harms(optimizer, self.run.ours) if h.name not in told), None)
                moment = next((h for h in harms(optimizer, self.run.ours, state=True) if h.name not in told), None)
            if harm is not None:
                damage = self._explained(optimizer, harm, last, None, gradients=True)
                if damage is not None:
                    return damage
            if moment is not None:
                found = birth_in_step(optimizer, moment, last.mark, exact=False, gradients=True)
                if found is None:
                    return Damage(last.step, birth_in_state(optimizer, moment, last.mark), "not_tried")
                birth, retake = found
                return Damage(last.step, birth, "yes", retake=retake)
        return None

    def _explained(
        self, optimizer: Any, harm: Harm, last: LastStep, birth: Birth | None, *, gradients: bool
    ) -> Damage | None:
        found = birth_in_step(optimizer, harm, last.mark, exact=False, gradients=gradients)
        if found is None and gradients:
            found = birth_in_step(optimizer, harm, last.mark, exact=False)
        if found is not None:
            birth_found, retake = found
            return self._dated(Damage(last.step, birth_found, "yes", retake=retake), harm, last, birth)
        with quiet():
            bad = _finite.bad_mask(harm.tensor)
            for moment in harms(optimizer, self.run.ours, state=True):
                if moment.parameter is not harm.parameter:
                    continue
                # Of another shape: statistics of rows and columns, which spoil all they are of.
                if moment.tensor.shape != bad.shape or bool((_finite.bad_mask(moment.tensor) & bad).any()):
                    retake = retake_with_state(optimizer, moment, gradients=gradients)
                    return Damage(last.step, birth_in_state(optimizer, moment, last.mark), "yes", retake=retake)
        if self._was_good(harm, last, birth):
            return Damage(last.step, birth_unknown(optimizer, harm, last.mark), "no")
        return None

    def _dated(self, damage: Damage, harm: Harm, last: LastStep, birth: Birth | None) -> Damage:
        """`damage` with the first step that may have done it: taken again, each step does the same to a mended row."""
        since = self.last_finite(harm.name) or 0
        if since >= last.step or not self._is_looked_up(harm, birth):
            return damage
        said = f"in step {since} or a later one: what no step looks up shows in no loss"
        note = f"{damage.birth.note}; {said}" if damage.birth.note else said
        return replace(damage, step=since, birth=replace(damage.birth, note=note))

    def _is_looked_up(self, harm: Harm, birth: Birth | None) -> bool:
        """True where a step uses some elements of the parameter and leaves others alone."""
        if birth is not None and birth.op.strip("_") in _SELECT:
            return True
        modules = (m for model in self.run.models.values() for m in model.modules() if isinstance(m, _SELECTIVE))
        return any(p is harm.parameter for m in modules for p in m._parameters.values())

    def _was_good(self, harm: Harm, last: LastStep, birth: Birth | None) -> bool:
        """True when the gate before would have seen these elements, had they been bad, and the step was large."""
        if self._is_looked_up(harm, birth):
            return False
        steps, columns = self.run.recorder.columns(ROWS)
        norms = columns.get(f"{GRAD_NORM_OF}{harm.name}", [])
        rates = columns.get(LEARNING_RATE, [])
        # A step of ordinary size makes nothing non-finite: then the training's own code wrote it, after the step.
        edge = _COULD_OVERFLOW * torch.finfo(harm.tensor.dtype).max
        rows = [(n, r) for s, n, r in zip(steps, norms, rates, strict=False) if s == last.step and n == n]
        # Of several gates in one step (weights moved for a second backward), the last is the optimizer's own.
        return any(n > 0 and not n * r < edge for n, r in rows[-1:])
