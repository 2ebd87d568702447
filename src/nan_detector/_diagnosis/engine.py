"""From a trace to its cause: every rule is asked, in order of specificity, and the first answer is the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nan_detector._causes import cause
from nan_detector._diagnosis import backward, division, domain, infinities, loop, masks, matrices, range, state
from nan_detector._diagnosis.facts import Rule, operands
from nan_detector._diagnosis.numbers import number
from nan_detector._records import Cause
from nan_detector._trace import Birth, Trace

RUNNERS_UP = 2

#: Undefined results. When such a value was dropped by a mask, that is the better story and this the runner-up; with an
#: overflow it is the other way round, because bounding the overflow repairs the backward as well.
UNDEFINED: tuple[Rule, ...] = (
    *matrices.DETERMINANT,
    *domain.ROOTS,
    *division.RULES,
    *infinities.RULES,
    *domain.RULES,
    *matrices.IN_LOG,
)


def dropped_undefined(birth: Birth, trace: Trace) -> Cause | None:
    """`unselected_branch`, where what was dropped is undefined rather than too large."""
    found = backward.unselected_branch(birth, trace)
    undefined = next(_answers(UNDEFINED, birth, trace), None)
    if found is None or undefined is None:
        return None
    return replace(found, evidence=(*undefined.evidence[:1], *found.evidence))


#: Rules that name a mechanism by what the operation did. Loop before state: an optimizer's moment is not a parameter.
SPECIFIC: tuple[Rule, ...] = (
    *loop.RULES,
    *state.RULES,
    *masks.RULES,
    *backward.RULES,
    *range.EXP,
    dropped_undefined,
    *UNDEFINED,
)
#: What explains a value that is merely too large. The history of the steps comes first: the operation is innocent then.
TOO_LARGE: tuple[Rule, ...] = range.RULES


def diagnose(trace: Trace) -> tuple[Cause | None, tuple[Cause, ...]]:
    """Why the birth of `trace` happened.

    Returns:
        The best cause and up to two runners-up. The best is None only when the trace has no birth; an operation that no
        rule explains gives the cause "unknown".
    """
    birth = trace.birth
    if birth is None:
        return None, ()
    found = list(_answers(SPECIFIC, birth, trace))
    grown = list(_answers(loop.GROWTH, birth, trace))
    if not found:
        found = [*grown, *list(_answers(TOO_LARGE, birth, trace))[:1]]
    elif any(c.code == "exp_overflow" for c in found):
        uphill = bool(trace.learning_rates) and trace.learning_rates[-1] < 0  # no exponential is to blame for that
        found = [*grown, *found] if uphill else [*found, *grown]
    found += _answers((backward.unselected_branch,), birth, trace)
    distinct = _first_of_each_code(found)
    if not distinct:
        return _unknown(birth), ()
    return distinct[0], tuple(distinct[1 : 1 + RUNNERS_UP])


def _answers(rules: Iterable[Rule], birth: Birth, trace: Trace) -> Iterator[Cause]:
    return (found for rule in rules if (found := rule(birth, trace)) is not None)


def _first_of_each_code(causes: Iterable[Cause]) -> list[Cause]:
    first: dict[str, Cause] = {}
    for found in causes:
        first.setdefault(found.code, found)
    return list(first.values())


def _unknown(birth: Birth) -> Cause:
    total = birth.output.numel if birth.output is not None else birth.guilty_count
    bad = birth.guilty_count or (birth.output.bad_count if birth.output is not None else 0)
    ranges = [
        f"{number(s.min)} ... {number(s.max)}" for s in operands(birth) if s.min is not None and s.max is not None
    ]
    inputs = f" from inputs in {' and '.join(ranges[:3])}" if ranges else ""
    return cause(
        "unknown",
        f"{birth.call or birth.op or 'The step'} made {bad or 'some'} of {total or 'its'} results non-finite{inputs}.",
    )
