"""The benchmark: writes its report, and (`--readme`) the table in README.md.

python benchmarks/run.py [--quick] [--out DIR] [--readme]
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
#: What the README compares with, and what it calls it there.
OTHERS = ((HOOKS, "plain hooks"), (ANOMALY, "anomaly mode"))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="in under a minute, three workloads on one thread")
    parser.add_argument("--out", type=Path, default=Path("nan-detector-bench"), help="folder for the report")
    parser.add_argument("--readme", action="store_true", help="write the table in README.md anew")
    options = parser.parse_args(argv)
    if options.quick and options.readme:
        parser.error("--readme needs the whole benchmark: leave --quick out.")
    report = measure.run(measure.QUICK if options.quick else measure.FULL, lambda text: print(text, file=sys.stderr))
    output.show(report, Console())
    for path in output.write(report, options.out):
        print(path)
    if options.readme:
        README.write_text(with_costs(README.read_text(encoding="utf-8"), costs(report)), encoding="utf-8")
    return 0


def costs(report: Report) -> str:
    """What stands between the markers."""
    machine = report.machine
    return (
        f"{readme_table(report, OTHERS)}\n"
        f"`make bench` made this, in {report.seconds / 60:.0f} minutes: PyTorch {machine['torch']}, Python "
        f"{machine['python']}, one of {machine['processors']} processors, {machine['platform'].partition('-')[0]}.\n"
    )


def with_costs(text: str, block: str) -> str:
    """The README `text` with `block` between the markers."""
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + block + text[end:]


if __name__ == "__main__":
    sys.exit(main())
