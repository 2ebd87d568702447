"""What happened, as text: the rows of a report, and the plain report made of them.

`rows` is the one place that decides what is said and in which order; the terminal and the HTML page only dress it.
Every string of an event is untrusted (a log can come from anywhere): no control character leaves this file, which is
long because each row has a few lines of wording.
"""

from __future__ import annotations

import linecache
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nan_detector._notebook import is_cell
from nan_detector._records import Location, NaNEvent, Site, TensorStats, Trial
from nan_detector._source import source_context
from nan_detector._source_text import clean
from nan_detector._summary_loss import term_lines
from nan_detector._verdict import shown_by

#: Label of the row that holds source lines. Renderers show its lines two columns further left, without the label.
SOURCE = "source"
#: Stands between a fix and what came of it.
GAP = " " * 6
#: Columns of labels and of text in a report.
LABEL_COLUMN, TEXT_COLUMN = 3, 11

_PHASES = {
    "data": "in the data",
    "forward": "in the forward pass",
    "loss": "in the loss",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer",
    "state": "in the state (bad before the step)",
}
_SEVERITIES = {"silent": ", absorbed in silence", "handled": ", and handled"}
_ACTIONS = {
    "stop": "the step was not taken",
    "raise": "the step was not taken",
    "skip": "the step was skipped",
    "warn": "the step was taken",
    "rollback": "the run was rolled back",
}
_WEIGHTS = {"clean": "weights are clean", "restored": "weights were restored"}
_REPRODUCED = {"yes": "yes", "no": "no", "not_tried": "not tried"}
_VERDICTS = {
    "data": "data: the batch has to change",
    "precision": "precision: a wider number format keeps the step finite",
    "formula": "formula: the computation has to change",
    "state": "state: bad before the step began",
    "optimizer": "optimizer: its own arithmetic did it",
    "compiler": "compiler: run eagerly, the step is finite",
    "not_reproducible": "not reproducible: run again, the step was finite",
}
#: Names of trials for a person, and those whose detail is the whole answer.
_TRIALS = {
    "again": "again",
    "eager": "with nothing compiled",
    "float32": "in float32",
    "float64": "in float64",
    "loss_scale_1": "at loss scale 1",
    "finite_state": "with finite state",
    "finite_data": "with finite data",
    "samples": "samples",
}
_TOLD_IN_FULL = ("again", "samples")
_LONGEST_LINE, _LONGEST_JOIN = 240, 110
_LARGEST_SOURCE_FILE = 4 * 2**20
_MOST_CONTINUATIONS = 3
_MOST_SITES = 10
_MOST_SAMPLES = 8
_MOST_INPUTS = 4


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


def report(event: NaNEvent) -> str:
    """The plain-text report of one event, without a newline at its end."""
    out = [" " + title(event), ""]
    for row in rows(event):
        out += [prefix + line for prefix, line in zip(prefixes(row), row.lines, strict=True)]
    return "\n".join(out).rstrip()


def prefixes(row: Row) -> list[str]:
    """What stands left of each line of `row`: its label, or the blanks below it."""
    if row.label == SOURCE:
        return [" " * (TEXT_COLUMN - 2)] * len(row.lines)
    first = " " * LABEL_COLUMN + row.label.ljust(TEXT_COLUMN - LABEL_COLUMN)
    return [first] + [" " * TEXT_COLUMN] * (len(row.lines) - 1)


def headline(event: NaNEvent) -> str:
    """One line for a log: what, when, where and, where known, why."""
    place = where(event)
    cause = f" ({clean(event.cause.title)})" if event.cause is not None else ""
    return f"{title(event)}{': ' + place if place else ''}{cause}"


def title(event: NaNEvent) -> str:
    """What was born or found, at which step, in which phase."""
    step = f" at step {event.step}" + (f", micro-step {event.micro_step}" if event.micro_step else "")
    if _is_of_a_block(event):
        count = event.step
        step = f" after {count} backward pass{'es' * (count > 1)}" if count else ""
    rank = f", on rank {event.rank}" if event.rank else ""
    if event.phase == "state" and event.severity == "silent":
        return f"{_kind(event)} {_verb(event)}{step}{rank}, in state that no step uses"
    phase = _PHASES.get(event.phase, clean(event.phase))
    comma = "," if step or rank else ""
    return f"{_kind(event)} {_verb(event)}{step}{rank}{comma} {phase}{_SEVERITIES.get(event.severity, '')}"


