"""Which line of the user's source is running, and what it says.

Marking is on the hot path of every recorded call, so it is kept apart from reading: a `Mark` is two references,
and lines, names and source text are looked up only when a report needs them. Nothing here imports torch.
"""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import sys
import sysconfig
import types
from typing import NamedTuple

from nan_detector._notebook import cell_of
from nan_detector._records import Location
from nan_detector._source_text import argument_text, call_expression, clean

__all__ = [
    "Mark",
    "argument_text",
    "call_expression",
    "clean",
    "enclosing_module",
    "frame_self",
    "here",
    "here_until",
    "is_user_code",
    "is_user_file",
    "location_of",
    "source_context",
]

#: Longest source line in a record.
MAX_LINE = 200

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
#: Shipped with the package, but written as a user would write it: reports must point into it.
_DEMO = os.path.join(_PACKAGE, "_demo")
_LIKE_A_USERS = (_DEMO + os.sep, _DEMO + ".py", os.path.join(_PACKAGE, "_bench", "workloads.py"))
#: Code without a file that a person typed. Any other name in angle brackets is a template (dataclasses, fx, numpy).
_TYPED = ("<stdin>", "<console>", "<input>", "<timeit-src>")
_TYPED_PREFIXES = ("<ipython-input-", "<python-input-", "<doctest ", "<command-")
#: `python -c` and `exec`. The standard library makes methods of dataclasses from such text: those with names of their
#: kind are the user's only where no real file is further out.
_STRING = "<string>"


class Mark(NamedTuple):
    """An instruction of the user's code: enough to find its line and text later.

    The line is not stored: `frame.f_lineno` decodes the function's line table from its start, 6 µs in a body of 300
    lines, where this costs 0.1 µs anywhere.
    """

    code: types.CodeType
    lasti: int

    @property
    def lineno(self) -> int:
        """The line of the instruction, counted from 1."""
        code, lasti = self
        for start, end, line in code.co_lines():
            if start <= lasti < end and line is not None:
                return line
        return code.co_firstlineno


#: co_filename -> whether it is the user's; of `_STRING`, that name, as it depends on the code. Filled by `_classify`.
_USER: dict[str, bool | str] = {}
#: Relative co_filename -> absolute path, taken when the file was first met: a run may change its folder later.
_ABSOLUTE: dict[str, str] = {}
_MAX_KNOWN = 10_000
#: Names of code that runs within the function around it.
_INNER = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
#: Code met by `enclosing_module` that is no method of a module, by identity: hashing code hashes all its constants.
_NO_METHODS: dict[int, types.CodeType] = {}
#: Code that was met by `here`, by identity, and whether it is what `here` looks for. Filled by `_learn`.
_WANTED: dict[int, tuple[bool, types.CodeType]] = {}
#: Code of `_NO_METHODS` that runs on its own, by identity, and whether it is the user's.
_PLAIN: dict[int, bool] = {}

#: Handlers of modes and tensor subclasses, through which every call passes: the line that made the call is further out.
_PASSING_ON = frozenset(("__torch_function__", "__torch_dispatch__"))

_new_mark = tuple.__new__
_getframe = sys._getframe


def here(depth: int = 1) -> Mark | None:
    """The innermost frame that the user, or a library other than PyTorch, wrote.

    Args:
        depth: Frames to pass before looking: 1 starts at the caller of this function.

    Returns:
        Its mark, or None where no frame is the user's (a thread started by PyTorch).
    """
    frame: types.FrameType | None = _getframe(depth)
    while frame is not None:
        code = frame.f_code
        wanted = _WANTED.get(id(code)) or _learn(code)
        if wanted[0]:
            return _new_mark(Mark, (code, frame.f_lasti))
        frame = frame.f_back
    return _typed_on_command_line(sys._getframe(depth), None)


def _learn(code: types.CodeType) -> tuple[bool, types.CodeType]:
    if len(_WANTED) >= _MAX_KNOWN:
        _WANTED.clear()
    user = _user(code.co_filename)
    wanted = bool(user) and code.co_name not in _PASSING_ON and (user is True or _is_written(code))
    _WANTED[id(code)] = learned = (wanted, code)
    return learned


