"""The trial of the fix: the step once more with the guilty call, and nothing else, in a repaired form."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nan_detector._again import Outcome
from nan_detector._call_site import CallSite
from nan_detector._change import Change
from nan_detector._diagnosis.facts import base_op
from nan_detector._records import Cause
from nan_detector._remedies import NOT_TRIED, Remedy, remedies_for
from nan_detector._remedies.call import name_of
from nan_detector._remedies.wording import with_origin, written
from nan_detector._repair import Repair
from nan_detector._trace import Birth

#: Replays that are made at most, forms without a fit included.
MAX_TRIES = 12
#: Forms that a failed trial names.
MAX_NAMED = 3
#: A loss beyond this is finite by luck: another form may keep it small.
HUGE = 1e10
#: Lines after the guilty one that tell what its result is used for.
LINES_AFTER = 4


@dataclass(frozen=True, slots=True)
class Fixed:
    """What came of the trial.

    Attributes:
        finite: Whether a form made losses and gradients finite; None where none was tried.
        detail: Which form, or why none.
        loss: The loss that followed.
    """

    finite: bool | None
    detail: str
    loss: float | None = None


def try_remedies(
    run: Callable[[Change], Outcome | None], site: CallSite | None, birth: Birth, cause: Cause | None
) -> Fixed:
    """Try the remedies for a cause until one makes the step finite.

    Args:
        run: Runs the step with a change; gives None when there is no time left for it.
        site: Where the guilty call is; None where that is not known.
        birth: The birth.
        cause: Its cause.
    """
    if cause is None:
        return Fixed(None, "the cause is not known")
    why_not = _why_not(site, birth, cause)
    if why_not or site is None:
        return Fixed(None, why_not)
    failed: list[str] = []
    best: Fixed | None = None
    error, spent = "", False
    for repair in _repairs(site, birth, cause):
        outcome = run(repair)
        if outcome is None:
            spent = True
            break
        if best is not None and repair.whole_function:
            break
        if repair.unfit or repair.words is None or repair.first is None:
            continue
        said = written(repair.place, repair.first, with_origin(repair.words, site))
        if len(repair.lines) > 1:
            said += f" (so too at the other calls of {name_of(repair.first.func)} there)"
        if outcome.finite:
            fixed = _worked(said, outcome)
            if best is None or abs(fixed.loss or 0.0) < abs(best.loss or 0.0):
                best = fixed
            if abs(fixed.loss or 0.0) < HUGE:
                break
        elif said not in failed:
            failed.append(said)
            error = outcome.error or f"{outcome.bad} is not finite"
    if best is not None:
        return best
    if not failed:
        if spent:
            return Fixed(None, "there was no time left for it")
        return Fixed(None, f"no other form of {_called(site, birth)} is known for this cause")
    more = f" and {len(failed) - MAX_NAMED} more" if len(failed) > MAX_NAMED else ""
    return Fixed(False, f"{'; '.join(failed[:MAX_NAMED])}{more}: {error}")


def _worked(said: str, outcome: Outcome) -> Fixed:
    followed = "all finite" if outcome.loss is None else f"loss {outcome.loss:.4g}, all gradients finite"
    return Fixed(True, f"{said}: {followed}", outcome.loss)


def _why_not(site: CallSite | None, birth: Birth, cause: Cause) -> str:
    if cause.code in NOT_TRIED:
        return NOT_TRIED[cause.code]
    if birth.phase == "optimizer":
        return "it happens inside the optimizer's step, which a replay of the step does not reach"
    if site is None:
        return "where the function of the library was called is not known"
    return ""


def _repairs(site: CallSite, birth: Birth, cause: Cause) -> Iterator[Repair]:
    """At the place alone first, then, as a fault is often repeated, wherever that function calls the same."""
    names = frozenset((name_of(site.func) if site.func is not None else base_op(birth.derivative_of or birth.op),))
    remedies = [r for r in remedies_for(cause.code, names) if r.names or site.func is not None]
    context = _context(site)
    in_slope = birth.phase == "backward"
    fitting: list[Remedy] = []
    tried = 0
    for remedy in remedies:
        repair = Repair(site, remedy, context, in_slope=in_slope)
        tried += 1
        if tried > MAX_TRIES:
            return
        yield repair
        if repair.words is not None:
            fitting.append(remedy)
    for remedy in fitting:
        tried += 1
        if tried > MAX_TRIES:
            return
        yield Repair(site, remedy, context, whole_function=True, in_slope=in_slope)


def _context(site: CallSite) -> str:
    """The user's line, and those after it in the same function."""
    first = site.mark.lineno
    last = max((line for _, _, line in site.mark.code.co_lines() if line is not None), default=first)
    lines = linecache.getlines(site.mark.code.co_filename)
    return "".join(lines[first - 1 : min(last, first + LINES_AFTER)])


def _called(site: CallSite, birth: Birth) -> str:
    return birth.call or (name_of(site.func) if site.func is not None else birth.op)
