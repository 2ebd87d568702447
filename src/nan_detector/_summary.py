"""What happened, as text: the rows of a report, and the plain report made of them.

`rows` is the one place that decides what is said and in which order; the terminal and the HTML page only dress it.
Every string of an event is untrusted (a log can come from anywhere): no control character leaves this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nan_detector._records import NaNEvent, Site, TensorStats
from nan_detector._source_text import clean
from nan_detector._summary_loss import term_lines
from nan_detector._summary_source import place, source_lines
from nan_detector._summary_state import state_lines
from nan_detector._summary_title import title, where
from nan_detector._summary_trials import fix_lines, trial_lines, verdict_line

#: Label of the row that holds source lines. Renderers show its lines two columns further left, without the label.
SOURCE = "source"
#: Columns of labels and of text in a report.
LABEL_COLUMN, TEXT_COLUMN = 3, 11

#: Operations whose names say nothing to who wrote `clip_grad_norm_` or has a norm logged.
_UNNAMED = {"foreach_norm": "gradient norm", "foreach_mul": "gradients"}
_LONGEST_LINE, _LONGEST_JOIN = 240, 110
_MOST_SITES = 10
_MOST_SAMPLES = 8
_MOST_INPUTS = 4
_TOLD_EACH_TIME = ("where", "sample", "why", "state", "capsule", "note")  # of a story that was told before


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a report.

    Attributes:
        label: What the row is about, at most 7 characters. `SOURCE` for source lines, whose text begins with
            the marker "> " (the guilty line) or with two spaces.
        lines: Clean text, at least one line; no line holds a control character.
    """

    label: str
    lines: tuple[str, ...]


def report(event: NaNEvent, *, told_at: int | None = None) -> str:
    """The plain-text report of one event, without a newline at its end; `told_at` as for `rows`."""
    out = [" " + title(event), ""]
    for row in rows(event, told_at=told_at):
        out += [prefix + line for prefix, line in zip(prefixes(row), row.lines, strict=True)]
    return "\n".join(out).rstrip()


def prefixes(row: Row) -> list[str]:
    """What stands left of each line of `row`: its label, or the blanks below it."""
    if row.label == SOURCE:
        return [" " * (TEXT_COLUMN - 2)] * len(row.lines)
    first = " " * LABEL_COLUMN + row.label.ljust(TEXT_COLUMN - LABEL_COLUMN)
    return [first] + [" " * TEXT_COLUMN] * (len(row.lines) - 1)


def rows(event: NaNEvent, *, told_at: int | None = None) -> tuple[Row, ...]:
    """The report as data, in the order in which it is read. What is not known has no row.

    Args:
        event: What is reported.
        told_at: The step of an earlier event with the same story: what was said there is not said again.
    """
    unexplained = event.cause is None or event.cause.code == "unknown"
    unfinished = event.status == "provisional"
    parts: list[tuple[str, Iterable[str]]] = [
        ("where", [where(event)]),
        (SOURCE, source_lines(event.location) if event.location is not None else ()),
        ("sample", [_samples(event)]),
        ("seen", [event.symptom] if unexplained else ()),
        ("search", ["not finished: the birthplace and the cause may still be found."] if unfinished else ()),
        ("why", _why(event)),
        ("values", _values(event) if unexplained else ()),
        ("fix", fix_lines(event)),
        ("tried", _joined_if_short(trial_lines(event))),
        ("verdict", [verdict_line(event)]),
        ("terms", term_lines(event.loss_terms, place)),
        ("spread", [_spread(event)]),
        ("before", _joined_if_short(event.before)),
        ("state", state_lines(event)),
        ("capsule", [event.capsule or ""]),
        ("note", event.notes),
    ]
    if told_at is not None:
        title_ = f": {event.cause.title}" if event.cause is not None else ""
        parts = [(label, [f"as at step {told_at}{title_}."] if label == "why" else lines) for label, lines in parts]
        parts = [(label, lines) for label, lines in parts if label in _TOLD_EACH_TIME]
    made = ((label, _clean_lines(lines)) for label, lines in parts)
    return tuple(Row(label, lines) for label, lines in made if lines)


