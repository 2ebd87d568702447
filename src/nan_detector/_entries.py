"""What stands on the tape: calls, and in the place of each tensor that they use or make a token.

- A tensor that an earlier entry made is a `Made` token (entry, position): the replay makes it again, so the tape keeps
  no reference to it (keeping one logits tensor raised the peak memory of a step by a quarter where it was measured).
- Any other tensor comes from outside the step (batch, labels, parameters): an `Outside` token that holds it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nan_detector._errors import ReplayRefused
from nan_detector._source import Mark

Tensor = torch.Tensor

#: Types of values that hold no tensor.
ATOMS = frozenset(
    {int, float, bool, str, type(None), slice, torch.dtype, torch.device, torch.Size, complex, type(Ellipsis), bytes}
)
#: True for types of values that are kept as they are.
all_atoms = ATOMS.issuperset


class Outside:
    """A tensor from outside the step, held by reference (detached, so that no foreign graph is kept alive).

    Args:
        tensor: The tensor.
        weak: Leave it to the program how long it lives: the tape holds enough already.
    """

    # What nearly all have in common stands in the class: one is made for each batch.
    bytes = 0
    snapshot: Tensor | None = None
    name: str | None = None
    parameter = False
    _held: Tensor | None = None
    _ref: weakref.ref[Tensor] | None = None

    def __init__(self, tensor: Tensor, *, weak: bool = False, size: int = 0) -> None:
        self.ident = id(tensor)
        self.leaf = leaf = tensor.is_leaf
        if weak:
            self._ref = weakref.ref(tensor)
        else:
            self._held = tensor if leaf else tensor.detach()
            self.bytes = size
        try:
            self.version = tensor._version
        except RuntimeError:  # of inference tensors nobody counts them
            self.version = -1

    @property
    def opaque(self) -> bool:
        """True for a grad_fn that no recorded call explains: the work of code that the tape does not see."""
        return not self.leaf

    def stands_for(self, t: Tensor) -> bool:
        """True when this is the token of `t`, whose id it has."""
        if self._held is None:
            return self._ref is not None and self._ref() is t
        # The id of a non-leaf, of which an alias is held, may have been given to another tensor meanwhile.
        return self._held is t or (self.opaque and self._held.data_ptr() == t.data_ptr() and not t.is_leaf)

    @property
    def gone(self) -> bool:
        """True when it was held weakly and the program has let it go."""
        return self.snapshot is None and self._held is None and (self._ref is None or self._ref() is None)

    @property
    def tensor(self) -> Tensor:
        """The tensor as it is now.

        Raises:
            ReplayRefused: The program has let it go.
        """
        if self._held is not None:
            return self._held
        t = self._ref() if self._ref is not None else None
        if t is None:
            raise ReplayRefused(f"{self.name or 'a tensor'} was let go, and max_hold_bytes did not allow to keep it")
        return t if self.leaf else t.detach()

    @property
    def value(self) -> Tensor:
        """The tensor as it was when the step first used it, as far as that is known."""
        return self.tensor if self.snapshot is None else self.snapshot

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What it keeps alive: the tensor, unless that is left to the program, and the copy of its earlier values."""
        return tuple(t for t in (self._held, self.snapshot) if t is not None)

    @property
    def changed(self) -> bool:
        """True when the tensor was written in place since and no copy of the earlier value was kept."""
        if self.snapshot is not None or self.version < 0 or self.gone:
            return False
        t = self.tensor
        return not t.is_inference() and t._version != self.version


class Made:
    """A tensor that entry `entry` made: leaf number `position` of its flattened output."""

    __slots__ = ("entry", "position")

    def __init__(self, entry: Entry, position: int) -> None:
        self.entry = entry
        self.position = position


class Entry:
    """One recorded call.

    Most are plain calls: what they have in common stands in the class, and an instance holds only what is its own
    (making one with every field costs as much as the rest of the recording).
    """

    kind = "call"  # "call" | "root" | "backward" | "zero_grad" | "scale"
    autocast: tuple[Any, ...] | None = None
    rng: Any = None
    generators: tuple[tuple[Any, Any], ...] = ()
    number = 0
    extra: Any = None  # of a root call: its Moment
    judged = False
    losses: tuple[Tensor, ...] = ()  # of a backward: detached aliases of the roots it started from
    unscaled: tuple[Tensor, ...] = ()  # of a backward, and of a GradScaler's `scale`: the same before the loss scale
    owner: Any = None
    scalar: float | None = None  # a non-finite Python number the call gave
    age = 0  # gates passed since
    writes = False  # it writes into a tensor that it did not make
    raised = False  # it ended in an exception
    compiled = False  # of a root call: compiled code ran in its place
    rewrites = False  # it wrote weights, or made what was written into them, after the last step and before the next

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        mark: Mark | None,
        grad_enabled: bool,
        autocast: tuple[Any, ...] | None = None,
        **further: Any,
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.mark = mark
        self.grad_enabled = grad_enabled
        self.made: list[weakref.ref[Tensor]] = []
        if autocast is not None:
            self.autocast = autocast
        if further:
            vars(self).update(further)


AUTOCAST_KEYS = ("cpu", "cuda")


def autocast_state() -> tuple[Any, ...] | None:
    """Which autocast regions are open, or None when none is: cheap, as it is asked for every recorded call."""
    if not torch._C._is_any_autocast_enabled():
        return None
    return (
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in AUTOCAST_KEYS),
        torch.is_autocast_cache_enabled(),
    )


class Packed:
    """A dataclass or mapping argument, shallow, with tokens for its tensors; `rebuild` makes one like it."""

    __slots__ = ("items", "original")

    def __init__(self, original: Any, items: list[tuple[Any, Any]]) -> None:
        self.original = original
        self.items = items

    def rebuild(self, decode: Callable[[Any], Any]) -> Any:
        """A shallow copy of the original whose tensors are those of the replay."""
        import copy

        fresh = copy.copy(self.original)
        for key, value in self.items:
            if isinstance(self.original, Mapping):
                fresh[key] = decode(value)
            else:
                object.__setattr__(fresh, key, decode(value))
        return fresh


def items_of(value: Any) -> Iterator[tuple[Any, Any]]:
    """Key-value pairs of a dataclass instance or a mapping."""
    if isinstance(value, Mapping):
        yield from value.items()
    else:
        for f in dataclasses.fields(value):
            if hasattr(value, f.name):
                yield f.name, getattr(value, f.name)


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Every tensor in `value`, in a fixed order: containers, mappings, dataclasses, attributes of plain objects."""
    if isinstance(value, Tensor):
        yield value
    elif value is None or type(value) in ATOMS or depth == 0:
        return
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tensors_in(v, depth - 1)
    elif isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        for _, v in items_of(value):
            yield from tensors_in(v, depth - 1)
    elif isinstance(value, (torch.nn.Module, type)) or callable(value):
        return
    elif hasattr(value, "__dict__"):
        for v in vars(value).values():
            yield from tensors_in(v, min(depth - 1, 2))


def tokens_in(value: Any) -> Iterator[Made | Outside]:
    """Every token in an encoded value."""
    if isinstance(value, (Made, Outside)):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from tokens_in(v)
    elif isinstance(value, dict):
        for v in value.values():
            yield from tokens_in(v)
    elif isinstance(value, Packed):
        for _, v in value.items:
            yield from tokens_in(v)


def size_of(t: Tensor) -> int:
    """Bytes of `t`'s elements; 0 where they are not laid out plainly."""
    return t.numel() * t.element_size() if t.layout is torch.strided else 0
