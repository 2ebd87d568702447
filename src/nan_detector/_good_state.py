"""A good state of a training as it is kept: copies, and what they are copies of."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nan_detector import _finite

Tensor = torch.Tensor


@dataclass(slots=True)
class KeptTensor:
    """A tensor of the user's and a copy of its values."""

    tensor: Tensor
    value: Tensor

    def put_back(self) -> None:
        """Give it the values that were copied."""
        # `set_` and `resize_` may have changed it since: then there is no place to put the values.
        if self.tensor.shape == self.value.shape:
            self.tensor.copy_(self.value)


@dataclass(slots=True)
class Copy:
    """The values of a piece of state that may have to be made anew, and where it was."""

    value: Tensor
    device: torch.device

    def fresh(self) -> Tensor:
        """A new tensor with the values, where the old one was."""
        return self.value.to(self.device, copy=True)


@dataclass(slots=True)
class KeptOptimizer:
    """State, settings and further attributes of an optimizer."""

    optimizer: weakref.ref[Any]
    state: dict[Any, Any]
    groups: list[dict[str, Any]]
    attributes: dict[str, Any]


@dataclass(slots=True)
class GoodState:
    """One snapshot."""

    step: int
    tensors: list[KeptTensor] = field(default_factory=list)
    optimizers: list[KeptOptimizer] = field(default_factory=list)
    holders: list[tuple[weakref.ref[Any], dict[str, Any]]] = field(default_factory=list)  # schedulers and scalers
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    generators: list[tuple[torch.Generator, Tensor]] = field(default_factory=list)
    rng: tuple[Tensor, ...] = ()
    python_rng: Any = None
    numpy_rng: Any = None

    @property
    def nbytes(self) -> int:
        """Memory of all copied tensors, in bytes."""
        return sum(t.numel() * t.element_size() for _, t in copies(self))

    def add_holder(self, holder: Any) -> bool:
        """Keep the state of a scheduler or scaler. False where it cannot be had (a lambda in it that does not copy)."""
        try:
            self.holders.append((weakref.ref(holder), copy.deepcopy(holder.state_dict())))
        except Exception:  # a class of the user's
            return False
        return True


def like(sequence: Any, items: list[Any]) -> Any:
    """`items` in a sequence of the kind of another."""
    return sequence._make(items) if hasattr(sequence, "_make") else type(sequence)(items)


def copied_value(value: Any) -> Any:
    """A piece of optimizer state as it is kept: of a tensor, the copy itself."""
    return value.value if isinstance(value, Copy) else value


def copies(state: GoodState) -> Iterator[tuple[int, Tensor]]:
    """Every copy, with the identity of what it is a copy of where that is known."""
    for kept in state.tensors:
        yield id(kept.tensor), kept.value
    for kept_optimizer in state.optimizers:
        optimizer = kept_optimizer.optimizer()
        for p, values in kept_optimizer.state.items():
            current = optimizer.state.get(p) if optimizer is not None else None
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, Copy):
                    yield id(current.get(key)) if isinstance(current, dict) else id(value), value.value


def was_finite(state: GoodState, t: Tensor) -> bool | None:
    """Whether a tensor (of those that keep their identity) held only finite values at `state`; None: not known."""
    for at, value in copies(state):
        if at == id(t):
            return _finite.is_finite(value)
    return None
