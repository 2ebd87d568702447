"""What happened, as text: the rows of a report, and the plain report made of them.

`rows` is the one place that decides what is said and in which order; the terminal and the HTML page only dress it.
Every string of an event is untrusted (a log can come from anywhere): no control character leaves this file, which is
long because each row has a few lines of wording.
"""

from __future__ import annotations

import linecache
import math
import os
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from nan_detector._notebook import is_cell
from nan_detector._records import Location, NaNEvent, Site, TensorStats, Trial
from nan_detector._source import source_context
from nan_detector._source_text import clean
from nan_detector._summary_loss import term_lines
from nan_detector._summary_state import state_lines
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
_VERDICTS = {
    "data": "data: the batch has to change",
    "precision": "precision: a wider number format keeps the step finite",
    "formula": "formula: the computation has to change",
    "state": "state: bad before the step began",
    "optimizer": "optimizer: the gradients were finite, the step itself was not",
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
    "rate": "with the last finite learning rate",
    "option": "with the option as it was at first",
    "eps": "with a larger eps",
    "clipped": "with gradients clipped to norm 1",
    "unfused": "without multi-tensor and fused kernels",
}
_TOLD_IN_FULL = ("again", "samples")
#: Causes for which what is tried on one step tells less than it seems to: the numbers grow from step to step.
_GROWTH = ("learning_rate_too_high", "gradient_explosion", "gradients_accumulated")
_SETTINGS = ("learning_rate_non_finite", "hyperparameter_non_finite")
#: Operations whose names say nothing to who wrote `clip_grad_norm_` or has a norm logged.
_UNNAMED = {"foreach_norm": "gradient norm", "foreach_mul": "gradients"}
_LONGEST_LINE, _LONGEST_JOIN = 240, 110
_LARGEST_SOURCE_FILE = 4 * 2**20
_MOST_CONTINUATIONS = 3
_MOST_SITES = 10
_MOST_SAMPLES = 8
_MOST_INPUTS = 4
_TOLD_EACH_TIME = ("where", "sample", "why", "state", "capsule", "note")  # of a story that was told before
_FEW_SAMPLES = 3  # that are named again where it is said what the step did without them


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
    operation = _operation(event)
    parts = [module, operation, event.tensor_name or ""]
    # Where a tensor was bad before any operation ran, its name is the answer; elsewhere the operation is.
    if event.tensor_name and event.phase in ("data", "state"):
        parts = [event.tensor_name, module if event.module_type else "", event.call or ""]
    elif event.phase == "optimizer":
        parts = [event.tensor_name or "", module, operation if operation != event.op or not event.output else ""]
    if event.location is not None:
        parts.append(place(event.location))
    elif event.first_use is not None:
        parts.append(f"first used at {place(event.first_use)}")
    return clean("  ·  ".join(p for p in parts if p))


def place(location: Location) -> str:
    """File and line, or cell and line: `models/norm.py:41`, `cell In[3], line 7`."""
    if location.cell is not None:
        return clean(f"cell {location.cell}, line {location.line}")
    if is_cell(location.file):  # of a notebook elsewhere: a path that leads nowhere would only mislead
        return f"a notebook's cell, line {location.line}"
    return clean(f"{_short_path(location.file)}:{location.line}")


def story(event: NaNEvent) -> Hashable:
    """What two events have in common of which one report is enough."""
    code = event.cause.code if event.cause is not None else None
    return event.phase, event.op, event.layer_name, event.location, event.first_use, event.tensor_name, code


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
        (SOURCE, _source(event.location) if event.location is not None else ()),
        ("sample", [_samples(event)]),
        ("seen", [event.symptom] if unexplained else ()),
        ("search", ["not finished: the birthplace and the cause may still be found."] if unfinished else ()),
        ("why", _why(event)),
        ("values", _values(event) if unexplained else ()),
        ("fix", _fix(event)),
        ("tried", _joined_if_short([_trial(t, event) for t in _told(event)])),
        ("verdict", [_verdict(event)]),
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
    if event.phase in ("data", "state") or event.op == "optimizer_state":
        return "found"
    located = event.op or event.call or event.layer_name or event.tensor_name or event.location
    return "born" if located and event.status == "final" else "seen"


def _operation(event: NaNEvent) -> str:
    name = event.call or event.op or ""
    if not name or event.phase != "backward":
        return name
    if event.derivative is not None:
        return f"derivative of {name}" if event.derivative else name
    # A log of before `derivative` was recorded. In a hand-written backward the operation itself is guilty.
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


