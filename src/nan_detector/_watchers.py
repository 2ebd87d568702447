"""The three watch levels, as what they add to the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nan_detector._diagnosis import diagnose
from nan_detector._gate import Suspicion
from nan_detector._hit import Finding, investigate, silent_event
from nan_detector._layers import Layers, suspicious_layers
from nan_detector._lineage import Gen
from nan_detector._live import Live
from nan_detector._origin import birth_of, silent_births
from nan_detector._session import Session
from nan_detector._trace import BirthKind, Trace
from nan_detector._tracer import OpTracer

if TYPE_CHECKING:
    from nan_detector._run import Run

Tensor = torch.Tensor


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

    def healthy(self, current: Session, columns: list[str], extremes: list[float]) -> None:
        """The gate found nothing."""

    def explain(self, current: Session, suspicion: Suspicion) -> Finding | None:
        """What is known of a bad step without a replay; None to replay."""
        return None

    def next_step(self) -> None:
        """The gate is done with this step."""


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
        self.live = Live(run.names, self._tracer)
        self._reported: set[Any] = set()

    def _tracer(self) -> OpTracer:
        return OpTracer(outside=self._name)

    def _name(self, t: Tensor) -> tuple[BirthKind, str] | None:
        from nan_detector._lineage import key_of
        from nan_detector._session import session

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

    def healthy(self, current: Session, columns: list[str], extremes: list[float]) -> None:
        found = [g for g in silent_births(self.live.tracer) if self._key(g) not in self._reported]
        self._reported.update(self._key(g) for g in found)
        if found:
            self.live.pause()
            report_silent(self.run, tuple(birth_of(g) for g in found))

    @staticmethod
    def _key(gen: Gen) -> Any:
        return gen.record.mark

    def next_step(self) -> None:
        self.live.next_step()
        self.live.resume()


def report_silent(run: Run, births: tuple[Any, ...]) -> None:
    """Events for overflows that arithmetic absorbed; the first of a step only, as with every event."""
    birth = births[0]
    cause, _ = diagnose(Trace(birth=birth))
    event = silent_event(run.step, birth, cause)
    run.book.provisional(event)
    run.book.final(event)
