"""Warnings that PyTorch gives within a call that goes through us, at the line of the user's that made the call.

A warning is attributed to the innermost Python code (or to that which is so many callers further out), and while calls
are recorded that is ours. It is told anew in the name of the code that would have been named without us, so that its
filters and its memory of what was shown already are asked. Nothing is done in a call: what is exchanged is the function
of the standard library that is called with a warning that is about to be shown.
"""

from __future__ import annotations

import os
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

from nan_detector._call_site import passes_on
from nan_detector._source import is_user_file

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
#: The function that shows a warning; the interpreter looks it up for each.
_NAME = "_showwarnmsg"

_lock = threading.RLock()
_users = 0
_original: Callable[[Any], None] | None = None


def begin() -> None:
    """Attribute warnings to the user's lines, until `end` was called as often as this function."""
    global _users, _original
    with _lock:
        _users += 1
        if _original is None and callable(getattr(warnings, _NAME, None)):
            _original = getattr(warnings, _NAME)
            setattr(warnings, _NAME, _show)


def end() -> None:
    """Leave the attribution of warnings alone, once nobody needs it any more."""
    global _users, _original
    with _lock:
        _users -= 1
        # Where somebody has put something around ours it stays, and only hands on.
        if not _users and _original is not None and getattr(warnings, _NAME) is _show:
            setattr(warnings, _NAME, _original)
            _original = None


def _show(shown: Any) -> None:
    original = _original
    if original is None:  # taken away by another thread just now
        getattr(warnings, _NAME)(shown)
        return
    ours, caller = _caller(shown.filename) if _users and _is_ours(shown.filename) else (None, None)
    if ours is None or caller is None:
        original(shown)
        return
    # It was not shown there, and must not count as shown when the next line of the user's gives the same.
    ours.f_globals.get("__warningregistry__", {}).clear()
    getattr(warnings, "onceregistry", {}).pop((str(shown.message), shown.category), None)
    warnings.warn_explicit(
        shown.message,
        shown.category,
        caller.f_code.co_filename,
        caller.f_lineno,
        module=caller.f_globals.get("__name__"),
        registry=caller.f_globals.setdefault("__warningregistry__", {}),
        source=shown.source,
    )


def _caller(filename: str) -> tuple[types.FrameType | None, types.FrameType | None]:
    """The frame that the warning was attributed to, and the one that made the call which went through it."""
    ours: types.FrameType | None = sys._getframe(2)
    while ours is not None and ours.f_code.co_filename != filename:
        ours = ours.f_back
    frame = ours
    while frame is not None and (_is_ours(frame.f_code.co_filename) or passes_on(frame.f_code.co_filename)):
        frame = frame.f_back
    return ours, frame


def _is_ours(filename: str) -> bool:
    return filename.startswith(_HERE) and not is_user_file(filename)