def here_and_module(depth: int = 1) -> tuple[Mark | None, object | None]:
    """`here` and `enclosing_module` in one walk: this runs for every recorded call."""
    frame: types.FrameType | None = _getframe(depth)
    while frame is not None:
        code = frame.f_code
        users = _PLAIN.get(id(code))
        if users is None:
            if id(code) not in _NO_METHODS:
                owner = _owner_of(frame, code)
                if owner is not None:
                    return here(depth + 1), owner
            users = is_user_code(code) and code.co_name not in _PASSING_ON
            if users and code.co_name in _INNER:
                mark = _new_mark(Mark, (code, frame.f_lasti))
                return mark, enclosing_module(mark, depth + 1)
            _PLAIN[id(code)] = users
        if users:
            return _new_mark(Mark, (code, frame.f_lasti)), None
        frame = frame.f_back
    mark_at_end = here(depth + 1)
    return mark_at_end, None if mark_at_end is None else enclosing_module(mark_at_end, depth + 1)


def _owner_of(frame: types.FrameType, code: types.CodeType) -> object | None:
    """The module that a frame's ``self`` is; code that is no method of one is remembered."""
    owner: object | None = None
    if code.co_argcount and code.co_varnames[0] == "self":
        owner = frame.f_locals.get("self")
    if hasattr(type(owner), "named_modules"):
        return owner
    if len(_NO_METHODS) >= _MAX_KNOWN:
        _NO_METHODS.clear()
        _PLAIN.clear()
    _NO_METHODS[id(code)] = code
    return None


def here_until(barrier_code: types.CodeType, depth: int = 1) -> Mark | None:
    """Like `here`, but None when a frame that runs `barrier_code` is met first.

    A replay calls the recorded operations from its own runner: what is outside the runner is not what the user wrote
    for that operation.
    """
    frame: types.FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if code is barrier_code:
            return None
        try:
            user = _USER[code.co_filename]
        except KeyError:
            user = _classify(code.co_filename)
        if user and code.co_name not in _PASSING_ON and (user is True or _is_written(code)):
            return _new_mark(Mark, (code, frame.f_lasti))
        frame = frame.f_back
    return _typed_on_command_line(sys._getframe(depth), barrier_code)


def frame_self(depth: int = 1, barrier: types.CodeType | None = None) -> object | None:
    """The module whose method is the innermost user frame, such as the one whose ``forward`` is running.

    Reading a frame's locals copies them: call this for a finding, not for every operation.

    Returns:
        The local ``self`` of that frame, where the function is named ``forward`` or ``self`` is a module (its class
        has ``named_modules``); of a comprehension, that of the function around it. None otherwise.
    """
    frame: types.FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if code is barrier:
            return None
        if is_user_code(code) and code.co_name not in _PASSING_ON:
            if "self" in code.co_varnames or "self" in code.co_cellvars or "self" in code.co_freevars:
                owner: object | None = frame.f_locals.get("self")
                if code.co_name == "forward" or hasattr(type(owner), "named_modules"):
                    return owner
                return None
            if code.co_name not in _INNER:
                return None
        frame = frame.f_back
    return None


def enclosing_module(mark: Mark, depth: int = 1) -> object | None:
    """The module in one of whose methods a call stands: one of PyTorch's own within it, or that of the user's frame.

    Only methods whose code was seen with a module as ``self`` are read: reading a frame's locals copies them.

    Args:
        mark: The call's innermost user frame; frames outside it are not looked at.
        depth: Frames to pass before looking: 1 starts at the caller of this function.

    Returns:
        The module, or None where there is none.
    """
    frame: types.FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if id(code) not in _NO_METHODS:
            owner = _owner_of(frame, code)
            if owner is not None:
                return owner
        if code is mark.code and code.co_name not in _INNER:
            return None
        frame = frame.f_back
    return None


