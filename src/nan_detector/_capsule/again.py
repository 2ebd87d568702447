"""A capsule's step run again: the same replay and diagnosis, with a model that the user's code makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nan_detector._answers import OpSeen
from nan_detector._births import location_text, name_of_op
from nan_detector._capsule.endings import Loss, with_gradients, with_loss
from nan_detector._capsule.evidence import Evidence
from nan_detector._capsule.read import Capsule
from nan_detector._capsule.rebuild import Rebuilder
from nan_detector._capsule.rebuilt import Rebuilt
from nan_detector._capsule.state import put_state, settings_of
from nan_detector._errors import CapsuleError
from nan_detector._events import complete, new_event
from nan_detector._finding import Finding
from nan_detector._finite import stats
from nan_detector._gate import Suspicion
from nan_detector._hit import investigate
from nan_detector._lineage import OpRecord
from nan_detector._naming import models_of
from nan_detector._quiet import quiet
from nan_detector._records import Location, NaNEvent
from nan_detector._trials import with_trials

Tensor = torch.Tensor

#: Operations shown before and after the birth.
BEFORE, AFTER = 10, 5
#: Seconds that the trials may take.
TRIALS_S = 60.0


@dataclass(frozen=True)
class Again:
    """What the step gave this time.

    Attributes:
        event: The event of this replay.
        differences: In what it is not the capsule's event, in words; () where it is the same.
        notes: How the step was made, and what of it is not in the capsule.
        operations: Those around the birth, where they were asked for.
    """

    event: NaNEvent
    differences: tuple[str, ...]
    notes: tuple[str, ...]
    operations: tuple[OpSeen, ...] = ()

    @property
    def same(self) -> bool:
        """True where the event is the capsule's: same operation, place and cause."""
        return not self.differences


@dataclass
class _Around(Evidence):
    """Statistics of the operations around one of them."""

    number: int = 0
    seen: list[OpSeen] = field(default_factory=list)

    def gave(self, record: OpRecord, ins: list[Tensor], outs: list[Tensor]) -> None:
        if self.number - BEFORE <= record.index <= self.number + AFTER:
            self.seen.append(
                OpSeen(
                    record.index,
                    name_of_op(record),
                    record.phase,
                    record.module[0] if record.module is not None else None,
                    location_text(record),
                    tuple(stats(t) for t in ins),
                    stats(outs[0]) if outs else None,
                    record.index == self.number,
                )
            )

    def __hash__(self) -> int:
        return id(self)


def again(
    capsule: Capsule,
    make_model: Callable[[], Any],
    loss: Loss | None = None,
    *,
    budget_s: float = 600.0,
    operations: bool = False,
) -> Again:
    """Run the capsule's step again.

    Args:
        capsule: The capsule.
        make_model: Gives the model that was trained, or a list or dict of models; its weights are replaced by the
            capsule's.
        loss: Called as ``loss(output, batch)`` with what the model returned and the tensors of the step by name. None
            uses the recorded calls, or where they cannot be made the gradients that arrived at the model's outputs.
        budget_s: Seconds that one replay may take.
        operations: Also list the operations around the birth.

    Returns:
        What was found.

    Raises:
        CapsuleError: The capsule is damaged, or does not fit the model.
    """
    with settings_of(capsule.environment):
        models = _models(make_model)
        notes = put_state(capsule.state, models, capsule.state_tensors())
        rebuilt = Rebuilder(capsule.step, models, capsule.step_tensors()).rebuild()
        notes += _loss_part(rebuilt, capsule, loss)
        finding, number = _replayed(rebuilt, models, budget_s, None)
        event = _event(capsule, finding, rebuilt)
        seen: tuple[OpSeen, ...] = ()
        if operations and number is not None:
            around = _Around(number=number)
            _replayed(rebuilt, models, budget_s, around)
            seen = tuple(around.seen)
    differences = differences_of(capsule.event, event)
    if differences:
        notes += [f"not in the capsule: {what}" for what in dict.fromkeys(rebuilt.lost)]
    return Again(event, differences, tuple(notes), seen)


