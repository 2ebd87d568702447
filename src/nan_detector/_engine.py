"""What one detector does when something happens: hooks and patches call here, and it decides in which order."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, TypeVar

import torch

from nan_detector import _schedulers
from nan_detector._aftermath import Aftermath
from nan_detector._book import Book
from nan_detector._config import Config, Policy, Protect, Watch
from nan_detector._contained import Contained
from nan_detector._damage import LastStep
from nan_detector._entries import Entry
from nan_detector._errors import NonFiniteError
from nan_detector._glance import Glance
from nan_detector._hazards import Hazards, Judged
from nan_detector._judge import Judge, parameters_with_gradients
from nan_detector._keeper import Keeper
from nan_detector._optimizers import Optimizers, is_within_step
from nan_detector._peaks import Peaks
from nan_detector._quiet import hidden
from nan_detector._respond import Responder
from nan_detector._roots import Roots
from nan_detector._rounds import Rounds
from nan_detector._run import Run
from nan_detector._scaled_clip import ScaledClips
from nan_detector._session import Session, session
from nan_detector._shared_step import SharedStep
from nan_detector._skip import cancelled, closure_of, is_stand_in, judged
from nan_detector._source import Mark, here
from nan_detector._state import is_replaying
from nan_detector._stepped import Stepped
from nan_detector._summary_title import headline
from nan_detector._watchers import LayerWatch, OpWatch, StepWatch
from nan_detector._zeroing import EMPTY

Tensor = torch.Tensor
T = TypeVar("T")

#: Steps over which the mean overhead is taken.
OVERHEAD_STEPS = 1000
#: Backward passes of other detectors' models that are spared when the step is forgotten.
MAX_UNJUDGED = 64
#: Root calls without gradients that are kept: a teacher's, a target network's, not those of a whole evaluation.
MAX_IDLE = 8

#: Frames between the short way through the gate and the function that runs the hooks around an optimizer's step.
_TO_STEP = 5

_clock = time.perf_counter
_getframe = sys._getframe
_new_tuple = tuple.__new__
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack

_LEVELS = {Watch.STEP: StepWatch, Watch.LAYERS: LayerWatch, Watch.OPS: OpWatch}


class Engine:
    """The working half of a `NaNDetector`, from attach to detach."""

    def __init__(self, models: dict[str, torch.nn.Module], config: Config, book: Book) -> None:
        self.run = Run(models, config, book)
        self.overheads: deque[float] = deque(maxlen=OVERHEAD_STEPS)
        self.contained = Contained()
        self.contain = self.contained.run
        self.optimizers = Optimizers(self.run, self._name_anew)
        self.guessed_groups = 0  # counted while no optimizer was known: one step, if one comes (accumulation)
        steppeds = self.optimizers.stepped
        self._clips = ScaledClips(self.run)
        self._unforgotten = False  # the step was judged, and is not yet off the tape
        self.watch: StepWatch = _LEVELS[config.watch](self.run)
        self.aftermath = Aftermath(self.run, steppeds, config.protect is Protect.FULL)
        self.keeper: Keeper | None = None
        if config.snapshot_every is not None and not (
            isinstance(config.on_nan, Policy) and config.on_nan is not Policy.ROLLBACK
        ):
            self.keeper = Keeper(
                self.run,
                self.optimizers.owns,
                self.optimizers.known,
                config.snapshot_every,
                on_host=config.snapshot_on_host,
            )
        self.responder = Responder(self.run, self.watch, self.aftermath, self.keeper)
        self.zeroing = self.responder.zeroing
        self.hazards = Hazards(self.run, self.watch)
        self.shared = SharedStep(self.run, steppeds, self.hazards)
        rounds = Rounds(self.run, steppeds)
        self.judge = Judge(self.run, self.watch, self.responder, self.aftermath, rounds, self.shared)
        self.aftermath.last_finite = lambda name: self.judge.rounds.last_finite(name)
        if config.watch is Watch.LAYERS:
            book.rows_for_log = Peaks(self.run, lambda: self.watch.limits).rows
        #: Where nothing is asked for beyond the gate itself, a step like the one before can take the short way.
        usual = self.judge.simple and self.keeper is None and not self.aftermath.full and config.hazards_every is None
        self._glance = Glance(self.judge, self.judge.layers) if usual else None
        self.roots = Roots(list(models.values()), self.on_enter, self.on_leave, self.contained)

    # -- from attach to detach -------------------------------------------------------------------------------------

    def open(self, current: Session) -> None:
        """Begin to watch on the calling thread."""
        current.users += 1
        current.home = True
        held = self.run.config.max_hold_bytes
        current.tape.max_held = max(current.tape.max_held, held) if current.users > 1 else held
        current.before_update.append(self.before_update)
        current.push()
        self.watch.open()
        if self.keeper is not None:
            _schedulers.watch(self.keeper.meet)

    def close(self, current: Session, error: BaseException | None) -> None:
        """Judge what is left and leave no hook behind."""
        try:
            self.contain(self._finish, current, error)
        finally:
            self.responder.calls.running = self.responder.calls.raised = self.hazards.last = None
            self.watch.close()
            self.aftermath.forget()
            if self.keeper is not None:
                _schedulers.unwatch(self.keeper.meet)
                self.contain(self.keeper.close)
            self.roots.remove()
            current.users -= 1
            current.before_update.remove(self.before_update)
            if current.users == 0:
                current.close()

    def add(self, model: torch.nn.Module) -> None:
        """Watch one more model."""
        kind, models = type(model).__name__, self.run.models
        key = next(k for k in (kind, *(f"{kind}_{i}" for i in range(2, 10_000))) if k not in models)
        self.run.watch({**models, key: model})
        self.judge.evaluation.names = self.run.names
        self.optimizers.stepped.clear()
        self.judge.rounds = Rounds(self.run, self.optimizers.stepped)
        self.roots.add(model)

    @property
    def standing_down(self) -> bool:
        """There was a bug of ours, or another detector took over: nothing more is done."""
        return self.contained.down

    @standing_down.setter
    def standing_down(self, down: bool) -> None:
        self.contained.down = down

    # -- root calls ------------------------------------------------------------------------------------------------

    def on_enter(self, current: Session, training: bool) -> None:
        """A watched model is about to be called, outermost."""
        if not training or self.contained.down:
            return
        if current.looks:
            self.contain(self.judge.explain_looks, current)
        self.hazards.last = None  # from here on the memory is the next step's
        if self.keeper is not None:
            self.contain(self.keeper.settle)
            self.keeper.stale = False
        if self.aftermath.unchecked and not current.stepping:
            self.contain(self._undo_damage)
        run = self.run
        current.step = run.step
        run.entered = run.groups
        self.responder.calls.raised = None
        if run.stopped:
            event = run.overlooked(current, len(self.optimizers.known))
            if event is not None:
                raise NonFiniteError(f"{headline(event)}. Training went on although the step was stopped.", event)
        if current.tape.backwards and not self.optimizers.known:
            self.contain(self._judge_unstepped, current)

    def _judge_unstepped(self, current: Session) -> None:
        """A loop that writes its own update: its last step is judged here, before the next begins."""
        if not self.optimizers.will_step():
            self._judge_without_optimizer(current)
            self.guessed_groups += 1

    def on_leave(self, current: Session, entry: Entry, output: Any) -> None:
        """A watched model has returned."""
        if not entry.grad_enabled:
            self.judge.evaluation.note(entry.owner, output, self.run.step)
        if not current.tape.backwards and len(current.tape.entries) > 1:
            current.tape.drop_abandoned(entry)
            if not entry.grad_enabled:
                current.tape.drop_idle(MAX_IDLE)

    # -- loops without an optimizer --------------------------------------------------------------------------------

    def _judge_without_optimizer(self, current: Session) -> bool:
        refuse = self._judge(current, given=list(parameters_with_gradients(self.run.names)))
        self._end_of_step(current)
        return refuse

    def before_update(self, weights: list[Tensor]) -> bool:
        """Weights are about to be written while a backward waits to be judged. True when they must not be.

        In a loop without an optimizer this is the loop's own update: judged now, the replay still sees the weights of
        the step, and the update can be refused.
        """
        if self.standing_down or self.optimizers.known or self.optimizers.expected:
            return False
        if not any(id(p) in self.run.ours for p in weights) or self.optimizers.will_step():
            return False
        self.run.updating = True
        try:
            return bool(self.contain(self._judge_without_optimizer, session()))
        finally:
            self.run.updating = False

    # -- optimizer steps -------------------------------------------------------------------------------------------

    def _name_anew(self) -> None:
        """The watched models may have other parameters than when the watch began."""
        self.run.watch(self.run.models)
        self.judge.evaluation.names = self.run.names

    def before_step(self, optimizer: Any, args: Any, kwargs: Any, current: Session) -> tuple[Any, Any] | None:
        """The gate. None lets the step through; a replaced call takes its place."""
        contained = self.contained
        if contained.down:
            return None
        if self._glance is not None and not kwargs and len(args) == 1 and not current.stepping:
            started = _clock()
            try:
                if self._is_ordinary(self._glance, optimizer, current):
                    return None
            except NonFiniteError:
                raise
            except Exception:
                contained.failed()
                return None
            finally:
                contained.spent += _clock() - started
        if is_stand_in(optimizer):
            return None
        if current.stepping and is_within_step(optimizer):
            return None  # a subclass that calls `super().step()` fires the hooks again, within one and the same step
        return self.contain(self._before_step, optimizer, args, kwargs, current)

    def _is_ordinary(self, glance: Glance, optimizer: Any, current: Session) -> bool:
        """The gate where all is as in the step before. False where it is not: then nothing has been done."""
        stepped, tape = self.optimizers.stepped.get(id(optimizer)), current.tape
        if (
            stepped is None
            or tape.backwards != 1
            or current.users != 1
            or current.broken
            or self._unforgotten
            or self.aftermath.unchecked
            or not (tape.entries[0].kind == "root" or self.roots.armed or tape.has_root())
            or not glance.passes(stepped, optimizer, current)
        ):
            return False
        current.gates += 1
        run = self.run
        step, groups = run.step, run.groups
        self.hazards.last = Judged(tape, self.responder.calls.running, step)
        if groups < 2 or len(self.optimizers.stepped) > 1 or _function_modes() or _dispatch_modes():
            self._forget(current)
        else:
            tape.forget_step()
        # Nearly always the line that called the step before calls this one too, and stands where it stood.
        frame, last = _getframe(_TO_STEP - 1), stepped.last
        mark = None
        if last is not None and last.mark is not None and last.mark.code is frame.f_code:
            mark = _new_tuple(Mark, (frame.f_code, frame.f_lasti))
        stepped.last = _new_tuple(LastStep, (step, mark or here(_TO_STEP), groups))
        return True

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any, current: Session) -> tuple[Any, Any] | None:
        if current.broken:
            self.standing_down = True
            return None
        stepped = self.optimizers.of(optimizer)
        if not stepped.owned:
            return None
        undone = bool(self.aftermath.unchecked) and not current.stepping and self._undo_damage()
        if undone or (self.keeper is not None and self.keeper.refuses(current)):
            current.gates += 1
            self._meet(stepped, current)
            return cancelled(optimizer, args, kwargs)
        if not stepped.counted:
            stepped.counted = True
            self.optimizers.known.add(optimizer)
            stepped.forewarning.met(self.run, optimizer)
            self.judge.rounds.met(optimizer)
            if self.keeper is not None:
                self.keeper.met_optimizer()
            self.run.groups -= self.guessed_groups
            self.run.entered = min(self.run.entered, self.run.groups)
            self.guessed_groups = 0
        current.gates += 1
        if not current.tape.backwards and self.zeroing.empties(self.run.groups):
            self._tell_empty()
        if closure_of(args, kwargs) is not None:
            if self.aftermath.full:
                self.aftermath.shadow(optimizer)
            return self._gate_closure(stepped, args, kwargs, current)
        if self._gate(stepped, current):
            return cancelled(optimizer, args, kwargs)
        if self.aftermath.full:
            self.aftermath.shadow(optimizer)
        return None

    def _tell_empty(self) -> None:
        self.run.warn(
            "zeroed_before_step",
            f"step {self.run.step}: zero_grad() is called between backward() and step(), so {EMPTY} steps in a row had "
            "no gradients: call it before backward(), or after step()",
        )

    def _gate_closure(self, stepped: Stepped, args: Any, kwargs: Any, current: Session) -> tuple[Any, Any] | None:
        """`step(closure)`: the gradients do not exist yet; judge after the closure has made them."""

        def refuse(loss: Any, can_cancel: bool) -> bool:
            current.pause_again()
            if self.keeper is not None:
                self.keeper.moved = not can_cancel
            return bool(self.contain(self._gate, stepped, current)) and can_cancel

        optimizer = stepped.optimizer()
        replaced = judged(optimizer, args, kwargs, refuse) if optimizer is not None else None
        return None if replaced is None else current.recording_closure(replaced)

    def _gate(self, stepped: Stepped, current: Session) -> bool:
        """Judge the step that is about to be taken. True when it must not be."""
        if not self.roots.armed and not current.tape.backwards and not current.tape.has_root():
            self.roots.arm_children()
        self._meet(stepped, current)
        refuse = self._judge(current, stepped=stepped)
        stepped.last = LastStep(self.run.step, here(), self.run.groups) if self.judge.clean else None
        return refuse

    def _meet(self, stepped: Stepped, current: Session) -> None:
        """An optimizer is at the gate: is it the next step that it takes, or its part in that of another?"""
        if self.shared.meet(stepped, bool(current.tape.backwards)) and self.overheads:
            self.contained.spent += self.overheads.pop() / 1000.0

    def _judge(
        self, current: Session, *, stepped: Stepped | None = None, given: list[tuple[str, Tensor]] | None = None
    ) -> bool:
        """Judge gradients (`given`, or those of `stepped`'s optimizer) and the losses since the last gate."""
        if self._unforgotten:  # a step that raised
            self._forget(current)
        pending = current.tape.pending()
        if current.users > 1:
            pending = [e for e in pending if self._is_mine(current, e)]
        if pending and not self.roots.armed and not current.tape.has_root():
            self.roots.arm_children()
        refuse = self.judge.judge(current, pending, stepped=stepped, given=given, is_mine=self._is_mine)
        self.hazards.at_gate(current, self.responder.calls.running, pending, refuse)
        self.shared.over(stepped, current.tape, refuse)
        if self.keeper is not None and self.judge.clean:
            self.keeper.clean(current)
        if current.users > 1 and stepped is not None:
            self._unforgotten = True  # another detector may have to judge the same step
        elif not (self.shared.joined and current.tape.idle):
            self._forget(current)
        self.watch.next_step()
        return refuse

    def _is_mine(self, current: Session, backward: Entry) -> bool:
        """True when a watched model, or no model at all, took part in what this backward started from."""
        roots = [e for e in current.tape.needed([backward]) if e.kind == "root"]
        return not roots or any(self.run.names.is_watched(e.owner) for e in roots)

    def after_step(self, optimizer: Any, current: Session) -> None:
        """The step was taken or stood in for."""
        stepped = self.optimizers.stepped.get(id(optimizer))
        if current.stepping and is_within_step(optimizer):
            return
        if stepped is None or not stepped.owned or self.contained.down:
            return
        if self._glance is not None and not (current.stepping or self.run.ledger.rows or self._unforgotten):
            try:
                self._count_step()
            except Exception:
                self.contained.failed()
        else:
            self.contain(self._after_step, stepped, current)

    def _undo_damage(self) -> bool:
        """Look at steps that never came to their end. True when one was undone."""
        found = False
        for key in list(self.aftermath.unchecked):
            self.aftermath.unchecked.discard(key)
            stepped = self.optimizers.stepped.get(key)
            damage = self.aftermath.undone(stepped) if stepped is not None else None
            if damage is not None:
                found = True
                self.responder.damaged(damage)
        return found

    def _after_step(self, stepped: Stepped, current: Session) -> None:
        # An optimizer around another one (Lookahead) steps it within its own step: both together are one.
        nested = bool(current.stepping) and is_within_step(None)
        try:
            if self.keeper is not None and not nested:
                self.keeper.moved = False
                self.keeper.settle()
            damage = self.aftermath.undone(stepped) if self.aftermath.full else None
            if damage is not None:
                self.responder.damaged(damage, optimizer=stepped.optimizer())
            if self.run.ledger.rows:
                self.run.ledger.stepped(self.run.groups, id(stepped.optimizer()))
        finally:
            if not nested:
                self._end_of_step(current)

    def _forget(self, current: Session) -> None:
        """What was judged leaves the tape; what only other detectors of this thread watch stays for them."""
        self._unforgotten = False
        tape = current.tape
        with hidden():
            spare: set[Entry] = set()
            if current.users > 1:
                theirs = [e for e in tape.pending() if not self._is_mine(current, e)]
                spare = tape.needed(theirs[-MAX_UNJUDGED:])
            alive = len(self.optimizers.known) != 1 or self.run.groups < 2
            tape.judged(keep_alive=alive, spare=spare, stepped=bool(self.optimizers.known))

    def _end_of_step(self, current: Session) -> None:
        if self._unforgotten:
            self._forget(current)
        self._count_step()

    def _count_step(self) -> None:
        self.run.groups += 1
        contained = self.contained
        self.overheads.append(1000.0 * contained.spent)
        contained.spent = 0.0

    # -- everything else that happens ------------------------------------------------------------------------------

    def gradients_dropped(self, owner: Any, current: Session) -> None:
        """`zero_grad`: backward passes that were never stepped were given up by the loop itself."""
        self.zeroing.zeroed(owner, self.run.groups)
        if current.tape.backwards or not self.optimizers.expected:
            self.contain(self._gradients_dropped, owner, current)

    def _gradients_dropped(self, owner: Any, current: Session) -> None:
        tape = current.tape
        if not self.optimizers.expected and isinstance(owner, torch.optim.Optimizer) and self.optimizers.owns(owner):
            self.optimizers.expected = True
        if not tape.backwards or is_replaying() or current.stepping:
            return
        mine = owner in self.run.models.values() if isinstance(owner, torch.nn.Module) else self.optimizers.owns(owner)
        if not mine:
            return
        if not self.optimizers.known:
            self._judge_without_optimizer(current)
            self.guessed_groups += 1  # no step of its own, should an optimizer come (SAM's first pass)
        else:
            self.zeroing.dropped(self.run.groups)
            self.run.entered = self.run.groups
            if not tape.goes_on_from_gradients():
                tape.judged(keep_alive=True)

    def scaler_skipped(self, scaler: Any, optimizer: Any, current: Session) -> None:
        """The GradScaler did not step: an overflow of scaled gradients is its business, a NaN of the loss is ours."""
        self.contain(self._scaler_skipped, optimizer, current)

    def _scaler_skipped(self, optimizer: Any, current: Session) -> None:
        if self.optimizers.owns(optimizer):
            self.optimizers.known.add(optimizer)
            self.judge.skipping = self.optimizers.of(optimizer)
            self._meet(self.judge.skipping, current)
            try:
                self._judge(current)
            finally:
                self.judge.skipping = None
            self._end_of_step(current)

    def unscaling(self, scaler: Any, optimizer: Any, current: Session) -> None:
        """Gradients are about to be divided by the loss scale: was a clip before it?"""
        if current.users:
            self.contain(self._unscaling, scaler, optimizer, current)

    def _unscaling(self, scaler: Any, optimizer: Any, current: Session) -> None:
        if self.optimizers.owns(optimizer):
            self._clips.look(current.tape, scaler)

    def set_batch(self, index: int, sample_ids: tuple[str, ...], current: Session) -> None:
        """The user names the step that begins."""
        if current.looks:
            self.contain(self.judge.explain_looks, current)
        self.run.told_step, self.run.sample_ids = index, sample_ids
        self.run.entered = self.run.groups
        current.told_step = index
        if not current.tape.backwards:
            with hidden():
                self.contain(self.zeroing.look, current.tape, self.run.groups)
                self.contain(current.tape.judged, True)

    def check_grad_norms(self) -> bool:
        """Look at the gradient norms now. True when a warning was logged in this call."""
        return bool(self.contain(self.judge.check_grad_norms, session()))

    def _finish(self, current: Session, error: BaseException | None) -> None:
        """Judge what the last gate has not seen."""
        try:
            if self.aftermath.unchecked:
                with current.off():
                    self._undo_damage()
            self._judge_rest(current, error)
        finally:
            self.watch.last_look()
            for stepped in list(self.optimizers.stepped.values()):
                stepped.forewarning.catch_up(self.run)
            if self.judge.further is not None:
                self.judge.further.finish()
            self.judge.tell_evaluations()
            if current.looks and error is None:
                self.judge.tell_handled(current, [])

    def _judge_rest(self, current: Session, error: BaseException | None) -> None:
        tape = current.tape
        if isinstance(error, (NonFiniteError, KeyboardInterrupt, SystemExit, GeneratorExit)):
            return
        if error is not None and tape.entries and tape.entries[-1].raised and tape.backwards:
            # A backward that failed has left no gradients to judge: what made it fail is asked first.
            known = len(self.run.book.events)
            self.responder.after_exception(current, error)
            if len(self.run.book.events) > known:
                return
        known = len(self.run.book.events)
        if tape.pending():
            with current.off():
                self._judge(current, given=list(parameters_with_gradients(self.run.names)))
        elif error is not None and any(e.number >= tape.boundary for e in tape.entries):
            self.responder.after_exception(current, error)
        if error is None and len(self.run.book.events) == known:
            with current.off():
                damage = self.aftermath.left_behind()
            if damage is not None:
                self.responder.damaged(damage)
            elif not any(e.severity == "error" for e in self.run.book.events):
                with current.off():  # what a bad step has left behind is told with its event
                    self.judge.last_round(current, list(self.optimizers.stepped.values()))
