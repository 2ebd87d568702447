"""What the parts of one attached detector share: what is watched, how, and where the run stands."""

from __future__ import annotations

import threading
from typing import Any

import torch

from nan_detector._book import Book
from nan_detector._config import Config
from nan_detector._ledger import Ledger
from nan_detector._naming import Names
from nan_detector._quiet import hidden
from nan_detector._recorder import Recorder
from nan_detector._records import NaNEvent, WarningRecord
from nan_detector._session import Session

#: More optimizer steps than a loop takes for one batch that it has named (a discriminator's several, an inner loop's).
_STEPS_OF_A_BATCH = 16


class Run:
    """One watched run, from attach to detach.

    Attributes:
        models: Watched modules by key.
        names: Their names; made anew when a model is added.
        ours: Name of each watched parameter by identity.
        groups: Steps of optimizers so far; each has the number that it is counted with as its position.
        shared: Of them, those that belonged to a step which another optimizer had begun.
        entered: Value of `groups` when a watched model was last called for training.
        stopped: A policy "stop" waits to be noticed by the loop.
        noticed: Somebody has asked for the events since.
        updating: The loop's own update of the weights has begun.
        ledger: Steps taken and dropped.
    """

    def __init__(self, models: dict[str, torch.nn.Module], config: Config, book: Book) -> None:
        self.config = config
        self.book = book
        self.recorder = Recorder(config.history, config.history_bytes)
        self.ledger = Ledger()
        self.lock = threading.RLock()
        self.told_step: int | None = None
        self.sample_ids: tuple[str, ...] = ()
        self.groups = 0
        self.shared = 0
        self.entered = 0
        self.stopped = False
        self.noticed = False
        self._stopped_at: tuple[int | None, int] = (None, 0)
        self.updating = False
        self.watch(models)

    def watch(self, models: dict[str, torch.nn.Module]) -> None:
        """Watch these models from now on."""
        self.models = models
        with hidden():
            self.names = Names(models)
        self.ours = {id(p): name for name, p in self.names.parameters()}

    @property
    def step(self) -> int:
        """The step that is running."""
        return self.told_step if self.told_step is not None else self.groups - self.shared

    @property
    def steps(self) -> int:
        """How many there were."""
        return self.groups - self.shared

    def go_on_from(self, steps: int) -> None:
        """Count on from so many."""
        self.groups = self.entered = steps
        self.shared = 0

    def stop(self) -> None:
        """A policy "stop" waits from now on to be noticed by the loop."""
        self.stopped, self.noticed = True, False
        self._stopped_at = (self.told_step, self.groups)

    def overlooked(self, current: Session, optimizers: int) -> NaNEvent | None:
        """The event of a stop that nobody has noticed, although training goes on.

        Args:
            current: The session.
            optimizers: How many of the loop's optimizers are known. With several (a GAN) the rest of an iteration
                calls the model again before the loop comes to where it looks.
        """
        if not self.stopped or self.noticed or current.busy:
            return None
        told, groups = self._stopped_at
        same_batch = optimizers > 1 and self.told_step is not None and told == self.told_step
        if self.groups - groups < (_STEPS_OF_A_BATCH if same_batch else optimizers):
            return None
        return self.book.events[0]

    def ids_of(self, rows: tuple[int, ...]) -> tuple[str, ...]:
        """What the user calls these samples of the batch."""
        return tuple(self.sample_ids[r] for r in rows if r < len(self.sample_ids))

    def warn(self, kind: str, message: str, *, step: int | None = None, **more: Any) -> None:
        """Keep, write and log a warning."""
        at = self.step if step is None else step
        self.book.warn(WarningRecord(kind=kind, step=at, message=message, **more), message)