def _is_of_a_block(event: NaNEvent) -> bool:
    """True for an event of `detect_nan`, which knows of no steps and no weights."""
    return event.action == "raise" and not event.weights


def where(event: NaNEvent) -> str:
    """Tensor, module, call and line where known: `encoder.norm2 (CustomNorm)  ·  torch.sqrt  ·  models/norm.py:41`."""
    module = event.layer_name or ""
    if module and event.module_type:
        module += f" ({event.module_type})"
    # Where a tensor was bad before any operation ran, its name is the answer; elsewhere the operation is.
    tensor_first = event.phase in ("data", "state", "optimizer")
    parts = [module, _operation(event), event.tensor_name or ""]
    if tensor_first:
        parts = [event.tensor_name or "", module, _operation(event)]
    if event.location is not None:
        parts.append(place(event.location))
    return clean("  ·  ".join(p for p in parts if p))


def place(location: Location) -> str:
    """File and line, or cell and line: `models/norm.py:41`, `cell In[3], line 7`."""
    if location.cell is not None:
        return clean(f"cell {location.cell}, line {location.line}")
    if is_cell(location.file):  # of a notebook elsewhere: a path that leads nowhere would only mislead
        return f"a notebook's cell, line {location.line}"
    return clean(f"{_short_path(location.file)}:{location.line}")


def rows(event: NaNEvent) -> tuple[Row, ...]:
    """The report as data, in the order in which it is read. What is not known has no row."""
    unexplained = event.cause is None or event.cause.code == "unknown"
    unfinished = event.status == "provisional"
    parts: list[tuple[str, Iterable[str]]] = [
        ("where", [where(event)]),
        (SOURCE, _source(event.location) if event.location is not None else ()),
        ("sample", [_samples(event)]),
        ("seen", [event.symptom] if unexplained else ()),
        ("search", ["not finished: the birthplace and the cause may still be found."] if unfinished else ()),
        ("why", _why(event)),
        ("values", _values(event) if unexplained else ()),
        ("fix", _fix(event)),
        ("tried", _joined_if_short([_trial(t) for t in event.trials if not _is_fix(t)])),
        ("verdict", [_verdict(event)]),
        ("terms", term_lines(event.loss_terms, place)),
        ("spread", [_spread(event)]),
        ("before", _joined_if_short(event.before)),
        ("state", [_state(event)]),
        ("capsule", [event.capsule or ""]),
        ("note", event.notes),
    ]
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


def _kind(event: NaNEvent) -> str:
    # The inputs only speak where the result is silent: a NaN made of an intended -inf is a NaN.
    for stats in ((event.output,) if event.output is not None else (), event.inputs):
        nan = any(s.nan_count for s in stats)
        inf = any(s.posinf_count or s.neginf_count for s in stats)
        if nan or inf:
            return " and ".join(["NaN"] * nan + ["Inf"] * inf)
    if event.loss is not None and not math.isfinite(event.loss):
        return "NaN" if math.isnan(event.loss) else "Inf"
    return "NaN or Inf"


def _verb(event: NaNEvent) -> str:
    if event.phase in ("data", "state"):
        return "found"
    located = event.op or event.call or event.layer_name or event.tensor_name or event.location
    return "born" if located and event.status == "final" else "seen"


def _operation(event: NaNEvent) -> str:
    name = event.call or event.op or ""
    if not name or event.phase != "backward":
        return name
    # A hand-written backward is the user's own code: there the operation itself is guilty, not a derivative.
    inside_backward = event.location is not None and event.location.function.rsplit(".", 1)[-1] == "backward"
    # Clipping works on gradients that are there already.
    clips = event.cause is not None and event.cause.code in ("clip_norm_overflow", "clip_spreads_nan")
    return name if inside_backward or clips else f"derivative of {name}"


def _short_path(file: str) -> str:
    try:
        here = os.getcwd()
        inside = os.path.relpath(file, here)
    except (OSError, ValueError):  # the folder is gone; the file is on another drive or has a name no path can have
        return file
    at_root = os.path.dirname(here) == here
    outside = at_root or not os.path.isabs(file) or inside.startswith(os.pardir)
    return file if outside else inside.replace(os.sep, "/")


