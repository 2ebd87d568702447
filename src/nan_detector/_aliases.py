"""What a model is run with in a replay: aliases of its trained parameters (same memory), copies of its buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nan_detector._entries import Outside
from nan_detector._lineage import key_of
from nan_detector._moment import is_passive_buffer
from nan_detector._naming import Names
from nan_detector._patches import ReplayEnds
from nan_detector._quiet import quiet

Tensor = torch.Tensor


class Aliases:
    """The replay's own leaves and memory.

    Args:
        names: Told of each alias and copy.
        outside: The tensors from outside the step, by identity: some were copied before they were written.
        notes: Takes what could not be run again.
    """

    def __init__(self, names: Names, outside: Mapping[int, Outside], notes: list[str]) -> None:
        self.names = names
        self.outside = outside
        self.notes = notes
        self.of: dict[int, Tensor] = {}  # by the identity of the parameter
        self.buffer_copies: list[tuple[torch.nn.Module, str, Tensor]] = []
        self.own: set[int] = set()  # keys of memory that nobody else has
        self.own_leaves: set[int] = set()  # identities
        self.on_alias: Callable[[Tensor, Tensor], None] | None = None  # told of a parameter and its new alias

    @contextlib.contextmanager
    def swapped(self, models: dict[str, torch.nn.Module]) -> Iterator[None]:
        """Aliases for the trained parameters and copies of the buffers, in every watched module."""
        undo: list[tuple[dict[str, Any], str, Any]] = []
        copies: dict[int, Tensor] = {}
        try:
            with quiet():
                for model in models.values():
                    for module in model.modules():
                        for name, p in module._parameters.items():
                            if p is None or not p.requires_grad:
                                continue
                            undo.append((module._parameters, name, p))
                            module._parameters[name] = self._alias(p)  # type: ignore[assignment]  # no Parameter: an alias
                        for name, b in module._buffers.items():
                            if b is None:
                                continue
                            undo.append((module._buffers, name, b))
                            if id(b) not in copies:
                                copies[id(b)] = _buffer_copy(module, name, b)
                                self.stands_for(copies[id(b)], b, module, name)
                            module._buffers[name] = copies[id(b)]
                            self.buffer_copies.append((module, name, copies[id(b)]))
            yield
        finally:
            for table, name, value in reversed(undo):
                table[name] = value

    def stands_for(self, copy: Tensor, buffer: Tensor, module: torch.nn.Module, name: str) -> None:
        """`copy` is what `module` is run with in the place of its buffer `name`."""
        self.own.add(key_of(copy))
        self.names.also(key_of(copy), buffer, module, name)

    def _alias(self, p: Tensor) -> Tensor:
        alias = self.of.get(id(p))
        if alias is None:
            token = self.outside.get(id(p))
            if token is not None and token.snapshot is not None and token.stands_for(p):
                # It was written since the step used it, by the user's own code: the copy is what the step used.
                alias = token.snapshot.clone().requires_grad_()
                self.own.add(key_of(alias))
                self.names.alias(key_of(alias), key_of(p))
            else:
                alias = p.detach().requires_grad_()
            for hook in (p._backward_hooks or {}).values():
                alias.register_hook(hook)
            for hook in (getattr(p, "_post_accumulate_grad_hooks", None) or {}).values():
                alias.register_post_accumulate_grad_hook(self._without_steps(hook))
            self.of[id(p)] = alias
            self.own_leaves.add(id(alias))
            if self.on_alias is not None:
                self.on_alias(p, alias)
        return alias

    def _without_steps(self, hook: Any) -> Any:
        """A hook on a finished gradient, which may scale the gradient, but may not step an optimizer in a replay."""

        def call(alias: Tensor) -> None:
            try:
                hook(alias)
            except ReplayEnds:
                pass
            except Exception as error:  # it looks its optimizer up by the parameter, which the alias is not
                self.notes.append(f"a hook on a finished gradient could not be run again ({type(error).__name__})")

        return call


def _buffer_copy(module: torch.nn.Module, name: str, b: Tensor) -> Tensor:
    copy = b.detach().clone()
    if module.training and is_passive_buffer(module, name) and copy.is_floating_point():
        # Running statistics were already written by the step that is replayed, and training does not read them: what
        # that step put there must not look as if it had been there before.
        copy.nan_to_num_(0.0, 0.0, 0.0)
    return copy
