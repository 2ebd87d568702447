"""Which samples of a batch do it: a search that runs the step on parts of the batch. Pure: the runs are handed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Rows = tuple[int, ...]

#: Parts of the batch that are followed at once; where more of them are bad it is not the samples.
MAX_PARTS = 3


@dataclass(frozen=True, slots=True)
class Guilty:
    """What the search found.

    Attributes:
        rows: The samples that do it, ascending; () where none was found.
        shown: How that is known, for a person.
        finite_without: Without them the step is finite.
        everywhere: Every part of the batch does it.
    """

    rows: Rows = ()
    shown: str = ""
    finite_without: bool = False
    everywhere: bool = False


class Untold(Exception):
    """A run on part of the batch could not tell; the message says why."""


def find_guilty(size: int, suspects: Rows, bad: Callable[[Rows], bool]) -> Guilty:
    """The samples that make a step of `size` samples bad; the whole step is known to be.

    Args:
        size: Number of samples, at least 2.
        suspects: Samples that are thought to do it; () where nothing is known.
        bad: Runs the step on these samples alone, and tells whether it is bad. May raise `Untold`.

    Raises:
        Untold: As `bad` did.
    """
    suspected = tuple(sorted(r for r in set(suspects) if 0 <= r < size))
    if suspected and len(suspected) < size and not bad(_rest(size, suspected)):
        return _without(suspected)
    found = _halved(size, bad)
    if found.rows and found.rows != suspected and not bad(_rest(size, found.rows)):
        return _without(found.rows)
    return found


def _rest(size: int, rows: Rows) -> Rows:
    taken = set(rows)
    return tuple(r for r in range(size) if r not in taken)


def _without(rows: Rows) -> Guilty:
    return Guilty(rows, f"without {spell(rows)} the step is finite", finite_without=True)


def _halved(size: int, bad: Callable[[Rows], bool]) -> Guilty:
    parts: list[Rows] = [tuple(range(size))]
    found: list[Rows] = []
    while parts:
        halves = [half for part in parts for half in (part[: len(part) // 2], part[len(part) // 2 :])]
        worse = [half for half in halves if bad(half)]
        for part in parts:
            if not any(set(half) <= set(part) for half in worse):
                found.append(part)  # only together
        if len(worse) == len(halves) == 4 and size > 4 and sum(map(len, halves)) == size:
            return Guilty(everywhere=True, shown="each quarter of the batch does it")
        if size > 4 and len(worse) + len(found) > MAX_PARTS:
            return Guilty(everywhere=True, shown="most parts of the batch do it")
        found += [half for half in worse if len(half) == 1]
        parts = [half for half in worse if len(half) > 1]
    rows = tuple(sorted(r for part in found for r in part))
    if len(found) == 1 and len(rows) == size:
        return Guilty(shown="no part of the batch does it alone")
    if len(rows) == size:
        each = "each sample" if all(len(part) == 1 for part in found) else "every part"
        return Guilty(everywhere=True, shown=f"{each} of the batch does it")
    if all(len(part) == 1 for part in found):
        return Guilty(rows, f"{spell(rows)} alone {'does' if len(rows) == 1 else 'do'} it")
    return Guilty(rows, f"{spell(rows)} {'do' if len(rows) > 1 else 'does'} it, none of them alone")


def spell(rows: Rows) -> str:
    """'sample 3', 'samples 1, 2 and 5', 'samples 0 to 31'."""
    if len(rows) == 1:
        return f"sample {rows[0]}"
    if len(rows) > 3 and rows[-1] - rows[0] + 1 == len(rows):
        return f"samples {rows[0]} to {rows[-1]}"
    shown = [str(r) for r in rows[:8]]
    more = len(rows) - len(shown)
    return (
        "samples " + ", ".join(shown if more else shown[:-1]) + (f" and {more} more" if more else f" and {shown[-1]}")
    )