def describe(stats: TensorStats) -> str:
    """Shape, type, finite range and bad counts of one tensor, in one line."""
    dtype = stats.dtype.removeprefix("torch.")
    shape = "scalar" if not stats.shape else "×".join(str(n) for n in stats.shape)
    parts = [f"{dtype} {shape}"]
    if stats.min is not None and stats.max is not None:
        one = stats.min == stats.max
        parts.append(
            f"finite values all {stats.min:.4g}" if one else f"finite values {stats.min:.4g} to {stats.max:.4g}"
        )
    if stats.mean is not None and stats.min != stats.max:
        parts.append(f"mean {stats.mean:.4g}")
    counts = (
        (stats.nan_count, "NaN"),
        (stats.posinf_count, "+Inf"),
        (stats.neginf_count, "-Inf"),
        (stats.zero_count, "zero"),
        (stats.negative_count, "below 0"),
    )
    said = [f"{n} {what}" for n, what in counts if n]
    return ", ".join(parts) + (f"; of {stats.numel}: " + ", ".join(said) if said else "")


def _clean_lines(texts: Iterable[str]) -> tuple[str, ...]:
    lines = [clean(line).rstrip() for text in texts for line in text.splitlines()]
    return tuple(line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 1] + "…" for line in lines if line)


def _samples(event: NaNEvent) -> str:
    names: list[str] = [str(i) for i in event.sample_index]
    if len(event.sample_id) == len(names):
        names = [f"{i} ({name})" for i, name in zip(names, event.sample_id, strict=True)]
    elif event.sample_id:
        names = list(event.sample_id)
    more = len(names) - _MOST_SAMPLES
    return ", ".join(names[:_MOST_SAMPLES]) + (f" and {more} more" if more > 0 else "")


def _why(event: NaNEvent) -> list[str]:
    if event.cause is None:
        return []
    cause = event.cause
    first, *others = _joined_if_short(cause.evidence) or [""]
    lines = [f"{cause.title}: {first}" if first else cause.title, *others, cause.explanation]
    return [line if line.endswith((".", "!", "?", ":")) else f"{line}." for line in lines if line]


def _values(event: NaNEvent) -> list[str]:
    lines = [f"input {i}: {describe(s)}" for i, s in enumerate(event.inputs[:_MOST_INPUTS])]
    if len(event.inputs) > _MOST_INPUTS:
        lines.append(f"and {len(event.inputs) - _MOST_INPUTS} more inputs")
    if event.output is not None:
        lines.append(("result: " if lines or event.op else "") + describe(event.output))
    return lines


def _spread(event: NaNEvent) -> str:
    names: list[str] = []
    passed: set[str] = set()  # on the way forward, or on the way back: a place that is left and entered is one place
    turned = event.phase == "backward"
    for site in _sites(event):
        name = site.layer_name or (site.phase if site.phase in ("loss", "optimizer") else site.op)
        name = _UNNAMED.get(name, name)
        turns = site.phase == "backward" and not turned
        if turns:
            turned, passed = True, set()
        if name not in passed:
            names.append(f"backward: {name}" if turns else name)
        passed.add(name)
    if len(names) > _MOST_SITES:
        middle = len(names) - _MOST_SITES + 1
        names = [*names[: _MOST_SITES - 4], f"… {middle} more …", *names[-3:]]
    return " → ".join(names) if names != [event.layer_name] else ""


def _sites(event: NaNEvent) -> Sequence[Site]:
    if event.layer_name and event.spread and event.spread[0].layer_name != event.layer_name:
        return (Site(op=event.op or "", phase=event.phase, layer_name=event.layer_name), *event.spread)
    return event.spread


def _joined_if_short(sentences: Sequence[str]) -> Sequence[str]:
    joined = (" " if all(s.endswith(".") for s in sentences) else "; ").join(sentences)
    return [joined] if len(joined) <= _LONGEST_JOIN else sentences
