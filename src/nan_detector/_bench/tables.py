"""A benchmark's report as text: a table for the terminal, Markdown, and the few lines that the README has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nan_detector._bench.results import BARE, BARE_AGAIN, Cell, Report, Row, Trend

HEAD = (
    "variant", "step ms", "ratio", "quartiles", "less A/A", "above one read", "forward ms", "forward",
    "forward less A/A", "peak", "steady", "answer", "trials",
)  # fmt: skip
#: Of the targets.
TARGETS_HEAD = ("workload", "watch", "to hold", "found", "one read", "above one read", "noise", "verdict")

#: A process that computes on one thread of an idle machine has a processor for all of the time but a little.
_IDLE = 0.9


def markdown(report: Report) -> str:
    """The whole report."""
    parts = ["# What watching costs", "", machine_line(report), ""]
    for cell in report.cells:
        parts += [f"## {heading(cell)}", "", *_table(HEAD, rows_of(cell)), ""]
    if report.targets():
        parts += ["## Targets", "", *_table(TARGETS_HEAD, target_rows(report), left=(0, 1, 7)), ""]
    if report.trends:
        parts += ['## Growth of the cost of `watch="step"`', "", *trend_lines(report.trends), ""]
    if report.missing:
        parts += [f"Not measured: {', '.join(f'{n} ({why})' for n, why in report.missing.items())}.", ""]
    if report.unfinished:
        parts += [unfinished_line(report), ""]
    parts += [*reading_lines(report), ""]
    return "\n".join(parts)


def heading(cell: Cell) -> str:
    """What a cell is about."""
    return f"{cell.workload}: {cell.title}; {cell.threads} thread{'s' * (cell.threads > 1)}"


def rows_of(cell: Cell) -> list[list[str]]:
    """A line of text per variant."""
    return [_line(row, cell) for row in cell.rows]


def _line(row: Row, cell: Cell) -> list[str]:
    limit = cell.limits.get(row.level or "")
    net = f"{row.net:.3f}" if row.variant not in (BARE, BARE_AGAIN) else ""
    return [
        row.variant,
        f"{row.step_ms.median:.3f}",
        f"{row.ratio.median:.3f}",
        f"{row.ratio.low:.3f} to {row.ratio.high:.3f}",
        net if limit is None else f"{net} (≤ {limit:.2f})",
        _points(row.above_read),
        f"{row.forward_ms.median:.3f}",
        f"{row.forward_ratio.median:.3f}",
        f"{row.forward_net:.3f}" if net else "",
        _size(row.peak_bytes),
        _size(row.steady_bytes),
        "" if row.answer_steps is None else f"{row.answer_steps:.1f} steps",
        "" if row.trials_steps is None else f"+{row.trials_steps:.1f}",
    ]


def target_rows(report: Report) -> list[list[str]]:
    """A line of text per target: what was to hold, what was found, and how far above the floor it is."""
    return [
        [
            f"{t.workload}, {t.threads} thread{'s' * (t.threads > 1)}",
            t.level,
            f"≤ {t.limit:.2f}",
            f"{t.found:.3f}",
            "" if t.read is None else f"{t.read:.3f}",
            _points(t.above_read),
            f"± {t.noise:.3f}",
            t.verdict,
        ]
        for t in report.targets()
    ]


def _points(difference: float | None) -> str:
    return "" if difference is None else f"{difference:+.3f}"


def unfinished_line(report: Report) -> str:
    """What was still to come when the report was made."""
    return f"Not finished; still to be measured: {'; '.join(report.unfinished)}."


def trend_lines(trends: Sequence[Trend]) -> list[str]:
    """One bullet per axis."""
    lines = []
    for t in trends:
        found = ", ".join(f"{size:g}: {r.median:.3f}" for size, r in zip(t.sizes, t.ratios, strict=True))
        flat = "flat" if t.share.is_flat else "not flat"
        lines.append(
            f"- {t.name}: {t.cost.slope:+.1f} µs per {t.unit} ({t.cost.low:+.1f} to {t.cost.high:+.1f}); as a share of "
            f"the step {100 * t.share.slope:+.2f} % per {t.unit} ({100 * t.share.low:+.2f} to "
            f"{100 * t.share.high:+.2f}: {flat}). Ratios: {found}."
        )
    return lines


def reading_lines(report: Report) -> list[str]:
    """How to read it, and what it is worth."""
    lines = [
        "Ratios are medians over rounds of a block's mean step, each over the bare block of the same round. Less A/A: "
        "without what the second bare run was off by. One read: every gradient is read once, and nothing is done with "
        "it; no check that looks at all gradients costs less, on this machine. Above one read: by how much of a bare "
        "step a variant's step is longer than that, in the same round. Noise: what two bare runs "
        "differed by. Answer: from the bad `optimizer.step()` to the "
        "located event on the disk, in bare steps; trials: from there to the final event.",
    ]
    # With more threads the time of a processor is more than that of the clock.
    had = min((c.processor for c in report.cells if c.threads == 1 and report.machine["device"] == "cpu"), default=1.0)
    if had < _IDLE:
        lines += [
            "",
            f"This machine was busy with other things: at worst this process had a processor for {had:.0%} of the "
            "time. Measure again on an idle one before believing small differences.",
        ]
    return lines


def machine_line(report: Report) -> str:
    """What it ran on."""
    m = report.machine
    return (
        f"PyTorch {m['torch']}, Python {m['python']}, {m['platform']}, {m['processors']} processors, {m['device']}; "
        f"{report.seconds:.0f} s."
    )


def readme_table(report: Report, others: Sequence[tuple[str, str]]) -> str:
    """Ratios of a full step with one thread, one line per workload.

    Args:
        report: The report.
        others: Variant and heading of the further columns.
    """
    ours = ['`watch="step"`', '`watch="layers"`']
    head = ["workload", "a bare step", "one read", *ours, *(title for _, title in others), "answer"]
    lines = []
    for cell in report.cells:
        if cell.threads != 1:
            continue
        step, bare = cell.level("step"), cell.rows[0]
        lines.append(
            [
                f"{cell.workload}: {cell.title}",
                f"{bare.step_ms.median:.2f} ms",
                _net(cell.floor),
                *(_net(cell.level(level)) for level in ("step", "layers")),
                *(_net(cell.row(name)) for name, _ in others),
                "" if step is None or step.answer_steps is None else f"{step.answer_steps:.1f} steps",
            ]
        )
    return "".join(f"{line}\n" for line in _table(head, lines))


def _net(row: Row | None) -> str:
    return "" if row is None else f"{row.net:.2f}"


def _table(head: Iterable[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    head = list(head)
    rule = ["---" if i in left else "---:" for i in range(len(head))]
    return [f"| {' | '.join(line)} |" for line in [head, rule, *rows]]


def _size(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.2f} MiB"
