"""Did a 0 that something divided by, or took the logarithm of, underflow? The operations that made it are asked."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from nan_detector import _finite
from nan_detector._diagnosis.dtypes import plain
from nan_detector._diagnosis.facts import base_op
from nan_detector._diagnosis.numbers import number
from nan_detector._lineage import OpRecord
from nan_detector._quiet import quiet
from nan_detector._trace import UNDERFLOWED

Tensor = torch.Tensor

#: Operations that a 0 can be the fault of, and which operand stands under them.
_DIVIDES = {"div": 1, "reciprocal": 0, "rsqrt": 0, "log": 0, "log2": 0, "log10": 0}
#: What is not 0 stays so in mathematics; where the result is 0 all the same, the dtype had no smaller number.
_KEEPS_APART = frozenset("mul pow exp exp2 div prod cumprod norm softmax safe_softmax sigmoid to_copy".split())
_OF_TWO = ("mul", "div", "pow")
_EXPONENTIALS = frozenset("exp exp2 softmax safe_softmax sigmoid".split())
#: 0 of 0 and of nothing else: the question is passed on.
_PASSES = frozenset("sum mean sqrt neg abs cumsum clone where cat stack add copy amax mul pow div index select".split())
#: So far back at most.
HOPS = 12


def underflow(op: str, operands: list[Tensor], records: Mapping[int, OpRecord]) -> str:
    """A note on the operation that made 0 of something else; "" where none did, or nobody knows.

    Args:
        op: The operation that met the 0.
        operands: Its operands.
        records: The operations of the trace by the sequence number of their node.
    """
    position = _DIVIDES.get(base_op(op))
    if position is None or position >= len(operands):
        return ""
    with quiet():
        return _asked(operands[position], records)


def _asked(t: Tensor, records: Mapping[int, OpRecord]) -> str:
    node, dtype = t.grad_fn, t.dtype
    for _ in range(HOPS):
        record = records.get(node._sequence_nr()) if node is not None else None
        if record is None or node is None:
            return ""
        inputs = [i for i in (_alive(x) for x in record.inputs) if i is not None]
        if not record.inputs:  # a view
            node = node.next_functions[0][0] if node.next_functions else None
            continue
        if len(inputs) < len(record.inputs):
            return ""
        op = base_op(record.info.op)
        zero = next((i for i in inputs if bool((i == 0).any())), None)
        if op in _OF_TWO and not _both_known(record, inputs):
            return ""
        if op in _KEEPS_APART and (zero is None or op in _EXPONENTIALS):
            return _said(op, inputs, dtype)
        if zero is None or op not in _PASSES:
            return ""
        node, dtype = zero.grad_fn, zero.dtype
    return ""


def _both_known(record: OpRecord, inputs: list[Tensor]) -> bool:
    """False where a factor is a mask or a whole number, whose values are not kept, or the number 0."""
    numbers = [text.partition("=")[2] for text in record.args]
    whole = record.info.op.strip("_").removeprefix("foreach_") == "square" or len(inputs) + len(numbers) >= 2
    return whole and not any(n in ("0", "0.0", "-0.0", "False") for n in numbers)


def _said(op: str, inputs: list[Tensor], dtype: torch.dtype) -> str:
    stats = [_finite.stats(i) for i in inputs]
    if any(s.bad_count for s in stats):  # exp(-inf) is 0, and rightly so
        return ""
    if op in _EXPONENTIALS:
        least = stats[0].min
        return f"{UNDERFLOWED} {op} of {number(least)} is 0 in {plain(str(dtype))}" if least is not None else ""
    least = min((s.min_nonzero for s in stats if s.min_nonzero is not None), default=None)
    return f"{UNDERFLOWED} {op} made 0 of {number(least)} in {plain(str(dtype))}" if least is not None else ""


def _alive(kept: Any) -> Tensor | None:
    t = kept() if isinstance(kept, weakref.ref) else kept
    return t if isinstance(t, Tensor) and _finite.checkable(t) else None
