"""What a replay keeps of the operations that gave birth, so that one of them can be shown alone.

Only where a capsule is wanted: the tracer asks for none of this otherwise.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._capsule.layout import MAX_REPRO_BYTES
from nan_detector._entries import Entry, tensors_in
from nan_detector._lineage import Gen, OpRecord
from nan_detector._opinfo import OpInfo
from nan_detector._quiet import quiet
from nan_detector._records import TensorStats

Tensor = torch.Tensor

#: Births whose operation is kept: the one to blame is nearly always among the first.
MAX_BIRTHS = 24
#: Bytes of their inputs, all together.
MAX_BYTES = 8 * MAX_REPRO_BYTES
#: Tensors that are no floats (indices, masks) up to this many elements are kept by a forward operation's record.
MAX_INDEX = 1 << 18
#: Nodes of a graph that are asked for their gradients.
MAX_NODES = 100_000


@dataclass(frozen=True)
class KeptCall:
    """One operation with its inputs, on the host.

    Attributes:
        func: The operation.
        args: Its arguments, tensors copied.
        kwargs: Its keyword arguments.
        output: Statistics of what it gave.
        elements: The inputs are those of the guilty elements alone: the whole was too large.
        forward: Of a birth in the backward: the operation whose derivative it is.
        gradients: What had arrived at that operation's outputs, by position.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: TensorStats | None = None
    elements: bool = False
    forward: KeptCall | None = None
    gradients: tuple[Tensor | None, ...] = ()


