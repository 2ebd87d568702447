"""The replays of the step at hand: what is looked for in it, and which way of making it again is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nan_detector._capsule.write import Capsules
from nan_detector._config import Replay
from nan_detector._erased import erased
from nan_detector._finding import Finding
from nan_detector._hit import investigate
from nan_detector._run import Run
from nan_detector._session import Session
from nan_detector._step_calls import StepCalls


class Search:
    """Looks for origins in the step that a session holds.

    Args:
        run: The run.
        calls: The calls of a step function, which a replay may call again.
        capsules: What keeps evidence of a replay, where capsules are wanted.
    """

    def __init__(self, run: Run, calls: StepCalls, capsules: Capsules | None) -> None:
        self.run = run
        self.calls = calls
        self.capsules = capsules

    def origin(self, current: Session, tell: Callable[[Finding], None] | None = None) -> Finding:
        """Of what is bad in the step: of the whole step where it is one call, else (or where that fails) of the tape.

        `current` is off while this runs.

        Args:
            current: The session.
            tell: Told where a bad loss comes from as soon as that is known; the search goes on.
        """
        models, budget = self.run.models, self.run.config.replay_budget_s
        call = self.calls.of(current)
        if call is None:
            return investigate(current.tape, models, budget, evidence=self._evidence, tell=tell)
        whole = investigate(current.tape, models, budget, call=call, evidence=self._evidence, tell=tell)
        if whole.reproduced == "yes":
            return replace(whole, micro_step=whole.micro_step + call.backwards_before)
        taped = investigate(current.tape, models, budget, evidence=self._evidence)
        notes = tuple(n for n in whole.notes if n not in taped.notes)
        if taped.reproduced == "yes":
            return replace(taped, notes=(*taped.notes, *(f"the step function called again: {n}" for n in notes)))
        return replace(whole, notes=(*whole.notes, *(n for n in taped.notes if n not in whole.notes)))

    def bad_at_any_scale(self, current: Session) -> Finding | None:
        """What makes a step bad that a GradScaler skips, if it is so without a loss scale as well."""
        if self.run.config.replay is Replay.OFF:
            return None
        models, budget = self.run.models, self.run.config.replay_budget_s
        with current.off():
            finding = investigate(current.tape, models, budget, unscaled=True, evidence=self._evidence)
        return finding if finding.trace is not None and finding.trace.birth is not None else None

    def erased_by(self, current: Session) -> Finding | None:
        """The overflow that left this step without gradients, if one did."""
        if self.run.config.replay is Replay.OFF:
            return None
        models, budget, call = self.run.models, self.run.config.replay_budget_s, self.calls.of(current)
        with current.off():
            for way in (None, call) if call is not None else (None,):
                finding = investigate(current.tape, models, budget, call=way, conclude=erased)
                if finding.trace is not None:
                    return finding
        return None

    @property
    def _evidence(self) -> Any:
        return self.capsules.evidence if self.capsules is not None else None
