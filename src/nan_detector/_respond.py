"""What follows a confirmed suspicion: written down, explained, acted upon, in that order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from nan_detector._aftermath import Aftermath, BadState, Damage
from nan_detector._before import LEARNING_RATE, before_sentences
from nan_detector._capsule.write import Capsules
from nan_detector._config import Policy, Replay, policy_named
from nan_detector._entries import Entry
from nan_detector._erased import erased
from nan_detector._errors import NonFiniteError
from nan_detector._gate import Suspicion
from nan_detector._hit import (
    FINITE_AGAIN,
    HISTORY,
    Finding,
    complete,
    investigate,
    new_event,
    relevant_entries,
    unmoved,
    weights_state,
)
from nan_detector._hyper import HyperProblem
from nan_detector._keeper import Keeper
from nan_detector._moment import Habits
from nan_detector._optimizer_events import hyper_event
from nan_detector._quiet import quiet
from nan_detector._ready import make_ready
from nan_detector._records import NaNEvent
from nan_detector._retake import Retake
from nan_detector._run import Run
from nan_detector._run_step import Call
from nan_detector._session import Session, session
from nan_detector._state import logger, strict
from nan_detector._step_trials import with_step_trials
from nan_detector._summary import headline, story
from nan_detector._trace import BirthKind
from nan_detector._trials import with_trials
from nan_detector._watchers import StepWatch
from nan_detector._zeroing import Zeroing

T = TypeVar("T")

#: Policies that do not take the step.
REFUSING = (Policy.STOP, Policy.SKIP, Policy.ROLLBACK)
_STALE = (
    "the gradients of the same step again are finite: what is in .grad was there before it, or was written there by "
    "other code (is optimizer.zero_grad() called in every step?)"
)
_LOOK_UPS = ("embedding", "embedding_bag", "index", "index_select", "gather")
#: Times that trials are made of the same story: a run that skips a bad batch in every epoch need not be slower for it.
TRIED_AT_MOST = 3
_TOLD_ENOUGH = f"not tried: the same was tried {TRIED_AT_MOST} times in this run"
#: Rows of the flight recorder that an event is explained from.
ROWS = 200


class Responder:
    """Makes events of suspicions, and decides what becomes of the step."""

    def __init__(self, run: Run, watch: StepWatch, aftermath: Aftermath, keeper: Keeper | None) -> None:
        self.run = run
        self.aftermath = aftermath
        self.keeper = keeper
        self.watch = watch
        self.running: Call | None = None  # the call of `run_step` that is running
        self.raised: Call | None = None  # the last one, if it raised and nothing else was done since
        self.zeroing = Zeroing()
        self._not_zeroed = ""  # what is known of the gradients of the step that is explained
        self._habits: dict[int, Habits] = {}
        self._told: Counter[Any] = Counter()  # how often each story was tried
        make_ready()
        config = run.config
        self.capsules = Capsules(run, config.log_dir, config.capsule_bytes) if config.capsule else None

    def hit(
        self,
        current: Session,
        suspicion: Suspicion,
        backwards: int,
        *,
        stepping: bool,
        finding: Finding | None = None,
        optimizer: Any = None,
    ) -> bool:
        """A confirmed bad step: write it down, find out, act.

        Args:
            current: The session of the thread that steps.
            suspicion: What was confirmed.
            backwards: Backward passes since the last gate.
            stepping: An optimizer's step (or the loop's own update) is about to follow.
            finding: What is known already; None to find out.
            optimizer: The optimizer whose step it is, where there is one.

        Returns:
            True when the step must not be taken.

        Raises:
            NonFiniteError: The policy says so.
        """
        run, config = self.run, self.run.config
        known = config.stop_on_first and any(e.severity == "error" for e in run.book.events)
        key = id(optimizer) if optimizer is not None else 0
        # "skip" and "rollback" go on because each bad step is news; after "warn" all that follow are of the first.
        if known and config.on_nan is Policy.WARN:
            return False
        if known and config.on_nan is Policy.STOP:
            run.ledger.dropped(run.step, run.groups, key)
            return True
        if known and config.on_nan is Policy.SKIP and self._is_told(suspicion):
            run.ledger.dropped(run.step, run.groups, key)
            if not run.ledger.excess(config.max_skips, run.groups, key):
                return True
        event = new_event(
            run.step,
            suspicion,
            phase="loss" if suspicion.losses else "backward" if suspicion.gradients else "optimizer",
            micro_step=max(0, backwards - 1),
        )
        run.book.provisional(event)
        if self.capsules is not None and (suspicion.losses or suspicion.gradients):
            with current.off():
                event = self.capsules.begin(event, current.tape)
        self._not_zeroed = self._about_zeroing(current, optimizer)
        event = self._explained(current, event, suspicion, finding, optimizer)
        event = replace(event, sample_id=run.ids_of(event.sample_index) or event.sample_id)
        policy = self._policy(event)
        weights = self._weights(event, policy, stepping and not suspicion.erased, relevant_entries(current.tape))
        event = replace(event, weights=weights, action=policy.value)
        if isinstance(suspicion.hyper, BadState) and suspicion.hyper.since is not None and event.phase == "state":
            event = replace(event, weights=f"damaged since step {suspicion.hyper.since}")
        event = self._with_capsule(current, self._since(event))
        return self._decided(event, policy, key, later=optimizer is not None)

    def _is_told(self, suspicion: Suspicion) -> bool:
        """True for state that stays bad from step to step, which one event has told of."""
        if suspicion.losses or suspicion.gradients or not isinstance(suspicion.hyper, BadState):
            return False
        return any(e.tensor_name == suspicion.hyper.birth.tensor_name for e in self.run.book.events)

    def _with_capsule(self, current: Session, event: NaNEvent) -> NaNEvent:
        """`event`, whose capsule holds all that was found; without it where there is nothing to replay."""
        if self.capsules is None or event.capsule is None:
            return event
        if event.phase == "optimizer":  # of an earlier step, and of what no replay runs
            self.capsules.drop(event.capsule)
            return replace(event, capsule=None)
        self.run.book.write(event, sync=True)  # what is known is in the log before anything else is written
        with current.off():
            self.capsules.finish(event)
        return event

    def _decided(self, event: NaNEvent, policy: Policy, key: int, *, later: bool, refused: bool = True) -> bool:
        """Write the final event down and do what the policy says. True when the step must not be taken.

        Args:
            event: The event, complete.
            policy: What to do.
            key: Identity of the optimizer; 0 where there is none.
            later: It is stepping: a state is put back when that is over.
            refused: The step is not taken, or was undone, where the policy is one of those that go on.
        """
        run = self.run
        excess = ""
        if policy in REFUSING and refused:
            run.ledger.dropped(run.step, run.groups, key)
            if policy is not Policy.STOP:
                excess = run.ledger.excess(run.config.max_skips, run.groups, key)
        if policy is Policy.ROLLBACK:
            event = self._went_back(event, later=later and not excess)
        elif policy is Policy.SKIP and event.weights.startswith("damaged"):
            note = "skipping cannot mend weights that are damaged already: use on_nan='rollback', or protect='full'"
            event = replace(event, notes=(*event.notes, note))
        if excess:
            said = f"{excess}: more than max_skips={run.config.max_skips} allows"
            event = replace(event, action="raise", notes=(*event.notes, said))
            self._final(event)
            raise NonFiniteError(
                f"{headline(event)}. {said[0].upper()}{said[1:]} ({run.ledger.skipped_steps} in all). Mend the cause "
                "that the event names, or allow more with max_skips (None: no limit).",
                event,
            )
        self._final(event)
        return self._act(policy, event)

    def _final(self, event: NaNEvent) -> None:
        if self.capsules is not None:
            self.capsules.update(event)
        self.run.book.final(event)

    def _went_back(self, event: NaNEvent, *, later: bool) -> NaNEvent:
        said = self.keeper.go_back(later=later) if self.keeper is not None else ()
        if said:
            return replace(event, weights="restored", bad_buffers=(), notes=(*event.notes, *said))
        note = "there was no good state to go back to yet: the step was dropped, as with 'skip'"
        return replace(event, notes=(*event.notes, note))

    def _weights(self, event: NaNEvent, policy: Policy, stepping: bool, entries: Sequence[Entry] = ()) -> str:
        if weights_state(self.run.names.parameters(), ()) == "clean":
            if policy is Policy.WARN and stepping:
                return f"damaged since step {event.step}"
            self.aftermath.sound()
            return "clean"
        if event.phase == "optimizer" or not (event.phase == "state" or unmoved(entries)):
            return f"damaged since step {event.step}"
        # They were bad before this step began. A clean gate tells that the weights its step used were finite, so that
        # step, or what came after it, has damaged them; a row that is looked up now and then is not used in every step.
        last = self.run.ledger.last_good_step
        return f"damaged since step {last if last is not None and event.op not in _LOOK_UPS else 0}"

    def _since(self, event: NaNEvent) -> NaNEvent:
        """`event` of a parameter that was bad before the step, with a fix that knows when it was still finite."""
        last = self.run.ledger.last_good_step
        late = event.cause is not None and event.cause.code == "parameter_non_finite" and event.op not in _LOOK_UPS
        if not late or event.cause is None or last is None:
            return event
        fix = (
            f"it was finite in step {last}: look at what has written it since, which is the optimizer's step and any "
            "code after it (clipping, averaging, loading)"
        )
        return replace(event, cause=replace(event.cause, fix=fix))

    def _explained(
        self,
        current: Session,
        event: NaNEvent,
        suspicion: Suspicion,
        finding: Finding | None,
        optimizer: Any = None,
    ) -> NaNEvent:
        """`_explain`, or the provisional event made final: a bug in the search must not cost the protection."""
        try:
            return self._explain(current, event, suspicion, finding, optimizer)
        except Exception as error:
            if strict():
                raise
            logger.exception("the search for the origin failed; the event keeps what the gate saw")
            return replace(
                event, status="final", notes=(*event.notes, f"the search failed: {type(error).__name__}: {error}")
            )

    def _explain(
        self, current: Session, event: NaNEvent, suspicion: Suspicion, finding: Finding | None, optimizer: Any
    ) -> NaNEvent:
        if suspicion.hyper is not None and not suspicion.losses and not suspicion.gradients:
            steps, columns = self.run.recorder.columns(ROWS)
            rates = tuple(columns.get(LEARNING_RATE, ()))
            event = hyper_event(event, suspicion.hyper, before_sentences(columns, steps, layer=None), rates)
            option = suspicion.hyper.name if isinstance(suspicion.hyper, HyperProblem) else ""
            retake = Retake(optimizer) if optimizer is not None else None
            return self._step_tried(event, retake, option, rates)
        if finding is None and self.run.config.replay is Replay.OFF:
            finding = Finding(notes=("replay='off': only what the gate saw is known",))
        if finding is None:
            finding = self.watch.explain(current, suspicion)
        if finding is None:
            with current.off():
                finding = self._investigate(current)
        if suspicion.gradients and not suspicion.losses:
            finding = replace(finding, notes=tuple(_STALE if n == FINITE_AGAIN else n for n in finding.notes))
        damage = self._damage_behind(finding)
        if damage is not None:
            return self._complete_damage(event, damage)
        finding = self._with_zeroing(finding)
        return self._tried(current, self._complete(event, finding), finding)

    def _about_zeroing(self, current: Session, optimizer: Any) -> str:
        stepped = self.aftermath.stepped(optimizer)
        pending = current.tape.pending()
        if stepped is None or stepped.last is None or not pending:
            return ""
        with quiet():
            p = next((p for p in stepped.parameters if p.grad is not None), None)
            return self.zeroing.note(optimizer, p, stepped.last.position, current.tape, pending[0].number)

    def _with_zeroing(self, finding: Finding) -> Finding:
        """`finding` with what is known of gradients that nobody has set back."""
        said, self._not_zeroed = self._not_zeroed, ""
        if not said:
            return finding
        birth = finding.trace.birth if finding.trace is not None else None
        if finding.trace is None or birth is None:
            return replace(finding, notes=(*finding.notes, said))
        note = f"{birth.note}; {said}" if birth.note else said
        return replace(finding, trace=replace(finding.trace, birth=replace(birth, note=note)))

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

    def _complete_damage(self, event: NaNEvent, damage: Damage) -> NaNEvent:
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

    def damaged(self, damage: Damage, *, optimizer: Any = None) -> None:
        """What a step did is found after it.

        Raises:
            NonFiniteError: The policy says so.
        """
        name = damage.birth.tensor_name or "a parameter"
        suspicion = Suspicion(note=f"the optimizer's step left {name} non-finite, from finite gradients")
        event = new_event(damage.step, suspicion, phase="optimizer")
        self.run.book.provisional(event)
        event = self._complete_damage(event, damage)
        policy = self._policy(event)
        weights = "restored" if damage.restored else self._weights(event, policy, stepping=False)
        event = replace(event, weights=weights, action=policy.value)
        key = id(optimizer) if optimizer is not None else 0
        self._decided(event, policy, key, later=False, refused=damage.restored)

    def found_at_end(self, current: Session, problem: BadState, step: int) -> None:
        """State that is not finite when the watch ends, which neither loss nor gradients have shown.

        Raises:
            NonFiniteError: The policy says so.
        """
        suspicion = Suspicion(hyper=problem)
        event = new_event(step, suspicion, phase="optimizer")
        self.run.book.provisional(event)
        event = self._explained(current, event, suspicion, None)
        policy = self._policy(event)
        known = problem.since is not None and event.phase == "state"
        weights = f"damaged since step {problem.since}" if known else self._weights(event, policy, stepping=False)
        self._decided(replace(event, weights=weights, action=policy.value), policy, 0, later=False, refused=False)

    def _complete(self, event: NaNEvent, finding: Finding) -> NaNEvent:
        _, columns = self.run.recorder.columns(ROWS, only=HISTORY)
        return complete(event, finding, {name: tuple(values) for name, values in columns.items()}, ())

    def _investigate(self, current: Session) -> Finding:
        """The replay: of the whole step where it is one call, else (or where that fails) of what the tape holds."""
        models, budget = self.run.models, self.run.config.replay_budget_s
        evidence = self.capsules.evidence if self.capsules is not None else None
        call = self.running or self.raised
        if call is None or call.session is not current or not call.whole:
            return investigate(current.tape, models, budget, evidence=evidence)
        whole = investigate(current.tape, models, budget, call=call, evidence=evidence)
        if whole.reproduced == "yes":
            return replace(whole, micro_step=whole.micro_step + call.backwards_before)
        taped = investigate(current.tape, models, budget, evidence=evidence)
        notes = tuple(n for n in whole.notes if n not in taped.notes)
        if taped.reproduced == "yes":
            return replace(taped, notes=(*taped.notes, *(f"the step function called again: {n}" for n in notes)))
        return replace(whole, notes=(*whole.notes, *(n for n in taped.notes if n not in whole.notes)))

    def bad_at_any_scale(self, current: Session) -> Finding | None:
        """What makes a step bad that a GradScaler skips, if it is so without a loss scale as well."""
        if self.run.config.replay is Replay.OFF:
            return None
        evidence = self.capsules.evidence if self.capsules is not None else None
        with current.off():
            finding = investigate(
                current.tape, self.run.models, self.run.config.replay_budget_s, unscaled=True, evidence=evidence
            )
        return finding if finding.trace is not None and finding.trace.birth is not None else None

    def erased_by(self, current: Session) -> Finding | None:
        """The overflow that left this step without gradients, if one did."""
        if self.run.config.replay is Replay.OFF:
            return None
        call = self.running or self.raised
        ways = (None, call) if call is not None and call.session is current and call.whole else (None,)
        with current.off():
            for way in ways:
                finding = investigate(
                    current.tape, self.run.models, self.run.config.replay_budget_s, call=way, conclude=erased
                )
                if finding.trace is not None:
                    return finding
        return None

    def after_exception(self, current: Session, error: BaseException) -> None:
        """The user's code raised: if a bad value made it do so, the event must still be there."""
        with current.off():
            finding = self._investigate(current)
        if finding.trace is None or finding.trace.birth is None:
            return
        event = new_event(self.run.step, Suspicion(), phase="forward")
        event = replace(event, symptom=f"the step raised {type(error).__name__}")
        self.run.book.provisional(event)
        if self.capsules is not None:
            with current.off():
                event = self.capsules.begin(event, current.tape)
        damage = self._damage_behind(finding)
        if damage is None:
            event = self._tried(current, self._complete(event, finding), finding)
        else:
            event = self._complete_damage(event, damage)
        weights = self._weights(event, Policy.STOP, stepping=False)
        event = self._with_capsule(current, replace(event, weights=weights, action="raised by the training"))
        self._final(event)

    def _policy(self, event: NaNEvent) -> Policy:
        chosen = self.run.config.on_nan
        if isinstance(chosen, Policy):
            return chosen
        try:
            return policy_named(chosen(event), "the answer of on_nan")
        except Exception:
            # The user's callback is neither the training nor ours; the weights are protected all the same.
            logger.exception("on_nan gave no policy; the step is not taken, as with 'stop'")
            return Policy.STOP

    def _act(self, policy: Policy, event: NaNEvent) -> bool:
        if policy is Policy.RAISE:
            raise NonFiniteError(str(event), event)
        if policy is Policy.STOP:
            self.run.stop()
        return policy in REFUSING

    def run_step(
        self,
        contain: Callable[..., Any],
        function: Callable[..., T],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> T:
        """Call a step function so that it can be called again."""
        outer, self.raised = self.running, None
        self.running = contain(Call, function, args, kwargs, self.run.models, self._habits, session())
        try:
            out = function(*args, **kwargs)
        except Exception:
            # The end of the watch may still want to know why.
            self.raised = self.running
            if self.raised is not None:
                self.raised.raised = True
            raise
        else:
            if self.running is not None:
                contain(self.running.ended)
        finally:
            self.running = outer
        return out
