"""The op tracer: a dispatch mode that follows every non-finite value of a step from its birth.

For each operation: GEN (finite inputs, non-finite result: a birth), PROP (non-finite makes non-finite: the births are
carried), KILL (they vanish). Literal infinities are births too, but *intended* ones; where intended values alone enter
an operation and a NaN comes out, that is a new birth.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Set
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from nan_detector import _finite
from nan_detector._bad_results import bad_result
from nan_detector._brought_in import brought_in
from nan_detector._call_site import Called
from nan_detector._errors import ReplayRefused
from nan_detector._graph_nodes import GraphNodes
from nan_detector._journal import Journal
from nan_detector._kept_inputs import KeptInputs
from nan_detector._lineage import EMPTY, Gen, Line, Lineage, OpRecord, key_of, memory_of
from nan_detector._op_values import (
    finite_fast,
    finite_number,
    floats_in,
    plain_arguments,
)
from nan_detector._opinfo import OpInfo, info_of
from nan_detector._quiet import quiet
from nan_detector._source import Mark, here_until
from nan_detector._subclassed import convert_as_before, convert_outside_modes
from nan_detector._trace import BirthKind

Tensor = torch.Tensor

#: Births whose inputs are described in full; later ones keep only their place.
MAX_DESCRIBED = 40

_ENGINE = torch.autograd.graph._engine_run_backward.__code__
_current_node = torch._C._current_autograd_node


def _shown_to(modes: list[Any], func: Callable[..., Any]) -> Callable[..., Any]:
    """`func` with `modes` (innermost first) back on the stack while it runs."""

    def call(*args: Any, **kwargs: Any) -> Any:
        for mode in reversed(modes):
            torch.utils._python_dispatch._push_mode(mode)
        try:
            return func(*args, **kwargs)
        finally:
            for _ in modes:
                torch._C._pop_torch_dispatch_stack(None)

    return call


class OpTracer(TorchDispatchMode):
    """Traces the operations of the calling thread.

    Args:
        barrier: Code object of the runner that re-makes recorded calls; frames outside it are not the operation's.
            None for a live trace.
        outside: Finds the name and kind of a tensor that was not made under the trace.
        deadline: `time.perf_counter()` value after which the trace gives up with `ReplayRefused`.
    """

    def __init__(
        self,
        *,
        barrier: Any = None,
        outside: Callable[[Tensor], tuple[BirthKind, str] | None] | None = None,
        deadline: float = math.inf,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch ships it
        self.barrier = barrier
        self.outside = outside or (lambda t: None)
        self.deadline = deadline
        self.lineage = Lineage()
        self.births: list[Gen] = []
        self.max_described: float = MAX_DESCRIBED
        self.operations = 0
        self.phase = "loss"
        self.mark: Mark | None = None  # of the recorded call that is being made again
        self.module: tuple[str | None, str] | None = None
        self.api: str | None = None
        self.api_inputs: Any = None  # arguments of that function
        self.called: Called | None = None
        self.on_leaf: Callable[[Tensor], None] | None = None  # told of each leaf that gradients could flow into
        self.on_birth: Callable[[Gen], None] | None = None
        self.observer: Callable[..., None] | None = None  # shown each operation that gave finite values
        self.evidence: Any = None  # keeps what shows the guilty operation alone, where a capsule is wanted
        self.last_scalar: Line = EMPTY
        self.on_scalar: Callable[[Line], None] | None = None
        self.leaves: dict[int, weakref.ref[Tensor]] = {}  # leaves that require grad, of a live trace
        self.transformed = False  # inside a transform of torch.func
        #: By its key, memory that operations have made. The reference keeps no numbers, but the address: were it given
        #: out again, a number that no operation made (``g[0] = nan``) would be taken for one of this trace.
        self._made: dict[int, Any] = {}
        self.journal = Journal(self._made.keys())
        self.nodes = GraphNodes()
        self.kept = KeptInputs()
        self._checked: dict[int, Any] = {}
        self.last: OpRecord | None = None
        self.paused = False  # every operation passes by

    def __enter__(self) -> Any:
        convert_outside_modes()
        return super().__enter__()  # type: ignore[no-untyped-call]  # as torch ships it

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as torch ships it
        convert_as_before()

    # -- the hot path ------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        info = info_of(func)
        if info.is_view:
            if self.on_leaf is not None and isinstance(args[0], Tensor) and args[0].requires_grad and args[0].is_leaf:
                self.on_leaf(args[0])
            out = func(*args, **kwargs)
            tracked = isinstance(args[0], Tensor) and args[0].requires_grad
            if _current_node() is None and (tracked or self.transformed):
                self._remember_view(info, tracked)
            return out
        if info.collective:
            raise ReplayRefused(f"the step talks to other processes ({info.aten}), which a replay must not do")
        with torch._C.DisableTorchFunction():
            if torch._C._len_torch_dispatch_stack():
                # Modes that stand below are shown the operation itself, and nothing of what we do around it.
                with _disable_current_modes() as below:
                    return self._operation(_shown_to(below, func), info, args, kwargs)
            return self._operation(func, info, args, kwargs)

    def _operation(self, func: Any, info: OpInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.operations += 1
        if not self.operations & 63 and time.perf_counter() > self.deadline:
            raise ReplayRefused("the replay ran out of its time budget (replay_budget_s)")
        ins = list(floats_in((args, kwargs)))
        before: list[Tensor] = []
        bad_before: dict[int, Line] = {}
        if info.mutates:
            self.journal.about_to_run(info, args, kwargs)
            before = self.kept.before(info, args, kwargs, ins)
            bad_before = self.bad_inputs(info, ins)
            if info.overwrites:
                bad_before.pop(0, None)
        record = self._record(info, args, ins)
        if self.evidence is not None:
            self.evidence.ran(record, info, func, args, kwargs)
        out = func(*args, **kwargs)
        if info.op == "local_scalar_dense":
            self._scalar_read(record, ins, out)
            return out
        outs = list(floats_in(out))
        if info.mutates and not outs:
            outs = [t for t in ins if t._version >= 0][:1] if not info.op.startswith("foreach") else ins
        for o in outs:
            self.has_made(o)
        if info.writes_statistics:
            outs += [t for i, t in enumerate(ins) if i not in bad_before and t.numel() < outs[0].numel()]
        if info.uninitialised:
            self._uninitialised(record, outs)
            return out
        if self.evidence is not None:
            self.evidence.gave(record, before if info.mutates else ins, outs)
        bad = [o for o in outs if not finite_fast(o)]
        if not bad:
            self._finite_result(info, record, ins, outs, bad_before)
            if self.observer is not None:
                self.observer(info, record, args, kwargs, ins, before if info.mutates else ins, outs)
            return out
        record.numel = bad[0].numel()
        bad_result(self, func, info, record, ins, bad, args, kwargs, before, bad_before)
        return out

    def has_made(self, t: Tensor) -> None:
        """Note that an operation gave `t`."""
        memory = memory_of(t)
        key = 0 if memory is None else int(memory._cdata)
        if key not in self._made:
            self._made[key] = None if memory is None else StorageWeakRef(memory)

    # -- one operation -----------------------------------------------------------------------------------------------

    def _record(self, info: OpInfo, args: tuple[Any, ...], ins: list[Tensor]) -> OpRecord:
        node = _current_node()
        record = self.placed(info, node)
        record.inputs = self.kept.keep(ins)
        record.called = self.called
        if self.barrier is None:
            for t in ins:
                if t.requires_grad and t.is_leaf and id(t) not in self.leaves:
                    self.leaves[id(t)] = weakref.ref(t)
        elif self.on_leaf is not None:
            for t in ins:
                if t.requires_grad and t.is_leaf:
                    self.on_leaf(t)
        record.args = plain_arguments(info, args)
        # A record inside another node's backward (create_graph, a recomputation) explains the new node by the one that
        # made it.
        self.nodes.number(
            record if node is None or record.own_frame else record.forward or record,
            any(t.requires_grad for t in ins),
        )
        self.nodes.wrote = record if info.mutates and ins and ins[0]._is_view() else None
        if ins:
            self.last = record  # the last operation that could carry a bad value
        return record

    def placed(self, info: OpInfo, node: Any) -> OpRecord:
        """Where the running operation stands: its line, module and phase, and what it is the derivative of."""
        if node is None:
            mark = here_until(self.barrier, 4) if self.barrier is not None else here_until(_NOWHERE, 4)
            record = OpRecord(self.operations, info, self.phase, mark or self.mark, self.module, self.api)
        else:
            mark = here_until(_ENGINE, 4)
            origin = self.nodes.forward_of(node)
            if mark is not None:
                module = self.module or (origin.module if origin is not None else None)
                record = OpRecord(
                    self.operations, info, "backward", mark, module, self.api, forward=origin, own_frame=True
                )
            elif origin is not None:
                record = OpRecord(
                    self.operations, info, "backward", origin.mark, origin.module, origin.api, forward=origin
                )
            else:
                record = OpRecord(self.operations, info, "backward", self.mark, None, self.api)
            record.node = node.name()
        return record

    def _remember_view(self, info: OpInfo, tracked: bool) -> None:
        mark = here_until(self.barrier or _NOWHERE, 3) or self.mark
        record = OpRecord(self.operations, info, self.phase, mark, self.module, self.api, called=self.called)
        self.nodes.number(record, tracked)
        self.nodes.wrote = None

    def bad_inputs(self, info: OpInfo, ins: list[Tensor]) -> dict[int, Line]:
        """Births carried by those inputs that do hold non-finite values, by position; meets tensors from outside."""
        found: dict[int, Line] = {}
        for position, t in enumerate(ins):
            line = self.lineage.of(t)
            if line:
                if not finite_fast(t):
                    found[position] = line
                continue
            key = key_of(t)
            if key in self._made or key in self._checked:
                continue
            # The address must not be given out again while the trace runs; the memory itself may be freed.
            memory = memory_of(t)
            self._checked[key] = t if memory is None else StorageWeakRef(memory)
            if not finite_fast(t):
                found[position] = brought_in(self, info, t)
        return found

    def _scalar_read(self, record: OpRecord, ins: list[Tensor], value: Any) -> None:
        if isinstance(value, (float, complex)) and not finite_number(value):
            self.last_scalar = self.lines(self.bad_inputs(record.info, ins))
            if self.on_scalar is not None:
                self.on_scalar(self.last_scalar)

    def number_given(self, args: Any) -> None:
        """A call gave a non-finite Python number without an operation of its own (`tolist`)."""
        with quiet():
            line = self.lineage.union(floats_in(args))
        if line:
            self.last_scalar = line

    def _uninitialised(self, record: OpRecord, outs: list[Tensor]) -> None:
        for o in outs:
            if o.numel():
                gen = Gen((2, self.operations), BirthKind.OPERATION, False, record, note="uninitialised memory")
                self.births.append(gen)
                self.lineage.mark(o, frozenset((gen,)))

    def _finite_result(
        self, info: OpInfo, record: OpRecord, ins: list[Tensor], outs: list[Tensor], bad_before: dict[int, Line]
    ) -> None:
        carried = bad_before if info.mutates else self.bad_inputs(info, ins)
        for line in carried.values():
            for gen in line:
                if len(gen.ended) < 64:
                    gen.ended.append(record)
        if self.lineage._lines:
            for o in outs:
                self.lineage.overwritten(o)

    def born(self, gen: Gen) -> None:
        """Note a birth."""
        self.births.append(gen)
        gen.record.births.append(gen)
        if self.on_birth is not None:
            self.on_birth(gen)

    @staticmethod
    def lines(carried: dict[int, Line]) -> Line:
        """All births that inputs carry."""
        out: Line = EMPTY
        for line in carried.values():
            out |= line
        return out

    # -- asked afterwards ----------------------------------------------------------------------------------------------

    @property
    def own(self) -> Set[int]:
        """Memory that operations of this trace have written."""
        return self._made.keys()

    def made(self, key: int) -> bool:
        """True for memory that an operation of this trace has written."""
        return key in self._made

    def ancestry(self, t: Tensor) -> Line:
        """Births that the non-finite values of `t` descend from; empty where `t` is finite."""
        line = self.lineage.of(t)
        # Asked first: most gradients descend from none, and need not be read.
        return EMPTY if not line or not _finite.checkable(t) or _finite.is_finite(t) else line


def _nowhere() -> None:  # its code is never on the stack: a barrier that is never met
    return None


_NOWHERE = _nowhere.__code__
