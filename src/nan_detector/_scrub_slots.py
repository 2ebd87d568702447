"""Where everything that a run keeps from step to step is found: parameters, buffers, optimizer state.

A slot names the place, not the tensor: what user code, a checkpoint or an optimizer puts there later is seen as it is,
and nothing that was thrown away is kept alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nan_detector._naming import is_wrapper, join, plain_path

#: Calls after which modules are walked again: new ones and new names are rare, the walk costs 1 µs a module.
WALK_EVERY = 320


class Slot(NamedTuple):
    """A place of a tensor, or of a list, tuple or dictionary of tensors.

    Attributes:
        name: Its name, for a person.
        owner: What holds it: ``owner[key]`` is the tensor; it may be None.
        key: Key or index.
        mask: True where -inf may be meant, as in a buffer that is an attention mask.
    """

    name: str
    owner: Any
    key: Any
    mask: bool = False


class StateSlots:
    """The slots of models and of the optimizers that step them: the source of a `Scrub`.

    Calling it gives the same list as long as nothing came or went; about 0.3 µs. State that an optimizer makes in its
    first step, or takes from a checkpoint, is found in the next call; a new module within `WALK_EVERY` calls.

    Args:
        models: The watched modules by key; a single model has the key "".
        optimizers: Optimizers; held weakly, and when one dies nothing of its state is kept.
    """

    def __init__(self, models: Mapping[str, torch.nn.Module], optimizers: Iterable[Any] = ()) -> None:
        self._models = dict(models)
        self._optimizers: list[weakref.ref[Any]] = []
        self._states: list[tuple[weakref.ref[Any], Any, int]] = []
        self._slots: list[Slot] = []
        self._calls = 0
        for optimizer in optimizers:
            self.add(optimizer)

    def add(self, optimizer: Any) -> None:
        """Look at the state of a further optimizer, too; nothing happens where it is known."""
        if all(ref() is not optimizer for ref in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer, self._forget))
            self._calls = 0

    def __call__(self) -> list[Slot]:
        """All slots, parameters and buffers first."""
        calls, self._calls = self._calls, self._calls + 1
        if calls % WALK_EVERY == 0 or self._changed():
            slots = list(self._walk())
            if not _same(slots, self._slots):
                self._slots = slots
        return self._slots

    def _forget(self, ref: weakref.ref[Any]) -> None:
        self._optimizers = [r for r in self._optimizers if r is not ref]
        self._states = []
        # In place: whoever has the list would keep the tensors.
        self._slots.clear()
        self._calls = 0

    def _changed(self) -> bool:
        for ref, state, size in self._states:
            optimizer = ref()
            if optimizer is None or optimizer.state is not state or len(state) != size:
                return True
        return False

    def _walk(self) -> Iterator[Slot]:
        names: dict[int, str] = {}
        seen: set[int] = set()
        for key, model in self._models.items():
            wrapped = is_wrapper(model)
            for path, module in model.named_modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                place = join(key, plain_path(path, wrapped))
                for name, p in module._parameters.items():
                    if p is not None:
                        yield Slot(names.setdefault(id(p), join(place, name)), module._parameters, name)
                for name in module._buffers:
                    yield Slot(join(place, name), module._buffers, name, mask=True)
        self._states = []
        for ref in self._optimizers:
            optimizer = ref()
            if optimizer is not None:
                self._states.append((ref, optimizer.state, len(optimizer.state)))
                yield from _of_optimizer(optimizer, names)


def _of_optimizer(optimizer: Any, names: dict[int, str]) -> Iterator[Slot]:
    count = 0
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if id(p) not in names:
                names[id(p)] = f"optimizer parameter {count}"
                yield Slot(names[id(p)], group["params"], i)
            count += 1
    for p, state in optimizer.state.items():
        if not isinstance(state, Mapping):
            continue
        owner = names.get(id(p), "optimizer state")
        for key, value in state.items():
            if isinstance(value, (Tensor, list, tuple, Mapping)):
                yield Slot(f"{owner}.{key}", state, key)


def _same(a: list[Slot], b: list[Slot]) -> bool:
    # By identity: comparing two dictionaries of tensors would compare the tensors.
    return len(a) == len(b) and all(x.owner is y.owner and x.key == y.key for x, y in zip(a, b, strict=True))
