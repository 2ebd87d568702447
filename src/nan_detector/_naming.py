"""Names for modules, parameters, buffers and the tensors of a batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nan_detector._entries import Entry, Made, Outside, Packed
from nan_detector._lineage import key_of
from nan_detector._source import argument_text
from nan_detector._trace import BirthKind

Tensor = torch.Tensor


class Names:
    """Names of all that belongs to the watched models.

    Args:
        models: The watched modules by key; a single model has the key "".
    """

    def __init__(self, models: dict[str, torch.nn.Module]) -> None:
        self.models = models
        self._modules: dict[int, tuple[str, torch.nn.Module]] = {}
        for key, model in models.items():
            for path, module in model.named_modules():
                self._modules.setdefault(id(module), (join(key, plain_path(path, is_wrapper(model))), module))
        # Taken once: during a replay other tensors stand in their places.
        self._parameters = list(self._named("named_parameters"))
        self._buffers = list(self._named("named_buffers"))
        self._memory: dict[int, tuple[BirthKind, str]] = {}
        for name, p in self.parameters():
            self._memory.setdefault(key_of(p), (BirthKind.PARAMETER, name))
        for name, b in self.buffers():
            self._memory.setdefault(key_of(b), (BirthKind.BUFFER, name))

    def _named(self, method: str) -> Iterator[tuple[str, Tensor]]:
        for key, model in self.models.items():
            for name, t in getattr(model, method)():
                if is_lazy(t):  # there is nothing of it yet: its optimizer's first step has all named anew
                    continue
                yield join(key, plain_path(name, is_wrapper(model))), t

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of each parameter, once."""
        return self._parameters

    def buffers(self) -> list[tuple[str, Tensor]]:
        """Name and tensor of each buffer, once."""
        return self._buffers

    def also(self, key: int, original: Tensor, module: Any, name: str) -> None:
        """Memory `key` is a copy of `original`, buffer `name` of `module`."""
        path = self.of_module(module)
        full = f"{path[0]}.{name}" if path and path[0] not in (None, "root") else name
        self._memory.setdefault(key, self._memory.get(key_of(original), (BirthKind.BUFFER, full)))

    def alias(self, key: int, original: int) -> None:
        """Memory `key` is a copy of memory `original`."""
        if original in self._memory:
            self._memory.setdefault(key, self._memory[original])

    def of_memory(self, key: int) -> tuple[BirthKind, str] | None:
        """Kind and name of the parameter or buffer in memory `key`."""
        return self._memory.get(key)

    def of_module(self, module: Any) -> tuple[str | None, str]:
        """Path and class name of `module`; the path is None where it is not part of a watched model."""
        found = self._modules.get(id(module))
        if found is None or found[1] is not module:
            return None, type(module).__name__
        return found[0] or "root", type(module).__name__

    def is_watched(self, module: Any) -> bool:
        """True for a watched model and its parts."""
        found = self._modules.get(id(module))
        return found is not None and found[1] is module

    def named_arguments(self, entry: Entry) -> Iterator[tuple[str, Any]]:
        """Name and encoded value of each argument of a root call."""
        names = _parameter_names(entry)
        for i, value in enumerate(entry.args):
            yield names[i] if i < len(names) else f"args[{i}]", value
        yield from entry.kwargs.items()

    def arguments(self, entry: Entry) -> Iterator[tuple[BirthKind, str, Outside]]:
        """Kind, path and token of each outside tensor among the arguments of `entry`."""
        usual = BirthKind.INPUT if entry.kind == "root" else BirthKind.LABEL
        names = _parameter_names(entry) if entry.kind == "root" else []
        for i, value in enumerate(entry.args):
            name = names[i] if i < len(names) else None
            if name is None and entry.mark is not None and entry.kind != "root":
                name = argument_text(entry.mark, i, None) if _has_outside(value) else None
            kind = BirthKind.GRADIENT if entry.kind == "backward" and i == 1 else usual
            for path, token in _paths(value, _subscripts(name) or f"args[{i}]"):
                yield kind, path, token
        for key, value in entry.kwargs.items():
            kind = BirthKind.GRADIENT if key in ("gradient", "grad_tensors") and entry.kind == "backward" else usual
            text = (
                argument_text(entry.mark, None, key)
                if entry.mark is not None and entry.kind != "root" and _has_outside(value)
                else None
            )
            for path, token in _paths(value, _subscripts(text) or key):
                yield kind, path, token


