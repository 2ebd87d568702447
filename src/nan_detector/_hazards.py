"""`hazards()`: one healthy step again, under the tracer, for the operations that are nearest an edge."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from nan_detector._answers import Hazard
from nan_detector._births import birth_of, call_of, layer_of, module_type_of, place_of
from nan_detector._entries import Entry, Outside, tokens_in
from nan_detector._errors import ReplayRefused
from nan_detector._hazard_observer import Near, Observer
from nan_detector._hit import one_at_a_time, relevant_entries
from nan_detector._lineage import OpRecord
from nan_detector._naming import Names
from nan_detector._origin import silent_births, trace_of
from nan_detector._records import Phase
from nan_detector._replay import Step
from nan_detector._replayed import Replayed
from nan_detector._run import Run
from nan_detector._run_step import Call, WholeStep
from nan_detector._session import Session
from nan_detector._state import logger, strict
from nan_detector._tape import Tape
from nan_detector._trace import Birth
from nan_detector._watchers import StepWatch

#: Hazards given at most.
MAX_HAZARDS = 10
#: Within a factor of two of the edge: worth a warning.
CLOSE = math.log10(2.0)
#: Decades that an operand must have moved to be said to move: batches differ among themselves.
LEAST_MOVE = 0.05
#: Looks that must agree, each nearer than the one before, for what is far to be named, and for a forecast to be a
#: reason to warn: of numbers that only fluctuate, one series of five in 120 does so.
AGREEING = 5
#: A forecast reaches as far ahead as this many looks.
HORIZON = 20
#: Places whose earlier distances are remembered.
MAX_REMEMBERED = 4096
#: Kinds whose value itself runs towards 0.
_TO_ZERO = frozenset(("log_zero", "sqrt_zero", "small_denominator", "domain_edge", "cancellation"))


class Judged:
    """What the tape held of a step when its gate had judged it."""

    __slots__ = ("boundary", "call", "entries", "step")

    def __init__(self, tape: Tape, call: Call | None, step: int) -> None:
        self.entries = tape.entries  # the tape forgets by beginning another list
        self.boundary = tape.boundary
        self.call = call
        self.step = step

    def relevant(self) -> tuple[list[Entry], list[Outside]]:
        """The step's entries with those that they depend on, and the tensors from outside."""
        tape = Tape()
        tape.entries = self.entries
        wanted = tape.needed([e for e in self.entries if e.number >= self.boundary])
        entries = [e for e in self.entries if e in wanted]
        tokens = (t for e in entries for t in tokens_in((e.args, e.kwargs)) if isinstance(t, Outside))
        return entries, list({id(t): t for t in tokens}.values())


