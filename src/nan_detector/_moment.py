"""The kept start of one call of a watched module: what a replay needs to make the call again.

No tensor is read and none is copied, except buffers and attributes that the model's first calls showed to change in a
way that matters.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from nan_detector._errors import ReplayRefused
from nan_detector._python_state import MACHINERY, PythonState, is_iterator
from nan_detector._rng import restore_rng, rng_state

Tensor = torch.Tensor

#: Root calls that are looked at closely to learn what the model changes when it is called.
LEARNING_CALLS = 3

#: Largest tensor attribute, in elements, that a Moment copies.
MAX_COPIED = 1 << 20


class Moment:
    """The start of a call of `module`."""

    # What most calls have in common stands in the class: one is made in every step.
    python_rng: Any = None
    numpy_rng: Any = None
    buffers: tuple[tuple[Any, str, Tensor], ...] = ()
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    state: PythonState | None = None  # what the attributes hold
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()
    versions: tuple[tuple[Tensor, int], ...] = ()
    raised = False

    def __init__(self, module: Any, rng: tuple[Tensor, ...]) -> None:
        self.module = module
        self.rng = rng


class Habits:
    """What calls of one module were seen to change. Learned from its first calls, then only looked up."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.calls = 0
        self.settled = False  # nothing more is learned, and a call changes nothing but torch's own random streams
        self.python_rng = False
        self.numpy_rng = False
        self.buffers: set[tuple[int, str]] = set()
        self.attributes: set[tuple[int, str]] = set()
        self.written: set[tuple[int, str]] = set()  # attributes that hold a tensor which the call writes in place
        self.writes_inputs = False
        self.modules = list(module.modules())
        self.generators = [v for m in self.modules for v in vars(m).values() if isinstance(v, torch.Generator)]
        self._before: _Picture | None = None

    @property
    def learning(self) -> bool:
        """True while calls are still looked at closely."""
        return self.calls < LEARNING_CALLS

    def start(self, module: torch.nn.Module) -> Moment:
        """The Moment of a call that is about to begin."""
        if self.learning:
            self._before = _Picture(self.modules)
            moment = Moment(module, rng_state())
            moment.python_rng, moment.numpy_rng = random.getstate(), _numpy_state()
            moment.buffers = tuple(
                (m, n, b.detach().clone()) for m, n, b in _buffers(self.modules) if not is_passive_buffer(m, n)
            )
            moment.attributes = tuple((m, n, _kept(v, True)) for m in self.modules for n, v in own_attributes(m))
            held = (v for m in self.modules for _, v in own_attributes(m) if is_container(v))
            moment.state = PythonState(held, detach=True, clone=True)
            moment.generators = self._generator_states()
            return moment
        moment = Moment(module, rng_state())
        by_id = {id(m): m for m in self.modules} if self.buffers or self.attributes else {}
        if self.python_rng:
            moment.python_rng = random.getstate()
        if self.numpy_rng:
            moment.numpy_rng = _numpy_state()
        moment.buffers = tuple(
            (by_id[i], n, b.detach().clone()) for i, n in self.buffers if (b := by_id[i]._buffers.get(n)) is not None
        )
        moment.attributes = tuple(
            (by_id[i], n, _kept(vars(by_id[i]).get(n), (i, n) in self.written)) for i, n in self.attributes
        )
        moment.state = self._state(by_id)
        moment.generators = self._generator_states()
        return moment

    def finish(self, moment: Moment) -> None:
        """The call has ended: learn from it while that is still going on."""
        if not self.learning:
            return
        self.calls += 1
        before, self._before = self._before, None
        if before is not None:
            self._compare(before, moment)
        self.settled = not self.learning and not (
            self.buffers or self.attributes or self.python_rng or self.numpy_rng or self.generators
        )

    def _compare(self, before: _Picture, moment: Moment) -> None:
        self.python_rng |= random.getstate() != moment.python_rng
        self.numpy_rng |= not _same_numpy(moment.numpy_rng, _numpy_state())
        for m, n, b in _buffers(self.modules):
            if before.versions.get((id(m), n)) != (id(b), _version(b)) and not is_passive_buffer(m, n):
                self.buffers.add((id(m), n))
        for m in self.modules:
            for n, v in own_attributes(m):
                key = (id(m), n)
                if key not in before.attributes or not _same(before.attributes[key], v):
                    self.attributes.add(key)
                elif key in before.states and before.states[key].changed():
                    self.attributes.add(key)
                elif key in before.states and before.states[key].written():
                    self.attributes.add(key)
                    self.written.add(key)
                elif isinstance(v, Tensor) and before.versions.get(key) != (id(v), _version(v)):
                    self.attributes.add(key)
                    self.written.add(key)

    def _state(self, by_id: dict[int, torch.nn.Module]) -> PythonState | None:
        held = [(vars(by_id[i]).get(n), (i, n) in self.written) for i, n in self.attributes]
        values = [v for v, _ in held if is_container(v)]
        return PythonState(values, detach=True, clone=any(w for _, w in held)) if values else None

    def _generator_states(self) -> tuple[tuple[torch.Generator, Tensor], ...]:
        return tuple((g, g.get_state()) for g in self.generators)


