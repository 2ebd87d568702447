"""The three watch levels, as what they add to the gate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from nan_detector._births import birth_of
from nan_detector._diagnosis import diagnose
from nan_detector._events import silent_event
from nan_detector._finding import Finding
from nan_detector._gate import Suspicion
from nan_detector._hit import investigate
from nan_detector._layers import Layers, suspicious_layers
from nan_detector._lineage import Gen
from nan_detector._live import Live
from nan_detector._origin import silent_births, trace_of_line
from nan_detector._quiet import quiet
from nan_detector._session import Session, session
from nan_detector._stored import Stored, candidates, stored
from nan_detector._trace import BirthKind, Trace
from nan_detector._tracer import OpTracer

if TYPE_CHECKING:
    from nan_detector._run import Run

Tensor = torch.Tensor

#: Times that the births of one line are looked for in the modules that are alive.
MAX_SEARCHES = 3
AS_IT_RAN = "seen by watch='ops' as the step ran; a replay did not show it"
_NOTHING: Mapping[str, float] = MappingProxyType({})


class StepWatch:
    """`watch="step"`: the gate and nothing else."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def open(self) -> None:
        """Begin."""

    def close(self) -> None:
        """End."""

    def collect(self) -> tuple[list[str], Tensor | None]:
        """Names and device values to be read along with the gate's."""
        return [], None

    def recorded(self, columns: list[str], values: Tensor | None) -> tuple[tuple[str, ...], Tensor] | None:
        """What of `collect` goes into the flight recorder: names of columns, and a vector on the device."""
        return None

    @property
    def limits(self) -> Mapping[str, float]:
        """Largest finite value of each layer's output."""
        return _NOTHING

    def healthy(self, current: Session, columns: list[str], extremes: list[float]) -> None:
        """The gate found nothing."""

    def explain(self, current: Session, suspicion: Suspicion) -> Finding | None:
        """What is known of a bad step without a replay; None to replay."""
        return None

    def as_it_ran(self, current: Session, finding: Finding) -> Finding:
        """`finding` of a replay that did not show the birth, with what was seen while the step ran."""
        return finding

    def next_step(self) -> None:
        """The gate is done with this step."""

    def last_look(self) -> None:
        """The watch ends, and no gate follows."""

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """Nothing in here is looked at."""
        yield


