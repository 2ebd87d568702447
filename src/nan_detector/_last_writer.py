"""Of weights and buffers that were bad before the step: which line of the loop's own code wrote them last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from nan_detector import _finite
from nan_detector._entries import Outside
from nan_detector._naming import Names
from nan_detector._quiet import quiet
from nan_detector._records import NaNEvent
from nan_detector._source import location_of
from nan_detector._source_text import call_expression
from nan_detector._summary_title import is_rewrite
from nan_detector._written_weights import Writers, Written


def with_writer(
    event: NaNEvent, names: Names, writers: Writers, last_good: int | None, outside: Mapping[int, Outside]
) -> NaNEvent:
    """`event` with the line that wrote the bad tensor, and the step in which it did.

    Args:
        event: An event of a step.
        names: Names of the models.
        writers: What the loop's own calls have written.
        outside: What the step took from outside, by identity, with the values of before it was written.
        last_good: The last step whose weights were good when the model was called; None where there was none.
    """
    written = _writer(event, names, writers, last_good, outside)
    if written is None or written.mark is None:
        # Where it was worked out is known, and not when: mostly after the last good step, before the loop began anew.
        return _dated(event, last_good) if is_rewrite(event) and last_good is not None else event
    event = _dated(event, written.step)
    if event.location is not None:  # where it was worked out what was written
        return event
    call = call_expression(written.mark) or written.name
    return replace(event, location=location_of(written.mark), call=call, op=written.name)


def _dated(event: NaNEvent, step: int) -> NaNEvent:
    if step >= event.step:
        return event
    return replace(event, step=step, notes=(*event.notes, f"found at step {event.step}, when {event.symptom}"))


def _writer(
    event: NaNEvent, names: Names, writers: Writers, last_good: int | None, outside: Mapping[int, Outside]
) -> Written | None:
    if event.phase != "state" or event.tensor_name is None:
        return None
    tensor = next((t for n, t in [*names.parameters(), *names.buffers()] if n == event.tensor_name), None)
    if tensor is None or _was_bad(outside.get(id(tensor)), tensor):
        return None
    written = writers.of(tensor)
    if written is None or (written.step >= event.step and not written.before):  # the model was called before the write
        return None
    if last_good is None:
        return written
    # What a good step was run with is not what made a later one bad.
    is_later = written.step > last_good or (written.step == last_good and not written.before)
    return written if is_later else None


def _was_bad(token: Outside | None, tensor: Tensor) -> bool:
    """True where what stood there before it was written was bad already."""
    if token is None or token.snapshot is None or not token.stands_for(tensor):
        return False
    with quiet():
        return _finite.checkable(token.snapshot) and not _finite.is_finite(token.snapshot)