class _Picture:
    """Identities and versions of buffers and tensor attributes, and values of other attributes, before a call."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        self.attributes = {(id(m), n): v for m, n, v in _attribute_values(modules)}
        self.states = {(id(m), n): PythonState([v]) for m in modules for n, v in own_attributes(m) if is_container(v)}
        self.versions = {(id(m), n): (id(b), _version(b)) for m, n, b in _buffers(modules)}
        self.versions |= {k: (id(v), _version(v)) for k, v in self.attributes.items() if isinstance(v, Tensor)}


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _buffers(modules: list[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, Tensor]]:
    for m in modules:
        for n, b in m._buffers.items():
            if b is not None and not is_lazy(b):
                yield m, n, b


def is_passive_buffer(module: torch.nn.Module, name: str) -> bool:
    """True for running statistics: a module in training mode writes them and does not read them."""
    return name in ("running_mean", "running_var", "num_batches_tracked") and isinstance(
        module, (torch.nn.modules.batchnorm._NormBase, torch.nn.LazyBatchNorm1d)
    )


def own_attributes(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """A module's attributes that are neither parameters, buffers, submodules nor bookkeeping."""
    for name, value in vars(module).items():
        if name not in MACHINERY and not callable(value):
            yield name, value


def is_container(value: Any) -> bool:
    """True for a value that can change while it stays the same object."""
    return not isinstance(value, (int, float, str, bytes, complex, type(None), Tensor, torch.dtype, torch.device))


def _attribute_values(modules: list[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    for m in modules:
        for n, v in own_attributes(m):
            yield m, n, frozen_copy(v)


def frozen_copy(value: Any) -> Any:
    """A shallow copy of a container; any other value itself."""
    if type(value) in (list, dict, set) or type(value).__name__ in ("deque", "OrderedDict", "defaultdict", "Counter"):
        return copy.copy(value)
    return value


def _kept(value: Any, copy_tensor: bool) -> Any:
    """An attribute as a Moment keeps it: without the graph behind it, and copied where the call writes into it."""
    if isinstance(value, Tensor):
        return value.detach().clone() if copy_tensor and value.numel() <= MAX_COPIED else value.detach()
    return frozen_copy(value)


def restore_attribute(module: torch.nn.Module, name: str, value: Any) -> None:
    """Give `module` back an attribute's earlier value; containers are refilled in place, as others may hold them."""
    current = vars(module).get(name)
    if current is value:
        return
    if isinstance(current, list) and isinstance(value, list):
        current[:] = value
    elif isinstance(current, (dict, set)) and type(current) is type(value):
        current.clear()
        current.update(value)
    else:
        # A copy was made so that the call can write into it; a second replay needs it again.
        plain = isinstance(value, Tensor) and not value.requires_grad
        vars(module)[name] = value.clone() if plain else frozen_copy(value)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, Tensor):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, (int, float, str, bool, bytes, complex)):
        return bool(a == b)
    return False


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random.get_state()


def _same_numpy(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return bool(a[0] == b[0] and a[2:] == b[2:] and (a[1] == b[1]).all())


def restore(moment: Moment) -> None:
    """Set the random streams, generators and attributes to what they were at `moment` (buffers: see the replay)."""
    restore_rng(moment.rng)
    if moment.python_rng is not None:
        random.setstate(moment.python_rng)
    if moment.numpy_rng is not None:
        sys.modules["numpy"].random.set_state(moment.numpy_rng)
    for generator, state in moment.generators:
        generator.set_state(state)
    for module, name, value in moment.attributes:
        restore_attribute(module, name, value)
    if moment.state is not None:
        moment.state.restore()


class Snapshot:
    """Everything a replay may disturb outside tensors, taken before it and put back after it.

    Args:
        modules: Modules that may run.
        generators: Generators that recorded calls used.
        values: Functions and values that will be called or changed (their closures and globals count).
    """

    def __init__(
        self, modules: list[torch.nn.Module], generators: list[torch.Generator], values: tuple[Any, ...] = ()
    ) -> None:
        self._rng = rng_state()
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._state = PythonState([*modules, *values])
        self._training = [(m, m.training) for m in modules]
        self._generators = [(g, g.get_state()) for g in generators]
        for module in modules:
            for name, value in own_attributes(module):
                if is_iterator(value):
                    vars(module)[name] = Tripwire(f"attribute {name!r} of {type(module).__name__}", value)

    def restore(self) -> None:
        """Put everything back."""
        self._state.restore()
        for module, training in self._training:
            module.training = training
        restore_rng(self._rng)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._generators:
            generator.set_state(state)


class Tripwire:
    """Stands in a replay for an iterator: the item that a call would take is gone, and the next is the user's."""

    def __init__(self, name: str, iterator: Any) -> None:
        self._name = name
        self._kind = type(iterator).__name__

    def __iter__(self) -> Tripwire:
        return self

    def __next__(self) -> Any:
        raise ReplayRefused(f"{self._name} is an iterator ({self._kind}), which can be used only once")
