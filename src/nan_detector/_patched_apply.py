"""Calls of `autograd.Function`, which no function mode sees."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch

from nan_detector._patched import compiling, to_undo
from nan_detector._recorded_whole import custom_function
from nan_detector._session import session


class Apply(Protocol):
    """`autograd.Function.apply` as it is, and as it is while its calls are seen."""

    def see(self) -> None:
        """Hand each call to the session."""

    def leave(self) -> None:
        """Back to the original."""

    def bare(self, cls: Any) -> Callable[..., Any]:
        """The original, for a function's class."""


class PythonApply:
    """That of PyTorch up to 2.13, a function in Python: its code is exchanged, so that every call is seen.

    A method bound before (``fn = MyFunction.apply``) holds the function itself and would pass by a patched attribute;
    and TorchDynamo, which compares the attribute with the bound method, would refuse to compile. So the function object
    stays and its code is exchanged. TorchDynamo also guards on the code: while compiled code runs, which is not
    recorded call by call anyway, the original is in place.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.function = f = function
        self.code: types.CodeType = f.__code__
        self._bare = types.FunctionType(self.code, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
        # Under PyTorch's file name: its frames are never compiled, and never taken for the user's.
        self.seeing: types.CodeType = _seeing(None).__code__.replace(
            co_filename=self.code.co_filename, co_firstlineno=self.code.co_firstlineno
        )

    def see(self) -> None:
        if self.code.co_freevars == self.seeing.co_freevars:  # else a PyTorch whose apply is of another kind
            self.function.__code__ = self.seeing

    def leave(self) -> None:
        self.function.__code__ = self.code

    def bare(self, cls: Any) -> Callable[..., Any]:
        return types.MethodType(self._bare, cls)


class NativeApply:
    """That of later ones, which is not Python: the attribute is exchanged.

    What was bound before the watch began passes by. Such a result has a graph that no recorded call explains, and the
    report says so.
    """

    def __init__(self, descriptor: Any) -> None:
        self.original = descriptor

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return call(self, cls, args, kwargs)

        self.seeing = classmethod(functools.wraps(descriptor.__get__(None, torch.autograd.Function))(apply))

    def see(self) -> None:
        setattr(torch.autograd.Function, "apply", self.seeing)  # noqa: B010  # its type is another

    def leave(self) -> None:
        setattr(torch.autograd.Function, "apply", self.original)  # noqa: B010

    def bare(self, cls: Any) -> Callable[..., Any]:
        bound: Callable[..., Any] = self.original.__get__(None, cls)
        return bound


#: Kept for the life of the process: the code that sees must be the same object at each attach, or guards fail anew.
FUNCTION_APPLY: list[Apply] = []


def wrap_apply() -> None:
    """See every call of an `autograd.Function`."""
    if not FUNCTION_APPLY:
        found = torch.autograd.Function.__dict__["apply"]
        function = getattr(found, "__func__", None)
        FUNCTION_APPLY.append(PythonApply(function) if isinstance(function, types.FunctionType) else NativeApply(found))
    FUNCTION_APPLY[0].see()
    to_undo.append(FUNCTION_APPLY[0].leave)


def call(apply: Apply, cls: Any, args: Any, kwargs: Any) -> Any:
    """What a call does while it is seen."""
    bare = apply.bare(cls)
    if compiling():
        return bare(*args, **kwargs)
    return custom_function(session(), cls, bare, args, kwargs)


def _seeing(__class__: Any) -> Any:  # the one cell of the original, which calls `super()`
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from nan_detector._patched_apply import FUNCTION_APPLY, call  # the globals of this code are PyTorch's

        __class__  # noqa: B018  # so that the code closes over it, as the original's does
        return call(FUNCTION_APPLY[0], cls, args, kwargs)

    return apply
