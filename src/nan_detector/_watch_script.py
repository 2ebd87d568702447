"""Run a script that nobody changed, as if Python had started it, with the watch on."""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nan_detector._cli import CommandError
from nan_detector._errors import NonFiniteError
from nan_detector._on_import import on_import
from nan_detector._render.bars import end_bars
from nan_detector._run_folder import new_folder
from nan_detector._script import NoSuchModule, run_file, run_module, traceback_of, within_program
from nan_detector._source import is_user_file
from nan_detector._summary_title import headline

if TYPE_CHECKING:
    from nan_detector._auto import AutoWatch
    from nan_detector._records import NaNEvent

#: Exit status when an event stopped the script.
STOPPED = 3
#: How the folder for the log of a forked child begins; its process id follows.
_CHILD = "child-"


@dataclass(frozen=True)
class Watching:
    """How a script is watched: options of `NaNDetector`.

    Attributes:
        watch: A watch level.
        on_nan: A policy. "stop" ends the script with exit status 3 when a bad step was refused.
        log_dir: Folder for the log; None makes one in ``nan-detector-runs``.
        capsule: Keep what replays the step elsewhere.
    """

    watch: str = "step"
    on_nan: str = "stop"
    log_dir: str | None = None
    capsule: bool = False


def run_script(script: str, args: list[str], *, module: bool, options: Watching) -> int:
    """Run `script` (with `module`: the module of that name) and return its exit status.

    This process is the script's from here on: ``__main__``, ``sys.argv`` and ``sys.path`` stay as it needs them, for
    its ``atexit`` functions and for its threads.

    Args:
        script: Path of a Python file (or of a folder or zip archive with a ``__main__.py``), or a module's name.
        args: Its own arguments.
        module: `script` is a module's name.
        options: How it is watched.

    Returns:
        The script's own exit status; 1 when it raised (its traceback is printed as Python would); 3 when an event
        stopped it.

    Raises:
        CommandError: There is no such module.
        KeyboardInterrupt: The script was interrupted; it has been told as Python would, and Python now ends the
            process with the signal.
    """
    watch = ScriptWatch(options)
    call_off = on_import("torch", watch.start)
    error: BaseException | None = None
    try:
        (run_module if module else run_file)(script, args)
        _wait_for_threads()
    except NoSuchModule as missing:
        raise CommandError(str(missing)) from None
    except BaseException as raised:
        error = raised
    finally:
        call_off()
    watch.end(error)
    if watch.stopped:
        end_bars()
    status = _told_as_python_would(error)
    watch.tell_where()
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = lambda *_: None  # it has been told
        raise error
    return STOPPED if watch.stopped else status


class ScriptWatch:
    """The watch around one script, from the moment it imports torch.

    Attributes:
        stopped: An event ended the script.
    """

    def __init__(self, options: Watching) -> None:
        self.stopped = False
        self._options = options
        self._folder = new_folder() if options.log_dir is None else os.path.abspath(options.log_dir)
        self._auto: AutoWatch | None = None
        self._events: list[NaNEvent] = []
        self._ending = False
        self._process = os.getpid()
        self._earlier = self._children()

    def start(self) -> None:
        """Look for what trains."""
        from nan_detector._auto import AutoWatch
        from nan_detector._detector import NaNDetector

        def make(model: Any) -> NaNDetector:
            o = self._options
            return NaNDetector(
                model,
                watch=o.watch,
                on_nan=o.on_nan,
                log_dir=self._log_folder(),
                capsule=o.capsule,
                on_event=self._on_event,
            )

        self._auto = AutoWatch(make)
        self._auto.__enter__()

    def _log_folder(self) -> str:
        """A forked child trains for itself: in its parent's file the lines of both would be one story."""
        child = os.getpid() != self._process
        return os.path.join(self._folder, f"{_CHILD}{os.getpid()}") if child else self._folder

    def _children(self) -> set[str]:
        return set(glob.glob(os.path.join(glob.escape(self._folder), f"{_CHILD}*")))

    def end(self, error: BaseException | None) -> None:
        """Judge what is left, and stop watching.

        Args:
            error: What the script raised.
        """
        self._ending = True
        if self._auto is None:
            return
        try:
            self._auto.__exit__(type(error) if error is not None else None, error, None)
        except NonFiniteError as late:
            if error is None:  # the last step was bad, and the policy is to raise
                _told_as_python_would(late)
        self.stopped = self.stopped or isinstance(error, NonFiniteError)

    def tell_where(self) -> None:
        """The last lines on standard error: how it went and where the records are; nothing if all was well."""
        if os.getpid() != self._process:  # a child that came out of the script's end
            return
        if not self._events:
            if self._auto is not None and self._auto.in_vain and not self.stopped:
                children = sorted(self._children() - self._earlier)
                nothing = "nothing was watched: no module of this process was trained."
                forked = "what its forked children trained was watched"
                where = "".join(f"\n  log      {_relative(c)}" for c in children)
                _say(f"nan-detector: {f'this process trained nothing; {forked}.{where}' if children else nothing}")
            return
        count, refused = len(self._events), self._auto.skipped_steps if self._auto is not None else 0
        said = [f"{count} event{'s' * (count > 1)}"]
        if self.stopped:
            said.append(f"the script was stopped at step {self._events[-1].step}")
        elif refused:
            said.append(f"{refused} step{'s' * (refused > 1)} not taken")
        lines = [f"nan-detector: {', '.join(said)}.", f"  log      {_relative(self._folder)}"]
        lines += [f"  capsule  {_relative(e.capsule)}" for e in self._events if e.capsule]
        _say("\n".join(lines))

    def _on_event(self, event: NaNEvent) -> None:
        self._events.append(event)
        if self._options.on_nan == "stop" and event.severity == "error":
            self.stopped = True
            if not self._ending:
                raise SystemExit(STOPPED)


def _wait_for_threads() -> None:
    """The script's threads may train on after its last line; Python waits for them as well."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


def _told_as_python_would(error: BaseException | None) -> int:
    """Tell of what ended the script where Python would have, and give the exit status."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        _say(str(error.code))
        return 1
    trace = traceback_of(error)
    if isinstance(error, NonFiniteError):
        # Its text is the report, which has been told when the event was found.
        _say("Traceback (most recent call last):")
        _say("".join(traceback.format_tb(within_program(trace, is_user_file))).rstrip("\n"))
        _say(f"{type(error).__name__}: {headline(error.event) if error.event is not None else error}")
        return STOPPED
    error = error.with_traceback(trace)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as exit_:
        return _told_as_python_would(exit_)
    except BaseException as in_hook:
        _say("Error in sys.excepthook:")
        traceback.print_exception(type(in_hook), in_hook, traceback_of(in_hook))
        _say("\nOriginal exception was:")
        traceback.print_exception(type(error), error, trace)
    return 1


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a script may have closed it, or a pipe is gone
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _relative(path: str) -> str:
    try:
        inside = os.path.relpath(path)
    except (OSError, ValueError):  # the folder is gone, or on another drive
        return path
    return path if inside.startswith(os.pardir) else inside
