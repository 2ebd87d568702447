"""A call that made a bad value, as a remedy sees it: its operands, and how to make it again with others."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from nan_detector._calls import is_in_place, public_name
from nan_detector._diagnosis.facts import base_op
from nan_detector._errors import ReplayRefused

Tensor = torch.Tensor

HALF = (torch.float16, torch.bfloat16)

#: Guards by dtype: small beside ordinary values, and large enough that 1 / eps and its like do not overflow.
_EPS = {torch.float64: 1e-12, torch.float32: 1e-12, torch.bfloat16: 1e-12, torch.float16: 1e-4}
#: Distances from an edge like 1 that the dtype can tell from the edge.
_MARGIN = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


class Unfit(ReplayRefused):
    """A remedy has no form for this call."""


@dataclass(frozen=True, slots=True)
class Words:
    """A repaired call in the words of the user's line.

    Attributes:
        operands: Position of an operand to what is written in its place, with "{}" for what stood there.
        keywords: Keyword arguments that are added or changed, as source text.
        whole: What is written instead of the whole call, with "{0}", "{1}" for its operands; "" where operands tell.
        after: What is said behind it.
        of: An operand that was made by a guilty call, of which "{of}" in `whole` is the first operand.
        general: What is said, all of it, where the user's own words are not known; "" for the others with x, y and z.
    """

    operands: Mapping[int, str] = field(default_factory=dict)
    keywords: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""
    after: str = ""
    of: Call | None = None
    general: str = ""


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a remedy gives: the result, how it would be written, and whether what follows must be in float32 too."""

    value: Any
    words: Words
    promotes: bool = False


def _unknown(t: Tensor) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the library.

    Attributes:
        func: The function, as `__torch_function__` receives it.
        args: Its positional arguments, as received.
        kwargs: Its keyword arguments, without ``out``.
        context: The user's line and those after it, for remedies that depend on what the result is used for.
        made_by: The call that made a tensor, where it was remembered (see `Remedy.needs`).
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: str = ""
    made_by: Callable[[Tensor], Call | None] = _unknown

    @property
    def name(self) -> str:
        """One name for all spellings: "sqrt" for torch.sqrt, Tensor.sqrt_ and so on."""
        return name_of(self.func)

    @property
    def reflected(self) -> bool:
        """True for ``__rtruediv__`` and its like, which get the right operand first."""
        return is_reflected(self.func)

    def operand(self, position: int) -> Any:
        """Operand `position`, counted as in mathematics: 0 is divided by 1, however the call was written."""
        if self.reflected:
            position = 1 - position
        if position < len(self.args):
            return self.args[position]
        names = list(self.kwargs)
        known = [n for n in ("input", "self", "x", "other", "exponent", "target", "x1", "x2") if n in names]
        return self.kwargs[known[position - len(self.args)]] if position - len(self.args) < len(known) else self.unfit()

    def tensor(self, position: int) -> Tensor:
        """Operand `position`, which must be a floating tensor."""
        value = self.operand(position)
        return value if isinstance(value, Tensor) and value.is_floating_point() else self.unfit()

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument that may be given by position or by name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if position < len(self.args) else default

    def again(self, changed: Mapping[int, Any] | None = None, **kwargs: Any) -> Any:
        """Make the call with other operands or keyword arguments."""
        args, given = list(self.args), dict(self.kwargs)
        for position, value in (changed or {}).items():
            index = 1 - position if self.reflected else position
            if index < len(args):
                args[index] = value
            else:
                old = self.operand(position)
                given[next(k for k, v in given.items() if v is old)] = value
        for name, value in kwargs.items():
            place = self._position_of(name)
            if place is not None and place < len(args):
                args[place] = value
            else:
                given[name] = value
        return self.func(*args, **given)

    def _position_of(self, name: str) -> int | None:
        try:
            names = list(inspect.signature(self.func).parameters)
        except (TypeError, ValueError):  # a function of the C extension
            return None
        return names.index(name) if name in names else None

    def bound(self) -> dict[str, Any]:
        """Arguments by name, defaults included; for functions written in Python."""
        try:
            found = inspect.signature(self.func).bind(*self.args, **self.kwargs)
        except (TypeError, ValueError):
            self.unfit()
        found.apply_defaults()
        return dict(found.arguments)

    def unfit(self) -> NoReturn:
        """Say that the remedy has no form for this call."""
        raise Unfit(f"no form for this call of {self.name}")


def name_of(func: Callable[..., Any]) -> str:
    """One name for all spellings of a function: "div" for ``Tensor.__rtruediv__``, "norm" for torch.linalg.norm."""
    return base_op(public_name(func))


def is_reflected(func: Callable[..., Any]) -> bool:
    """True for a method like ``__rtruediv__``, whose second argument is the left operand."""
    name = getattr(func, "__name__", "")
    return name.startswith("__r") and name not in ("__reversed__", "__round__", "__repr__")


def writes_in_place(func: Callable[..., Any]) -> bool:
    """True where a call of `func` writes into its first argument."""
    return is_in_place(getattr(func, "__name__", ""))


def eps_of(t: Tensor) -> float:
    """A guard that the dtype of `t` holds, and whose reciprocal it holds as well."""
    return _EPS.get(t.dtype, 1e-12)


def margin_of(t: Tensor) -> float:
    """A distance from 1 that the dtype of `t` can tell from 1."""
    return _MARGIN.get(t.dtype, 1e-6)


def number(value: float) -> str:
    """`value` as it is written in code: "1e-12", "87", "-20"."""
    text = f"{value:g}"
    if 0 < abs(value) < 1e-2 and "e" not in text:
        digits, exponent = f"{value:e}".split("e")
        text = f"{digits.rstrip('0').rstrip('.')}e{exponent}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
