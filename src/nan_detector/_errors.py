"""Everything this package raises, in one place.

Exception
├── FloatingPointError
│   └── NonFiniteError        a NaN or Inf was born; carries the event
├── ValueError
│   ├── OptionError           an option has a value that cannot be used
│   └── CapsuleError          (internal) a capsule cannot be used; says what is wrong with it, in one line
└── RuntimeError
    ├── NotAttachedError      a call that needs an attached detector
    └── ReplayRefused         (internal) the step cannot be replayed safely; says why
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nan_detector._records import NaNEvent


class NonFiniteError(FloatingPointError):
    """A NaN or Inf was born in the watched training.

    Attributes:
        event: The record of the birth: where, why, and what it did to the weights.
    """

    def __init__(self, message: str, event: NaNEvent | None = None) -> None:
        super().__init__(message)
        self.event = event

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[str, NaNEvent | None]]:
        # The default would drop the event when the error crosses a process (DataLoader workers, launchers).
        return (type(self), (str(self), self.event))


class OptionError(ValueError):
    """An option was given a value that cannot be used; the message names both and the way out."""


class CapsuleError(ValueError):
    """Internal: a capsule is damaged, or does not fit the model it is replayed with. The message is one line."""


class NotAttachedError(RuntimeError):
    """A call that only makes sense between ``attach()`` and ``detach()``."""


class ReplayRefused(RuntimeError):
    """Internal: replaying this step would not be safe or faithful. The message is shown in the event's notes."""