class Hazards:
    """Replays a healthy step on demand, or at every N-th gate; costs a copied list per step otherwise.

    Args:
        run: The watched run.
        watch: Its watch level, whose own tracer stands aside meanwhile.
    """

    def __init__(self, run: Run, watch: StepWatch) -> None:
        self.run = run
        self.watch = watch
        self.found: list[Hazard] = []
        self.last: Judged | None = None  # from its gate to the next call of a model
        self._every = run.config.hazards_every
        self._gates = 0
        self._due = False
        self._earlier: dict[Any, deque[tuple[int, float, float]]] = {}  # step, distance, value
        self._sure: set[Any] = set()  # places whose forecast enough looks agree on
        self._warned: set[Any] = set()

    # -- when -----------------------------------------------------------------------------------------------------

    def at_gate(self, current: Session, call: Call | None, pending: list[Entry], refuse: bool) -> None:
        """A step was judged (with the backward passes `pending`), and is still on the tape."""
        if not pending and call is None:
            return  # a second optimizer of the same step
        self.last = Judged(current.tape, call, self.run.step)
        if self._every:
            self._gates += 1
            self._due = self._due or self._gates % self._every == 0
        if self._due and not refuse:
            self._due = False
            self.look(self.last, current)
            self._warn()

    def now(self, current: Session, call: Call | None) -> list[Hazard]:
        """The hazards of the step that is running or, between two steps, of the last one with the weights of now."""
        tape = current.tape
        if tape.backwards or any(e.kind == "root" and e.grad_enabled for e in relevant_entries(tape)):
            self.look(Judged(tape, call, self.run.step), current)
        elif self.last is not None:
            self.look(self.last, current)
        else:
            self._due = True
            logger.warning(
                "hazards(): no step is at hand to be looked at; the next one will be, before it is taken. "
                "Call it between backward and the next forward."
            )
        return list(self.found)

    def look(self, kept: Judged, current: Session) -> None:
        """Replay `kept` and rank what it came near to."""
        with self.watch.at_rest(), current.off():
            replayed, observer, problem = self._replay(kept)
            if replayed is None:
                self.found = []
                self.run.warn("hazards", f"step {kept.step}: hazards() could not replay the step: {problem}")
                return
            self.found = self._ranked(replayed, observer, kept.step)

    # -- the replay -----------------------------------------------------------------------------------------------

    def _replay(self, kept: Judged) -> tuple[Replayed | None, Observer, str]:
        entries, outside = kept.relevant()
        call = kept.call if kept.call is not None and kept.call.whole else None
        observer = Observer(scaled=any(e.kind == "scale" for e in entries))
        problem = "nothing of it was recorded"
        for whole in (call, None) if call is not None else (None,):
            if whole is None and not entries:
                break
            observer = Observer(scaled=observer.scaled)
            try:
                return self._replayed(entries, outside, whole, observer), observer, ""
            except ReplayRefused as refusal:
                problem = str(refusal)
            except (torch.OutOfMemoryError, MemoryError) as error:
                problem = f"out of memory ({type(error).__name__})"
            except Exception as error:
                if strict():
                    raise
                logger.exception("hazards(): the replay failed")
                problem = f"{type(error).__name__}: {error}"
        return None, observer, problem

    def _replayed(
        self, entries: list[Entry], outside: list[Outside], call: Call | None, observer: Observer
    ) -> Replayed:
        models, budget = self.run.models, self.run.config.replay_budget_s
        with one_at_a_time(budget):
            names, deadline = Names(models), time.perf_counter() + budget
            step = (
                Step(entries, outside, models, names, deadline)
                if call is None
                else WholeStep(call, entries, outside, models, names, deadline)
            )
            step.tracer.observer = observer
            return step.run()

    # -- the ranking ----------------------------------------------------------------------------------------------

    def _ranked(self, replayed: Replayed, observer: Observer, step: int) -> list[Hazard]:
        found = [(h, False) for h in _of_births(replayed, step)]
        found += [(_hazard(near, step), near.far) for near in observer.found.values()]
        nearest: dict[Any, tuple[Hazard, bool]] = {}
        for h, far in sorted(found, key=lambda pair: (pair[1], pair[0].distance)):
            nearest.setdefault(_place(h), (h, far))
        ranked = []
        self._sure.clear()
        for key, (h, far) in nearest.items():
            at, looks = self._forecast((*key, h.kind), h, step)
            if at is not None and looks >= AGREEING:
                self._sure.add(key)
            elif far:
                continue
            if at is not None:
                h = replace(h, forecast_step=at, message=f"{h.message}; it moves there, to arrive about step {at}")
            ranked.append(h)
        return sorted(ranked, key=_rank)[:MAX_HAZARDS]

    def _forecast(self, key: Any, h: Hazard, step: int) -> tuple[int | None, int]:
        """The step at which `h` reaches its edge, and how many looks agree that it moves there."""
        if key not in self._earlier and len(self._earlier) >= MAX_REMEMBERED:
            self._earlier.clear()
        looks = self._earlier.setdefault(key, deque(maxlen=AGREEING))
        if looks and looks[-1][0] >= step:  # the same step once more
            looks.pop()
        value = math.inf if h.value is None else abs(h.value)
        looks.append((step, h.distance, value))
        agreeing = list(looks)
        for i in range(len(agreeing) - 1, 0, -1):
            if not agreeing[i][1] < agreeing[i - 1][1]:
                agreeing = agreeing[i:]
                break
        (first, far, most), (_, near, least) = agreeing[0], agreeing[-1]
        if len(agreeing) < 2 or near <= 0.0 or far - near < LEAST_MOVE:
            return None, 0
        steps = near * (step - first) / (far - near)
        if h.kind in _TO_ZERO and math.inf > most > least:
            steps = min(steps, least * (step - first) / (most - least))
        ahead = HORIZON * (step - first) / (len(agreeing) - 1)
        return (step + max(1, math.ceil(steps)) if steps <= ahead else None), len(agreeing)

    def _warn(self) -> None:
        """Say what is close, once for each place."""
        for h in self.found:
            key = _place(h)
            if key in self._warned or (h.distance > CLOSE and key not in self._sure):
                continue
            self._warned.add(key)
            where = f" at {h.location.file}:{h.location.line}" if h.location is not None else ""
            message = f"step {h.step}: {h.op}{where} is near an edge: {h.message}"
            value = None if h.value is None else float(h.value)
            self.run.warn("hazard", message, layer_name=h.layer_name, value=value, location=h.location, step=h.step)