def _source(location: Location) -> list[str]:
    numbered = _numbered_source(location)
    gutter = max((len(str(number)) for number, _ in numbered), default=0)
    return [f"{'>' if n == location.line else ' '} {n:>{gutter}} |   {text}" for n, text in numbered]


def _numbered_source(location: Location) -> list[tuple[int, str]]:
    """The guilty line, the line above it, and those below that belong to an open bracket."""
    below = source_context(location, before=0, after=_MOST_CONTINUATIONS) if _may_read(location.file) else []
    if not below:  # the file is elsewhere or was edited since: what the record itself says is still right
        return [(location.line, location.source_line)] if location.source_line.strip() else []
    texts = [text for _, text in below]
    after = 0
    while after < len(texts) - 1 and _open_brackets(texts[: after + 1]) > 0:
        after += 1
    context = source_context(location, before=1, after=after)
    return context if context[0][1].strip() else context[1:]


def _may_read(file: str) -> bool:
    """True where reading `file` is quick and stays on this machine: the name may come from somebody else's log."""
    if file in linecache.cache:
        return True
    if file.startswith(("\\\\", "//")):  # a network share: Windows would send it the user's credentials
        return False
    try:
        return os.path.isfile(file) and os.path.getsize(file) <= _LARGEST_SOURCE_FILE
    except (OSError, ValueError):
        return False


def _open_brackets(lines: Sequence[str]) -> int:
    text = "".join(lines)
    return sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))


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


#: What came of the fix is told beside it up to this length.
_BESIDE_FIX = 70


def _is_fix(trial: Trial) -> bool:
    return trial.name.startswith("fix")


def _fix(event: NaNEvent) -> list[str]:
    lines = (event.cause.fix or "").strip().splitlines() if event.cause is not None else []
    if not lines:
        return []
    *above, last = lines
    tried = next((t for t in event.trials if _is_fix(t)), None)
    if tried is None:
        return lines
    outcome = _outcome_of_fix(tried)
    return [*lines, outcome] if len(outcome) > _BESIDE_FIX else [*above, f"{last}{GAP}{outcome}"]


def _outcome_of_fix(trial: Trial) -> str:
    detail = trial.detail.rstrip(".")
    if trial.finite is None:
        return "not tried" + (f": {detail}" if detail else "")
    outcome = "all finite" if trial.finite else "still not finite"
    return "tried on this step: " + (detail if "finite" in detail else ", ".join(filter(None, [detail, outcome])))


def trial_name(trial: Trial) -> str:
    """What was changed, in words."""
    return _TRIALS.get(trial.name, trial.name.replace("_", " "))


def _verdict(event: NaNEvent) -> str:
    """What the verdict means, and what was tried that shows it (the fix has a row of its own)."""
    said = _VERDICTS.get(event.verdict, "")
    shown = shown_by(event)
    if shown is None or shown.name in _TOLD_IN_FULL or _is_fix(shown):
        return said
    return f"{said} (tried {_TRIALS[shown.name]})" if said and shown.name in _TRIALS else said


def _trial(trial: Trial) -> str:
    name = trial_name(trial)
    if trial.finite is not None and trial.name in _TOLD_IN_FULL and trial.detail:
        return f"{name}: {trial.detail}"
    outcome = {True: "finite", False: "not finite", None: "not tried"}[trial.finite]
    # Which gradient stays bad is in the record; here it would drown what did help.
    detail = trial.detail if trial.finite is not False or trial.name not in _TRIALS else ""
    return f"{name}: {outcome}" + (f" ({detail})" if detail else "")


def _spread(event: NaNEvent) -> str:
    names: list[str] = []
    previous = ""
    for site in _sites(event):
        name = site.layer_name or (site.phase if site.phase in ("loss", "optimizer") else site.op)
        if name != previous:
            turned = event.phase == "backward" or any(n.startswith("backward:") for n in names)
            turns = site.phase == "backward" and not turned
            names.append(f"backward: {name}" if turns else name)
        previous = name
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


def _state(event: NaNEvent) -> str:
    weights = _WEIGHTS.get(event.weights, f"weights are {event.weights}" if event.weights else "")
    action = "" if _is_of_a_block(event) else _ACTIONS.get(event.action, event.action).rstrip(".")
    said = ": ".join(p for p in (weights, action) if p)
    reproduced = f"reproduced: {_REPRODUCED.get(event.reproduced, event.reproduced)}"
    return f"{said}.        {reproduced}" if said else reproduced
