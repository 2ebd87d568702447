"""What an optimizer steps: its parameters by name, worked out once and kept while its groups stay the same."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch

from nan_detector._damage import LastStep
from nan_detector._forewarn import Forewarning
from nan_detector._gate import column_names

Tensor = torch.Tensor

#: Values of a parameter group that cannot change and stay the same object.
_FIXED = (float, int, str, bool, type(None), torch.dtype)


class Places(NamedTuple):
    """Where the loss and the norms of a few gradients are measured into.

    Attributes:
        table: The flight recorder's table that they are copied into.
        gradients: How many there are.
        scratch: A vector like a row of it.
        first: A view of its first element, the loss.
        norms: Views of the others.
    """

    table: Any
    gradients: int
    scratch: Tensor
    first: Tensor
    norms: list[Tensor]

    @classmethod
    def of(cls, table: Any, row: Tensor) -> Places:
        """Those for rows like `row`."""
        # Made inside the user's inference_mode they could never be written outside it.
        with torch.inference_mode(False), torch.no_grad():
            scratch = torch.zeros_like(row)
            first, *norms = scratch.unbind()
        return cls(table, len(norms), scratch, first, norms)


class Stepped:
    """The parameters of one optimizer.

    Args:
        optimizer: The optimizer.
        known: Names of the watched models' parameters by identity.
    """

    def __init__(self, optimizer: Any, known: Mapping[int, str]) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.names = [known.get(id(p)) or f"optimizer parameter {i}" for i, p in enumerate(self.parameters)]
        self.owned = any(id(p) in known for p in self.parameters)
        self.counted = False  # among the optimizers that have stepped
        self.last: LastStep | None = None  # its last step, if the gate found everything finite
        self.state_seen: int | None = None  # identity of the state that was looked at: a checkpoint brings another
        self.forewarning = Forewarning()
        self.call = -1  # the call of a step that the early warnings were fed in last
        self.at = -1  # position of its last step that went the long way through the gate
        #: Those that were seen to step after it on the same backward, by identity; None until there was one to see.
        self.others: dict[int, Stepped] | None = None
        self.places: Places | None = None
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._kept: list[tuple[list[Any], int]] | None = None
        self._columns: dict[tuple[int, bool, int], tuple[str, ...]] = {}

    @property
    def position(self) -> int:
        """How many steps the run had before the last one of this; -1 before the first."""
        return self.at if self.last is None else max(self.at, self.last.position)

    def fits(self, optimizer: Any) -> bool:
        """True while these are still the optimizer's parameters, in groups of the same sizes."""
        known: Any = self.optimizer()
        groups = optimizer.param_groups
        if known is not optimizer or self._sizes != [len(g["params"]) for g in groups]:
            return False
        return all(map(is_, self.parameters, chain.from_iterable(g["params"] for g in groups)))

    def unchanged(self, groups: list[dict[str, Any]]) -> bool:
        """True while the groups hold the very objects that `settled` found sound: nothing need be looked at again."""
        kept = self._kept
        if kept is None or len(groups) != len(kept):
            return False
        for group, (values, size) in zip(groups, kept, strict=True):
            if len(group) != len(values) or len(group["params"]) != size or not all(map(is_, group.values(), values)):
                return False
        return True

    def one_unchanged(self, group: dict[str, Any]) -> bool:
        """`unchanged` for an optimizer with one group, as most are."""
        kept = self._kept
        if kept is None or len(kept) != 1:
            return False
        values, size = kept[0]
        return len(group) == len(values) and len(group["params"]) == size and all(map(is_, group.values(), values))

    def settled(self, optimizer: Any) -> None:
        """The hyperparameters are sound as they are: remember them. A tensor may change in place, so it never is."""
        groups = [list(group.values()) for group in optimizer.param_groups]
        values = (v for g in optimizer.param_groups for v in g.values() if v is not g["params"])
        plain = all(_is_fixed(v) for v in values)
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._kept = list(zip(groups, sizes, strict=True)) if plain else None

    def gradients(self) -> tuple[list[str], list[Tensor]]:
        """Names and gradients of the parameters that have one."""
        grads = [g for p in self.parameters if (g := p.grad) is not None]
        if len(grads) == len(self.names):
            return self.names, grads
        return [n for n, p in zip(self.names, self.parameters, strict=True) if p.grad is not None], grads

    def columns(self, names: list[str], has_loss: bool, width: int) -> tuple[str, ...]:
        """Names of a row's entries; the same object as long as nothing changes."""
        if names is not self.names:
            return column_names(names, has_loss, width)
        key = (len(names), has_loss, width)
        found = self._columns.get(key)
        if found is None:
            found = self._columns[key] = column_names(names, has_loss, width)
        return found


def _is_fixed(value: Any) -> bool:
    return isinstance(value, _FIXED) or (type(value) is tuple and all(map(_is_fixed, value)))