def _rank(h: Hazard) -> tuple[int, float, float]:
    if h.distance <= 0.0:
        return (0, _ORDER.get(h.kind, 1), 0.0)
    if h.forecast_step is not None:
        return (1, float(h.forecast_step), h.distance)
    return (2, h.distance, 0.0)


#: Among those beyond the edge.
_ORDER = {"non_finite": 0, "absorbed": 2}


def _place(h: Hazard) -> Any:
    if h.location is None:
        return h.op, h.layer_name, h.kind
    return h.op, h.location.file, h.location.line


def _hazard(near: Near, step: int) -> Hazard:
    record = near.record
    return Hazard(
        kind=near.kind,
        distance=near.distance,
        op=_op(record),
        call=call_of(record),
        layer_name=layer_of(record),
        module_type=module_type_of(record),
        location=place_of(record),
        phase="backward" if record.phase == "backward" else "forward" if record.phase == "forward" else "loss",
        value=near.value,
        count=near.count,
        message=near.message,
        step=step,
    )


def _op(record: OpRecord) -> str:
    return record.forward.info.op if record.forward is not None and not record.own_frame else record.info.op


def _of_births(replayed: Replayed, step: int) -> Iterable[Hazard]:
    """What is beyond the edge already: not finite with the weights of now, absorbed by arithmetic, or masked away."""
    trace = trace_of(replayed)
    told: set[int] = set()
    if trace.birth is not None:
        told.add(trace.birth.number)
        yield _from_birth(
            trace.birth, "non_finite", 0.0, "the last batch makes it not finite with the weights as they are now", step
        )
    silent = {id(g) for g in silent_births(replayed.tracer)}
    for gen in replayed.tracer.births:
        if gen.intended or gen.record.phase == "backward" or gen.record.index in told or gen.output is None:
            continue
        told.add(gen.record.index)
        if id(gen) in silent:
            yield _from_birth(
                birth_of(gen), "absorbed", 0.0, "it overflows, and arithmetic absorbs the infinity in silence", step
            )
        elif gen.ended and trace.birth is None:
            yield _from_birth(
                birth_of(gen), "dropped", 0.5, "it is not finite, and a mask or a selection drops those elements", step
            )


def _from_birth(birth: Birth, kind: str, distance: float, message: str, step: int) -> Hazard:
    inputs = birth.inputs[0].whole if birth.inputs else None
    value = None if inputs is None else inputs.max
    phase: Phase = "loss" if birth.phase == "loss" else "backward" if birth.phase == "backward" else "forward"
    return Hazard(
        kind=kind,
        distance=distance,
        op=birth.op,
        call=birth.call,
        layer_name=birth.layer_name,
        module_type=birth.module_type,
        location=birth.location,
        phase=phase,
        value=value,
        count=birth.guilty_count,
        message=message,
        step=step,
    )
