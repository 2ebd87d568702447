"""What the patches share: who is watching, what is put back at the end, and how a method is wrapped."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

from nan_detector._session import Session

compiling = torch.compiler.is_compiling


class Watcher(Protocol):
    """What an attached detector must answer."""

    roots: Any  # its `Roots`

    def before_step(self, optimizer: Any, args: Any, kwargs: Any, session: Session) -> tuple[Any, Any] | None:
        """An optimizer is about to step: None to let it, or the replaced call."""

    def after_step(self, optimizer: Any, session: Session) -> None:
        """The step was taken (or its stand-in ran)."""

    def gradients_dropped(self, owner: Any, session: Session) -> None:
        """`zero_grad` of an optimizer or module is about to run."""

    def scaler_skipped(self, scaler: Any, optimizer: Any, session: Session) -> None:
        """A GradScaler decided not to step."""

    def unscaling(self, scaler: Any, optimizer: Any, session: Session) -> None:
        """Gradients that carry a loss scale are about to lose it."""


#: Held while patches are made or taken back.
lock = threading.RLock()
#: Who is asked, in the order of attaching.
watchers: list[Watcher] = []
#: What the last detector to leave calls, newest first.
to_undo: list[Callable[[], object]] = []


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around` in the place of a method: it is called with the original in front, except where code is traced."""
    original = owner.__dict__[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return original(*args, **kwargs)
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    to_undo.append(lambda: setattr(owner, name, original))
