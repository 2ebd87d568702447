"""Our own work inside the user's run: how long it took, and what becomes of a bug of ours in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from nan_detector._errors import NonFiniteError
from nan_detector._session import session
from nan_detector._state import BUG, strict

T = TypeVar("T")


class Contained:
    """Runs work of ours so that a bug in it never stops the user's training.

    Attributes:
        down: There was one: nothing more is done.
        spent: Seconds, in this step. What runs in every step does by itself what `run` does, and adds to them.
    """

    __slots__ = ("down", "spent")

    def __init__(self) -> None:
        self.down = False
        self.spent = 0.0

    def run(self, work: Callable[..., T], *args: Any) -> T | None:
        """``work(*args)``; None where it fails, or nothing more is done.

        Raises:
            NonFiniteError: The work ends the user's run on purpose.
        """
        if self.down:
            return None
        started = time.perf_counter()
        try:
            return work(*args)
        except NonFiniteError:
            raise
        except Exception:
            self.failed()
            return None
        finally:
            self.spent += time.perf_counter() - started

    def failed(self) -> None:
        """The exception that is being handled is a bug of ours: tell it, and do nothing more.

        Raises:
            Exception: That one, where our own failures must be raised.
        """
        self.down = True
        if strict():
            raise
        session().tell(BUG)
