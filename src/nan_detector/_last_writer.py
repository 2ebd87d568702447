"""Of weights and buffers that were bad before the step: which line of the loop's own code wrote them last."""

from __future__ import annotations

from dataclasses import replace

from nan_detector._naming import Names
from nan_detector._records import NaNEvent
from nan_detector._source import location_of
from nan_detector._source_text import call_expression
from nan_detector._summary_title import is_rewrite
from nan_detector._written_weights import Writers, Written


def with_writer(event: NaNEvent, names: Names, writers: Writers, last_good: int | None) -> NaNEvent:
    """`event` with the line that wrote the bad tensor, and the step in which it did.

    Args:
        event: An event of a step.
        names: Names of the models.
        writers: What the loop's own calls have written.
        last_good: The last step whose weights were good when the model was called; None where there was none.
    """
    written = _writer(event, names, writers, last_good)
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


def _writer(event: NaNEvent, names: Names, writers: Writers, last_good: int | None) -> Written | None:
    if event.phase != "state" or event.tensor_name is None:
        return None
    tensor = next((t for n, t in [*names.parameters(), *names.buffers()] if n == event.tensor_name), None)
    written = writers.of(tensor) if tensor is not None else None
    if written is None or (written.step >= event.step and not written.before):  # the model was called before the write
        return None
    if last_good is None:
        return written
    # What a good step was run with is not what made a later one bad.
    is_later = written.step > last_good or (written.step == last_good and not written.before)
    return written if is_later else None