def _models(make_model: Callable[[], Any]) -> dict[str, torch.nn.Module]:
    made = make_model()
    try:
        return models_of(made)
    except TypeError as error:
        raise CapsuleError(f"--model gave no model: {error}") from None


def _loss_part(rebuilt: Rebuilt, capsule: Capsule, loss: Loss | None) -> list[str]:
    if loss is not None:
        with_loss(rebuilt, loss)
        return []
    if not rebuilt.unknown:
        return []
    what = ", ".join(dict.fromkeys(rebuilt.unknown))
    if with_gradients(rebuilt, capsule.gradients()):
        return [
            f"the loss is not in the capsule ({what} is no function of PyTorch): the gradients that arrived at the "
            "model's output took its place; --loss runs the loss itself"
        ]
    return [f"part of the step is not in the capsule ({what} is no function of PyTorch): give --loss"]


def _replayed(rebuilt: Rebuilt, models: Any, budget_s: float, evidence: Evidence | None) -> tuple[Finding, int | None]:
    finding = investigate(rebuilt.tape, models, budget_s, names=rebuilt.names, evidence=evidence)
    birth = finding.trace.birth if finding.trace is not None else None
    return finding, birth.number if birth is not None else None


def _event(capsule: Capsule, finding: Finding, rebuilt: Rebuilt) -> NaNEvent:
    was = capsule.event
    event = new_event(was.step, Suspicion(), phase=was.phase, micro_step=was.micro_step)
    event = replace(
        event, symptom=was.symptom, loss=was.loss, weights=was.weights, action=was.action, capsule=str(capsule.path)
    )
    with quiet():
        event = complete(event, finding, capsule.history, was.before)
    if finding.again is not None:
        event = with_trials(event, finding, TRIALS_S)
    return _with_place(event, rebuilt)


def _with_place(event: NaNEvent, rebuilt: Rebuilt) -> NaNEvent:
    """The event with what the capsule knows of the lines of the loop, whose code is not loaded here."""

    def known_at(where: Location | None) -> list[tuple[Location, str, str | None]]:
        return rebuilt.places.get((where.file, where.line), []) if where is not None else []

    sites = [replace(s, location=known_at(s.location)[0][0]) if known_at(s.location) else s for s in event.spread]
    event = replace(event, spread=tuple(sites))
    known = known_at(event.location)
    if not known:
        return event
    calls = {call for _, name, call in known if call is not None and name.strip("_").startswith(event.call or " ")}
    return replace(event, location=known[0][0], call=calls.pop() if len(calls) == 1 else event.call)


def differences_of(was: NaNEvent, now: NaNEvent) -> tuple[str, ...]:
    """In what `now` is another event than `was`, in words: its operation, its place, its cause."""
    if now.op is None:
        return ("nothing non-finite was found this time",)
    out = []
    if was.op != now.op:
        out.append(f"the operation is {now.op}, and was {was.op}")
    if (was.layer_name, was.phase) != (now.layer_name, now.phase) and _line(was) != _line(now):
        out.append(f"the place is {_place(now)}, and was {_place(was)}")
    codes = [e.cause.code if e.cause is not None else None for e in (was, now)]
    if codes[0] != codes[1]:
        out.append(f"the cause is {codes[1] or 'not known'}, and was {codes[0] or 'not known'}")
    return tuple(out)


def _line(event: NaNEvent) -> tuple[str, int] | None:
    return (event.location.file, event.location.line) if event.location is not None else None


def _place(event: NaNEvent) -> str:
    line = _line(event)
    at = f", {line[0]}:{line[1]}" if line is not None else ""
    return f"{event.layer_name or 'outside any module'} in phase {event.phase}{at}"
