"""From a provisional event to one that says why: what is found out, and what is tried, in that order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

from nan_detector._aftermath import Aftermath, Damage
from nan_detector._before import LEARNING_RATE, before_sentences
from nan_detector._config import Replay
from nan_detector._events import HISTORY, complete
from nan_detector._finding import FINITE_AGAIN, Finding
from nan_detector._gate import Suspicion
from nan_detector._hyper import HyperProblem
from nan_detector._last_writer import with_writer
from nan_detector._optimizer_events import hyper_event
from nan_detector._records import NaNEvent
from nan_detector._retake import Retake
from nan_detector._run import Run
from nan_detector._search import Search
from nan_detector._session import Session, session
from nan_detector._state import logger, strict
from nan_detector._step_trials import with_step_trials
from nan_detector._summary_title import story
from nan_detector._trace import BirthKind
from nan_detector._trials import with_trials
from nan_detector._watchers import StepWatch

_STALE = (
    "the gradients of the same step again are finite: what is in .grad was there before it, or was written there by "
    "other code (is optimizer.zero_grad() called in every step?)"
)
#: Operations that use a few rows of a parameter.
LOOK_UPS = ("embedding", "embedding_bag", "index", "index_select", "gather")
#: Times that trials are made of the same story: a run that skips a bad batch in every epoch need not be slower for it.
TRIED_AT_MOST = 3
_TOLD_ENOUGH = f"not tried: the same was tried {TRIED_AT_MOST} times in this run"
#: Rows of the flight recorder that an event is explained from.
ROWS = 200


class Explainer:
    """Explains the events of one run."""

    def __init__(self, run: Run, watch: StepWatch, aftermath: Aftermath, search: Search) -> None:
        self.run = run
        self.watch = watch
        self.aftermath = aftermath
        self.search = search
        self._told: Counter[Any] = Counter()  # how often each story was tried

    def explained(
        self,
        current: Session,
        event: NaNEvent,
        suspicion: Suspicion,
        finding: Finding | None = None,
        optimizer: Any = None,
        not_zeroed: str = "",
    ) -> NaNEvent:
        """`event` with its reason; made final as it is where that fails: a bug of ours must not cost the protection.

        Args:
            current: The session of the thread that steps.
            event: The provisional event.
            suspicion: What was confirmed.
            finding: What is known already; None to find out.
            optimizer: The optimizer whose step it is, where there is one.
            not_zeroed: What is known of gradients that nobody has set back.
        """
        try:
            return self._explain(current, event, suspicion, finding, optimizer, not_zeroed)
        except Exception as error:
            if strict():
                raise
            logger.exception("the search for the origin failed; the event keeps what the gate saw")
            return replace(
                event, status="final", notes=(*event.notes, f"the search failed: {type(error).__name__}: {error}")
            )

    def _explain(
        self,
        current: Session,
        event: NaNEvent,
        suspicion: Suspicion,
        finding: Finding | None,
        optimizer: Any,
        not_zeroed: str,
    ) -> NaNEvent:
        if suspicion.hyper is not None and not suspicion.losses and not suspicion.gradients:
            steps, columns = self.run.recorder.columns(ROWS)
            rates = tuple(columns.get(LEARNING_RATE, ()))
            event = hyper_event(event, suspicion.hyper, before_sentences(columns, steps, layer=None), rates)
            option = suspicion.hyper.name if isinstance(suspicion.hyper, HyperProblem) else ""
            event = self._with_writer(current, event)
            retake = Retake(optimizer) if optimizer is not None else None
            return self._step_tried(event, retake, option, rates)
        if finding is None and self.run.config.replay is Replay.OFF:
            finding = Finding(notes=("replay='off': only what the gate saw is known",))
        if finding is None:
            finding = self.watch.explain(current, suspicion)
        if finding is None:
            with current.off():
                finding = self.search.origin(current, partial(self._place_known, event, not_zeroed))
                finding = self.watch.as_it_ran(current, finding)
        if suspicion.gradients and not suspicion.losses:
            finding = replace(finding, notes=tuple(_STALE if n == FINITE_AGAIN else n for n in finding.notes))
        return self.completed(current, event, finding, not_zeroed)

    def completed(self, current: Session, event: NaNEvent, finding: Finding, not_zeroed: str = "") -> NaNEvent:
        """`event` of what a replay found, or of the optimizer's step that this goes back to, with its trials."""
        damage = self._damage_behind(finding)
        if damage is not None:
            return self.of_damage(event, damage)
        finding = _with_zeroing(finding, not_zeroed)
        return self._tried(current, self._with_writer(current, self._complete(event, finding)), finding)

    def _with_writer(self, current: Session, event: NaNEvent) -> NaNEvent:
        last, outside = self.run.ledger.last_good_step, current.tape.outside
        return with_writer(event, self.run.names, current.writers, last, outside)

    def _place_known(self, event: NaNEvent, not_zeroed: str, finding: Finding) -> None:
        """The replay has come as far as the bad loss: what is known by then is written down, and it goes on."""
        event = self._complete(event, _with_zeroing(finding, not_zeroed))
        if self._told[story(event)] < TRIED_AT_MOST:
            self.run.book.located(event)

    def _complete(self, event: NaNEvent, finding: Finding) -> NaNEvent:
        _, columns = self.run.recorder.columns(ROWS, only=HISTORY)
        return complete(event, finding, {name: tuple(values) for name, values in columns.items()}, ())

    def _tried(self, current: Session, event: NaNEvent, finding: Finding) -> NaNEvent:
        """The event with its trends and trials. What is known already is written down first: they take their time."""
        if finding.again is None:
            return self._with_trends(event)
        if self._is_tried_enough(event):
            return self._with_trends(replace(event, notes=(*event.notes, _TOLD_ENOUGH)))
        self.run.book.located(event)
        compiled = current.compiled_after >= current.tape.boundary
        event = self._with_trends(event)
        with current.off(), self.watch.at_rest():
            return with_trials(event, finding, self.run.config.replay_budget_s, compiled)

    def _with_trends(self, event: NaNEvent) -> NaNEvent:
        """`event` with what had been growing before it, in the layer that it names."""
        steps, columns = self.run.recorder.columns(ROWS)
        return replace(event, before=before_sentences(columns, steps, layer=event.layer_name))

    def _damage_behind(self, finding: Finding) -> Damage | None:
        """The optimizer step that made the bad parameter which a bad step goes back to."""
        birth = finding.trace.birth if finding.trace is not None else None
        if birth is not None and birth.kind != BirthKind.PARAMETER.value:
            return None
        return self.aftermath.found(birth)

    def of_damage(self, event: NaNEvent, damage: Damage) -> NaNEvent:
        """The event of what an optimizer's own arithmetic did, which is that of an earlier step."""
        steps, columns = self.run.recorder.columns(ROWS)
        history = {name: tuple(v for v in values if v == v) for name, values in columns.items()}  # no rate: NaN
        finding = Finding(damage.trace, damage.reproduced)
        event = complete(event, finding, history, before_sentences(columns, steps, layer=None))
        notes = event.notes
        if damage.step != event.step:
            notes = (*notes, f"found at step {event.step}, when {event.symptom}")
        event = replace(event, step=damage.step, phase="optimizer", verdict="optimizer", notes=notes)
        return self._step_tried(event, damage.retake)

    def _step_tried(
        self, event: NaNEvent, retake: Retake | None, option: str = "", rates: tuple[float, ...] = ()
    ) -> NaNEvent:
        """The event of an optimizer's step with its trials; what is known already is written down first."""
        config = self.run.config
        if retake is None or config.replay is Replay.OFF:
            return event
        if self._is_tried_enough(event):
            return replace(event, notes=(*event.notes, _TOLD_ENOUGH))
        self.run.book.located(event)
        with session().off(), self.watch.at_rest():
            return with_step_trials(event, retake, self.run.ours, config.replay_budget_s, option=option, rates=rates)

    def _is_tried_enough(self, event: NaNEvent) -> bool:
        """Count the event's story, and say whether it was tried often enough."""
        key = story(event)
        self._told[key] += 1
        return self._told[key] > TRIED_AT_MOST

    def dated(self, event: NaNEvent) -> NaNEvent:
        """`event` of a parameter that was bad before the step, with what is known of when it was still finite."""
        last = self.run.ledger.last_good_step
        if event.cause is not None and event.cause.code == "buffer_non_finite" and last is None:
            cause = replace(
                event.cause,
                explanation="No operation of the step made it: it was so before the first step that was judged.",
                fix="look at where it is made, in the module's __init__, or at the checkpoint that it was loaded from",
            )
            return replace(event, cause=cause)
        late = event.cause is not None and event.cause.code == "parameter_non_finite" and event.op not in LOOK_UPS
        if not late or event.cause is None or last is None:
            return event
        if event.location is not None:
            fix = f"it was finite in step {last}: look at what this line writes, which is the last that wrote it"
        else:
            fix = (
                f"it was finite in step {last}: look at what has written it since, which is the optimizer's step and "
                "any code after it (clipping, averaging, loading)"
            )
        return replace(event, cause=replace(event.cause, fix=fix))


def _with_zeroing(finding: Finding, said: str) -> Finding:
    """`finding` with what is known of gradients that nobody has set back."""
    if not said:
        return finding
    birth = finding.trace.birth if finding.trace is not None else None
    if finding.trace is None or birth is None:
        return replace(finding, notes=(*finding.notes, said))
    note = f"{birth.note}; {said}" if birth.note else said
    return replace(finding, trace=replace(finding.trace, birth=replace(birth, note=note)))
