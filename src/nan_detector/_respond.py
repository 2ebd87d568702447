"""What follows a confirmed suspicion: written down, explained, acted upon, in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nan_detector._aftermath import Aftermath, BadState, Damage
from nan_detector._bad_weights import unmoved, weights_state
from nan_detector._capsule.write import Capsules
from nan_detector._config import Policy, policy_named
from nan_detector._entries import Entry
from nan_detector._errors import NonFiniteError
from nan_detector._events import new_event
from nan_detector._explain import LOOK_UPS, Explainer
from nan_detector._finding import Finding
from nan_detector._gate import Suspicion
from nan_detector._hit import relevant_entries
from nan_detector._keeper import Keeper
from nan_detector._quiet import quiet
from nan_detector._ready import make_ready
from nan_detector._records import NaNEvent
from nan_detector._run import Run
from nan_detector._search import Search
from nan_detector._session import Session
from nan_detector._state import logger
from nan_detector._step_calls import StepCalls
from nan_detector._summary_title import headline
from nan_detector._watchers import StepWatch
from nan_detector._zeroing import Zeroing

#: Policies that do not take the step.
REFUSING = (Policy.STOP, Policy.SKIP, Policy.ROLLBACK)


class Responder:
    """Makes events of suspicions, and decides what becomes of the step."""

    def __init__(self, run: Run, watch: StepWatch, aftermath: Aftermath, keeper: Keeper | None) -> None:
        self.run = run
        self.aftermath = aftermath
        self.keeper = keeper
        self.told: NaNEvent | None = None  # the last event
        self.zeroing = Zeroing()
        make_ready()
        config = run.config
        self.capsules = Capsules(run, config.log_dir, config.capsule_bytes) if config.capsule else None
        self.calls = StepCalls(run)
        self.search = Search(run, self.calls, self.capsules)
        self.explainer = Explainer(run, watch, aftermath, self.search)

    def hit(
        self,
        current: Session,
        suspicion: Suspicion,
        backwards: int,
        *,
        stepping: bool,
        finding: Finding | None = None,
        optimizer: Any = None,
        notes: tuple[str, ...] = (),
    ) -> bool:
        """A confirmed bad step: write it down, find out, act.

        Args:
            current: The session of the thread that steps.
            suspicion: What was confirmed.
            backwards: Backward passes since the last gate.
            stepping: An optimizer's step (or the loop's own update) is about to follow.
            finding: What is known already; None to find out.
            optimizer: The optimizer whose step it is, where there is one.
            notes: What else the event has to say.

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
        event = replace(event, notes=(*event.notes, *notes))
        run.book.provisional(event)
        if self.capsules is not None and (suspicion.losses or suspicion.gradients):
            with current.off():
                event = self.capsules.begin(event, current.tape)
        not_zeroed = self._about_zeroing(current, optimizer)
        event = self.explainer.explained(current, event, suspicion, finding, optimizer, not_zeroed)
        event = replace(event, sample_id=run.ids_of(event.sample_index) or event.sample_id)
        policy = self._policy(event)
        weights = self._weights(event, policy, stepping and not suspicion.erased, relevant_entries(current.tape))
        event = replace(event, weights=weights, action=policy.value)
        since = suspicion.hyper.since if isinstance(suspicion.hyper, BadState) else None
        if since is not None and event.phase in ("state", "optimizer"):
            event = replace(event, weights=f"damaged since step {since}")
        event = self._with_capsule(current, self.explainer.dated(event))
        return self._decided(event, policy, key, later=optimizer is not None)

    def hit_again(self, event: NaNEvent, optimizer: Any) -> bool:
        """A further optimizer of a step that an event has told of: it is treated likewise, without another event.

        Returns:
            True when its step must not be taken.

        Raises:
            NonFiniteError: The policy says so.
        """
        policy = policy_named(event.action, "the action of an event")
        if policy is Policy.RAISE:
            raise NonFiniteError(str(event), event)
        if policy in REFUSING:
            self.run.ledger.dropped(self.run.step, self.run.groups, id(optimizer))
        return policy in REFUSING

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
        self.told = event
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
        return f"damaged since step {last if last is not None and event.op not in LOOK_UPS else 0}"

    def _about_zeroing(self, current: Session, optimizer: Any) -> str:
        stepped = self.aftermath.stepped(optimizer)
        pending = current.tape.pending()
        if stepped is None or stepped.last is None or not pending:
            return ""
        with quiet():
            p = next((p for p in stepped.parameters if p.grad is not None), None)
            return self.zeroing.note(optimizer, p, stepped.last.position, current.tape, pending[0].number)

    def damaged(self, damage: Damage, *, optimizer: Any = None) -> None:
        """What a step did is found after it.

        Raises:
            NonFiniteError: The policy says so.
        """
        name = damage.birth.tensor_name or "a parameter"
        suspicion = Suspicion(note=f"the optimizer's step left {name} non-finite, from finite gradients")
        event = new_event(damage.step, suspicion, phase="optimizer")
        self.run.book.provisional(event)
        event = self.explainer.of_damage(event, damage)
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
        event = self.explainer.explained(current, event, suspicion)
        policy = self._policy(event)
        known = problem.since is not None and event.phase in ("state", "optimizer")
        weights = f"damaged since step {problem.since}" if known else self._weights(event, policy, stepping=False)
        self._decided(replace(event, weights=weights, action=policy.value), policy, 0, later=False, refused=False)

    def after_exception(self, current: Session, error: BaseException) -> None:
        """The user's code raised: if a bad value made it do so, the event must still be there."""
        with current.off():
            finding = self.search.origin(current)
        if finding.trace is None or finding.trace.birth is None:
            return
        event = new_event(self.run.step, Suspicion(), phase="forward")
        event = replace(event, symptom=f"the step raised {type(error).__name__}")
        self.run.book.provisional(event)
        if self.capsules is not None:
            with current.off():
                event = self.capsules.begin(event, current.tape)
        event = self.explainer.completed(current, event, finding)
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