def location_of(mark: Mark) -> Location:
    """File, line, function and text of a mark, as a record."""
    code = mark.code
    line = mark.lineno
    return Location(
        file=_absolute(code.co_filename),
        line=line,
        function=clean(getattr(code, "co_qualname", code.co_name)),  # co_qualname: Python 3.11
        source_line=clean(linecache.getline(code.co_filename, line).strip())[:MAX_LINE],
        cell=cell_of(code.co_filename),
    )


def source_context(location: Location, before: int = 1, after: int = 0) -> list[tuple[int, str]]:
    """The line of a location with its neighbours, less their common indentation.

    Args:
        location: Where; a location from another machine's log is fine.
        before: Lines before it.
        after: Lines after it.

    Returns:
        Pairs of line number and text. [] where the file cannot be read, or no longer says what the location says:
        neighbours of another line would mislead.
    """
    lines = linecache.getlines(location.file)
    if not 1 <= location.line <= len(lines):
        return []
    if clean(lines[location.line - 1].strip())[:MAX_LINE] != location.source_line:
        return []
    numbers = range(max(1, location.line - before), min(len(lines), location.line + after) + 1)
    texts = [lines[n - 1].rstrip().expandtabs(4) for n in numbers]
    indent = min((len(t) - len(t.lstrip()) for t in texts if t), default=0)
    return [(n, clean(t[indent:])[:MAX_LINE]) for n, t in zip(numbers, texts, strict=True)]


def is_user_code(code: object) -> bool:
    """True for the code of a function that the user, and no library, wrote."""
    if not isinstance(code, types.CodeType):
        return False
    user = _user(code.co_filename)
    return user is True or (user is not False and _is_written(code))


def is_user_file(filename: str) -> bool:
    """True for the file name of code that the user, or a library other than PyTorch, wrote."""
    return bool(_user(filename))


def _user(filename: str) -> bool | str:
    known = _USER.get(filename)
    return _classify(filename) if known is None else known


def _is_written(code: types.CodeType) -> bool:
    """False for a method of the kind that the standard library makes from text."""
    return not code.co_name.startswith("__")


def _classify(filename: str) -> bool | str:
    if len(_USER) >= _MAX_KNOWN:  # a program that compiles code for ever, each piece under a new name
        _USER.clear()
        _ABSOLUTE.clear()
    user = _USER[filename] = _STRING if filename == _STRING else _is_user_file(filename)
    if user:
        _absolute(filename)
    return user


def _is_user_file(filename: str) -> bool:
    if filename.startswith("<"):
        return filename in _TYPED or filename.startswith(_TYPED_PREFIXES)
    path = os.path.abspath(filename)
    if f"{os.sep}torchinductor_" in path:  # code that the compiler wrote
        return False
    libraries, standard = _plumbing_folders()
    for resolve in (str, os.path.realpath):  # links are followed only of what is not known by its name
        candidate = resolve(path)
        if candidate.startswith(_LIKE_A_USERS):
            return True
        if candidate.startswith(libraries):
            return False
        # site-packages lies inside the standard library's folder, and what is in it is a library like any other.
        if candidate.startswith(standard) and not {"site-packages", "dist-packages"} & set(candidate.split(os.sep)):
            return False
    return True


@functools.cache
def _plumbing_folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Folders of PyTorch and this package; folders of the standard library."""
    libraries = {_PACKAGE}
    for name in ("torch", "functorch"):
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # a stand-in module without a spec
            continue
        if spec is not None:
            libraries.update(spec.submodule_search_locations or ())
    paths = sysconfig.get_paths()
    return _prefixes(libraries), _prefixes({paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)})


def _prefixes(folders: set[str]) -> tuple[str, ...]:
    return tuple(sorted({f(folder) + os.sep for folder in folders for f in (os.path.abspath, os.path.realpath)}))


def _absolute(filename: str) -> str:
    if filename.startswith("<"):
        return filename
    known = _ABSOLUTE.get(filename)
    if known is None:
        known = _ABSOLUTE[filename] = os.path.abspath(filename)
    return known


def _typed_on_command_line(frame: types.FrameType | None, barrier: types.CodeType | None) -> Mark | None:
    while frame is not None and frame.f_code is not barrier:
        if frame.f_code.co_filename == _STRING:
            return _new_mark(Mark, (frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return None
