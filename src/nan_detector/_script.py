"""Run a program as Python itself would run it: its code, ``__main__``, ``sys.argv`` and ``sys.path``.

`runpy` is made for running code inside a program that goes on afterwards: it puts another ``__main__`` back when the
code ends, before ``atexit`` functions and other threads are done with it, and its frames stand in the traceback. Here
the process is the program's for the rest of its life.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import PathFinder, SourceFileLoader, SourcelessFileLoader
from typing import Any

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: The import system's own frames, which Python leaves out of its tracebacks as well.
_MACHINERY = ("<frozen importlib", "<frozen runpy", "<frozen zipimport")


class NoSuchModule(Exception):
    """``-m NAME``: there is no module of that name that could be run; the message says which and why."""


def run_file(path: str, args: list[str]) -> None:
    """Run a script, or the ``__main__`` of a folder or zip archive, in this process. What it raises passes.

    Args:
        path: The file or folder, as the user wrote it.
        args: The program's own arguments.
    """
    sys.argv = [path, *args]
    # Not `abspath`: Python leaves ".." in it as it was written.
    file = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    archive = PathFinder.find_spec("__main__", [file])
    if archive is not None and archive.loader is not None:
        _lead_with(file)
        _execute(_code_of(archive.loader, "__main__"), _attributes_of(archive))
        return
    _lead_with(os.path.dirname(os.path.realpath(path)))
    compiled = file.endswith(".pyc")
    loader = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", file)
    attributes = {"__file__": file, "__cached__": None, "__loader__": loader, "__package__": None, "__spec__": None}
    # Not `get_code`, which would keep the script's bytecode: Python compiles a script anew in each run.
    code = _code_of(loader, "__main__") if compiled else loader.source_to_code(loader.get_data(file), file)
    _execute(code, attributes)


def run_module(name: str, args: list[str]) -> None:
    """Run a module, or a package's ``__main__``, in this process, as ``python -m NAME`` would. What it raises passes.

    Raises:
        NoSuchModule: Nothing of that name can be run.
    """
    sys.argv = ["-m", *args]  # what packages see that are imported on the way
    _lead_with(os.getcwd())
    spec = _spec_of(name)
    code = _code_of(spec.loader, spec.name)
    if code is None:
        raise NoSuchModule(f"-m {name!r}: there is no Python code in {spec.origin}.")
    sys.argv[0] = spec.origin or name
    _execute(code, _attributes_of(spec))


def traceback_of(error: BaseException) -> types.TracebackType | None:
    """The traceback of what a program raised, without the frames from which it was run."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_PACKAGE, *_MACHINERY)):
        trace = trace.tb_next
    return trace


def within_program(trace: types.TracebackType | None, is_program: Callable[[str], bool]) -> types.TracebackType | None:
    """`trace` up to the last frame whose file is the program's: what the libraries did below that is cut off."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    while entries and not is_program(entries[-1].tb_frame.f_code.co_filename):
        entries.pop()
    cut: types.TracebackType | None = None
    for entry in reversed(entries):
        cut = types.TracebackType(cut, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return cut


def _lead_with(folder: str) -> None:
    """Make `folder` the first place to import from, where this program's own folder stood."""
    if not getattr(sys.flags, "safe_path", False):  # `python -P`: none was put there
        sys.path[0:1] = [folder]


def _spec_of(name: str) -> Any:
    if not name or name.startswith("."):
        raise NoSuchModule(f"-m {name!r} is no module's full name: give one such as package.module.")
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                raise NoSuchModule(f"-m {name!r} is a package without a __main__.py: name a module in it.")
    except ImportError as error:
        # Packages on the way were imported, and what fails inside them is the program's own failure.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except (ValueError, AttributeError, TypeError) as error:  # __main__ itself, a name with two dots
        raise NoSuchModule(f"-m {name!r} cannot be looked for ({error}).") from None
    if spec is None or spec.loader is None:
        hint = f" Leave -m away to run the file {name}." if os.path.exists(name) else ""
        raise NoSuchModule(f"-m {name!r}: there is no module of that name in {os.getcwd()} or on sys.path.{hint}")
    return spec


def _code_of(loader: Any, name: str) -> Any:
    return loader.get_code(name)


def _attributes_of(spec: Any) -> dict[str, Any]:
    return {
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
        "__package__": spec.parent,
        "__spec__": spec,
    }


def _execute(code: Any, attributes: dict[str, Any]) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(attributes)
    main.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        setattr(main, "__annotations__", {})  # noqa: B010  # typed as an attribute of functions only
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
