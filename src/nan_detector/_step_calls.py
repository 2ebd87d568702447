"""Calls of a step function: the one that is running, and the last one, kept while it can be made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from nan_detector._moment import Habits
from nan_detector._run import Run
from nan_detector._run_step import Call
from nan_detector._session import Session, session

T = TypeVar("T")


class StepCalls:
    """The calls of `run_step` in one run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.running: Call | None = None
        self.raised: Call | None = None  # the last one, if it raised and nothing else was done since
        self._habits: dict[int, Habits] = {}

    def of(self, current: Session) -> Call | None:
        """The call that is all of the step at hand; None where there is none."""
        call = self.running or self.raised
        return call if call is not None and call.session is current and call.whole else None

    def make(
        self, contain: Callable[..., Any], function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> T:
        """Call a step function so that it can be called again."""
        outer, self.raised = self.running, None
        self.running = contain(Call, function, args, kwargs, self.run.models, self._habits, session())
        try:
            out = function(*args, **kwargs)
        except Exception:
            # The end of the watch may still want to know why.
            self.raised = self.running
            if self.raised is not None:
                self.raised.raised = True
            raise
        else:
            if self.running is not None:
                contain(self.running.ended)
        finally:
            self.running = outer
        return out
