"""The folder of a run that was given none: one per run, and one for all processes that a launcher started together."""

from __future__ import annotations

import os
import time

DEFAULT_FOLDER = "nan-detector-runs"


def new_folder() -> str:
    """Absolute path of ``nan-detector-runs/<time>`` in the working directory; nothing is made yet.

    Processes of one launcher (torchrun) start within a second or two, and must agree: their time is the launcher's.
    """
    launched = os.environ.get("LOCAL_RANK") is not None
    started = (_start_of(os.getppid()) if launched else None) or time.time()
    name = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(started))
    path = os.path.abspath(os.path.join(DEFAULT_FOLDER, name))
    if launched:
        return path
    return next(p for p in (path, *(f"{path}-{i}" for i in range(2, 10_000))) if not os.path.exists(p))


def _start_of(process: int) -> float | None:
    """When a process was started, in seconds since the epoch; None where Linux's /proc is not there to tell."""
    try:
        with open(f"/proc/{process}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration, AttributeError):
        return None
