"""A step from a capsule, ready to be replayed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nan_detector._entries import Entry, Outside
from nan_detector._naming import Names
from nan_detector._records import Location
from nan_detector._tape import Tape
from nan_detector._trace import BirthKind

Tensor = torch.Tensor

#: Stands for what a call gave, which is made again.
NOBODY: Any = weakref.ref(type("_Nobody", (), {})())


@dataclass
class Rebuilt:
    """A step ready to be replayed.

    Attributes:
        tape: Its calls.
        names: Names of the models, and of the batch as the capsule has them.
        batch: Tensors from outside the step by name.
        losses: What each backward started from when the capsule was written, by entry.
        unknown: Calls that a capsule cannot hold, in words.
        lost: Arguments that were not kept, in words.
        places: What is known of the lines of the loop, by file and line.
    """

    tape: Tape
    names: BatchNames
    batch: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[Entry, tuple[Tensor, ...]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    places: dict[tuple[str, int], list[tuple[Location, str, str | None]]] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)  # tensors whose identities the tape goes by


class BatchNames(Names):
    """Names of the models' own, and for the batch those that the capsule gives."""

    def arguments(self, entry: Entry) -> Iterator[tuple[BirthKind, str, Outside]]:
        for kind, path, token in super().arguments(entry):
            yield kind, token.name or path, token
