"""Run a script that nobody changed, as if Python had started it, with the watch on."""

from __future__ import annotations

import os
import runpy
import sys
import time
import traceback
from typing import Any

#: Exit status when an event stopped the script.
STOPPED = 3
DEFAULT_FOLDER = "nan-detector-runs"


def run_script(script: str, args: list[str], *, module: bool, watch: str, on_nan: str, log_dir: str | None) -> int:
    """Run `script` (with `module`: the module of that name) and return its exit status.

    Args:
        script: Path of a Python file, or a module's name.
        args: Its own arguments.
        module: `script` is a module's name.
        watch: A watch level.
        on_nan: A policy. "stop" ends the script with exit status 3 when a bad step was refused.
        log_dir: Folder for the log; None makes one in ``nan-detector-runs``.

    Returns:
        The script's own exit status; 1 when it raised (its traceback is printed as Python would); 3 when stopped.
    """
    from nan_detector._auto import AutoWatch
    from nan_detector._detector import NaNDetector
    from nan_detector._records import NaNEvent

    folder = log_dir if log_dir is not None else os.path.join(DEFAULT_FOLDER, time.strftime("%Y-%m-%d_%H-%M-%S"))
    stopped = False

    def on_event(event: NaNEvent) -> None:
        nonlocal stopped
        if on_nan == "stop" and event.severity == "error":
            stopped = True
            raise SystemExit(STOPPED)

    def make(model: Any) -> NaNDetector:
        return NaNDetector(model, watch=watch, on_nan=on_nan, log_dir=folder, on_event=on_event)

    auto = AutoWatch(make)
    status = _run(auto, script, args, module)
    if auto.detector is not None and auto.detector.all_events:
        sys.stderr.write(f"events and the flight record: {folder}\n")
    return STOPPED if stopped else status


def _run(auto: Any, script: str, args: list[str], module: bool) -> int:
    argv, path = sys.argv, list(sys.path)
    sys.argv = [script, *args]
    try:
        with auto:
            if module:
                sys.path.insert(0, os.getcwd())
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
                runpy.run_path(script, run_name="__main__")
        return 0
    except SystemExit as exit_:
        return _status(exit_)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        _print_as_python_would(error)
        return 1
    finally:
        sys.argv, sys.path[:] = argv, path


def _status(exit_: SystemExit) -> int:
    if exit_.code is None or isinstance(exit_.code, int):
        return exit_.code or 0
    sys.stderr.write(f"{exit_.code}\n")
    return 1


def _print_as_python_would(error: BaseException) -> None:
    """The traceback from the script's first frame on: ours and runpy's are nobody's business."""
    trace = error.__traceback__
    not_the_scripts = (os.path.dirname(__file__), "<frozen runpy")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(not_the_scripts):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