class LayerWatch(StepWatch):
    """`watch="layers"`: extremes of every module's output; a value absorbed between two of them is looked into."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        config = run.config
        self.layers = Layers(
            list(run.models.values()), run.names, config.skip_types, config.check_inputs, config.check_backward
        )
        self._looked_into: set[str] = set()

    def close(self) -> None:
        self.layers.remove()

    def collect(self) -> tuple[list[str], Tensor | None]:
        return self.layers.collect()

    def recorded(self, columns: list[str], values: Tensor | None) -> tuple[tuple[str, ...], Tensor] | None:
        return self.layers.recorded(columns, values)

    @property
    def limits(self) -> Mapping[str, float]:
        return self.layers.limits

    def healthy(self, current: Session, columns: list[str], extremes: list[float]) -> None:
        new = [name for name in suspicious_layers(columns, extremes) if name not in self._looked_into]
        if not new:
            return
        # Once for each layer: a mask of NaN that the next layer drops would otherwise cost a replay in every step.
        self._looked_into.update(new)
        run = self.run
        with current.off():
            finding = investigate(current.tape, run.models, run.config.replay_budget_s, silent=True)
        if finding.silent:
            report_silent(run, finding.silent)


class OpWatch(StepWatch):
    """`watch="ops"`: the tracer on every operation as it runs."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps: dict[Gen, int] = {}  # the step that each birth belongs to
        self._searches: dict[Any, int] = {}
        self.live = Live(run.names, self._tracer)
        self._reported: set[Any] = set()

    def _tracer(self) -> OpTracer:
        tracer = OpTracer(outside=self._name)
        tracer.on_birth = self._note_step
        tracer.kept.room = self._room
        return tracer

    def _room(self) -> int:
        """Bytes that may be kept: what the tape keeps of outside counts as well."""
        return max(0, self.run.config.max_hold_bytes - session().tape.held_bytes)

    def _note_step(self, gen: Gen) -> None:
        """Until the next step begins, what happens belongs to the step that the last gate judged."""
        run, current = self.run, session()
        step = run.step
        if run.told_step is None and not current.roots and not current.stepping:
            tape = current.tape
            begun = any(e.kind == "root" and e.number >= tape.boundary for e in tape.entries)
            step = step if begun else max(0, step - 1)
        self._steps[gen] = step

    def _name(self, t: Tensor) -> tuple[BirthKind, str] | None:
        from nan_detector._lineage import key_of

        known = self.run.names.of_memory(key_of(t))
        if known is not None:
            return known
        token = session().tape.outside.get(id(t))
        in_root = bool(session().roots)
        return (BirthKind.INPUT if in_root else BirthKind.LABEL, "input" if token is None else token.name or "input")

    def open(self) -> None:
        self.live.open()

    def close(self) -> None:
        self.live.close()

    def explain(self, current: Session, suspicion: Suspicion) -> Finding | None:
        self.live.pause()
        return None

    def as_it_ran(self, current: Session, finding: Finding) -> Finding:
        if finding.trace is not None:
            return finding
        tracer = self.live.tracer
        with quiet():
            lines = [tracer.ancestry(t) for e in current.tape.pending() for t in e.losses]
        trace = trace_of_line(tracer, frozenset().union(*lines))
        return finding if trace.birth is None else Finding(trace, "not_tried", (AS_IT_RAN,))

    def healthy(self, current: Session, columns: list[str], extremes: list[float]) -> None:
        found = [g for g in silent_births(self.live.tracer) if self._key(g) not in self._reported]
        self._reported.update(self._key(g) for g in found)
        stored = self._stored()
        if found or stored:
            self.live.pause()
        if stored:
            report_stored(self.run, stored[0], self._steps.get(stored[0].gen, self.run.step))
        if found:
            report_silent(self.run, tuple(birth_of(g) for g in found))

    def last_look(self) -> None:
        stored = self._stored()
        if stored:
            self.live.pause()
            report_stored(self.run, stored[0], self._steps.get(stored[0].gen, self.run.step))

    def _stored(self) -> list[Stored]:
        """What an operation of this step made, and left in a parameter or buffer that no step uses."""
        new = []
        for gen in candidates(self.live.tracer):
            key = self._key(gen)
            # A mask of bad values that a training makes in every step is not looked for again and again.
            if key not in self._reported and self._searches.get(key, 0) < MAX_SEARCHES:
                self._searches[key] = self._searches.get(key, 0) + 1
                new.append(gen)
        if not new:
            return []
        trained = {id(p) for _, p in self.run.names.parameters()}
        found = [s for s in stored(self.live.tracer, new) if id(getattr(s.module, s.name, None)) not in trained]
        self._reported.update(self._key(s.gen) for s in found)
        return found

    @staticmethod
    def _key(gen: Gen) -> Any:
        return gen.record.mark

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        paused = self.live.tracer.paused
        self.live.pause()
        try:
            yield
        finally:
            self.live.tracer.paused = paused

    def next_step(self) -> None:
        self._steps.clear()
        self.live.next_step()
        self.live.resume()


def report_silent(run: Run, births: tuple[Any, ...]) -> None:
    """Events for overflows that arithmetic absorbed; the first of a step only, as with every event."""
    birth = births[0]
    cause, _ = diagnose(Trace(birth=birth))
    event = silent_event(run.step, birth, cause)
    run.book.provisional(event)
    run.book.final(event)


def report_stored(run: Run, found: Stored, step: int) -> None:
    """An event for an overflow outside of the model whose result stays in a module that no step uses."""
    birth = birth_of(found.gen)
    cause, _ = diagnose(Trace(birth=birth))
    further = {id(m): key for key, m in run.config.also_watch.items()}
    key = further.get(id(found.root))
    watched = run.names.is_watched(found.module)
    if watched:
        path = run.names.of_module(found.module)[0]
        name = found.name if path in (None, "root") else f"{path}.{found.name}"
    else:
        name = found.path if key is None else f"{key}.{found.path}"
    holder = "" if watched or key is not None else f" of a {type(found.root).__name__} that is not watched"
    event = replace(
        silent_event(step, birth, cause),
        phase="state",
        tensor_name=name,
        layer_name=(name.rpartition(".")[0] or "root") if watched or key is not None else birth.layer_name,
        module_type=type(found.module).__name__,
        symptom=f"{name}{holder} is not finite, and no step uses it",
    )
    run.book.provisional(event)
    run.book.final(event)
