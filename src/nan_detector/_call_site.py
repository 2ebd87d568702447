"""Where a function of the library is called: found in one replay, met again in the next.

A call is known by its place in the source, not by its number: a fix is written into a line, so it is at work in every
iteration of a loop, in each module that shares the code, and when a checkpoint computes its segment again.
"""

from __future__ import annotations

import os
import sys
import types
from typing import Any, NamedTuple

from nan_detector._source import Mark


class Called(NamedTuple):
    """A function, and the instruction that called it: the user's, or that of a module of the library."""

    func: Any
    caller: Mark | None


class CallSite(NamedTuple):
    """The place of a call.

    Attributes:
        func: The function, as `__torch_function__` receives it; None for whatever the line calls.
        caller: The instruction that called it.
        mark: The innermost instruction of the user's code, which is `caller` unless that is the library's.
    """

    func: Any
    caller: Mark
    mark: Mark

    def meets(self, called: Called, mark: Mark | None, *, whole_function: bool = False) -> bool:
        """True when a call is at this place.

        Args:
            called: The call.
            mark: The user's innermost instruction there.
            whole_function: The same function called anywhere in the same function of the source will do.
        """
        if called.caller is None or called.caller.code is not self.caller.code:
            return False
        if self.func is not None and called.func != self.func:
            return False
        if self.caller.code is not self.mark.code and not _same_line(mark, self.mark):
            return False
        return whole_function or _same_line(called.caller, self.caller)


def _same_line(a: Mark | None, b: Mark) -> bool:
    # By line: the offset of one and the same instruction depends on how the interpreter has specialised it.
    return a is not None and a.code is b.code and a.lineno == b.lineno


#: Files of PyTorch whose functions hand a call on; what is further out has made it.
_PASSING_ON = (
    ("overrides.py",),
    ("_tensor.py",),
    ("functional.py",),
    ("_jit_internal.py",),
    ("nn", "functional.py"),
)
#: Modes of the user's and subclasses of Tensor, through which a call may pass as well.
_HANDLERS = ("__torch_function__", "__torch_dispatch__")
_passing: dict[str, bool] = {}


def passes_on(filename: str) -> bool:
    """True for a file of PyTorch whose functions hand a call on: what is further out has made it."""
    found = _passing.get(filename)
    if found is None:
        torch = sys.modules.get("torch")
        folder = os.path.dirname(getattr(torch, "__file__", None) or "")
        found = _passing[filename] = filename in {os.path.join(folder, *parts) for parts in _PASSING_ON}
    return found


def caller(barrier: types.CodeType, depth: int = 2) -> Mark | None:
    """The instruction that called the function whose handler is running.

    Args:
        barrier: Code of the runner that makes recorded calls again.
        depth: Frames to pass before looking: 2 starts at the caller of this function's caller.

    Returns:
        The instruction, or None where the runner itself made the call.
    """
    frame: types.FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if code is barrier:
            return None
        if code.co_name not in _HANDLERS and not passes_on(code.co_filename):
            return Mark(code, frame.f_lasti)
        frame = frame.f_back
    return None