@dataclass
class _Ran:
    """A forward operation as it ran: references, and the versions of what they refer to."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class _Ref:
    ref: Any
    version: int

    def get(self) -> Tensor | None:
        t: Tensor | None = self.ref()
        return t if t is not None and _version(t) == self.version else None


class Gone(Exception):
    """Internal: a tensor that an operation used is no longer as it was."""


@dataclass
class Evidence:
    """Collects what one replay shows. `start` begins afresh."""

    calls: dict[int, KeptCall] = field(default_factory=dict)
    outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    left: int = MAX_BYTES
    blamed: int | None = None  # number of the operation to blame
    _ran: dict[int, _Ran] = field(default_factory=dict)
    _incoming: tuple[int, tuple[Tensor | None, ...]] | None = None
    _handles: list[Any] = field(default_factory=list)

    def start(self) -> None:
        """A replay begins."""
        self.finish()
        self.calls, self.outputs, self.left, self.blamed = {}, {}, MAX_BYTES, None

    def finish(self) -> None:
        """The replay is over: nothing of its graph is held any longer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ran.clear()
        self._incoming = None

    @property
    def guilty(self) -> KeptCall | None:
        """The operation to blame, where it was kept."""
        return None if self.blamed is None else self.calls.get(self.blamed)

    # -- told by the tracer --------------------------------------------------------------------------------------------

    def ran(self, record: OpRecord, info: OpInfo, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operation is about to run. What has a derivative is remembered, by reference."""
        if record.phase == "backward" or info.mutates or not any(t.requires_grad for t in _tensors((args, kwargs))):
            return
        strong = {id(t) for t in record.inputs if isinstance(t, Tensor)}

        def kept(t: Tensor) -> Any:
            if id(t) in strong or (not t.is_floating_point() and t.numel() <= MAX_INDEX):
                return _Ref(lambda: t, _version(t))
            return _Ref(weakref.ref(t), _version(t))

        self._ran[record.index] = _Ran(func, _mapped(args, kept), _mapped(kwargs, kept))

    def gave(self, record: OpRecord, ins: list[Tensor], outs: list[Tensor]) -> None:
        """An operation has run."""

    def born(
        self,
        gen: Gen,
        info: OpInfo,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ins: list[Tensor],
        values: list[Tensor],
        out: Tensor,
    ) -> None:
        """An operation gave birth. `values` are its inputs `ins` as they were before it wrote into them."""
        record = gen.record
        if len(self.calls) >= MAX_BIRTHS or record.index in self.calls:
            return
        earlier = {id(t): v for t, v in zip(ins, values, strict=False)}
        if info.mutates and any(earlier.get(id(t), t) is t for t in ins[:1]):
            return  # it was too large to be copied before it was overwritten
        args, kwargs = (_mapped(a, lambda t: earlier.get(id(t), t)) for a in (args, kwargs))
        with quiet():
            elements = _size((args, kwargs)) > MAX_REPRO_BYTES
            if elements:
                chosen = _guilty_elements((args, kwargs), out) if info.pointwise else None
                if chosen is None:
                    return
                args, kwargs = chosen
            try:
                kept = self._copied(func, args, kwargs)
            except Gone:
                return
            forward, gradients = self._derivative(record)
        self.calls[record.index] = KeptCall(
            func, kept.args, kept.kwargs, _finite.stats(out), elements, forward, gradients
        )

    def _derivative(self, record: OpRecord) -> tuple[KeptCall | None, tuple[Tensor | None, ...]]:
        node = torch._C._current_autograd_node()
        if node is None or record.forward is None or record.own_frame or self._incoming is None:
            return None, ()
        sequence, gradients = self._incoming
        ran = self._ran.get(record.forward.index)
        if ran is None or sequence != node._sequence_nr() or _size(gradients) > MAX_REPRO_BYTES:
            return None, ()
        try:
            args, kwargs = _mapped(ran.args, _got), _mapped(ran.kwargs, _got)
            if _size((args, kwargs)) > MAX_REPRO_BYTES:
                return None, ()
            forward = self._copied(ran.func, args, kwargs)
        except Gone:
            return None, ()
        return forward, tuple(None if g is None else self._copy(g) for g in gradients)

    def _copied(self, func: Any, args: Any, kwargs: Any) -> KeptCall:
        if _size((args, kwargs)) > self.left:
            raise Gone
        return KeptCall(func, _mapped(args, self._copy), _mapped(kwargs, self._copy))

    def _copy(self, t: Tensor) -> Tensor:
        self.left -= t.numel() * t.element_size()
        return t.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    # -- told by the replay --------------------------------------------------------------------------------------------

    def before_backward(self, args: Any, kwargs: Any) -> None:
        """A backward is about to start from tensors among these: each node of its graph will show what it is given."""
        with torch._C.DisableTorchFunction():
            todo = [t.grad_fn for t in tensors_in((args, kwargs)) if t.grad_fn is not None]
        done: set[Any] = set()
        while todo and len(done) < MAX_NODES:
            node = todo.pop()
            if node in done:
                continue
            done.add(node)
            if next(iter(node.next_functions), None) is not None:  # not the end of the graph, a leaf's accumulation
                self._handles.append(node.register_prehook(self._hook(node._sequence_nr())))
            todo.extend(n for n, _ in node.next_functions if n is not None)

    def _hook(self, sequence: int) -> Any:
        me = weakref.ref(self)

        def seen(gradients: tuple[Tensor | None, ...]) -> None:
            evidence = me()
            if evidence is not None:
                evidence._incoming = (sequence, gradients)

        return seen

    def root_gave(self, entry: Entry, outputs: list[Tensor]) -> None:
        """A watched model returned: the gradients that will arrive there stand for the loss where it is not known."""
        with torch._C.DisableTorchFunction():
            for position, t in enumerate(outputs):
                if t.requires_grad and not t.is_leaf:
                    self._handles.append(t.register_hook(self._arrives((entry.number, position))))

    def _arrives(self, key: tuple[int, int]) -> Any:
        me = weakref.ref(self)

        def seen(gradient: Tensor) -> None:
            evidence = me()
            if evidence is not None:
                evidence.outputs[key] = gradient

        return seen

    def __hash__(self) -> int:
        return id(self)


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _got(ref: Any) -> Tensor:
    t = ref.get()
    if t is None:
        raise Gone
    return t  # type: ignore[no-any-return]  # of a _Ref


def _mapped(value: Any, change: Any) -> Any:
    """`value` with each tensor (or reference to one) changed."""
    if isinstance(value, (Tensor, _Ref)):
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(v, change) for v in value]) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {k: _mapped(v, change) for k, v in value.items()}
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _size(value: Any) -> int:
    tensors: Iterable[Tensor] = _tensors(value)
    return sum(t.numel() * t.element_size() for t in tensors)


def _guilty_elements(value: Any, out: Tensor) -> Any:
    """The arguments of a pointwise operation, of the bad elements of its result alone."""
    mask = _finite.bad_mask(out)
    try:
        chosen = _mapped(value, lambda t: t.expand(mask.shape)[mask])
    except RuntimeError:  # shapes that do not broadcast
        return None
    return chosen if _size(chosen) <= MAX_REPRO_BYTES else None
