"""The tape: what happened in the current step outside the watched modules, kept so that it can be run again.

One tape per thread. An entry is a call the user made (or a whole call of a watched module, a `Moment`); see `_entries`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from nan_detector._entries import (
    ATOMS,
    Entry,
    Made,
    Outside,
    Packed,
    all_atoms,
    items_of,
    size_of,
    tensors_in,
    tokens_in,
)
from nan_detector._quiet import hidden

Tensor = torch.Tensor
_ref = weakref.ref

#: Calls kept at most per step; a step with more drops the oldest that no backward has used, and says so.
MAX_ENTRIES = 4096
#: Tensors up to this many bytes are always kept: labels, masks, scales.
ALWAYS_HELD = 4096
#: Gates after which a call is forgotten although what it made still lives: a list of losses must not hold every batch.
MAX_AGE = 8


class Tape:
    """The entries of the current step of one thread, oldest first."""

    moved = False  # weights that the step used are no longer there as they were

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.outside: dict[int, Outside] = {}
        self.held_bytes = 0
        self.max_held = 64 * 2**20
        self.unbounded = False  # the arguments of a root call are kept whatever their size
        self.begun = False  # since the last gate, something used a parameter
        self.dropped: list[str] = []
        self.boundary = 0  # number of the first entry after the last gate
        self.backwards = 0  # entries of kind "backward" not yet judged
        self._made: dict[int, tuple[weakref.ref[Tensor], Entry, int, bool]] = {}
        self._next = 0

    # -- recording ---------------------------------------------------------------------------------------------------

    def token(self, t: Tensor) -> Made | Outside:
        """The token for tensor `t`."""
        ident = id(t)
        known = self._made.get(ident)
        # A graph that it did not have when its entry made it is the work of code that the tape does not see, which
        # returned a tensor of its inside: it comes from outside.
        if known is not None and known[0]() is t and (known[3] or _is_leaf(t)):
            return Made(known[1], known[2])
        out = self.outside.get(ident)
        if out is not None and out.stands_for(t):
            self.begun = self.begun or out.parameter
            return out
        # A Parameter's isinstance is a function in Python: asked only of what is not plainly a tensor.
        if type(t) is not Tensor and isinstance(t, torch.nn.Parameter):
            self.begun = True
            out = Outside(t)
            out.parameter = True
        else:
            return self._outside(ident, t)
        self.outside[ident] = out
        return out

    def _outside(self, ident: int, t: Tensor) -> Outside:
        """The new token of a tensor from outside that is no parameter."""
        if self.unbounded:
            out = Outside(t)
        else:
            size = size_of(t)
            if size <= ALWAYS_HELD:
                self.held_bytes += size
                out = Outside(t, size=size)
            else:
                out = Outside(t, weak=not self.may_hold(size, "tensors from outside the step"), size=size)
        self.outside[ident] = out
        return out

    def made_token(self, t: Tensor) -> Made | None:
        """The token of a tensor that an entry made, as a node of a graph; None for any other."""
        known = self._made.get(id(t))
        return Made(known[1], known[2]) if known is not None and known[3] and known[0]() is t else None

    def may_hold(self, size: int, what: str) -> bool:
        """True when `size` more bytes may be kept; they count from now on. What is not kept is said in the event."""
        if size <= ALWAYS_HELD or self.held_bytes + size <= self.max_held:
            self.held_bytes += size
            return True
        said = f"{what} beyond max_hold_bytes={self.max_held}"
        if said not in self.dropped:
            self.dropped.append(said)
        return False

    def keep_earlier(self, token: Outside) -> None:
        """Copy a tensor from outside that is about to be written, if it may be kept."""
        if token.snapshot is None and not token.changed and not token.gone:
            size = size_of(token.tensor)
            if self.may_hold(size, "earlier values of tensors that were written in place"):
                token.snapshot = token.tensor.detach().clone()
                token.bytes += size

    def encode(self, value: Any) -> Any:
        """`value` with every tensor in lists, tuples, dicts and dataclasses replaced by its token."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is tuple or kind is list:
            if all_atoms(map(type, value)):
                return value if kind is tuple else value[:]
            # Flat, as nearly all arguments are: a call for each of them would cost more than the rest.
            token, encode = self.token, self.encode
            return kind([v if (t := type(v)) in ATOMS else token(v) if t is Tensor else encode(v) for v in value])
        if isinstance(value, Tensor):
            return self.token(value)
        if kind is dict:
            if all_atoms(map(type, value.values())):
                return value.copy()
            return {k: v if type(v) in ATOMS else self.encode(v) for k, v in value.items()}
        return self._encode_other(value)

    def encode_call(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """`encode` for the positional arguments of a call, which mostly are tensors."""
        made, outside = self._made, self.outside
        encoded: list[Any] = []
        for v in args:
            kind = type(v)
            if kind is not Tensor:
                encoded.append(v if kind in ATOMS else self.encode(v))
                continue
            ident = id(v)
            known = made.get(ident)
            if known is not None:
                encoded.append(Made(known[1], known[2]) if known[3] and known[0]() is v else self.token(v))
            elif ident in outside:
                encoded.append(self.token(v))
            else:
                encoded.append(self._outside(ident, v))
        return tuple(encoded)

    def _encode_other(self, value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*[self.encode(v) for v in value])
        if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            return [self.encode(v) for v in value] if isinstance(value, list) else tuple(self.encode(v) for v in value)
        if (dataclasses.is_dataclass(value) and not isinstance(value, type)) or isinstance(value, Mapping):
            return Packed(value, [(k, self.encode(v)) for k, v in items_of(value)])
        return value

    def add(self, entry: Entry, output: Any) -> Entry:
        """Append `entry`, whose call gave `output`."""
        if entry.kind != "call":
            self.begun = True
            if entry.kind == "backward":
                self.backwards += 1
        if type(output) is Tensor:
            self.append(entry, output)
            return entry
        self.append(entry, None)
        if output is not None:
            for position, t in enumerate((output,) if isinstance(output, Tensor) else tensors_in(output)):
                self._note(entry, position, t)
        return entry

    def append(self, entry: Entry, output: Tensor | None) -> None:
        """`add` for a plain call, as most are, that gave one tensor or none."""
        entry.number = number = self._next
        self._next = number + 1
        entries = self.entries
        entries.append(entry)
        if output is not None:
            if entry.grad_enabled:  # as `_note` does
                ref = _ref(output)
                entry.made.append(ref)
                self._made[id(output)] = (ref, entry, 0, True)
            else:
                self._note(entry, 0, output)
        if len(entries) > MAX_ENTRIES:
            self._drop_oldest()

    def _note(self, entry: Entry, position: int, t: Tensor) -> None:
        ref = _ref(t)
        entry.made.append(ref)
        in_graph = entry.grad_enabled
        if not in_graph:
            earlier = self._made.get(id(t))  # of a write in place
            in_graph = earlier is not None and earlier[0]() is t and earlier[3]
        self._made[id(t)] = (ref, entry, position, in_graph)

    def pending(self) -> list[Entry]:
        """Backward passes that no gate has judged, oldest first."""
        return [e for e in self.entries if e.kind == "backward" and not e.judged] if self.backwards else []

    def judged(
        self, keep_alive: bool, spare: frozenset[Entry] | set[Entry] = frozenset(), *, stepped: bool = False
    ) -> None:
        """A gate has judged all that is on the tape: forget it, except (`keep_alive`) what live tensors still need.

        Args:
            keep_alive: Keep what live tensors need.
            spare: Entries that another detector has yet to judge.
            stepped: An optimizer steps, which writes the weights itself: what was written into them before is over.
        """
        if not spare and not keep_alive:
            self.forget_step()
            return
        self.begun = False
        self.dropped.clear()
        if self.entries:
            self.boundary = self.entries[-1].number + 1
        self.backwards = 0
        for e in self.entries:
            e.judged = e.judged or e not in spare
            e.age += 1
        if spare:
            self.boundary = min(e.number for e in spare)
        wanted = self.needed(self._alive(weights=not stepped)) | spare
        self._restrict([e for e in self.entries if e in wanted])
        if any(o.parameter for o in self.outside.values()):
            self._forget_weights(spare)

    def _forget_weights(self, spare: frozenset[Entry] | set[Entry]) -> None:
        """The next step begins with other weights, and asks for tokens of its own: what stood there before is over."""
        wanted = {t for e in spare for t in tokens_in((e.args, e.kwargs)) if isinstance(t, Outside)}
        wanted |= {weight for e in self.entries if e.writes and (weight := weight_written(e)) is not None}
        for ident, o in list(self.outside.items()):
            if o.parameter and o not in wanted:
                o.snapshot = None
                del self.outside[ident]
        self.held_bytes = sum(o.bytes for o in self.outside.values())

    @property
    def idle(self) -> bool:
        """True while nothing was recorded since the last gate."""
        return not self.begun and (not self.entries or self.entries[-1].number < self.boundary)

    def forget_step(self) -> None:
        """A gate has judged all that is on the tape, and nothing that lives needs any of it."""
        self.begun = False
        if self.dropped:
            self.dropped.clear()
        self.boundary = self._next
        self.forget()

    def _alive(self, weights: bool = True) -> list[Entry]:
        """Entries that made a tensor which requires grad and still lives, and (`weights`) that wrote into a weight."""
        return [
            e
            for e in self.entries
            if e.age <= MAX_AGE and (weights if _rewrites(e) else any(_needs_grad(r()) for r in e.made))
        ]

    def rewrites(self, entries: set[Entry]) -> set[Entry]:
        """The program's own writes into weights before the first model call of `entries`, and what went into them.

        A replay begins with the weights as they were before these.
        """
        first = min((e.number for e in entries if e.kind == "root"), default=-1)
        writes = [e for e in self.entries if e.number < first and _rewrites(e)]
        return self.needed(writes) if writes else set()

    def goes_on_from_gradients(self) -> bool:
        """True where the loop has written into weights since a backward: the step goes on with its gradients.

        Sharpness-aware minimisation climbs along the gradients, sets them back, and takes those of the place it is at.
        """
        first = next((e.number for e in self.entries if e.kind == "backward" and not e.judged), None)
        return first is not None and any(e.number > first and _rewrites(e) for e in self.entries)

    def has_root(self) -> bool:
        """True when a call of a watched module is on the tape."""
        return any(e.kind == "root" for e in self.entries)

    def drop_idle(self, most: int) -> None:
        """Keep `most` calls without gradients at most: an evaluation's pile up until something needs them."""
        if self.backwards:
            return
        idle = [e.number for e in self.entries if e.kind == "root" and not e.grad_enabled]
        if len(idle) > most:
            self.forget_before(idle[-most // 2])

    def drop_abandoned(self, latest: Entry) -> None:
        """A forward before `latest` whose outputs are all gone was dropped by the loop, as an evaluation's is."""
        before = [e for e in self.entries if e is not latest and e.kind == "root" and e.number < latest.number]
        if all(any(r() is not None for r in e.made) for e in before):
            return
        last = before[-1].number
        self.keep_only(
            self.needed(
                [
                    e
                    for e in self.entries
                    if e.number >= latest.number
                    or any(r() is not None for r in e.made)
                    # A Python number outlives the tensor that it was read from.
                    or (e.scalar is not None and e.number > last)
                ]
            )
        )

    def forget_before(self, number: int) -> None:
        """Forget entries older than `number` that no living tensor with gradients needs."""
        wanted = self.needed(self._alive())
        self._restrict([e for e in self.entries if e.number >= number or e in wanted], sever=True)

    def keep_only(self, wanted: set[Entry]) -> None:
        """Forget all other entries."""
        self._restrict([e for e in self.entries if e in wanted])

    def forget(self) -> None:
        """Drop every entry; numbers go on."""
        self.entries = []  # not emptied: who keeps the last step, for `hazards`, keeps this list
        self.outside.clear()
        self._made.clear()
        self.held_bytes = 0
        self.backwards = 0

    def made_by(self, t: Tensor) -> Entry | None:
        """The entry that made `t`, or None."""
        known = self._made.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    # -- forgetting --------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything."""
        self.forget()
        self.dropped.clear()

    def needed(self, entries: list[Entry]) -> set[Entry]:
        """`entries` and all that they depend on, writes in place into what they use included."""
        wanted: set[Entry] = set()
        used: set[Outside] = set()
        todo = list(entries)
        last = max((e.number for e in entries), default=-1)
        writers = [e for e in self.entries if e.writes and e.number < last]
        while todo:
            while todo:
                e = todo.pop()
                if e in wanted:
                    continue
                wanted.add(e)
                for t in tokens_in((e.args, e.kwargs)):
                    if isinstance(t, Made):
                        todo.append(t.entry)
                    else:
                        used.add(t)
            if writers:
                todo = [e for e in writers if e not in wanted and _writes_into(e, wanted, used)]
        return wanted

    def _restrict(self, entries: list[Entry], *, sever: bool = False) -> None:
        kept = set(entries)
        if sever:
            # What stays may refer to what goes, and through it to all that was ever recorded (a running sum does).
            for e in self.entries:
                if e not in kept:
                    e.args, e.kwargs, e.extra = (), {}, None
        self.entries = entries
        self._made = {i: k for i, k in self._made.items() if k[1] in kept and k[0]() is not None}
        used = {t.ident for e in entries for t in tokens_in((e.args, e.kwargs)) if isinstance(t, Outside)}
        self.outside = {i: o for i, o in self.outside.items() if i in used}
        self.held_bytes = sum(o.bytes for o in self.outside.values())
        self.backwards = sum(e.kind == "backward" and not e.judged for e in entries)

    def _drop_oldest(self) -> None:
        half = len(self.entries) // 2
        wanted = self.needed(self.entries[half:])
        lost = [e for e in self.entries[:half] if e not in wanted and e.kind == "backward"]
        if lost:
            self.dropped.append(
                f"{len(lost)} backward passes: more than {MAX_ENTRIES} calls since the last optimizer step"
            )
        kept = [e for i, e in enumerate(self.entries) if i >= half or (e in wanted and i >= half // 2)]
        self._restrict(kept, sever=True)


def _writes_into(writer: Entry, wanted: set[Entry], used: set[Outside]) -> bool:
    """True when `writer` may write into memory of what `wanted` made or `used`, itself or through a view."""
    for token in tokens_in((writer.args[:1], writer.kwargs.get("out"))):
        while isinstance(token, Made):
            if token.entry in wanted:
                return True
            token = next(tokens_in(token.entry.args[:1]), None)  # type: ignore[assignment]  # None ends the loop
        if token in used:
            return True
    return False


def weight_written(entry: Entry) -> Outside | None:
    """The parameter that a call writes into, itself or through a view or its `.data`; None where it is no parameter."""
    token = next(tokens_in(entry.args[:1]), None)
    while isinstance(token, Made):
        token = next(tokens_in(token.entry.args[:1]), None)
    return token if token is not None and not token.gone and isinstance(token.tensor, torch.nn.Parameter) else None


def _rewrites(entry: Entry) -> bool:
    """True for a write into a parameter of which a copy was kept: a replay begins before it."""
    weight = weight_written(entry) if entry.writes else None
    return weight is not None and weight.snapshot is not None


def _needs_grad(t: Tensor | None) -> bool:
    return t is not None and t.requires_grad


def _is_leaf(t: Tensor) -> bool:
    with hidden():
        return t.is_leaf
