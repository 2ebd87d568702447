"""What the HTML page shows, as plain data: the template only lays it out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nan_detector._before import number
from nan_detector._digest import Digest, RunDigest
from nan_detector._records import LossTerm, NaNEvent, StepRow, TensorStats
from nan_detector._render import overview
from nan_detector._render.timeline import Chart, charts
from nan_detector._render.tree import Node, tree, way
from nan_detector._summary import SOURCE, Row, rows
from nan_detector._summary_source import place
from nan_detector._summary_title import headline, title, where
from nan_detector._summary_trials import GAP, trial_name

#: Events with a part of their own, and further ones with a line.
IN_FULL, IN_LINES = 20, 200
MOST_INPUTS, MOST_TERMS, LAST_STEPS = 16, 64, 12
#: What the report says and the page shows in another way.
_ELSEWHERE = ("tried", "terms", "values", "spread")
_SEVERITIES = {
    "error": "error: it would have reached, or has reached, the weights or the output",
    "silent": "silent: something absorbed it",
    "handled": "handled: the program dealt with it",
}
_OUTCOMES = {True: "finite", False: "not finite", None: "not tried"}

Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table: its caption, the names of its columns, and its rows; the first cell of a row names it."""

    caption: str
    columns: Cells
    rows: tuple[Cells, ...]


@dataclass(frozen=True, slots=True)
class EventView:
    """One event's part of the page."""

    anchor: str
    title: str
    place: str
    severity: str
    severity_said: str
    rows: tuple[Row, ...]
    trials: Table | None
    tree: list[Node]
    way: Table | None
    values: Table | None
    terms: Table | None
    record: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunView:
    """One run's part: pictures, warnings, what it ran on."""

    anchor: str
    title: str
    charts: list[Chart]
    last_steps: Table | None
    warnings: list[str]
    grads: list[str]
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class PageView:
    """The whole page."""

    name: str
    said: str
    events: list[EventView]
    further: list[str]
    left_out: int
    runs: list[RunView]
    problems: list[str]


def page_view(digest: Digest, name: str) -> PageView:
    """What the page says of a log.

    Args:
        digest: The log.
        name: What its user calls it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    events = digest.events
    further = events[IN_FULL:]
    left_out = max(0, len(further) - IN_LINES) + sum(r.events_left_out for r in digest.runs)
    ranks = len(digest.ranks) > 1
    return PageView(
        name,
        overview.said(digest),
        [_event(e, f"event-{i + 1}") for i, e in enumerate(events[:IN_FULL])],
        [headline(e) for e in further[:IN_LINES]],
        left_out,
        [_run(run, i, ranks, len(digest.runs) > 1) for i, run in enumerate(digest.runs)],
        overview.problem_lines(digest),
    )


def _event(event: NaNEvent, anchor: str) -> EventView:
    return EventView(
        anchor,
        title(event),
        where(event),
        event.severity if event.severity in _SEVERITIES else "error",
        _SEVERITIES.get(event.severity, event.severity),
        tuple(_fix_apart(row) for row in rows(event) if row.label not in _ELSEWHERE),
        _trials(event),
        tree(event),
        _way(event),
        _values(event),
        _terms(event.loss_terms),
        tuple(json.dumps(event.to_dict(), indent=2, ensure_ascii=False, allow_nan=False).splitlines()),
    )


def _fix_apart(row: Row) -> Row:
    if row.label != "fix":
        return row
    *above, last = row.lines
    return Row(row.label, (*above, *last.rsplit(GAP, 1)))


def _table(caption: str, columns: Cells, made: Iterable[Cells]) -> Table | None:
    found = tuple(made)
    # A column in which no row says anything is not worth its width on a phone.
    kept = [i for i in range(len(columns)) if any(row[i] for row in found)]
    body = tuple(tuple(row[i] for i in kept) for row in found)
    return Table(caption, tuple(columns[i] for i in kept), body) if found else None


def _trials(event: NaNEvent) -> Table | None:
    made = ((trial_name(t), t.question, _OUTCOMES[t.finite], t.detail) for t in event.trials)
    return _table("The step run again with one thing changed", ("changed", "to find out", "the step was", "seen"), made)


def _way(event: NaNEvent) -> Table | None:
    sites = way(event)
    made = (
        (
            f"{i + 1}",
            s.layer_name or "",
            s.module_type or "",
            s.op,
            s.phase,
            place(s.location) if s.location is not None else "",
        )
        for i, s in enumerate(sites)
    )
    return _table("The way of the bad values", ("", "module", "class", "operation", "phase", "line"), made)


def _values(event: NaNEvent) -> Table | None:
    stats = [(f"input {i}", s) for i, s in enumerate(event.inputs[:MOST_INPUTS])]
    if event.output is not None:
        stats.append(("result", event.output))
    columns = ("", "dtype", "shape", "device", "least", "greatest", "mean", "least ≠ 0", "NaN", "+Inf", "-Inf", "zeros")
    return _table("Inputs and result of the operation", (*columns, "below 0"), (_stats(n, s) for n, s in stats))


def _stats(name: str, s: TensorStats) -> Cells:
    shape = "×".join(map(str, s.shape)) or "scalar"
    counts = (s.nan_count, s.posinf_count, s.neginf_count, s.zero_count, s.negative_count)
    numbers = (_number(s.min), _number(s.max), _number(s.mean), _number(s.min_nonzero))
    return (name, s.dtype.removeprefix("torch."), shape, s.device, *numbers, *(str(c) if c else "" for c in counts))


def _terms(terms: Sequence[LossTerm]) -> Table | None:
    made = (
        (t.text, _number(t.weight), _number(t.value), "" if t.finite else "not finite", _place(t))
        for t in terms[:MOST_TERMS]
    )
    return _table("Summands of the loss", ("term", "weight", "value", "", "line"), made)


def _place(term: LossTerm) -> str:
    return place(term.location) if term.location is not None else ""


def _number(value: float | None) -> str:
    return "" if value is None else number(value, 4)


def _run(run: RunDigest, index: int, ranks: bool, several: bool) -> RunView:
    name = f"Run {index + 1}" if several else "The run"
    return RunView(
        f"run-{index + 1}",
        name + (f", rank {run.rank}" if ranks else ""),
        charts(run, f"chart-{index + 1}"),
        _last_steps(run.steps),
        [overview.warning_line(g) for g in run.warnings],
        [overview.grad_line(g) for g in run.grads],
        _environment(run),
    )


def _last_steps(steps: Sequence[StepRow]) -> Table | None:
    made = (
        (
            str(r.step),
            _number(r.loss),
            _number(r.grad_norm),
            _number(r.max_grad_norm),
            _number(r.lr),
            _number(r.loss_scale),
        )
        for r in steps[-LAST_STEPS:]
    )
    columns = ("step", "loss", "gradient norm", "largest of one parameter", "learning rate", "loss scale")
    return _table("The last steps in numbers", columns, made)


def _environment(run: RunDigest) -> tuple[tuple[str, str], ...]:
    steps = ((("steps", overview.steps_said(run)),) if run.steps else ()) + (("rank", str(run.rank)),)
    if run.run is None:
        return (("run", "the log does not say what ran: its first lines are missing"), *steps)
    record = run.run
    return (
        ("started", overview.started(record)),
        *steps,
        ("models", ", ".join(record.models)),
        ("nan-detector", record.package_version),
        ("torch", record.torch_version),
        ("Python", record.python_version),
        ("platform", record.platform),
        *((key, str(value)) for key, value in record.options.items()),
    )


__all__ = ["SOURCE", "EventView", "PageView", "RunView", "Table", "page_view"]
