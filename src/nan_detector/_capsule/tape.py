"""The recorded calls of a step as JSON: the writing half. `rebuild` is the other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from nan_detector._capsule.functions import name_of
from nan_detector._capsule.plain import KIND, encoded
from nan_detector._capsule.tensors import Writer
from nan_detector._entries import Entry, Made, Outside, tokens_in
from nan_detector._moment import Moment
from nan_detector._naming import Names
from nan_detector._record import encode
from nan_detector._source import Mark, call_expression, location_of

Tensor = torch.Tensor


class TapeWriter:
    """Turns entries into JSON, and hands their tensors to a `Writer`.

    Args:
        entries: The calls, oldest first.
        names: Names of the watched models.
        writer: Takes the tensors.

    Attributes:
        missing: What could not be kept, in words.
    """

    def __init__(self, entries: list[Entry], names: Names, paths: Mapping[int, str], writer: Writer) -> None:
        self.entries = entries
        self.names = names
        self.paths = paths
        self.writer = writer
        self.missing: list[str] = []
        self._numbers = {id(e): i for i, e in enumerate(entries)}
        self._outside: dict[int, int] = {}
        self._outsides: list[dict[str, Any]] = []
        self._parameters = {id(p): name for name, p in names.parameters()}
        self._told: dict[int, str] = {}
        self._generators: list[torch.Generator] = []
        for entry in entries:
            for _, path, token in names.arguments(entry):
                self._told.setdefault(id(token), token.name or path)

    def write(self) -> dict[str, Any]:
        """The step as JSON."""
        calls = [self._entry(e) for e in self.entries]
        return {
            "entries": calls,
            "outside": self._outsides,
            "generators": [self._generator(g) for g in self._generators],
        }

    # -- entries -----------------------------------------------------------------------------------------------------

    def _entry(self, entry: Entry) -> dict[str, Any]:
        missing: list[str] = []
        out: dict[str, Any] = {
            "kind": entry.kind,
            "func": self._function(entry),
            "args": encoded(entry.args, self._reference, missing),
            "kwargs": encoded(entry.kwargs, self._reference, missing),
            "grad": entry.grad_enabled,
            "autocast": encoded(entry.autocast, self._reference, []),
            "mark": _mark(entry.mark),
            "made": len(entry.made),
        }
        if missing:
            what = self.paths.get(id(entry.func)) or getattr(entry.func, "__name__", "a call")
            self.missing.append(f"an argument of {what or 'the model'} of type {', '.join(sorted(set(missing)))}")
        if entry.rng is not None:
            out["rng"] = [self.writer.add(t, always=True) for t in entry.rng]
        if entry.generators:
            out["generators"] = [
                [self._generator_index(g), self.writer.add(state, always=True)] for g, state in entry.generators
            ]
        if entry.owner is not None and id(entry.owner) in self.paths:
            out["owner"] = self.paths[id(entry.owner)]
        for name in ("writes", "raised", "rewrites"):
            if getattr(entry, name):
                out[name] = True
        if entry.scalar is not None:
            out["scalar"] = encode(entry.scalar)
        for name in ("losses", "unscaled"):
            if getattr(entry, name):
                out[name] = [self.writer.add(t, always=True) for t in getattr(entry, name)]
        if isinstance(entry.extra, Moment):
            out["moment"] = self._moment(entry.extra)
        return out

    def _function(self, entry: Entry) -> dict[str, str] | None:
        if entry.kind == "root":
            return {"module": self.paths.get(id(entry.func), "")}
        name = name_of(entry.func)
        if name is not None:
            return {"torch": name}
        shown = getattr(entry.func, "__qualname__", None) or type(entry.func).__name__
        owner = getattr(getattr(entry.func, "__self__", None), "__name__", None)
        return {"unknown": f"{owner}.{entry.func.__name__}" if owner else str(shown)}

    def _reference(self, value: Any) -> Any:
        if isinstance(value, Made):
            known = self._value_of(value)
            if known is not None:
                return {KIND: "outside", "v": known}
            number = self._numbers.get(id(value.entry))
            return None if number is None else {KIND: "made", "v": [number, value.position]}
        if isinstance(value, Outside):
            return {KIND: "outside", "v": self._outside_index(value)}
        if isinstance(value, Tensor):
            spec = self.writer.add(value)
            return None if spec is None else {KIND: "tensor", "v": spec}
        if isinstance(value, torch.Generator):
            return {KIND: "generator", "v": self._generator_index(value)}
        return None

    def _value_of(self, token: Made) -> int | None:
        """The value of what a call gave that a capsule cannot name, where it is no part of the graph."""
        entry: Entry = token.entry
        if entry.kind != "call" or name_of(entry.func) is not None:
            return None
        t = entry.made[token.position]() if token.position < len(entry.made) else None
        if t is None or t.requires_grad:
            return None
        key = id(t)
        if key not in self._outside:
            self._outside[key] = len(self._outsides)
            self._outsides.append({"name": None, "tensor": self.writer.add(t)})
        return self._outside[key]

    def _outside_index(self, token: Outside) -> int:
        found = self._outside.get(id(token))
        if found is None:
            found = self._outside[id(token)] = len(self._outsides)
            self._outsides.append(self._outside_of(token))
        return found

    def _outside_of(self, token: Outside) -> dict[str, Any]:
        name = self._told.get(id(token), token.name)
        if token.gone:
            self.missing.append(f"{name or 'a tensor'}, which max_hold_bytes did not allow to keep")
            return {"name": name}
        if token.leaf and id(token.tensor) in self._parameters:
            return {"parameter": self._parameters[id(token.tensor)]}
        spec = self.writer.add(token.value)
        if spec is None:
            t = token.value
            self.missing.append(f"{name or 'a tensor'} ({list(t.shape)}, {str(t.dtype).removeprefix('torch.')})")
        out: dict[str, Any] = {"name": name, "tensor": spec}
        if token.opaque:
            out["opaque"] = True
        elif token.tensor.requires_grad:
            out["requires_grad"] = True
        return out

    # -- moments -----------------------------------------------------------------------------------------------------

    def _moment(self, moment: Moment) -> dict[str, Any]:
        out: dict[str, Any] = {"rng": [self.writer.add(t, always=True) for t in moment.rng]}
        if moment.python_rng is not None and moment.python_rng != random.getstate():
            out["python_rng"] = encoded(moment.python_rng, self._reference, [])
        if moment.numpy_rng is not None:
            name, keys, *rest = moment.numpy_rng
            out["numpy_rng"] = [name, [int(k) for k in keys], *(encode(v) for v in rest)]
        out["buffers"] = [
            [self.paths[id(m)], name, spec]
            for m, name, value in moment.buffers
            if id(m) in self.paths
            and not _same(m._buffers.get(name), value)
            and (spec := self.writer.add(value)) is not None
        ]
        attributes = []
        for m, name, value in moment.attributes:
            lost: list[str] = []
            form = encoded(value, self._reference, lost) if id(m) in self.paths else None
            if id(m) in self.paths and not lost:
                attributes.append([self.paths[id(m)], name, form])
        out["attributes"] = attributes
        out["generators"] = [
            [self._generator_index(g), self.writer.add(state, always=True)] for g, state in moment.generators
        ]
        return out

    def _generator_index(self, generator: torch.Generator) -> int:
        for i, known in enumerate(self._generators):
            if known is generator:
                return i
        self._generators.append(generator)
        return len(self._generators) - 1

    def _generator(self, generator: torch.Generator) -> dict[str, Any]:
        """Where a generator is found in the model, or what makes one like it."""
        out: dict[str, Any] = {"device": str(generator.device)}
        for model in self.names.models.values():
            for module in model.modules():
                for name, value in vars(module).items():
                    if value is generator and id(module) in self.paths:
                        return {**out, "module": self.paths[id(module)], "attribute": name}
        return out


def needed_entries(entries: list[Entry]) -> list[Entry]:
    """`entries` and those that their tokens go back to, oldest first."""
    wanted = {id(e): e for e in entries}
    todo = list(entries)
    while todo:
        for token in tokens_in((todo[-1].args, todo.pop().kwargs)):
            if isinstance(token, Made) and id(token.entry) not in wanted:
                wanted[id(token.entry)] = token.entry
                todo.append(token.entry)
    return sorted(wanted.values(), key=lambda e: e.number)


def _mark(mark: Mark | None) -> dict[str, Any] | None:
    if mark is None:
        return None
    return {**location_of(mark).to_dict(), "name": mark.code.co_name, "call": call_expression(mark)}


def _same(a: Tensor | None, b: Tensor) -> bool:
    return a is not None and a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
