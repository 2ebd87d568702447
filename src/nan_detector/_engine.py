"""What one detector does when something happens: hooks and patches call here, and it decides in which order."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch

from nan_detector._before import before_sentences
from nan_detector._book import Book
from nan_detector._config import Config, Policy, Replay, Watch, policy_named
from nan_detector._errors import NonFiniteError
from nan_detector._evaluation import Evaluation, Seen, bad_outputs
from nan_detector._finite import read
from nan_detector._gate import Reading, Suspicion, column_names, confirm, measure, take, without_scale
from nan_detector._hit import Finding, complete, investigate, new_event, weights_state
from nan_detector._hyper import bad_hyperparameter
from nan_detector._moment import Habits
from nan_detector._naming import Names
from nan_detector._quiet import hidden, quiet
from nan_detector._recorder import Recorder
from nan_detector._records import GradEvent, NaNEvent, StepRow, WarningRecord
from nan_detector._roots import Roots
from nan_detector._run_step import Call
from nan_detector._scaling import Skips, knows_scale, scale_in_use, skips_itself, still_scaled
from nan_detector._session import Session, session
from nan_detector._skip import cancelled, closure_of, is_stand_in, judged
from nan_detector._source import location_of
from nan_detector._state import BUG, is_replaying, logger, strict
from nan_detector._stepped import Stepped
from nan_detector._summary import headline
from nan_detector._tape import Entry
from nan_detector._watchers import LayerWatch, OpWatch, StepWatch

Tensor = torch.Tensor
T = TypeVar("T")

#: Steps over which the mean overhead is taken.
OVERHEAD_STEPS = 1000
#: Root calls in a loop without an optimizer after which the oldest are judged anyway.
MAX_UNJUDGED = 64
#: Root calls without gradients that are kept: a teacher's, a target network's, not those of a whole evaluation.
MAX_IDLE = 8


class Engine:
    """The working half of a `NaNDetector`, from attach to detach."""

    def __init__(self, models: dict[str, torch.nn.Module], config: Config, book: Book) -> None:
        self.models = models
        self.config = config
        self.book = book
        with hidden():
            self.names = Names(models)
        self.recorder = Recorder(config.history)
        self._skips = Skips()
        self.evaluation = Evaluation(self.names)
        self.lock = threading.RLock()
        self.overheads: deque[float] = deque(maxlen=OVERHEAD_STEPS)
        self.told_step: int | None = None
        self.sample_ids: tuple[str, ...] = ()
        self.groups = 0
        self.stopped = False  # a policy "stop" is waiting to be noticed
        self.noticed = False
        self.standing_down = False
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_optimizer: bool | None = None  # one that will step our parameters sooner or later; None: not known
        self.guessed_groups = 0  # counted while no optimizer was known: one step, if one comes (accumulation)
        self._optimizers: dict[int, Stepped] = {}
        self._names_by_id = {id(p): name for name, p in self.names.parameters()}
        self._spent = 0.0
        self.running: Call | None = None  # the call of `run_step` that is running
        self._raised: Call | None = None  # the last one, if it raised and nothing else was done since
        self._step_habits: dict[int, Habits] = {}
        self._unforgotten = False  # the step was judged, and is not yet off the tape
        self._updating = False  # the loop's own update of the weights has begun
        self._warned_step: int | None = None
        self._kind: StepWatch = {Watch.STEP: StepWatch, Watch.LAYERS: LayerWatch, Watch.OPS: OpWatch}[config.watch](
            self
        )
        self.roots = Roots(list(models.values()), self.on_enter, self.on_leave, self.contain)

    # -- the user's view -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step that is running."""
        return self.told_step if self.told_step is not None else self.groups

    def open(self, current: Session) -> None:
        """Begin to watch on the calling thread."""
        current.users += 1
        current.home = True
        held = self.config.max_hold_bytes
        current.tape.max_held = max(current.tape.max_held, held) if current.users > 1 else held
        current.before_update.append(self.before_update)
        current.push()
        self._kind.open()

    def close(self, current: Session, error: BaseException | None) -> None:
        """Judge what is left and leave no hook behind."""
        try:
            self.contain(self._finish, current, error)
        finally:
            self.running = self._raised = None
            self._kind.close()
            self.roots.remove()
            current.users -= 1
            current.before_update.remove(self.before_update)
            if current.users == 0:
                current.close()

    def add(self, model: torch.nn.Module) -> None:
        """Watch one more model."""
        kind = type(model).__name__
        key = next(k for k in (kind, *(f"{kind}_{i}" for i in range(2, 10_000))) if k not in self.models)
        self.models = {**self.models, key: model}
        self.names = Names(self.models)
        self._names_by_id = {id(p): name for name, p in self.names.parameters()}
        self._optimizers.clear()
        self.roots.add(model)

    def contain(self, work: Callable[..., T], *args: Any) -> T | None:
        """Run our own ``work(*args)`` so that a bug in it never stops the user's training."""
        if self.standing_down:
            return None
        started = time.perf_counter()
        try:
            return work(*args)
        except NonFiniteError:
            raise
        except Exception:
            self.standing_down = True
            if strict():
                raise
            logger.exception(BUG)
            return None
        finally:
            self._spent += time.perf_counter() - started

    # -- root calls ------------------------------------------------------------------------------------------------

    def on_enter(self, current: Session, training: bool) -> None:
        """A watched model is about to be called, outermost."""
        if not training:
            return
        current.step = self.step
        self._raised = None
        if self.stopped and not self.noticed and not current.busy:
            event = self.book.events[0]
            raise NonFiniteError(f"{headline(event)}. Training went on although the step was stopped.", event)
        if current.tape.backwards and not self.optimizers and not self._will_step():
            # A loop that writes its own update: its last step is judged here, before the next begins.
            self.contain(lambda: self._judge_without_optimizer(current))
            self.guessed_groups += 1

    def _will_step(self) -> bool:
        """Whether there is an optimizer for our parameters: a second backward without a step may be accumulation."""
        if self.has_optimizer is None:
            # Asked once, and only of a loop whose optimizer has neither stepped nor dropped its gradients so far.
            made = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)]
            self.has_optimizer = any(self.owns(o) for o in made if getattr(o, "param_groups", None))
        return self.has_optimizer

    def on_leave(self, current: Session, entry: Entry, output: Any) -> None:
        """A watched model has returned."""
        if not entry.grad_enabled:
            self.evaluation.note(entry.owner, output, self.step)
        if not current.tape.backwards:
            self._drop_abandoned(current, entry)
            if not entry.grad_enabled:
                self._drop_idle(current)

    def _drop_idle(self, current: Session) -> None:
        """Evaluation: calls without gradients pile up until something needs them, and nothing will."""
        tape = current.tape
        if tape.backwards:
            return
        idle = [e.number for e in tape.entries if e.kind == "root" and not e.grad_enabled]
        if len(idle) > MAX_IDLE:
            tape.forget_before(idle[-MAX_IDLE // 2])

    def _drop_abandoned(self, current: Session, entry: Entry) -> None:
        """A forward whose outputs are all gone was dropped by the loop itself, as every batch of an evaluation is."""
        tape = current.tape
        before = [e for e in tape.entries if e is not entry and e.kind == "root" and e.number < entry.number]
        if any(not any(r() is not None for r in e.made) for e in before):
            last = before[-1].number
            wanted = tape.needed(
                [
                    e
                    for e in tape.entries
                    if e.number >= entry.number
                    or any(r() is not None for r in e.made)
                    # A Python number outlives the tensor that it was read from.
                    or (e.scalar is not None and e.number > last)
                ]
            )
            tape.keep_only(wanted)

    def _judge_without_optimizer(self, current: Session) -> bool:
        refuse = self._judge(current, list(parameters_with_gradients(self.names)), None)
        self._end_of_step(current)
        return refuse

    def before_update(self, weights: list[Tensor]) -> bool:
        """Weights are about to be written while a backward waits to be judged. True when they must not be.

        In a loop without an optimizer this is the loop's own update: judged now, the replay still sees the weights of
        the step, and the update can be refused.
        """
        if self.standing_down or self.optimizers or self.has_optimizer:
            return False
        if not any(id(p) in self._names_by_id for p in weights):
            return False
        self._updating = True
        try:
            return bool(self.contain(self._judge_without_optimizer, session()))
        finally:
            self._updating = False

    # -- optimizer steps -------------------------------------------------------------------------------------------

    def owns(self, optimizer: Any) -> bool:
        """True when `optimizer` steps a parameter of a watched model."""
        return self._stepped(optimizer).owned

    def _stepped(self, optimizer: Any) -> Stepped:
        found = self._optimizers.get(id(optimizer))
        if found is None or not found.fits(optimizer):
            found = self._optimizers[id(optimizer)] = Stepped(optimizer, self._names_by_id)
        return found

    def before_step(self, optimizer: Any, args: Any, kwargs: Any, current: Session) -> tuple[Any, Any] | None:
        """The gate. None lets the step through; a replaced call takes its place."""
        if self.standing_down or is_stand_in(optimizer):
            return None
        return self.contain(self._before_step, optimizer, args, kwargs, current)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any, current: Session) -> tuple[Any, Any] | None:
        if current.broken:
            self.standing_down = True
            return None
        stepped = self._stepped(optimizer)
        if not stepped.owned:
            return None
        if not stepped.counted:
            stepped.counted = True
            self.optimizers.add(optimizer)
            self.groups -= self.guessed_groups
            self.guessed_groups = 0
        current.gates += 1
        if closure_of(args, kwargs) is not None:
            return self._gate_closure(optimizer, args, kwargs, current)
        return cancelled(optimizer, args, kwargs) if self._gate(optimizer, current) else None

    def _gate_closure(self, optimizer: Any, args: Any, kwargs: Any, current: Session) -> tuple[Any, Any] | None:
        """`step(closure)`: the gradients do not exist yet; judge after the closure has made them."""

        def refuse(loss: Any, can_cancel: bool) -> bool:
            current.pause_again()
            return bool(self.contain(lambda: self._gate(optimizer, current))) and can_cancel

        replaced = judged(optimizer, args, kwargs, refuse)
        if replaced is None:
            return None
        return current.recording_closure(replaced)

    def after_step(self, optimizer: Any, current: Session) -> None:
        """The step was taken or stood in for."""
        stepped = self._optimizers.get(id(optimizer))
        if stepped is not None and stepped.owned and not self.standing_down:
            if self._unforgotten:
                self.contain(self._forget, current)
            self.contain(self._end_of_step, current)

    def _forget(self, current: Session) -> None:
        """What was judged leaves the tape; what only other detectors of this thread watch stays for them."""
        self._unforgotten = False
        tape = current.tape
        with hidden():
            spare: set[Entry] = set()
            if current.users > 1:
                theirs = [e for e in tape.pending() if not self._is_mine(current, e)]
                spare = tape.needed(theirs[-MAX_UNJUDGED:])
            tape.judged(keep_alive=len(self.optimizers) != 1 or self.groups < 2, spare=spare)

    def _is_mine(self, current: Session, backward: Entry) -> bool:
        """True when a watched model, or no model at all, took part in what this backward started from."""
        roots = [e for e in current.tape.needed([backward]) if e.kind == "root"]
        return not roots or any(self.names.is_watched(e.owner) for e in roots)

    def _end_of_step(self, current: Session) -> None:
        self.groups += 1
        self.overheads.append(1000.0 * (self._spent + current.take_spent()))
        self._spent = 0.0

    def _gate(self, optimizer: Any, current: Session) -> bool:
        """Judge the step that is about to be taken. True when it must not be."""
        if not current.tape.backwards and not self.roots.armed and not self._has_moment(current):
            self.roots.arm_children()
        return self._judge(current, None, optimizer)

    @staticmethod
    def _has_moment(current: Session) -> bool:
        return any(e.kind == "root" for e in current.tape.entries)

    def _judge(self, current: Session, given: list[tuple[str, Tensor]] | None, optimizer: Any) -> bool:
        """Judge gradients (`given`, or those `optimizer` is about to use) and the losses since the last gate."""
        if self._unforgotten:  # a step that raised
            self._forget(current)
        tape = current.tape
        pending = tape.pending()
        if current.users > 1:
            pending = [e for e in pending if self._is_mine(current, e)]
        if pending and not self.roots.armed and not self._has_moment(current):
            self.roots.arm_children()
        losses = [loss for e in pending for loss in e.unscaled or e.losses]
        scale = scale_in_use(current)
        if current.looks:
            self._tell_handled(current, pending)
        stepped = self._stepped(optimizer) if optimizer is not None else None
        with quiet():
            columns, extra = self._kind.collect()
            if given is None and stepped is not None:
                names, grads = stepped.gradients()
            else:
                names, grads = [n for n, _ in given or ()], [g for _, g in given or ()]
            if scale is not None:
                extra = scale.reshape(1) if extra is None else torch.cat([extra, scale.reshape(1).to(extra)])
            evaluated, outputs = self.evaluation.collect()
            if outputs is not None:
                extra = outputs if extra is None else torch.cat([extra, outputs.to(extra)])
            reading, extremes = measure(grads, losses, extra)
        if evaluated:
            tail = len(extremes) - 2 * len(evaluated)
            self._tell_evaluated(evaluated, extremes[tail:])
            del extremes[tail:]
        factor = extremes.pop() if scale is not None else None
        if scale is not None and factor is not None and still_scaled(optimizer):
            reading = without_scale(reading, scale, factor)
        overflow = scale is not None and optimizer is None
        problem = bad_hyperparameter(optimizer) if optimizer is not None else None
        if problem is not None and problem.kind == "negative":
            problem = None
        refuse = False
        suspicion = None
        if reading.suspicious or problem is not None:
            suspicion = confirm(names, grads, losses)
            if problem is not None:
                suspicion = Suspicion(suspicion.losses, suspicion.gradients, suspicion.loss, problem)
            elif scale is not None and suspicion and not suspicion.losses and skips_itself(optimizer):
                suspicion, overflow = Suspicion(), True
            if suspicion and not self._others_loss(current, suspicion, pending, grads):
                try:
                    refuse = self._hit(current, suspicion, pending, optimizer)
                except NonFiniteError:
                    # The step has been judged: it must not be judged a second time when the block ends.
                    tape.judged(keep_alive=True)
                    self._kind.next_step()
                    raise
                overflow = False
            else:
                suspicion = None
        if scale is not None:
            if overflow:
                suspicion = self._overflowed(current, pending)
            elif not suspicion:
                self._skips.over(current.scaler)
        self._record(reading, names, bool(losses), stepped, factor)
        if not suspicion:
            if reading.largest is not None and reading.largest > self.config.grad_norm_warn:
                self._warn_of_norms(reading, names)
            self._kind.healthy(current, columns, extremes)
        if current.users > 1 and optimizer is not None:
            self._unforgotten = True  # another detector may have to judge the same step
        else:
            self._forget(current)
        self._kind.next_step()
        return refuse

    def _tell_evaluated(self, seen: list[Seen], extremes: list[float]) -> None:
        """Warn of outputs without gradients that were not finite."""
        for s in bad_outputs(seen, extremes):
            calls = f"{s.calls} {'call' if s.calls == 1 else 'calls'} without gradients"
            message = (
                f"step {s.step}: {s.module_type} ({s.layer_name}) gave non-finite outputs in an evaluation ({calls}); "
                "the training is not touched by it"
            )
            self.book.warn(WarningRecord("evaluation", s.step, message, layer_name=s.layer_name), message)

    def _tell_handled(self, current: Session, pending: list[Entry]) -> None:
        """Note bad losses that the loop has looked at and has not trained on."""
        looks = current.looks[:]
        current.looks.clear()
        trained = {e.number for e in current.tape.needed(pending)}
        told = {e.step for e in self.book.events}
        for look in looks:
            if look.made_by in trained or look.step in told:
                continue
            told.add(look.step)
            location = location_of(look.mark) if look.mark is not None else None
            where = f" at {location.file}:{location.line}" if location is not None else ""
            message = f"step {look.step}: the loop saw that a loss was not finite{where}, and did not train on it"
            self.book.warn(WarningRecord("handled", look.step, message, value=look.value, location=location), message)

    def _overflowed(self, current: Session, pending: list[Entry]) -> Suspicion | None:
        """A GradScaler skips this step: its own business, unless the step is bad without any scale as well."""
        look = self._skips.worth_a_look(current.scaler) and knows_scale(current.tape)
        if not look or self.config.replay is Replay.OFF:
            return None
        with current.off():
            finding = investigate(current.tape, self.models, self.config.replay_budget_s, unscaled=True)
        if finding.trace is None or finding.trace.birth is None:
            return None
        suspicion = Suspicion(
            note="gradients are not finite at any loss scale: the GradScaler would skip such steps for ever"
        )
        self._hit(current, suspicion, pending, None, finding)
        return suspicion

    def _others_loss(self, current: Session, suspicion: Suspicion, pending: list[Entry], grads: list[Tensor]) -> bool:
        """True when the only thing bad is the loss of a model that this detector does not watch."""
        if suspicion.gradients or suspicion.hyper is not None:
            return False
        roots = {id(m) for model in self.models.values() for m in model.modules()}
        count = 0
        for e in pending:
            bad = any(count + i in suspicion.losses for i in range(len(e.losses)))
            count += len(e.losses)
            if bad and any(n.kind != "root" or id(n.owner) in roots for n in current.tape.needed([e]) if n is not e):
                mine = [n for n in current.tape.needed([e]) if n.kind == "root"]
                if not mine or any(id(n.owner) in roots for n in mine):
                    return False
        return True

    def _record(
        self, reading: Reading, names: list[str], has_loss: bool, stepped: Stepped | None, scale: float | None
    ) -> None:
        if not names and not has_loss:
            return
        with hidden():
            width = reading.row.numel()
        columns_of = column_names if stepped is None else stepped.columns
        columns = columns_of(names, has_loss, width)
        optimizer = stepped.optimizer() if stepped is not None else None
        rate = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        lr = float(rate) if isinstance(rate, (int, float)) else None
        with quiet(), self.lock:
            self.recorder.set_columns(columns)
            self.recorder.append(self.step, reading.row, lr, scale)
        if self.book.log is not None and reading.loss is not None:
            self.book.write(StepRow(self.step, reading.loss, reading.total, reading.largest, lr, scale))

    # -- warnings ----------------------------------------------------------------------------------------------------

    def check_grad_norms(self) -> bool:
        """Look at the gradient norms now. True when a warning was logged in this call."""
        pairs = list(parameters_with_gradients(self.names))
        if not pairs:
            return False
        current = session()
        factor = current.gradient_scale
        with current.off():
            reading, values = take([g for _, g in pairs], (), factor)
            if factor is not None:
                reading = without_scale(reading, factor, values[0])
        return self._warn_of_norms(reading, [n for n, _ in pairs])

    def _warn_of_norms(self, reading: Reading, names: list[str]) -> bool:
        threshold = self.config.grad_norm_warn
        if reading.largest is None or not reading.largest > threshold or self._warned_step == self.step:
            return False
        self._warned_step = self.step
        warned = False
        with quiet():
            each = reading.norms.tolist()
        for name, norm in zip(names, each, strict=True):
            if norm > threshold and norm != float("inf"):
                layer, _, parameter = name.rpartition(".")
                record = GradEvent(self.step, layer, parameter or name, norm, threshold)
                self.book.warn(
                    record,
                    f"step {self.step}: the gradient norm of {name} is {norm:.3g}, above grad_norm_warn={threshold:g}",
                )
                warned = True
        return warned

    # -- events ------------------------------------------------------------------------------------------------------

    def _hit(
        self,
        current: Session,
        suspicion: Suspicion,
        pending: list[Entry],
        optimizer: Any,
        finding: Finding | None = None,
    ) -> bool:
        """A confirmed bad step: write it down, find out, act. True when the step must not be taken."""
        known = self.config.stop_on_first and any(e.severity == "error" for e in self.book.events)
        if known and self.config.on_nan in (Policy.STOP, Policy.SKIP, Policy.WARN):
            return self.config.on_nan is not Policy.WARN
        event = new_event(
            self.step,
            suspicion,
            phase="loss" if suspicion.losses else "backward" if suspicion.gradients else "optimizer",
            micro_step=max(0, len(pending) - 1),
        )
        self.book.provisional(event)
        event = self._explained(current, event, suspicion, finding)
        event = replace(event, sample_id=self._ids(event.sample_index) or event.sample_id)
        policy = self._policy(event)
        bad = weights_state(self.names.parameters(), ())
        if policy is Policy.WARN and (optimizer is not None or self._updating):
            weights = f"damaged since step {self.step}"
        else:
            weights = "clean" if bad == "clean" else f"damaged since step {self.step if event.phase != 'state' else 0}"
        event = replace(event, weights=weights, action=policy.value)
        self.book.final(event)
        return self._act(policy, event)

    def _explained(self, current: Session, event: NaNEvent, suspicion: Suspicion, finding: Finding | None) -> NaNEvent:
        """`_explain`, or the provisional event made final: a bug in the search must not cost the protection."""
        try:
            return self._explain(current, event, suspicion, finding)
        except Exception as error:
            if strict():
                raise
            logger.exception("the search for the origin failed; the event keeps what the gate saw")
            return replace(
                event, status="final", notes=(*event.notes, f"the search failed: {type(error).__name__}: {error}")
            )

    def _explain(self, current: Session, event: NaNEvent, suspicion: Suspicion, finding: Finding | None) -> NaNEvent:
        steps, columns = self.recorder.columns(200)
        history = {k: tuple(v) for k, v in columns.items()}
        if suspicion.hyper is not None and not suspicion.losses and not suspicion.gradients:
            from nan_detector._optimizer_events import hyper_event

            return hyper_event(event, suspicion.hyper, before_sentences(columns, steps, layer=None))
        if finding is not None:
            pass  # known already
        elif self.config.replay is Replay.OFF:
            finding = Finding(notes=("replay='off': only what the gate saw is known",))
        else:
            finding = self._kind.explain(current, suspicion)
            if finding is None:
                with current.off():
                    finding = self._investigate(current)
        layer = (
            finding.trace.birth.layer_name if finding.trace is not None and finding.trace.birth is not None else None
        )
        return complete(event, finding, history, before_sentences(columns, steps, layer=layer))

    def _investigate(self, current: Session) -> Finding:
        """The replay: of the whole step where it is one call, else (or where that fails) of what the tape holds."""
        models, budget = self.models, self.config.replay_budget_s
        call = self.running or self._raised
        if call is None or call.session is not current or not call.whole:
            return investigate(current.tape, models, budget)
        whole = investigate(current.tape, models, budget, call=call)
        if whole.reproduced == "yes":
            return replace(whole, micro_step=whole.micro_step + call.backwards_before)
        taped = investigate(current.tape, models, budget)
        notes = tuple(n for n in whole.notes if n not in taped.notes)
        if taped.reproduced == "yes":
            return replace(taped, notes=(*taped.notes, *(f"the step function called again: {n}" for n in notes)))
        return replace(whole, notes=(*whole.notes, *(n for n in taped.notes if n not in whole.notes)))

    def run_step(self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """Call a step function so that it can be called again."""
        outer, self._raised = self.running, None
        self.running = self.contain(Call, function, args, kwargs, self.models, self._step_habits, session())
        try:
            out = function(*args, **kwargs)
        except Exception:
            # The end of the watch may still want to know why.
            self._raised = self.running
            if self._raised is not None:
                self._raised.raised = True
            raise
        else:
            if self.running is not None:
                self.contain(self.running.ended)
        finally:
            self.running = outer
        return out

    def _policy(self, event: NaNEvent) -> Policy:
        chosen = self.config.on_nan
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
            self.stopped, self.noticed = True, False
        return policy in (Policy.STOP, Policy.SKIP)

    def _ids(self, rows: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(self.sample_ids[r] for r in rows if r < len(self.sample_ids))

    def warn(self, kind: str, message: str, **more: Any) -> None:
        """A warning record."""
        self.book.warn(WarningRecord(kind=kind, step=self.step, message=message, **more), message)

    # -- everything else that happens ----------------------------------------------------------------------------------

    def gradients_dropped(self, owner: Any, current: Session) -> None:
        """`zero_grad`: backward passes that were never stepped were given up by the loop itself."""
        self.contain(self._gradients_dropped, owner, current)

    def _gradients_dropped(self, owner: Any, current: Session) -> None:
        tape = current.tape
        if not self.has_optimizer and isinstance(owner, torch.optim.Optimizer) and self.owns(owner):
            self.has_optimizer = True
        if not tape.backwards or is_replaying() or current.stepping:
            return
        mine = owner in self.models.values() if isinstance(owner, torch.nn.Module) else self.owns(owner)
        if not mine:
            return
        if not self.optimizers:
            self._judge_without_optimizer(current)
        else:
            tape.judged(keep_alive=True)

    def scaler_skipped(self, scaler: Any, optimizer: Any, current: Session) -> None:
        """The GradScaler did not step: an overflow of scaled gradients is its business, a NaN of the loss is ours."""
        self.contain(self._scaler_skipped, optimizer, current)

    def _scaler_skipped(self, optimizer: Any, current: Session) -> None:
        if not self.owns(optimizer):
            return
        self.optimizers.add(optimizer)
        self._judge(current, None, None)
        self._end_of_step(current)

    def set_batch(self, index: int, sample_ids: tuple[str, ...], current: Session) -> None:
        """The user names the step that begins."""
        self.told_step, self.sample_ids = index, sample_ids
        if not current.tape.backwards:
            with hidden():
                self.contain(current.tape.judged, True)

    def _finish(self, current: Session, error: BaseException | None) -> None:
        """Judge what the last gate has not seen."""
        try:
            self._judge_rest(current, error)
        finally:
            with quiet():
                evaluated, outputs = self.evaluation.collect()
                if outputs is not None:
                    self._tell_evaluated(evaluated, read(outputs))
            if current.looks and error is None:
                self._tell_handled(current, [])

    def _judge_rest(self, current: Session, error: BaseException | None) -> None:
        tape = current.tape
        if isinstance(error, (NonFiniteError, KeyboardInterrupt, SystemExit, GeneratorExit)):
            return
        if error is not None and tape.entries and tape.entries[-1].raised and tape.backwards:
            # A backward that failed has left no gradients to judge: what made it fail is asked first.
            known = len(self.book.events)
            self._after_exception(current, error)
            if len(self.book.events) > known:
                return
        if tape.pending():
            with current.off():
                self._judge(current, list(parameters_with_gradients(self.names)), None)
        elif error is not None and any(e.number >= tape.boundary for e in tape.entries):
            self._after_exception(current, error)

    def _after_exception(self, current: Session, error: BaseException) -> None:
        """The user's code raised: if a bad value made it do so, the event must still be there."""
        with current.off():
            finding = self._investigate(current)
        if finding.trace is None or finding.trace.birth is None:
            return
        event = new_event(self.step, Suspicion(), phase="forward")
        event = replace(event, symptom=f"the step raised {type(error).__name__}")
        self.book.provisional(event)
        steps, columns = self.recorder.columns(200)
        event = complete(
            event, finding, {k: tuple(v) for k, v in columns.items()}, before_sentences(columns, steps, layer=None)
        )
        self.book.final(replace(event, action="raised by the training"))


def parameters_with_gradients(names: Names) -> Iterator[tuple[str, Tensor]]:
    """Name and gradient of each parameter that has one."""
    for name, p in names.parameters():
        if p.grad is not None:
            yield name, p.grad
