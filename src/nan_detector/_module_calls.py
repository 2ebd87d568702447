"""Every call of a module goes through a function of ours for a while, at no cost that grows with the process.

Setting an attribute of `torch.nn.Module` makes Python go through its subclasses, of which a process may have thousands,
and forget what it has cached of each: a millisecond each time. So its method stays, and only the method's code is
exchanged.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

Call = Callable[..., Any]

#: What the exchanged code calls. It stays when the code is back: another thread may be on its way here.
STANDS_IN: list[Call] = []


def _handed_on(self: Any, *args: Any, **kwargs: Any) -> Any:
    from nan_detector._module_calls import STANDS_IN  # the globals of this code are PyTorch's

    return STANDS_IN[0](self, *args, **kwargs)


@contextlib.contextmanager
def calls_through(name: str, wrapped: Callable[[Call], Call]) -> Iterator[None]:
    """In here, calls of method `name` of `torch.nn.Module` go through another function.

    Args:
        name: The method.
        wrapped: Makes that function, given the original.
    """
    method: Any = getattr(torch.nn.Module, name)
    if not isinstance(method, types.FunctionType) or method.__code__.co_freevars or name.startswith("__"):
        setattr(torch.nn.Module, name, wrapped(method))
        try:
            yield
        finally:
            setattr(torch.nn.Module, name, method)
        return
    code = method.__code__
    nested = STANDS_IN[0] if code.co_code == _handed_on.__code__.co_code else None
    bare = nested or types.FunctionType(code, method.__globals__, name, method.__defaults__)
    # Under PyTorch's file name: a frame of it is never taken for the user's.
    seeing = _handed_on.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)
    STANDS_IN[:] = [wrapped(bare)]
    method.__code__ = seeing
    try:
        yield
    finally:
        method.__code__ = code
        STANDS_IN[:] = [bare]