#: What came of the fix is told beside it up to this length, of its own and with the fix.
_BESIDE_FIX, _LONGEST_BESIDE = 70, 120


def _is_fix(trial: Trial) -> bool:
    return trial.name.startswith("fix")


def _fix(event: NaNEvent) -> list[str]:
    general = (event.cause.fix or "").strip().splitlines() if event.cause is not None else []
    tried = next((t for t in event.trials if _is_fix(t)), None)
    if tried is None:
        return general
    if not general:
        return []
    form, _, followed = tried.detail.rstrip(".").rpartition(": ")
    if not tried.finite or not form:
        return _beside(general, _outcome_of_fix(tried))
    # What was seen to work comes first: it is written for the user's own line.
    return [*_beside([form], f"tried on this step: {followed}"), *_in_general(general, form)]


def _beside(lines: Sequence[str], outcome: str) -> list[str]:
    *above, last = lines
    if len(outcome) > _BESIDE_FIX or len(last) + len(GAP) + len(outcome) > _LONGEST_BESIDE:
        return [*lines, outcome]
    return [*above, f"{last}{GAP}{outcome}"]


def _in_general(general: Sequence[str], form: str) -> list[str]:
    """The cause's own advice, unless the form that was tried is nothing but that advice followed."""
    said = " ".join(general)
    names = _names_in(said)
    if said in form or (names and names <= _names_in(form) and " or " not in said):
        return []
    return [f"in general: {general[0]}", *general[1:]]


def _names_in(code: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*(?=\()|(?<=\.)[A-Za-z_]\w*", code))


def _outcome_of_fix(trial: Trial) -> str:
    detail = trial.detail.rstrip(".")
    if trial.finite is None:
        return "not tried" + (f": {detail}" if detail else "")
    if not trial.finite:
        return "tried on this step, and not enough" + (f": {detail}" if detail else "")
    return "tried on this step: " + (detail if "finite" in detail else ", ".join(filter(None, [detail, "all finite"])))


def trial_name(trial: Trial) -> str:
    """What was changed, in words."""
    return _TRIALS.get(trial.name, trial.name.replace("_", " "))


def _told(event: NaNEvent) -> list[Trial]:
    """The trials that tell something of their own."""
    growth = event.cause is not None and event.cause.code in _GROWTH  # of which every sample and format has its share
    hidden = ("samples", "float64") if growth else ()
    return [t for t in event.trials if not _is_fix(t) and not _is_same(t) and t.name not in hidden]


def _is_same(trial: Trial) -> bool:
    """True for the step run again with nothing changed that did the same: "reproduced" tells that."""
    return trial.name == "again" and trial.finite is False and trial.detail.startswith(("twice", "on a copy"))


def _trial(trial: Trial, event: NaNEvent) -> str:
    name = trial_name(trial)
    if trial.name == "samples" and trial.finite is not None and trial.detail:
        if len(event.sample_index) > _FEW_SAMPLES:  # they stand in a row of their own
            return re.sub(r"^without samples [\d, and to]*(more )?(?=the step)", "without those samples ", trial.detail)
        return trial.detail
    if trial.finite is not None and trial.name in _TOLD_IN_FULL and trial.detail:
        return f"{name}: {trial.detail}"
    outcome = {True: "finite", False: "not finite", None: "not tried"}[trial.finite]
    # Which gradient stays bad is in the record; here it would drown what did help.
    detail = trial.detail if trial.finite is not False or trial.name not in _TRIALS else ""
    return f"{name}: {outcome}" + (f" ({detail})" if detail else "")


def _verdict(event: NaNEvent) -> str:
    """What the verdict means, and what was tried that shows it (the fix has a row of its own)."""
    code = event.cause.code if event.cause is not None else ""
    if event.verdict == "formula" and code in _GROWTH:
        return "formula: the growth has to stop; a wider number format only puts it off"
    if event.verdict == "optimizer" and code in _SETTINGS:
        return "optimizer: loss and gradients are finite, a setting of the optimizer is not"
    said = _VERDICTS.get(event.verdict, "")
    shown = shown_by(event)
    if shown is None or shown.name in _TOLD_IN_FULL or _is_fix(shown):
        return said
    return f"{said} (tried {_TRIALS[shown.name]})" if said and shown.name in _TRIALS else said


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
