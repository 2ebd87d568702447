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
    """

    causes: frozenset[str]
    names: frozenset[str]
    repair: Callable[[Call], Repaired]
    needs: frozenset[str] = frozenset()


def remedy(causes: str, names: str, repair: Callable[[Call], Repaired], *, needs: str = "") -> Remedy:
    """A `Remedy` from lists of words."""
    return Remedy(frozenset(causes.split()), frozenset(names.split()), repair, frozenset(needs.split()))
