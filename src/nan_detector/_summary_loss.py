"""The summands of a loss, as lines of a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nan_detector._before import number
from nan_detector._records import Location, LossTerm

_MOST_TERMS = 8
_LONGEST_LINE = 110


def term_lines(terms: Sequence[LossTerm], place: Callable[[Location], str]) -> list[str]:
    """`recon 0.69 (train.py:41) + 0.1*kl NaN (train.py:42)`, or a line for each where they are many.

    Args:
        terms: The summands; fewer than two say nothing.
        place: Names a line of the source.
    """
    if len(terms) < 2:
        return []
    shown = list(terms)
    if len(shown) > _MOST_TERMS:
        kept = sorted(range(len(shown)), key=lambda i: (shown[i].finite, i))[: _MOST_TERMS - 1]
        shown = [shown[i] for i in sorted(kept)]
    places = [place(t.location) if t.location is not None else "" for t in shown]
    together = len(set(places)) == 1
    said = [f"{_signed(t, first=i == 0)} {number(t.value)}" for i, t in enumerate(shown)]
    if not together:
        said = [f"{s} ({at})" if at else s for s, at in zip(said, places, strict=True)]
    elif places[0]:
        said[-1] += f"   ({places[0]})"
    if len(shown) < len(terms):
        rest = len(terms) - len(shown)
        finite = all(t.finite for t in shown) or sum(not t.finite for t in terms) == sum(not t.finite for t in shown)
        said.append(f"and {rest} more{', all finite' if finite else ''}")
    joined = " ".join(said)
    return [joined] if len(joined) <= _LONGEST_LINE else said


def _signed(term: LossTerm, *, first: bool) -> str:
    size = abs(term.weight)
    text = term.text
    if size != 1:
        bare = " + " not in text and " - " not in text
        text = f"{number(size)}*{text if bare else f'({text})'}"
    if term.weight < 0:
        return f"-{text}" if first else f"- {text}"
    return text if first else f"+ {text}"
