"""Births that live on: an operation between two steps overflowed, and its result was stored in a module.

The tensors that a model's own step uses are judged by the gate. A copy of the model with averaged weights, or any other
module that is not called in the step, is found here: among all modules that are alive, those whose parameters or
buffers hold what an operation of the trace made.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nan_detector._lineage import Gen
from nan_detector._quiet import quiet
from nan_detector._trace import BirthKind
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Stored:
    """One birth and where it lives on.

    Attributes:
        gen: The birth.
        module: The module that holds it.
        name: Name of the parameter or buffer in that module.
        path: The same from the outermost module that holds `module`.
        root: That outermost module.
    """

    gen: Gen
    module: torch.nn.Module
    name: str
    path: str
    root: torch.nn.Module


def candidates(tracer: OpTracer) -> list[Gen]:
    """Births of the trace whose memory somebody but the trace still holds."""
    born = {g for g in tracer.births if not g.intended and g.kind is BirthKind.OPERATION and g.output is not None}
    if not born:
        return []
    held: set[Gen] = set()
    for line, storage in tracer.lineage.held():
        if line & born and _shared(storage):
            held |= line & born
    return sorted(held, key=lambda g: g.order)


def stored(tracer: OpTracer, births: Iterable[Gen]) -> list[Stored]:
    """Where `births` live on in parameters and buffers, in order of birth. Walks every living object: ~50 ms."""
    wanted = set(births)
    found: list[Stored] = []
    with quiet():
        modules = [o for o in gc.get_objects() if issubclass(type(o), torch.nn.Module)]
        for module in modules:
            for name, t in _tensors(module):
                line = tracer.ancestry(t) & wanted
                if line:
                    root, path = _outermost(module, modules)
                    gen = min(line, key=lambda g: g.order)
                    found.append(Stored(gen, module, name, f"{path}.{name}" if path else name, root))
    return sorted(found, key=lambda s: (s.gen.order, s.path))


def _shared(storage: Any) -> bool:
    """True when the trace is not the only one that holds `storage`; also where that is not known."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is None or int(count(storage._cdata)) > 1


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (vars(module).get("_parameters"), vars(module).get("_buffers")):
        for name, t in (table or {}).items():
            if isinstance(t, Tensor):
                yield name, t


def _outermost(module: torch.nn.Module, modules: list[torch.nn.Module]) -> tuple[torch.nn.Module, str]:
    """The outermost living module that `module` is part of, and the path there."""
    path: list[str] = []
    while True:
        above = next(((m, n) for m in modules for n, c in (vars(m).get("_modules") or {}).items() if c is module), None)
        if above is None or len(path) > 64:
            return module, ".".join(reversed(path))
        module, name = above
        path.append(name)
