"""On a CUDA device: does a watched step wait for it once and no more, and what does the watch cost there?

python benchmarks/gpu_check.py [--seconds S] [--out DIR]     (under 4 minutes)

The exit status is 0 where no step waited more than once, 1 where one did, and 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from nan_detector import NaNDetector
from nan_detector._bench import measure, output
from nan_detector._bench.workloads import Task, made, named

STEPS = 40
WORKLOADS = ("W1", "W2", "W3-50", "W4")


class Reads:
    """Counts the reads that are meant, and lets them pass."""

    def __init__(self) -> None:
        self.count = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Check, measure, write."""
    options = parsed(argv)
    if not torch.cuda.is_available():
        sys.stderr.write(
            "gpu_check: PyTorch sees no CUDA device here. Run it where torch.cuda.is_available() is True; the same is "
            "tested without one by tests/test_one_read.py.\n"
        )
        return 2
    console = Console()
    faults = [fault for name in WORKLOADS for level in ("step", "layers") for fault in waits(name, level)]
    for fault in faults:
        console.print(fault, markup=False)
    if not faults:
        console.print(f"Each of {STEPS} steps waited for the device once, in the gate.")
    plan = measure.Plan(
        WORKLOADS, cell_s=options.seconds, growth_s=0.0, answers=("step",), repeats=1, device="cuda", least=2
    )
    report = measure.run(plan, lambda text: print(text, file=sys.stderr))
    output.show(report, console)
    for path in output.write(report, options.out):
        print(path)
    return 1 if faults else 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="for the timing of each workload")
    parser.add_argument("--out", type=Path, default=Path("nan-detector-bench-gpu"), help="folder for the report")
    options = parser.parse_args(argv)
    if not 0.0 < options.seconds <= 600.0:
        parser.error(f"--seconds={options.seconds} must be above 0, and at most 600.")
    return options


def waits(workload: str, level: str) -> list[str]:
    """What waited for the device beside the gate's one read, in sentences."""
    faults = []
    # "error" stops at the first one; but an error that somebody expects is swallowed, and a warning is not.
    for mode in ("error", "warn"):
        task = made(named(workload), "cuda")
        with NaNDetector(task.model, watch=level, verbose=False), reads() as counted:
            for _ in range(5):
                task.step()
            counted.count = 0
            said = _under(mode, task)
        where = f"{workload}, watch={level!r}"
        faults += [f"{where}: {what}" for what in said]
        if counted.count != STEPS:
            faults.append(f"{where}: {counted.count} reads in {STEPS} steps, and one in each is meant.")
    return faults


def _under(mode: str, task: Task) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for _ in range(STEPS):
                task.step()
        except RuntimeError as error:
            return [str(error).splitlines()[0]]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}: {w.message}" for w in caught if "synchroniz" in str(w.message)]


@contextmanager
def reads() -> Iterator[Reads]:
    """In here a vector that is fetched whole is counted, and may be waited for."""
    found = Reads()
    fetch = Tensor.tolist

    def tolist(t: Tensor) -> Any:
        if not t.is_cuda:
            return fetch(t)
        found.count += 1
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return fetch(t)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    Tensor.tolist = tolist  # type: ignore[method-assign, assignment]  # counted for this run
    try:
        yield found
    finally:
        Tensor.tolist = fetch  # type: ignore[method-assign]  # as it was


if __name__ == "__main__":
    sys.exit(main())
