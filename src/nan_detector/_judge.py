"""The gate at work: measure the step that is about to be taken, record it, and hand what is bad to the responder."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nan_detector._aftermath import Aftermath, BadState
from nan_detector._entries import Entry
from nan_detector._erased import SYMPTOM, Erasures
from nan_detector._errors import NonFiniteError
from nan_detector._evaluation import Evaluation, Seen, bad_outputs
from nan_detector._finding import Finding
from nan_detector._finite import read
from nan_detector._forewarn import Forewarning
from nan_detector._further import Further
from nan_detector._gate import Reading, Suspicion, beside, column_names, confirm, in_full, measure, take, without_scale
from nan_detector._hyper import HyperProblem, bad_hyperparameter
from nan_detector._layers import absolute_maxima
from nan_detector._looks import Looks
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._records import GradEvent, StepRow
from nan_detector._respond import Responder
from nan_detector._rounds import Rounds
from nan_detector._run import Run
from nan_detector._scaling import Skips, knows_scale, scale_in_use, skips_itself, still_scaled
from nan_detector._session import Session
from nan_detector._shared_step import SharedStep
from nan_detector._stepped import Stepped
from nan_detector._watchers import LayerWatch, StepWatch

Tensor = torch.Tensor


class Judge:
    """Judges the steps of one run."""

    def __init__(
        self,
        run: Run,
        watch: StepWatch,
        responder: Responder,
        aftermath: Aftermath,
        rounds: Rounds,
        shared: SharedStep,
    ) -> None:
        self.run = run
        self.watch = watch
        self.responder = responder
        self.aftermath = aftermath
        self.rounds = rounds
        self.shared = shared
        self.clean = False  # what was judged last was finite
        self.evaluation = Evaluation(run.names)
        self.further = Further(run, run.config.also_watch) if run.config.also_watch else None
        self.layers = watch.layers if isinstance(watch, LayerWatch) else None
        #: Nothing is read but the loss, gradients, layers and a slice of the state.
        self.simple = (type(watch) is StepWatch or self.layers is not None) and self.further is None
        self.fetched: tuple[Tensor | None] | None = None  # a slice of the state that a glance has asked for in vain
        self.skipping: Stepped | None = None  # whose step a GradScaler does not take
        self._skips = Skips()
        self.erasures = Erasures()
        self.looks = Looks(run, watch)
        self._forewarning = Forewarning()  # of a loop that updates the weights itself
        self._warned_step: int | None = None

    def judge(
        self,
        current: Session,
        pending: list[Entry],
        *,
        stepped: Stepped | None = None,
        given: list[tuple[str, Tensor]] | None = None,
        is_mine: Callable[[Session, Entry], bool],
    ) -> bool:
        """Judge the losses of `pending` and the gradients of `stepped`'s optimizer, or those `given`.

        Returns:
            True when the step must not be taken.

        Raises:
            NonFiniteError: The policy says so.
        """
        self.clean = False
        losses = [loss for e in pending for loss in e.unscaled or e.losses]
        (state,) = self.fetched or (self.rounds.due(),)
        self.fetched = None
        scale = scale_in_use(current)
        if current.looks:
            self.tell_handled(current, pending)
        optimizer = stepped.optimizer() if stepped is not None else None
        with quiet():
            columns, extra = self.watch.collect()
            layers = extra
            if given is None and stepped is not None:
                names, grads = stepped.gradients()
            else:
                names, grads = [n for n, _ in given or ()], [g for _, g in given or ()]
            if scale is not None:
                extra = scale.reshape(1) if extra is None else torch.cat([extra, beside(scale.reshape(1), extra)])
            evaluated, outputs = self.evaluation.collect()
            if outputs is not None:
                extra = outputs if extra is None else torch.cat([extra, beside(outputs, extra)])
            sums = self.further.next_slice() if self.further is not None else None
            if sums is not None:
                extra = sums if extra is None else torch.cat([extra, beside(sums, extra)])
            if state is not None:
                extra = state if extra is None else torch.cat([extra, beside(state, extra)])
            others = self.shared.look(stepped)
            if others is not None:
                extra = others if extra is None else torch.cat([extra, beside(others, extra)])
            forewarning = self._forewarning if stepped is None else stepped.forewarning
            reading, extremes = measure(grads, losses, extra, whole=forewarning.asks_for_norms)
        if others is not None:
            self.shared.looked(extremes.pop())
        seen = [extremes.pop() for _ in self.rounds.parts] if state is not None else []
        further = [extremes.pop() for _ in range(sums.numel())] if sums is not None else []
        if evaluated:
            tail = len(extremes) - 2 * len(evaluated)
            self._tell_evaluated(evaluated, extremes[tail:])
            del extremes[tail:]
        factor = extremes.pop() if scale is not None else None
        carried = factor if scale is not None and still_scaled(optimizer) else None
        if scale is not None and carried is not None:
            reading = without_scale(reading, scale, carried)
        if reading.suspicious:
            reading = in_full(reading, grads, carried)
        overflow = scale is not None and optimizer is None
        damaged = self.rounds.judge(seen) if seen and not reading.suspicious else None
        problem: HyperProblem | BadState | None = self._damaging(stepped, optimizer)
        if stepped is not None and optimizer is not None and problem is None:
            unseen = id(optimizer.state) != stepped.state_seen
            found = self.aftermath.bad_state(stepped, optimizer) if unseen else None
            problem = self.rounds.dated(found) if found is not None else None
        problem = damaged if problem is None else problem
        refuse = False
        if reading.suspicious or problem is not None or overflow or reading.total == 0.0:
            # What is bad at the gate of a further optimizer is explained from the step that it shares.
            pending = pending or self.shared.reopen(current.tape)
        suspicion = Suspicion()
        if reading.suspicious or problem is not None:
            suspicion = confirm(names, grads, losses)
            if problem is not None:
                suspicion = Suspicion(suspicion.losses, suspicion.gradients, suspicion.loss, problem)
            elif scale is not None and suspicion and not suspicion.losses and skips_itself(optimizer):
                suspicion, overflow = Suspicion(), True
            if suspicion and self._is_others(current, suspicion, pending, is_mine):
                suspicion = Suspicion()
            if suspicion:
                refuse = self._hit(current, suspicion, pending, optimizer)
                overflow = False
        if not (suspicion or overflow or refuse) and reading.total == 0.0:
            suspicion, refuse = self._erased(current, pending, optimizer)
        if scale is not None:
            if overflow:
                self.run.ledger.scaler_skips += 1
                suspicion = self._overflowed(current, pending)
            elif not suspicion:
                self._skips.over(current.scaler)
        self._record(reading, names, bool(losses), stepped, factor, self.watch.recorded(columns, layers))
        if not suspicion:
            if reading.largest is not None and reading.largest > self.run.config.grad_norm_warn:
                self.warn_of_norms(reading, names)
            self.watch.healthy(current, columns, extremes)
            self._forewarn(current, reading, names, stepped, factor, overflow, columns, extremes)
            if not overflow and (names or losses):
                self.clean = True
                self.run.ledger.last_good_step = self.run.step
        if self.further is not None:
            self.further.judge(further)
        return refuse

    def last_round(self, current: Session, steppeds: Iterable[Stepped]) -> None:
        """Look at all state once more, at the end of the watch; the first that is bad is an event."""
        for problem in self.rounds.last():
            self.responder.found_at_end(current, problem, self.rounds.step)
            return
        for stepped in steppeds:
            optimizer = stepped.optimizer()
            if stepped.counted and optimizer is not None and stepped.state_seen != id(optimizer.state):
                found = self.aftermath.bad_state(stepped, optimizer)
                if found is not None:
                    self.responder.found_at_end(current, self.rounds.dated(found), self.rounds.step)
                    return

    def _erased(self, current: Session, pending: list[Entry], optimizer: Any) -> tuple[Suspicion, bool]:
        """Every gradient is 0: the event, and whether the step is refused, where an overflowed norm made them so."""
        key = id(optimizer) if optimizer is not None else 0
        if not self.erasures.suspected(current.tape, pending, key, self.run.groups):
            return Suspicion(), False
        finding = self.responder.search.erased_by(current)
        if finding is None:
            return Suspicion(), False
        self.erasures.over(key)
        suspicion = Suspicion(note=SYMPTOM, erased=True)
        return suspicion, self._hit(current, suspicion, pending, optimizer, finding)

    def _hit(
        self,
        current: Session,
        suspicion: Suspicion,
        pending: list[Entry],
        optimizer: Any,
        finding: Finding | None = None,
    ) -> bool:
        stepping = optimizer is not None or self.run.updating
        told = self.shared.told
        self.responder.told = None
        try:
            if told is not None and suspicion.hyper is None:
                return self.responder.hit_again(told, optimizer)
            return self.responder.hit(
                current,
                suspicion,
                len(pending),
                stepping=stepping,
                optimizer=optimizer,
                finding=finding,
                notes=self.shared.notes(current.tape),
            )
        except NonFiniteError:
            # The step has been judged: it must not be judged a second time when the block ends.
            current.tape.judged(keep_alive=True)
            self.watch.next_step()
            self.shared.raised()
            raise
        finally:
            if self.responder.told is not None and (suspicion.losses or suspicion.gradients or suspicion.erased):
                self.shared.tell(self.responder.told)

    def _overflowed(self, current: Session, pending: list[Entry]) -> Suspicion:
        """A GradScaler skips this step: its own business, unless the step is bad without any scale as well."""
        if not (self._skips.worth_a_look(current.scaler) and knows_scale(current.tape)):
            return Suspicion()
        finding = self.responder.search.bad_at_any_scale(current)
        if finding is None:
            return Suspicion()
        note = "gradients are not finite at any loss scale: the GradScaler would skip such steps for ever"
        suspicion = Suspicion(note=note)
        self.responder.hit(current, suspicion, len(pending), stepping=self.run.updating, finding=finding)
        return suspicion

    def _is_others(
        self,
        current: Session,
        suspicion: Suspicion,
        pending: list[Entry],
        is_mine: Callable[[Session, Entry], bool],
    ) -> bool:
        """True when the only thing bad is the loss of a model that this detector does not watch."""
        if suspicion.gradients or suspicion.hyper is not None:
            return False
        first = 0
        for e in pending:
            count = len(e.losses)
            if any(first <= i < first + count for i in suspicion.losses) and is_mine(current, e):
                return False
            first += count
        return True

    # -- the record ----------------------------------------------------------------------------------------------------

    def _record(
        self,
        reading: Reading,
        names: list[str],
        has_loss: bool,
        stepped: Stepped | None,
        scale: float | None,
        further: tuple[tuple[str, ...], Tensor] | None,
    ) -> None:
        if not names and not has_loss:
            return
        run = self.run
        columns = (column_names if stepped is None else stepped.columns)(names, has_loss, reading.width)
        optimizer = stepped.optimizer() if stepped is not None else None
        rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        lr = float(rate) if isinstance(rate, (int, float)) else None
        row = reading.row
        if further is not None:
            columns = (*further[0], *columns)
            with quiet():
                row = torch.cat([further[1].to(row), row])
        with quiet(), run.lock:
            run.recorder.set_columns(columns)
            run.recorder.append(run.step, row, lr, scale)
        if run.book.log is not None and reading.loss is not None:
            run.book.write(StepRow(run.step, reading.loss, reading.total, reading.largest, lr, scale))

    # -- warnings ------------------------------------------------------------------------------------------------------

    def _forewarn(
        self,
        current: Session,
        reading: Reading,
        names: list[str],
        stepped: Stepped | None,
        scale: float | None,
        skipped: bool,
        columns: list[str],
        extremes: list[float],
    ) -> None:
        """Feed the early warnings of the optimizer whose step this is."""
        if not names and reading.loss is None:
            return
        mine = stepped or self.skipping
        if mine is not None:
            if mine.call == current.steps and mine.optimizer() in current.stepping:
                return  # a further evaluation of a closure: a line search goes where no step goes
            mine.call = current.steps
        optimizer = mine.optimizer() if mine is not None else None
        rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        (self._forewarning if mine is None else mine.forewarning).feed(
            self.run,
            optimizer,
            reading,
            names,
            float(rate) if isinstance(rate, (int, float)) else None,
            scale,
            skipped,
            absolute_maxima(columns, extremes),
            self.watch.limits,
        )

    def _damaging(self, stepped: Stepped | None, optimizer: Any) -> HyperProblem | None:
        """A hyperparameter that makes weights non-finite. A negative learning rate is finite: it climbs."""
        problem = bad_hyperparameter(optimizer) if optimizer is not None else None
        if problem is None or problem.kind != "negative":
            return problem
        if stepped is not None:
            stepped.forewarning.negative(self.run, optimizer, problem)
        return None

    def check_grad_norms(self, current: Session) -> bool:
        """Look at the gradient norms now. True when a warning was recorded in this call."""
        pairs = list(parameters_with_gradients(self.run.names))
        if not pairs:
            return False
        factor = current.gradient_scale
        with current.off():
            reading, values = take([g for _, g in pairs], (), factor)
            if factor is not None:
                reading = without_scale(reading, factor, values[0])
        return self.warn_of_norms(reading, [n for n, _ in pairs])

    def warn_of_norms(self, reading: Reading, names: list[str]) -> bool:
        """Warn of gradients whose norm is above the threshold, once a step. True when one was."""
        step, threshold = self.run.step, self.run.config.grad_norm_warn
        if reading.largest is None or not reading.largest > threshold or self._warned_step == step:
            return False
        with quiet():
            each = reading.norms.tolist()
        large = [(n, norm) for n, norm in zip(names, each, strict=True) if norm > threshold and norm != float("inf")]
        if not large:
            return False
        self._warned_step = step
        events = [GradEvent(step, name.rpartition(".")[0], name.rpartition(".")[2], n, threshold) for name, n in large]
        name, most = max(large, key=lambda pair: pair[1])
        many = f"{len(large)} of {len(names)} gradient norms are above grad_norm_warn={threshold:g}, the largest "
        one = f"the gradient norm of {name} is {most:.3g}, above grad_norm_warn={threshold:g}"
        self.run.book.warn_each(events, f"step {step}: {one if len(large) == 1 else f'{many}{most:.3g} of {name}'}")
        return True

    def tell_evaluations(self) -> None:
        """Warn of what the last evaluation gave, when no gate follows that would read it."""
        with quiet():
            evaluated, outputs = self.evaluation.collect()
            if outputs is not None:
                self._tell_evaluated(evaluated, read(outputs))

    def _tell_evaluated(self, seen: list[Seen], extremes: list[float]) -> None:
        """Warn of outputs without gradients that were not finite."""
        for s in bad_outputs(seen, extremes):
            calls = f"{s.calls} {'call' if s.calls == 1 else 'calls'} without gradients"
            message = (
                f"step {s.step}: {s.module_type} ({s.layer_name}) gave non-finite outputs in an evaluation ({calls}); "
                "the training is not touched by it"
            )
            self.run.warn("evaluation", message, step=s.step, layer_name=s.layer_name)

    def tell_handled(self, current: Session, pending: list[Entry]) -> None:
        """Note bad losses that the loop has looked at and has not trained on."""
        self.looks.tell(current, current.tape.needed(pending))

    def explain_looks(self, current: Session) -> None:
        """Find out about bad losses that the loop has looked at, before they leave the tape."""
        self.looks.explain(current, current.tape.needed(current.tape.pending()))


def parameters_with_gradients(names: Names) -> Iterator[tuple[str, Tensor]]:
    """Name and gradient of each parameter that has one."""
    for name, p in names.parameters():
        if p.grad is not None:
            yield name, p.grad
