"""On a CUDA device: does a watched step wait for it once and no more, and what does the watch cost there?

python benchmarks/gpu_check.py [--seconds S] [--out DIR]     (under 4 minutes)

The exit status is 0 where no step waited more than once, 1 where one did, and 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from nan_detector._bench import measure, output
from nan_detector._bench.timing import Step
from nan_detector._bench.variants import BARE, ours, variant
from nan_detector._bench.workloads import Task, made, named

STEPS = 40
#: Steps before them: kernels are loaded, an optimizer makes its state, and whoever has just attached looks closely.
WARM = 5
WORKLOADS = ("W1", "W2", "W3-50", "W4", "W5")
#: What PyTorch says of a wait. When the mode is first set it also says that this is a prototype, in similar words.
WAITED = "called a synchronizing CUDA operation"


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
    # An error that we make is raised, not told and forgotten: it may be the wait that is looked for.
    os.environ["NAN_DETECTOR_STRICT"] = "1"
    console = Console()
    faults: list[str] = []
    for name in WORKLOADS:
        own = waits_of_its_own(name)
        if own:
            console.print(f"{name}: a bare step waits by itself, and is not looked at: {own[0]}", markup=False)
            continue
        found = [fault for level in ("step", "layers") for fault in waits(name, level)]
        console.print(f"{name}: {'; '.join(found) or f'each of {STEPS} steps waited once, in the gate'}", markup=False)
        faults += found
    plan = measure.Plan(
        WORKLOADS, cell_s=options.seconds, growth_s=0.0, answers=("step",), repeats=1, device="cuda", least=2
    )
    report = measure.run(
        plan, lambda text: print(text, file=sys.stderr), lambda report: output.write_text(report, options.out)
    )
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


def waits_of_its_own(workload: str, device: str = "cuda") -> list[str]:
    """What waits for the device in a bare step: a release of PyTorch may do so, and the watch is not to blame."""
    task = made(named(workload), device)
    with variant(BARE).watch(task) as step:
        for _ in range(WARM):
            step()
        return _under("warn", step, task)


def waits(workload: str, level: str, device: str = "cuda") -> list[str]:
    """What waits for the device beside the gate's one read, in sentences."""
    faults = []
    # "error" stops at the first one; but an error that somebody expects is swallowed, and a warning is not.
    for mode in ("error", "warn"):
        task = made(named(workload), device)
        with ours(level)(task) as step, reads(device) as counted:
            for _ in range(WARM):
                step()
            counted.count = 0
            said = _under(mode, step, task)
        where = f"{workload}, watch={level!r}"
        faults += [f"{where}: {what}" for what in said]
        if counted.count != STEPS and not said:
            faults.append(f"{where}: {counted.count} reads in {STEPS} steps, and one in each is meant")
    return faults


def _under(mode: str, step: Step, task: Task) -> list[str]:
    """Take the steps; what waited meanwhile, each place once."""
    with warnings.catch_warnings(record=True) as caught, sync_debug(mode, task.x.device):
        warnings.simplefilter("always")
        try:
            for _ in range(STEPS):
                step()
        except RuntimeError as error:
            if WAITED not in str(error):
                raise
            return [f"{_place(error)}: {str(error).splitlines()[0]}"]
    return list(dict.fromkeys(f"{w.filename}:{w.lineno}: {WAITED}" for w in caught if WAITED in str(w.message)))


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "?" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


@contextmanager
def sync_debug(mode: str | int, device: torch.device) -> Iterator[None]:
    """What PyTorch does in here when the host waits for a CUDA device; of others it does not know."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def reads(device: str = "cuda") -> Iterator[Reads]:
    """In here a vector on such a device that is fetched whole is counted, and may be waited for."""
    found = Reads()
    fetch = Tensor.tolist

    def tolist(t: Tensor) -> Any:
        if t.device.type != device:
            return fetch(t)
        found.count += 1
        with sync_debug("default", t.device):
            return fetch(t)

    Tensor.tolist = tolist  # type: ignore[method-assign, assignment]  # counted for this run
    try:
        yield found
    finally:
        del Tensor.tolist  # it is inherited


if __name__ == "__main__":
    sys.exit(main())
