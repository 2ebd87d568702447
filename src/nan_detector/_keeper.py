"""The policy "rollback": when the state of the training is kept, and when it goes back there."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from nan_detector._good_state import GoodState
from nan_detector._put_back import put_back
from nan_detector._recurrence import recurrence
from nan_detector._run import Run
from nan_detector._session import Session
from nan_detector._snapshot import NotFinite, keep
from nan_detector._state import is_replaying


class Keeper:
    """Keeps the last good state of one run.

    Args:
        run: The run.
        owns: Whether an optimizer steps a watched parameter.
        optimizers: Those that have stepped.
        every: Steps between two snapshots.

    Attributes:
        state: The snapshot; None before the first.
        waiting: It has to be put back as soon as nothing runs that holds on to the present weights.
        stale: It was put back since the last backward: the gradients there are belong to other weights.
        moved: The weights are not those of the step's beginning (a closure's optimizer has moved them).
    """

    def __init__(
        self, run: Run, owns: Callable[[Any], bool], optimizers: weakref.WeakSet[Any], every: int, on_host: bool
    ) -> None:
        self.run = run
        self.state: GoodState | None = None
        self.waiting = False
        self.stale = False
        self.moved = False
        self._owns = owns
        self._optimizers = optimizers
        self._every, self._on_host = every, on_host
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._taken_at = 0
        self._lacks = True  # something has come that the snapshot does not have
        self._returns = 0
        self._call = -1
        self._told: set[str] = set()

    def meet(self, holder: Any) -> None:
        """A scheduler is about to step, or a loss scaler is in use."""
        if holder in self._holders or is_replaying():
            return
        optimizer = getattr(holder, "optimizer", None)
        if optimizer is not None and not self._owns(optimizer):
            return
        self._holders.add(holder)
        # What it is now it was at the snapshot, if it was there then: it has not stepped since. One that is just being
        # made takes its first step in its constructor.
        made = vars(holder).get("last_epoch", 0) >= 0
        if self.state is None or not made or not self.state.add_holder(holder):
            self._lacks = True

    def met_optimizer(self) -> None:
        """An optimizer has come that the snapshot does not have."""
        self._lacks = True

    def clean(self, current: Session) -> None:
        """Everything was found finite and the step is about to be taken: keep the state, where that is due."""
        self.stale = False
        scaler = current.scaler
        if scaler is not None and scaler not in self._holders:
            self.meet(scaler)
        first = not current.stepping or current.steps != self._call  # of several evaluations of a closure
        self._call = current.steps
        if not first or self.moved or self.waiting:
            return
        if self._lacks or self.run.groups - self._taken_at >= self._every:
            self._keep()

    def _keep(self) -> None:
        run = self.run
        earlier, self._lacks, self._taken_at = self.state, False, run.groups
        try:
            self.state = keep(
                run.step,
                run.models.values(),
                list(self._optimizers),
                list(self._holders),
                on_host=self._on_host,
                instead_of=earlier,
            )
            self._returns = 0
        except NotFinite as what:
            self._tell(f"no state to go back to was kept: {what} holds non-finite values")
        except (torch.OutOfMemoryError, MemoryError):
            self.state = None
            self._tell(
                "no memory to keep a state to go back to: use snapshot_on_host=True, or another policy than 'rollback'"
            )

    def _tell(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self.run.warn("snapshot", f"step {self.run.step}: {message}")

    def go_back(self, *, later: bool) -> tuple[str, ...]:
        """Go back to the snapshot.

        Args:
            later: A step or closure is running: `settle` will be called when it is over.

        Returns:
            What was done and what will come again, for the event; () where there is no snapshot.
        """
        if self.state is None:
            return ()
        if not self.waiting:
            self._returns += 1
        again = recurrence(self.state, list(self._holders), same_draws=self._returns == 1)
        self.waiting = True
        if not later:
            self.settle()
        said = f"parameters, buffers, optimizers, schedulers and random streams are those before step {self.state.step}"
        if self._returns > 1:
            said += (
                f"; it is return number {self._returns} to that state, so the random streams were left where they are: "
                "the same draws could lead to the same place"
            )
        return (said, *again)

    def settle(self) -> None:
        """Do what `go_back` left for later, unless a backward is still running."""
        if not self.waiting or self.state is None or torch._C._current_graph_task_id() != -1:
            return
        self.waiting = False
        self.stale = True
        put_back(self.state, with_rng=self._returns == 1)

    def refuses(self, current: Session) -> bool:
        """True for a step whose gradients are of weights that are no longer there."""
        if self.waiting:
            return True
        if self.stale and current.tape.pending():
            self.stale = False
        return self.stale

    def close(self) -> None:
        """Put back what waits, and keep nothing."""
        self.settle()
        self.state = None
