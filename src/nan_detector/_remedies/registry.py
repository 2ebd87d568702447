"""What a remedy is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nan_detector._remedies.call import Call, Repaired


@dataclass(frozen=True, slots=True)
class Remedy:
    """A repaired form of a call.

    Attributes:
        causes: Cause codes that it is meant for.
        names: Functions that it can repair, by `name_of`; empty for any.
        repair: Gives the repaired result, or raises `Unfit`.
        needs: Functions whose calls it asks for by `Call.made_by`.
        follows: Where it repairs not the guilty call but one that takes its result: functions of which that may be one.
        suits: Asked at the guilty call of a remedy that `follows`: raises `Unfit` where there is nothing to follow.
    """

    causes: frozenset[str]
    names: frozenset[str]
    repair: Callable[[Call], Repaired]
    needs: frozenset[str] = frozenset()
    follows: frozenset[str] = frozenset()
    suits: Callable[[Call], object] | None = None


def remedy(
    causes: str,
    names: str,
    repair: Callable[[Call], Repaired],
    *,
    needs: str = "",
    follows: str = "",
    suits: Callable[[Call], object] | None = None,
) -> Remedy:
    """A `Remedy` from lists of words."""
    words = [frozenset(w.split()) for w in (causes, names, needs, follows)]
    return Remedy(words[0], words[1], repair, words[2], words[3], suits)
