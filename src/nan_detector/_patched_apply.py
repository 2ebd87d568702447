"""Calls of `autograd.Function`, which no function mode sees."""

from __future__ import annotations

import types
from typing import Any

import torch

from nan_detector._patched import compiling, to_undo
from nan_detector._recording import custom_function
from nan_detector._session import session


class Apply:
    """`autograd.Function.apply` with its code exchanged, so that every call is seen.

    A method bound before (``fn = MyFunction.apply``) holds the function itself and would pass by a patched attribute;
    and TorchDynamo, which compares the attribute with the bound method, would refuse to compile. So the function object
    stays and its code is exchanged. TorchDynamo also guards on the code: while compiled code runs, which is not
    recorded call by call anyway, the original is in place.
    """

    def __init__(self) -> None:
        self.function = torch.autograd.Function.__dict__["apply"].__func__
        f = self.function
        self.code: types.CodeType = f.__code__
        self.bare = types.FunctionType(self.code, f.__globals__, f.__name__, f.__defaults__, f.__closure__)
        # Under PyTorch's file name: its frames are never compiled, and never taken for the user's.
        self.seeing: types.CodeType = _seeing(None).__code__.replace(
            co_filename=self.code.co_filename, co_firstlineno=self.code.co_firstlineno
        )

    def see(self) -> None:
        """Hand each call to the session."""
        if self.code.co_freevars == self.seeing.co_freevars:  # else a PyTorch whose apply is of another kind
            self.function.__code__ = self.seeing

    def leave(self) -> None:
        """Back to the original."""
        self.function.__code__ = self.code

    def call(self, cls: Any, args: Any, kwargs: Any) -> Any:
        """What a call does while it is seen."""
        bare = types.MethodType(self.bare, cls)
        if compiling():
            return bare(*args, **kwargs)
        return custom_function(session(), cls, bare, args, kwargs)


#: Kept for the life of the process: the code that sees must be the same object at each attach, or guards fail anew.
FUNCTION_APPLY: list[Apply] = []


def wrap_apply() -> None:
    """See every call of an `autograd.Function`."""
    if not FUNCTION_APPLY:
        FUNCTION_APPLY.append(Apply())
    FUNCTION_APPLY[0].see()
    to_undo.append(FUNCTION_APPLY[0].leave)


def _seeing(__class__: Any) -> Any:  # the one cell of the original, which calls `super()`
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from nan_detector._patched_apply import FUNCTION_APPLY  # the globals of this code are PyTorch's

        __class__  # noqa: B018  # so that the code closes over it, as the original's does
        return FUNCTION_APPLY[0].call(cls, args, kwargs)

    return apply
