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


class Run:
    """One watched run, from attach to detach.

    Attributes:
        models: Watched modules by key.
        names: Their names; made anew when a model is added.
        ours: Name of each watched parameter by identity.
        groups: Steps counted so far.
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
        self.stopped = False
        self.noticed = False
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
        return self.told_step if self.told_step is not None else self.groups

    def overlooked(self, current: Session) -> NaNEvent | None:
        """The event of a stop that nobody has noticed, although training goes on."""
        return self.book.events[0] if self.stopped and not self.noticed and not current.busy else None

    def ids_of(self, rows: tuple[int, ...]) -> tuple[str, ...]:
        """What the user calls these samples of the batch."""
        return tuple(self.sample_ids[r] for r in rows if r < len(self.sample_ids))

    def warn(self, kind: str, message: str, *, step: int | None = None, **more: Any) -> None:
        """Keep, write and log a warning."""
        at = self.step if step is None else step
        self.book.warn(WarningRecord(kind=kind, step=at, message=message, **more), message)
