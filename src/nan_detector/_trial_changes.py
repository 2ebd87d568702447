"""The changes that trials make: a wider dtype, part of the batch, finite values for bad ones, no loss scale.

What a replay gets from outside (parameters, buffers, batch) is changed once; what the step makes by itself, or has
kept from elsewhere, is changed where it goes into a call of the library.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._calls import CallKind, kind_of
from nan_detector._change import Change, mapped
from nan_detector._entries import Entry, Made, Outside
from nan_detector._lineage import key_of
from nan_detector._naming import Names
from nan_detector._trial_facts import Batch, is_of_batch

Tensor = torch.Tensor

#: Dtypes from narrow to wide.
_WIDTHS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
#: Methods that cast to a dtype of their name.
_CASTS = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}
#: Calls whose arguments are tensors themselves, not their values.
_IDENTITY = frozenset(
    "grad backward __get__ __set__ __delete__ register_hook register_post_accumulate_grad_hook retain_grad "
    "requires_grad_ detach_".split()
)
_UNTOUCHED = (CallKind.BACKWARD, CallKind.IGNORE, CallKind.STATE)


class Widened(Change):
    """Everything narrower than `wide` is computed in `wide`, and autocast is off."""

    def __init__(self, wide: torch.dtype) -> None:
        super().__init__()
        self.wide = wide
        self.narrow = frozenset(_WIDTHS[: _WIDTHS.index(wide)])

    def outside(self, t: Tensor) -> Tensor:
        return self._widened(t)

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "") or ""
        kind = kind_of(func)
        if name in _IDENTITY or kind in _UNTOUCHED:
            return self.by_identity(func, args, kwargs)
        if _CASTS.get(name) in self.narrow and len(args) == 1 and isinstance(args[0], Tensor):
            return args[0].to(self.wide)
        in_place = kind is CallKind.IN_PLACE or "out" in kwargs
        first = args[:1] if in_place else ()
        args = (*first, *mapped(args[len(first) :], self._argument))
        kwargs = {k: v if k == "out" else mapped(v, self._argument) for k, v in kwargs.items()}
        if "rand" in name and name.endswith("_like"):
            # A wider dtype would draw other numbers.
            kwargs["dtype"] = torch.float32
        out = func(*args, **kwargs)
        return out if in_place else mapped(out, self._argument)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        # Recurrent layers compare the input's dtype with that of their weights, which is changed on the way only.
        with without_autocast(), _patched(torch.nn.RNNBase, "check_input", lambda original, *args: None):
            yield

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._widened(value)
        return self.wide if isinstance(value, torch.dtype) and value in self.narrow else value

    def _widened(self, t: Tensor) -> Tensor:
        if t.dtype not in self.narrow:
            return t
        if t.is_leaf and t.requires_grad:
            # Its gradient is as wide as the rest.
            return self.stand_in(t, lambda v: v.to(self.wide))
        return t.to(self.wide)


class Part(Change):
    """Only some samples of the batch.

    Args:
        rows: Which samples.
        batch: What is cut.
    """

    def __init__(self, rows: tuple[int, ...], batch: Batch) -> None:
        super().__init__()
        self.rows = rows
        self.batch = batch

    def given(self, t: Tensor, token: Made | Outside, entry: Entry) -> Tensor:
        return self.argument(t) if self.batch.is_cut(token, entry) else t

    def argument(self, t: Tensor) -> Tensor:
        if not is_of_batch(t, self.batch.size):
            return t
        first, last = self.rows[0], self.rows[-1]
        if last - first + 1 == len(self.rows):
            return t[first : last + 1]
        return t.index_select(0, torch.tensor(self.rows, device=t.device))


class FiniteState(Change):
    """Parameters and buffers with finite values where they are bad.

    Args:
        names: Names of what belongs to the watched models.
        guilty: Name of what is known to be bad: there -inf is no mask.
    """

    def __init__(self, names: Names, guilty: str | None = None) -> None:
        super().__init__()
        self._names = names
        self._guilty = guilty
        self._sound: dict[int, Tensor] = {}  # looked at, and held so that no other tensor gets its identity

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if getattr(func, "__name__", "") in _IDENTITY or kind_of(func) in (*_UNTOUCHED, CallKind.IN_PLACE):
            return self.by_identity(func, args, kwargs)
        return func(*mapped(args, self._argument), **mapped(kwargs, self._argument))

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_leaf or id(value) in self._sound:
            return value
        known = self._names.of_memory(key_of(value))
        if known is None or (_is_sound(value) and known[1] != self._guilty):
            self._sound[id(value)] = value
            return value
        return self.stand_in(value, mended)


class FiniteData(Change):
    """The batch with finite values where it is bad."""

    def outside(self, t: Tensor) -> Tensor:
        return t if _is_sound(t) else mended(t)


class Unscaled(Change):
    """Every loss scale is 1."""

    unscaled = True

    def around(self) -> contextlib.AbstractContextManager[None]:
        # On a tape it is an entry of its own; a step function calls it by itself.
        return _patched(torch.amp.GradScaler, "scale", lambda original, scaler, outputs: outputs)


def mended(t: Tensor) -> Tensor:
    """`t`, or a copy in which the mean of its finite values (0 where it has none) stands for those that are not."""
    if not _finite.checkable(t) or _finite.is_finite(t) or t.layout is not torch.strided:
        return t
    bad = _finite.bad_mask(t)
    good = t[~bad]
    mean = good.mean(dtype=None if t.is_complex() else torch.float32) if good.numel() else torch.zeros(())
    return torch.where(bad, torch.nan_to_num(mean, 0.0, 0.0, 0.0).to(t), t)


def _is_sound(t: Tensor) -> bool:
    """True where nothing is bad, or nothing but -inf, which masks are made of."""
    if not _finite.checkable(t) or _finite.is_finite(t):
        return True
    stats = _finite.stats(t)
    return stats.nan_count == 0 and stats.posinf_count == 0


def without_autocast() -> contextlib.AbstractContextManager[None]:
    """Autocast regions that this thread enters in here are off."""

    def enter(original: Callable[..., Any], region: Any) -> Any:
        out = original(region)
        torch.set_autocast_enabled(region.device, False)
        return out

    return _patched(torch.amp.autocast_mode.autocast, "__enter__", enter)


@contextlib.contextmanager
def _patched(owner: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """A method of the library, exchanged for this thread."""
    original, me = owner.__dict__[name], threading.get_ident()

    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs) if threading.get_ident() == me else original(*args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)
