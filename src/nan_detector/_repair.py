"""A replay in which the calls at one place are replaced by a repaired form."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._call_site import CallSite
from nan_detector._calls import CallKind, kind_of
from nan_detector._change import Change
from nan_detector._entries import tensors_in
from nan_detector._lineage import OpRecord
from nan_detector._quiet import quiet
from nan_detector._remade import make_call
from nan_detector._remedies.call import Call, Unfit, Words, name_of, writes_in_place
from nan_detector._remedies.registry import Remedy
from nan_detector._remedies.span import widened
from nan_detector._replay import Step
from nan_detector._source import here_until
from nan_detector._trace import Birth
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor

#: So many calls at the place have no such form: the rest will not have one either.
MOST_PASSED_BY = 16


def site_of(tracer: OpTracer, birth: Birth) -> CallSite | None:
    """The call that `birth` came of: of a derivative, the call of the forward that it belongs to.

    Returns:
        The place, or None where no function of the library was called there by code that is known.
    """
    record = next((r for r in _records(tracer) if r.index == birth.number and r.info.aten == birth.aten), None)
    if record is None:
        record = next((r for r in _records(tracer) if r.index == birth.number), None)
    if record is None:
        return None
    if not record.own_frame and record.phase == "backward" and record.forward is not None:
        record = record.forward
    if record.own_frame:  # within a backward the trace is shown operations, not what the user called
        return None if record.mark is None else CallSite(None, record.mark, record.mark)
    if record.called is None or record.called.caller is None:
        return None
    return CallSite(record.called.func, record.called.caller, record.mark or record.called.caller)


def _records(tracer: OpTracer) -> Iterator[OpRecord]:
    for gen in tracer.births:
        yield gen.record
    for gen in tracer.births:
        yield from gen.passed


class Repair(Change):
    """The calls at one place in a repaired form, and how that went.

    Args:
        site: Where.
        remedy: How.
        context: The user's line and those after it.
        whole_function: The same function called elsewhere in the same function of the source is repaired as well.
        in_slope: The slope of the call is bad, not its value.
    """

    def __init__(
        self,
        site: CallSite,
        remedy: Remedy,
        context: str = "",
        *,
        whole_function: bool = False,
        in_slope: bool = False,
    ) -> None:
        super().__init__()
        self.site = site
        self.remedy = remedy
        self.context = context
        self.whole_function = whole_function
        self.in_slope = in_slope
        self.words: Words | None = None  # of the first repaired call
        self.first: Call | None = None
        self.place = site  # of the first repaired call, which is another one where the remedy follows the result
        self.lines: set[int] = set()  # where calls were repaired
        self.unfit = False
        self._passed_by = 0
        self._promotes = False  # 16-bit tensors that meet what was computed in float32 are widened
        self._made: dict[int, tuple[weakref.ref[Tensor], Call]] = {}
        self._step: Step | None = None

    def starts(self, step: Step) -> None:
        self._step = step

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        unfit: Unfit | None = None
        follows = bool(self.remedy.follows)
        met = not self.unfit and self._meets(func)
        try:
            if (not self.unfit and self._takes_result(func, args)) if follows else met:
                return self._repaired(func, args, kwargs)
            if met and self.remedy.suits is not None:
                self.remedy.suits(self._call(func, args, kwargs))
        except Unfit as error:
            unfit = error
        if self._promotes and kind not in (CallKind.IGNORE, CallKind.BACKWARD, CallKind.STATE):
            return _promoted(func, args, kwargs)
        out = func(*args, **kwargs)
        if unfit is not None and not self.lines:
            # Where the guilty call does not fit, the remedy is the wrong one. Another call at the place may be one that
            # is sound: a round of a loop, the square before the root.
            self._passed_by += 1
            if self._passed_by >= MOST_PASSED_BY or not self._may_be_sound(out):
                self.unfit = True
                raise unfit
        needed = isinstance(out, Tensor) and name_of(func) in self.remedy.needs
        if needed and (not follows or (met and unfit is None) or self._takes_made(args)):
            self._made[id(out)] = weakref.ref(out), self._call(func, args, kwargs)
        return out

    def _may_be_sound(self, out: Any) -> bool:
        """True for a result without a bad value; where the slope is to blame, of any."""
        if self.in_slope:
            return True
        with quiet():
            return all(_finite.is_finite(t) for t in tensors_in(out) if _finite.checkable(t))

    def _meets(self, func: Callable[..., Any]) -> bool:
        tracer = self._step.tracer if self._step is not None else None
        if tracer is None or tracer.called is None or (self.remedy.names and name_of(func) not in self.remedy.names):
            return False
        if self.site.func is not None and self.site.func != func:
            return False
        mark = here_until(make_call.__code__, 2) or tracer.mark
        return self.site.meets(tracer.called, mark, whole_function=self.whole_function)

    def _takes_result(self, func: Callable[..., Any], args: Any) -> bool:
        """True for a call that the remedy is for, one of whose operands the guilty call has made."""
        return name_of(func) in self.remedy.follows and self._takes_made(args)

    def _takes_made(self, args: Any) -> bool:
        """True where an operand was made by the guilty call, or by a needed one that took its result."""
        return any(isinstance(a, Tensor) and self._made_by(a) is not None for a in args)

    def _repaired(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        target, out = None, kwargs.get("out")
        if writes_in_place(func):
            target, args = args[0], (args[0].clone(), *args[1:])
        elif isinstance(out, Tensor):
            target = out
        elif out is not None:
            raise Unfit("several results are written in place")
        call = self._call(func, args, {k: v for k, v in kwargs.items() if k != "out"})
        result = self.remedy.repair(call)
        if self.words is None:
            self.words, self.first = result.words, call
        assert self._step is not None and self._step.tracer.called is not None
        caller = self._step.tracer.called.caller
        if self.first is call and self.remedy.follows and caller is not None:
            mark = here_until(make_call.__code__, 2) or self._step.tracer.mark
            self.place = CallSite(func, caller, mark or caller)
        self.lines.add(caller.lineno if caller is not None else 0)
        self._promotes = self._promotes or result.promotes
        return result.value if target is None else target.copy_(result.value)

    def _call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Call:
        return Call(func, tuple(args), kwargs, self.context, self._made_by)

    def _made_by(self, t: Tensor) -> Call | None:
        known = self._made.get(id(t))
        return known[1] if known is not None and known[0]() is t else None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Calls within a backward are met too: those of a custom Function, and of a checkpoint that computes again.

        A function mode is off while a function that it was shown runs, and the backward is one.
        """
        me = threading.get_ident()
        original = torch.autograd.__dict__["_engine_run_backward"]

        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != me or self._step is None:
                return original(*args, **kwargs)
            with self._step.api_names():
                return original(*args, **kwargs)

        torch.autograd.__dict__["_engine_run_backward"] = run
        try:
            yield
        finally:
            torch.autograd.__dict__["_engine_run_backward"] = original


def _promoted(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """A call after one that was made in float32: where its operands are float32 in part, they all are."""
    dtypes = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}
    if torch.float32 not in dtypes or writes_in_place(func):
        return func(*args, **kwargs)
    device = next(t.device.type for t in tensors_in((args, kwargs)))
    with torch.autocast(device, enabled=False):
        return func(*widened(args), **widened(kwargs))
