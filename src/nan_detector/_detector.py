"""`NaNDetector`: the public face of the watch, wiring only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nan_detector import _patches
from nan_detector._answers import Cost, Hazard, StateProblem
from nan_detector._book import Book
from nan_detector._config import PolicyOption, build_config
from nan_detector._engine import Engine
from nan_detector._errors import NotAttachedError
from nan_detector._held import Held, cost_of, held
from nan_detector._history import History
from nan_detector._ledger import Ledger
from nan_detector._naming import models_of
from nan_detector._recorder import Recorder
from nan_detector._records import GradEvent, NaNEvent, WarningRecord
from nan_detector._run_record import run_record
from nan_detector._session import session
from nan_detector._state import is_replaying, logger, switched_off
from nan_detector._state_check import first_problem

if TYPE_CHECKING:
    from nan_detector._session import Session

T = TypeVar("T")


class NaNDetector:
    """Watches the training of a model; catches the step, module, operation and line where a NaN or Inf is born.

    Use it as a context manager around the training loop, or with `attach` and `detach`. Training is bit for bit the
    same with it, as long as nothing is wrong.

    Args:
        model: The model that is trained, or a list or dict of them.
        watch: How closely: "step" (one check before each optimizer step), "layers" (also every module's output, on
            the device), "ops" (every operation of every step; slow).
        on_nan: What happens to a step that would poison the weights. "stop" does not take it and sets `triggered`;
            "raise" raises `NonFiniteError`; "warn" only tells; "skip" drops it and goes on; "rollback" drops it, goes
            back to the last good state (`snapshot_every`) and goes on; a callable gets the event and answers with one
            of these names. None: "stop", or "skip" where `stop_on_first` is False.
        stop_on_first: False goes on after the first event and records up to `max_events`. "skip" and "rollback" do so
            in any case: each step that they drop is recorded.
        check_inputs: At "layers": also look at what the model is given.
        check_backward: At "layers": also look at the gradients of every module's output.
        grad_norm_warn: L2 norm of one parameter's gradient above which a `GradEvent` is recorded, in each step; the
            logger tells the first, and those ten times larger than what it has told.
        skip_types: At "layers": classes of modules that are not looked at.
        max_events: Events and warnings kept in memory at most.
        verbose: Print the report of an event to stderr.
        replay: "auto" runs a bad step again to find the birthplace; "off" tells only what the gate saw.
        protect: "gate": a bad step is refused before it is taken. "full": also, what the optimizer's own arithmetic
            makes of finite gradients is looked at after each step and undone where it is not finite, from a copy of the
            parameters and the optimizer's state made before the step. It takes as much memory as these two together,
            two passes over them and one more read to the host in each step.
        max_skips: When "skip" or "rollback" has had enough, and `NonFiniteError` is raised: above this number of
            dropped steps in a row, or (a number between 0 and 1) above this share of the last 100 steps.
            None: never. Refused with a policy that does not go on without the bad step.
        snapshot_every: Steps between the copies that "rollback" goes back to: parameters, buffers, optimizers, loss
            scalers, learning rate schedulers and random streams, of a step before which everything was finite. Two
            copies exist while one replaces the other. They are kept for "rollback", and for a callable, whose answer is
            not known beforehand; None keeps none.
        snapshot_on_host: Keep these copies in host memory; refused where none are made.
        log_dir: Folder for the event log; None writes nothing.
        capsule: On an event, write a folder from which the step can be replayed in another process
            (`nan-detector replay`): the batch, weights, random states, the calls of the loop, and the guilty operation
            alone as a program. It goes to ``capsules`` in `log_dir`, or in a new folder in ``nan-detector-runs``;
            `NaNEvent.capsule` is its path. At most 8 are kept in one folder. See `docs/capsule.md`.
        capsule_bytes: Bytes of tensors in one capsule; of weights that do not fit there are statistics.
        history: Rows of the flight recorder.
        history_bytes: Bytes of device memory that these rows may take: with many layers there are fewer of them.
        max_hold_bytes: Bytes of tensors from outside the step that are kept beyond the batch; at "ops" together with
            the inputs of operations that are kept until the step has ended.
        replay_budget_s: Seconds a replay may take.
        on_event: Called with each final `NaNEvent`.
        on_warning: Called with each `WarningRecord`.
        hazards_every: Steps after which `hazards` looks by itself, before the step is taken, and warns of what is
            close. Each time costs a replay of the step; None never does.
        also_watch: A module, or a list or dict of them, that is not trained itself: a copy with averaged weights, a
            target network. Its parameters and buffers are looked at in turn, all of them within 32 steps, and by
            `check_state`.

    Raises:
        OptionError: An option cannot be used; the message names it, its value and the way out.
        TypeError: `model` is not a module, or a list or dict of them.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module],
        *,
        watch: str = "step",
        on_nan: PolicyOption = None,
        stop_on_first: bool = True,
        check_inputs: bool = True,
        check_backward: bool = False,
        grad_norm_warn: float = 100.0,
        skip_types: tuple[type, ...] = (),
        max_events: int = 100,
        verbose: bool = True,
        replay: str = "auto",
        protect: str = "gate",
        max_skips: int | float | None = None,
        snapshot_every: int | None = 100,
        snapshot_on_host: bool = False,
        log_dir: str | Path | None = None,
        capsule: bool = False,
        capsule_bytes: int = 2**30,
        history: int = 1000,
        history_bytes: int = 2 * 2**20,
        max_hold_bytes: int = 64 * 2**20,
        replay_budget_s: float = 60.0,
        on_event: Callable[[NaNEvent], object] | None = None,
        on_warning: Callable[[WarningRecord], object] | None = None,
        hazards_every: int | None = None,
        also_watch: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module] | None = None,
    ) -> None:
        self._models = models_of(model)
        self._config = build_config(
            watch=watch,
            on_nan=on_nan,
            stop_on_first=stop_on_first,
            check_inputs=check_inputs,
            check_backward=check_backward,
            grad_norm_warn=grad_norm_warn,
            skip_types=skip_types,
            max_events=max_events,
            verbose=verbose,
            replay=replay,
            protect=protect,
            max_skips=max_skips,
            snapshot_every=snapshot_every,
            snapshot_on_host=snapshot_on_host,
            log_dir=log_dir,
            capsule=capsule,
            capsule_bytes=capsule_bytes,
            history=history,
            history_bytes=history_bytes,
            max_hold_bytes=max_hold_bytes,
            replay_budget_s=replay_budget_s,
            on_event=on_event,
            on_warning=on_warning,
            hazards_every=hazards_every,
            also_watch=also_watch,
        )
        self._engine: Engine | None = None
        self._session: Session | None = None
        self._finalizer: weakref.finalize[[Engine, Session, Book], NaNDetector] | None = None
        self._book: Book | None = None
        self._recorder: Recorder | None = None
        self._overheads: Iterable[float] = ()
        self._steps = 0  # of the watch that ended last
        self._hazards: list[Hazard] = []
        self._optimizers: list[weakref.ref[Any]] = []
        self._ledger = Ledger()

    # -- from attach to detach -----------------------------------------------------------------------------------------

    def attach(self) -> NaNDetector:
        """Begin to watch, on the calling thread; forgets earlier events. Attaching again starts afresh.

        Returns:
            The detector itself.
        """
        if self._engine is not None:
            self.detach()
        if switched_off():
            self._book, self._recorder = Book(replace(self._config, log_dir=None)), Recorder(self._config.history)
            self._ledger, self._overheads, self._steps = Ledger(), (), 0
            return self
        self._book = Book(self._config)
        self._book.write(run_record(self._config, self._models))
        engine = Engine(self._models, self._config, self._book)
        self._engine, self._session = engine, session()
        self._recorder, self._overheads, self._ledger = engine.run.recorder, engine.overheads, engine.run.ledger
        # A detector that is dropped without `detach` must not leave its hooks behind: the engine knows nothing of it.
        self._finalizer = weakref.finalize(self, _abandoned, engine, self._session, self._book)
        self._finalizer.atexit = False
        _patches.register(engine)
        engine.open(self._session)
        return self

    def detach(self) -> None:
        """Judge the last step, stop watching and leave nothing behind. Events stay; a second call does nothing."""
        self._detach(None)

    def _detach(self, error: BaseException | None) -> None:
        engine, current = self._engine, self._session
        if engine is None or current is None:
            return
        try:
            engine.close(current, error)
        finally:
            self._hazards = engine.hazards.found
            self._steps = engine.run.steps
            self._optimizers = [weakref.ref(o) for o in engine.optimizers.alive()]
            _patches.unregister(engine)
            if self._finalizer is not None:
                self._finalizer.detach()
            self._engine = self._session = self._finalizer = None
            if self._book is not None:
                self._book.close()

    def __enter__(self) -> NaNDetector:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach(error)

    def __deepcopy__(self, memo: Any) -> NaNDetector:
        raise TypeError("a NaNDetector cannot be copied; make another one for the copied model.")

    def __reduce__(self) -> Any:
        raise TypeError("a NaNDetector cannot be pickled; pickle det.all_events, or read the log in log_dir.")

    # -- the loop ------------------------------------------------------------------------------------------------------

    def set_batch(self, idx: int, sample_ids: Iterable[object] | None = None) -> None:
        """Name the step that begins.

        Args:
            idx: Its number, reported as `step` and `batch_idx`.
            sample_ids: Names of the batch's samples, in order, reported with a bad sample.

        Raises:
            TypeError: `idx` is not a whole number.
        """
        if isinstance(idx, bool) or not hasattr(idx, "__index__"):
            raise TypeError(f"idx={idx!r} must be a whole number, such as that of enumerate(loader).")
        if self._engine is not None and self._session is not None and not is_replaying():
            ids = () if sample_ids is None else tuple(str(s) for s in sample_ids)
            self._engine.set_batch(idx.__index__(), ids, self._session)

    def check_grad_norms(self) -> bool:
        """Compare each gradient's L2 norm with `grad_norm_warn` now; the gate does so by itself before each step.

        Returns:
            True when a norm is above it and this call is the first in the step to see it: `grad_events` has the
            gradients then. The logger tells the first step of them, each that is ten times larger than what it has
            told, and at the end how many there were.
        """
        engine = self._engine
        return bool(engine is not None and not is_replaying() and engine.check_grad_norms())

    def run_step(self, step_fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one training step, as ``step_fn(*args, **kwargs)``, and return what it returns.

        The same as the step in the plain loop, but when it goes wrong `step_fn` itself is called again, under the
        tracer and with nothing of what it does kept: so code is searched too that a recorder does not see (a compiled
        loss, an extension). Give it the batch, not an iterator to take it from; what it does to the outside world
        (files, prints) it does twice, unless it asks `is_replaying`.

        Raises:
            NotAttachedError: The detector is not attached.
        """
        if self._engine is None and not switched_off():
            raise NotAttachedError(
                "run_step needs an attached detector: use it inside `with NaNDetector(model) as det:`."
            )
        if self._engine is None or is_replaying():
            return step_fn(*args, **kwargs)
        return self._engine.responder.calls.make(self._engine.contain, step_fn, args, kwargs)

    def _add_model(self, model: torch.nn.Module) -> None:
        """Watch one more trained model from now on, under its class's name."""
        if self._engine is None:
            raise NotAttachedError("another model can be watched by an attached detector only: call attach() first.")
        self._engine.add(model)
        self._models = self._engine.run.models

    def enter_call(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        """A call of `model` that began before it was watched is running."""
        if self._engine is not None:
            self._engine.roots.enter(model, args, kwargs)

    # -- before it happens ---------------------------------------------------------------------------------------------

    def hazards(self) -> list[Hazard]:
        """What a healthy step came near to: its operations next to an edge, the nearest first, at most ten.

        One step is run again under the tracer: the one that is running, once its backward has been called; between two
        steps the last one, on its batch with the weights as they are now, so that what the coming step would meet is
        seen before it is taken. Where two looks at different steps have seen an operation move towards its edge, it
        comes before those that stand still, with a forecast of the step at which it gets there. Costs several steps'
        time, and nothing when it is not called. See `docs/hazards.md`.

        Returns:
            The hazards; [] where there are none, and before the first step: then the next step is looked at before it
            is taken, and a later call has its hazards.

        Raises:
            NotAttachedError: The detector was never attached.
        """
        engine = self._engine
        if engine is None or self._session is None or is_replaying():
            if self._book is None:
                raise NotAttachedError("hazards needs a step to look at: use `with NaNDetector(model) as det:`.")
            return list(self._hazards)
        found = engine.contain(engine.hazards.now, self._session, engine.responder.calls.running)
        self._hazards = engine.hazards.found if found is None else found
        return list(self._hazards)

    def check_state(self) -> StateProblem | None:
        """The first parameter, buffer or optimizer state that is not finite: is what I am about to save good?

        Looks at the watched models, the modules of `also_watch`, and the optimizers that have stepped a watched model
        while the detector was attached: exactly, at the cost of one pass over them. Works before, while and after the
        detector is attached. A buffer that holds no other bad value than -inf is a mask.

        Returns:
            What is bad, named as ``head.weight``, ``bn.running_var`` or ``optimizer.state[head.weight]['exp_avg']``;
            None where all is finite.
        """
        if self._engine is not None:
            self._optimizers = [weakref.ref(o) for o in self._engine.optimizers.alive()]
        optimizers = [o for ref in self._optimizers if (o := ref()) is not None]
        return first_problem(self._models, optimizers, self._config.also_watch)

    # -- what was found ------------------------------------------------------------------------------------------------

    @property
    def triggered(self) -> bool:
        """True once a step was found that would poison the weights. Silent and handled events do not count."""
        self._notice()
        return any(e.severity == "error" for e in self._events())

    @property
    def event(self) -> NaNEvent | None:
        """The first event, or None."""
        self._notice()
        return next(iter(self._events()), None)

    @property
    def all_events(self) -> list[NaNEvent]:
        """Every event kept, in order, at most `max_events`."""
        self._notice()
        return list(self._events())

    @property
    def grad_events(self) -> list[GradEvent]:
        """Gradients whose norm went beyond `grad_norm_warn`."""
        return [] if self._book is None else list(self._book.grad_events)

    @property
    def warnings(self) -> list[WarningRecord]:
        """What is not an event (yet)."""
        return [] if self._book is None else list(self._book.warnings)

    @property
    def last_good_step(self) -> int | None:
        """The last step before which loss, gradients and hyperparameters were all finite; None before the first."""
        return self._ledger.last_good_step

    @property
    def skipped_steps(self) -> int:
        """How many steps were not taken because they were bad."""
        return self._ledger.skipped_steps

    @property
    def scaler_skips(self) -> int:
        """How many steps a `GradScaler` did not take, because their gradients overflowed at its scale."""
        return self._ledger.scaler_skips

    @property
    def overhead_ms(self) -> float:
        """Mean time the watch took per step, in milliseconds, over the last 1000 steps; 0.0 before the first."""
        spent = list(self._overheads)
        return sum(spent) / len(spent) if spent else 0.0

    def cost(self) -> Cost:
        """What the watch costs: time per step, and the memory that it holds now.

        Reads no tensor. After `detach` the time is that of the whole watch, and only the flight recorder is still held.

        Raises:
            NotAttachedError: The detector was never attached.
        """
        if self._recorder is None:
            raise NotAttachedError("cost needs a watch to tell of: use `with NaNDetector(model) as det:`.")
        engine, current = self._engine, self._session
        if engine is not None and current is not None:
            self._steps = engine.run.steps
            bytes_ = held(engine, current)
        else:
            bytes_ = Held(recorder=self._recorder.nbytes)
        return cost_of(self._steps, list(self._overheads), bytes_)

    @property
    def history(self) -> History:
        """The flight recorder: column names and NumPy arrays, one row per step.

        Raises:
            NotAttachedError: The detector was never attached.
        """
        if self._recorder is None:
            raise NotAttachedError("history is empty before the first attach(): use `with NaNDetector(model) as det:`.")
        return self._recorder.history()

    def _events(self) -> list[NaNEvent]:
        return [] if self._book is None else self._book.events

    def _notice(self) -> None:
        if self._engine is not None and not is_replaying():
            self._engine.run.noticed = True


def _abandoned(engine: Engine, current: Session, book: Book) -> None:
    """The last reference to an attached detector is gone: nobody is left to be told, so nothing is judged."""
    engine.standing_down = True
    logger.warning("a NaNDetector was dropped while it was attached, and watches no more: keep a reference to it")
    try:
        engine.close(current, None)
    finally:
        _patches.unregister(engine)
        book.close()
