"""A whole log as text: what ran, each event's report, the warnings summed up, and what could not be read.

Every string comes from the log and is untrusted: none leaves this file but through `clean` or `_summary`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nan_detector._before import number
from nan_detector._digest import Digest, GradGroup, RunDigest, WarningGroup
from nan_detector._records import NaNEvent, RunRecord, StepRow
from nan_detector._source_text import clean
from nan_detector._summary_title import headline

#: Events whose whole report is shown, and further ones of which a line is, unless all are asked for.
IN_FULL, IN_LINES = 10, 50
#: Groups of warnings that are shown.
MOST_LINES = 30
_LONGEST = 300


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text, and what it is: "heading", "label", "note" or ""."""

    text: str
    kind: str = ""


def overview(digest: Digest, *, every_event: bool = False) -> Iterator[Line | NaNEvent]:
    """The log, top to bottom; an event stands for its report.

    Args:
        digest: The log.
        every_event: Show each event's whole report, however many there are.
    """
    yield Line(said(digest), "heading")
    for run in digest.runs:
        yield Line("")
        for text in run_lines(run, ranks=len(digest.ranks) > 1):
            yield Line(f" {text}", "note")
        yield from _events(run, every_event)
        yield from _block("warnings", [warning_line(g) for g in run.warnings])
        yield from _block("gradients beyond the threshold", [grad_line(g) for g in run.grads])
    yield from _block("could not be read", problem_lines(digest))


def said(digest: Digest) -> str:
    """What the log holds, in a sentence."""
    events = len(digest.events) + sum(r.events_left_out for r in digest.runs)
    warnings = sum(g.count for r in digest.runs for g in r.warnings)
    grads = sum(g.count for r in digest.runs for g in r.grads)
    parts = [
        counted(events, "event") if events else "no events",
        *([counted(warnings, "warning")] if warnings else []),
        *([counted(grads, "gradient") + " beyond the threshold"] if grads else []),
    ]
    ranks = f" of {counted(len(digest.ranks), 'rank')}" if len(digest.ranks) > 1 else ""
    return f"{', '.join(parts)} in {counted(len(digest.runs), 'run')}{ranks}"


def run_lines(run: RunDigest, *, ranks: bool) -> list[str]:
    """When it ran, with what, what was watched and how far it came."""
    lines = []
    if run.run is not None:
        lines = [f"{started(run.run)}  ·  {versions(run.run)}", f"watched {watched(run.run)}"]
    else:
        lines = ["the log does not say what ran: its first lines are missing"]
    if ranks:
        lines[0] = f"rank {run.rank}  ·  {lines[0]}"
    if run.steps:
        lines.append(steps_said(run))
    return [_short(line) for line in lines]


def started(run: RunRecord) -> str:
    """When the run began, in UTC: a log is read in other places than it was written in."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(run.started))
    except (OverflowError, ValueError, OSError):  # no such time, in a log that somebody made up
        return "at an unknown time"


def versions(run: RunRecord) -> str:
    """What it ran on."""
    return clean(
        f"nan-detector {run.package_version}, torch {run.torch_version}, Python {run.python_version}, {run.platform}"
    )


def watched(run: RunRecord) -> str:
    """Models and options."""
    options = " ".join(f"{k}={v}" for k, v in run.options.items())
    return clean(f"{', '.join(run.models) or 'no model'}" + (f"  ·  {options}" if options else ""))


def steps_said(run: RunDigest) -> str:
    """How many steps there were, and how the loss went."""
    first, last = run.steps[0], run.steps[-1]
    losses = [row for row in (first, last) if row.loss is not None]
    loss = f", loss {' → '.join(_loss(row) for row in losses)}" if losses else ""
    if run.step_count == 1:
        return f"step {first.step}" + (f", loss {_loss(first)}" if losses else "")
    return f"{run.step_count} steps, {first.step} to {last.step}{loss}"


def warning_line(group: WarningGroup) -> str:
    """The last warning of a group, and how often it came."""
    last = group.last
    when = _when(group.first_step, last.step, group.count)
    layer = f"{last.layer_name}: " if last.layer_name and last.layer_name not in last.message else ""
    return _short(f"{when}  {last.kind}: {layer}{last.message}")


def grad_line(group: GradGroup) -> str:
    """The largest norm of one parameter's gradient, and how often it was too large."""
    grad = group.largest
    when = _when(group.first_step, group.last_step, group.count)
    return _short(
        f"{when}  {parameter(grad.layer_name, grad.param_name)}: norm {number(grad.grad_norm)} "
        f"at step {grad.batch_idx}, beyond {number(grad.threshold)}"
    )


def problem_lines(digest: Digest) -> list[str]:
    """What could not be read, line by line."""
    lines = [_short(f"{p.file.name}, line {p.line}: {p.message}") for p in digest.problems]
    more = digest.problems_left_out
    return [*lines, f"and {counted(more, 'more line')}"] if more else lines


def parameter(layer: str, name: str) -> str:
    """A parameter's whole name."""
    return f"{layer}.{name}".lstrip(".")


def counted(count: int, what: str) -> str:
    """`count` of `what`, in the plural where it is not one."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _events(run: RunDigest, every: bool) -> Iterator[Line | NaNEvent]:
    in_full = len(run.events) if every else IN_FULL
    for event in run.events[:in_full]:
        yield Line("")
        yield event
    further = run.events[in_full : in_full + IN_LINES]
    left = len(run.events) - in_full - len(further) + run.events_left_out
    lines = [_short(headline(e)) for e in further]
    if left > 0:
        lines.append(f"and {left} more")
    yield from _block("further events (--all shows their reports)", lines, most=IN_LINES + 1)


def _block(title: str, lines: Sequence[str], most: int = MOST_LINES) -> Iterator[Line]:
    if not lines:
        return
    yield Line("")
    yield Line(f" {title}", "label")
    for line in lines[:most]:
        yield Line(f"   {line}")
    if len(lines) > most:
        yield Line(f"   and {len(lines) - most} more")


def _when(first: int, last: int, count: int) -> str:
    return f"step {first}" if count == 1 else f"steps {first} to {last} ({count} times)"


def _loss(row: StepRow) -> str:
    return "none" if row.loss is None else number(row.loss)


def _short(text: str) -> str:
    text = clean(text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