def _has_outside(value: Any) -> bool:
    return next(_paths(value, ""), None) is not None


def _parameter_names(entry: Entry) -> list[str]:
    """Names of the positional parameters of the root's forward; a *args collects under its own name."""
    module = getattr(entry.extra, "module", None)
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())  # type: ignore[union-attr]  # None is caught
    except (TypeError, ValueError, AttributeError):
        return []
    names: list[str] = []
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            names.extend(f"{p.name}[{i}]" for i in range(len(entry.args) - len(names)))
            break
        names.append(p.name)
    return names


#: Calls that hand on a tensor as it is, elsewhere or in another dtype.
_MOVES = frozenset("to cuda cpu float half bfloat16 double type contiguous pin_memory detach clone".split())


def is_move(entry: Entry) -> bool:
    """True for a call such as `x.to(device)`."""
    return entry.kind == "call" and getattr(entry.func, "__name__", "") in _MOVES


def _moved_from(token: Made) -> Outside | None:
    """The tensor from outside the step that `token` is a moved copy of, if it is that."""
    entry: Entry = token.entry
    while is_move(entry) and entry.args:
        source = entry.args[0]
        if isinstance(source, Outside):
            return source
        if not isinstance(source, Made):
            return None
        entry = source.entry
    return None


def _paths(value: Any, path: str, depth: int = 6) -> Iterator[tuple[str, Outside]]:
    if isinstance(value, Made):
        moved = _moved_from(value)
        if moved is not None and "(" not in path:  # `y.to(device)` written in place: the move itself knows it as `y`
            yield path, moved
    elif isinstance(value, Outside):
        yield path, value
    elif depth == 0:
        return
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        for i, v in enumerate(value):
            yield from _paths(v, f"{path}.{fields[i]}" if fields else f"{path}[{i}]", depth - 1)
    elif isinstance(value, Mapping):
        for k, v in value.items():
            yield from _paths(v, f"{path}[{_quoted(k)}]", depth - 1)
    elif isinstance(value, Packed):
        mapping = isinstance(value.original, Mapping)
        for k, v in value.items:
            yield from _paths(v, f"{path}[{_quoted(k)}]" if mapping else f"{path}.{k}", depth - 1)


def is_made(text: str) -> bool:
    """True when an argument's source text is a call that computes it, not one that takes it from the batch."""
    return "(" in text and not any(word in text for word in ("next(", ".get(", ".pop(", ".popleft("))


def _subscripts(text: str | None) -> str | None:
    """Source text with its keys quoted as in the paths of inputs."""
    return None if text is None else text.replace("['", '["').replace("']", '"]')


def _quoted(key: Any) -> str:
    return '"' + key.replace('"', '\\"') + '"' if isinstance(key, str) else repr(key)


def join(key: str, path: str) -> str:
    """'gen' and 'layer.0' -> 'gen.layer.0'."""
    return f"{key}.{path}" if key and path else key or path


def is_wrapper(model: torch.nn.Module) -> bool:
    """True for a model that holds the user's model as its attribute `module`."""
    return isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel))


def plain_path(path: str, wrapped: bool = False) -> str:
    """A module path without the wrappers that DataParallel, DDP (`wrapped`) and torch.compile put into it."""
    parts = [p for p in path.split(".") if p != "_orig_mod"]
    return ".".join(parts[1:] if wrapped and parts[:1] == ["module"] else parts)


def models_of(model: Any) -> dict[str, torch.nn.Module]:
    """The watched modules by key, from a module, a list or a dict of them.

    Raises:
        TypeError: `model` is none of these; the message names what it is.
    """
    if isinstance(model, torch.nn.Module):
        return {"": model}
    if isinstance(model, Mapping):
        pairs = [(str(k), m) for k, m in model.items()]
    elif isinstance(model, (list, tuple)):
        pairs = [(str(i), m) for i, m in enumerate(model)]
    else:
        raise TypeError(f"model must be a torch.nn.Module, or a list or dict of them, not {type(model).__name__}.")
    for key, m in pairs:
        if not isinstance(m, torch.nn.Module):
            raise TypeError(f"model[{key!r}] must be a torch.nn.Module, not {type(m).__name__}.")
    if not pairs:
        raise TypeError("model is an empty collection; give at least one torch.nn.Module.")
    return dict(pairs)
