"""The arguments of recorded calls in a replay: tokens replaced by the replay's own tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nan_detector._aliases import Aliases
from nan_detector._change import Change
from nan_detector._entries import Entry, Made, Outside, Packed, tokens_in
from nan_detector._errors import ReplayRefused
from nan_detector._lineage import key_of
from nan_detector._quiet import quiet

Tensor = torch.Tensor


#: Calls that are walked back from the last one of a step that raised.
MAX_LOOKED_AT = 32


class Lost(ReplayRefused):
    """An argument of a recorded call cannot be made again."""


class Arguments:
    """What tokens stand for, in one replay.

    Args:
        aliases: What the models are run with.
        opaque: Takes the names of tensors that functions made which a replay cannot call.
        change: What is done differently.
    """

    def __init__(self, aliases: Aliases, opaque: list[str], change: Change | None) -> None:
        self.aliases = aliases
        self.opaque = opaque
        self.change = change
        self.results: dict[Entry, list[Tensor]] = {}  # what the calls made so far have given
        self.locals: dict[int, Tensor] = {}  # what stands for a tensor from outside, by its identity
        self.making: Entry | None = None  # the call whose arguments are asked for

    def decode(self, value: Any) -> Any:
        """`value` with tokens replaced by the replay's tensors.

        Raises:
            Lost: What a token stands for is not there any more.
        """
        if isinstance(value, Made):
            made = self.results.get(value.entry)
            if made is None or value.position >= len(made):
                raise Lost("a tensor that the step used was made before what was kept of it")
            return self._given(made[value.position], value)
        if isinstance(value, Outside):
            return self._given(self._outside_value(value), value)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self.decode(v) for v in value])
        if kind is dict:
            return {k: self.decode(v) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self.decode(v) for v in value])
        if isinstance(value, Packed):
            return value.rebuild(self.decode)
        return value

    def changed(self, t: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """`change` of `t`, as memory of the replay's own where it is other memory."""
        with quiet():
            changed = change(t)
        if changed is not t and key_of(changed) != key_of(t):
            self.aliases.own.add(key_of(changed))
        return changed

    def looked_at(self, last: Entry) -> list[Tensor]:
        """The values that the last call was about: what an answer like `isfinite(loss).all()` was worked out from."""
        out: list[Tensor] = []
        todo = [last]
        done: set[Entry] = set()
        while todo and len(done) < MAX_LOOKED_AT:
            e = todo.pop()
            done.add(e)
            for t in tokens_in((e.args, e.kwargs)):
                made = self.results.get(t.entry, ()) if isinstance(t, Made) else ()
                if isinstance(t, Made) and t.position < len(made):
                    value = made[t.position]
                    if value.is_floating_point() or value.is_complex():
                        out.append(value)
                    elif t.entry not in done:
                        todo.append(t.entry)
        return out

    def _given(self, t: Tensor, token: Made | Outside) -> Tensor:
        if self.change is None or self.making is None:
            return t
        return self.change.given(t, token, self.making)

    def _outside_value(self, token: Outside) -> Tensor:
        alias = self.aliases.of.get(token.ident) if token.leaf else None
        if alias is not None:
            return alias
        if token.gone:
            raise Lost(f"{token.name or 'a tensor'} was let go, and max_hold_bytes did not allow to keep it")
        local = self.locals.get(token.ident)
        if local is None:
            local = token.value
            if token.snapshot is not None:
                local = local.clone()
                self.aliases.own.add(key_of(local))
            if self.change is not None:
                local = self.changed(local.detach(), self.change.outside)
            if token.opaque or (token.leaf and token.tensor.requires_grad):
                # Gradients must flow into the replay's own leaf, never into the user's.
                local = local.detach().requires_grad_()
                self.aliases.own_leaves.add(id(local))
            if token.opaque:
                self.opaque.append(token.name or f"a tensor of shape {tuple(local.shape)}")
            self.locals[token.ident] = local
        return local
