"""The benchmark: writes its report, and (`--readme`) the table in README.md.

python benchmarks/run.py [--quick | --brief] [--out DIR] [--readme]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from nan_detector._bench import measure, output
from nan_detector._bench.results import Report
from nan_detector._bench.tables import readme_table
from nan_detector._bench.variants import ANOMALY, HOOKS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- costs: written by `make bench` -->\n", "<!-- end of costs -->\n"
#: As a shell has it, after Ctrl-C.
INTERRUPTED = 130
#: What the README compares with, and what it calls it there.
OTHERS = ((HOOKS, "plain hooks"), (ANOMALY, "anomaly mode"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="in under a minute, three workloads on one thread")
    length.add_argument("--brief", action="store_true", help="in some 3 minutes, what the README's table needs")
    parser.add_argument("--out", type=Path, default=Path("nan-detector-bench"), help="folder for the report")
    parser.add_argument("--readme", action="store_true", help="write the table in README.md anew")
    options = parser.parse_args(argv)
    if options.quick and options.readme:
        parser.error("--readme needs all workloads: leave --quick out.")
    plan = measure.QUICK if options.quick else measure.BRIEF if options.brief else measure.FULL
    so_far: list[Report] = []

    def done(report: Report) -> None:
        so_far[:] = [report]
        output.write_text(report, options.out)

    try:
        report = measure.run(plan, lambda text: print(text, file=sys.stderr), done)
    except KeyboardInterrupt:
        if not so_far:
            return INTERRUPTED
        (report,) = so_far
    output.show(report, Console())
    for path in output.write(report, options.out):
        print(path)
    if report.unfinished:
        return INTERRUPTED
    if options.readme:
        command = "python benchmarks/run.py --brief --readme" if options.brief else "make bench"
        README.write_text(with_costs(README.read_text(encoding="utf-8"), costs(report, command)), encoding="utf-8")
    return 0


def costs(report: Report, command: str) -> str:
    """What stands between the markers: the table, and what made it where."""
    machine = report.machine
    apart = max(abs(cell.apart) for cell in report.cells if cell.threads == 1)
    return (
        f"{readme_table(report, OTHERS)}\n"
        f"`{command}` made this, in {report.seconds / 60:.0f} minutes: PyTorch {machine['torch']}, Python "
        f"{machine['python']}, one of {machine['processors']} processors, {machine['platform'].partition('-')[0]}. The "
        f"two bare runs lay up to {apart:.1%} apart: no difference below that means anything. One "
        "read is a hook that reads every gradient once and does nothing with it: on the machine at hand, no check that "
        "looks at all gradients costs less.\n"
    )


def with_costs(text: str, block: str) -> str:
    """The README `text` with `block` between the markers."""
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + block + text[end:]


if __name__ == "__main__":
    sys.exit(main())
