"""Bad losses that the loop saw and did not train on: where they were born, while the step can still be run again.

Neither an event nor a reason to stop: the loop has dealt with it. But whoever writes ``if torch.isnan(loss): continue``
loses a batch for a reason, and wants to know it.
"""

from __future__ import annotations

from nan_detector._config import Replay
from nan_detector._diagnosis import diagnose
from nan_detector._entries import Entry, Made, tokens_in
from nan_detector._finding import Finding
from nan_detector._hit import investigate
from nan_detector._lineage import Line
from nan_detector._origin import trace_of_line
from nan_detector._quiet import quiet
from nan_detector._recording import Look
from nan_detector._records import Location
from nan_detector._replayed import Replayed
from nan_detector._run import Run
from nan_detector._session import Session
from nan_detector._source import location_of
from nan_detector._trace import Birth, Trace
from nan_detector._watchers import StepWatch


class Looks:
    """The losses that the loop looked at, of one run.

    Args:
        run: The run.
        watch: What must rest while a step is run again.
    """

    def __init__(self, run: Run, watch: StepWatch) -> None:
        self.run = run
        self.watch = watch
        self._births: dict[int, Birth | None] = {}  # by the number of the call that made the loss
        self._count = 0

    def explain(self, current: Session, trained: set[Entry]) -> None:
        """Find out where the bad losses were born that are on the tape and not in `trained`.

        To be called before the step leaves the tape; what is told later on is known then.
        """
        if self.run.config.replay is Replay.OFF or self.run.stopped:
            return
        numbers = {e.number for e in trained}
        self._of_the_loss(current, trained)
        for look in current.looks:
            if look.made_by in self._births or look.made_by in numbers:
                continue
            maker = next((e for e in current.tape.entries if e.number == look.made_by), None)
            if maker is None:
                continue
            self._births[look.made_by] = None
            self._count += 1
            # A loop that drops every tenth batch must not pay for a replay each time: 1st, 2nd, 4th, 8th ...
            if self._count & (self._count - 1) == 0:
                with current.off(), self.watch.at_rest():
                    finding = investigate(
                        current.tape, self.run.models, self.run.config.replay_budget_s, only=maker, conclude=_birth
                    )
                self._births[look.made_by] = finding.trace.birth if finding.trace is not None else None

    @staticmethod
    def _of_the_loss(current: Session, trained: set[Entry]) -> None:
        """Forget values that were worked out from a loss which was trained on: a perplexity for the log is no loss."""
        roots = {
            token.entry
            for e in trained
            if e.kind == "backward"
            for token in tokens_in((e.args[:1], e.kwargs))
            if isinstance(token, Made)
        }
        makers = {e.number: e for e in current.tape.entries}
        current.looks[:] = [
            look
            for look in current.looks
            if (maker := makers.get(look.made_by)) is None
            or maker in roots
            or roots.isdisjoint(current.tape.needed([maker]))
        ]

    def tell(self, current: Session, trained: set[Entry]) -> None:
        """Warn of those that were not trained on, and forget them all."""
        self.explain(current, trained)
        looks = current.looks[:]
        current.looks.clear()
        births, self._births = self._births, {}
        numbers = {e.number for e in trained}
        told = {e.step for e in self.run.book.events}
        for look in looks:
            if look.made_by not in numbers and look.step not in told:
                told.add(look.step)
                self._warn(look, births.get(look.made_by))

    def _warn(self, look: Look, birth: Birth | None) -> None:
        seen = location_of(look.mark) if look.mark is not None else None
        message = f"step {look.step}: the loop saw that a loss was not finite{_at(seen)}, and did not train on it"
        layer = None
        if birth is not None:
            message += f"; {_said(birth)}"
            layer = birth.layer_name
        location = birth.location if birth is not None and birth.location is not None else seen
        self.run.warn("handled", message, step=look.step, value=look.value, location=location, layer_name=layer)


def _birth(replayed: Replayed, notes: list[str]) -> Finding:
    line: Line = frozenset()
    with quiet():
        line = frozenset(g for t in replayed.results_last for g in replayed.tracer.ancestry(t))
    trace = trace_of_line(replayed.tracer, line) if line and replayed.raised is None else None
    return Finding(trace, "yes" if trace is not None and trace.birth is not None else "no", tuple(notes))


def _said(birth: Birth) -> str:
    cause, _ = diagnose(Trace(birth=birth, reached=("loss",)))
    why = f" ({cause.title})" if cause is not None and cause.code != "unknown" else ""
    if birth.phase == "data":
        return f"the batch brought it, in {birth.tensor_name or 'an input'}"
    if birth.phase == "state":
        return f"{birth.tensor_name or 'a parameter'} was not finite before the step"
    within = f" in {birth.layer_name}" if birth.layer_name not in (None, "root") else ""
    return f"it was born in {birth.call or birth.op}{within}{_at(birth.location)}{why}"


def _at(location: Location | None) -> str:
    return f" at {location.file}:{location.line}" if location is not None else ""
