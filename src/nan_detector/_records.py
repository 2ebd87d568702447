"""What the detector says, as plain frozen data: no tensors, JSON in and out.

Field names are a public contract (see `docs/records.md` and `schema/`): other programs read them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

SCHEMA_VERSION = 1

Phase = Literal["data", "forward", "loss", "backward", "optimizer", "state"]
Severity = Literal["error", "silent", "handled"]
Reproduced = Literal["yes", "no", "not_tried"]
Status = Literal["provisional", "final"]
Verdict = Literal["data", "precision", "formula", "state", "optimizer", "compiler", "not_reproducible", "undecided"]

R = TypeVar("R", bound="Record")


class Record:
    """Base of all records: conversion to and from JSON-safe dictionaries."""

    __slots__ = ()  # without it the slots of every record would be in vain

    #: Value of the "record" key of a log line; empty for records that only live inside others.
    record: ClassVar[str] = ""
    #: Properties that readers of the log expect beside the fields.
    derived: ClassVar[tuple[str, ...]] = ()

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON values: tuples become lists, non-finite floats the strings "nan", "inf", "-inf"."""
        out: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "record": self.record} if self.record else {}
        for f in dataclasses.fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            out[f.name] = encode(getattr(self, f.name))
        for name in self.derived:
            out[name] = encode(getattr(self, name))
        return out

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """The record that `to_dict` gave. Unknown keys (a newer version's) are ignored.

        Raises:
            ValueError: A key that this record cannot do without is missing; the message names it.
        """
        kwargs: dict[str, Any] = {}
        for f in dataclasses.fields(cls):  # type: ignore[arg-type]  # every subclass is a dataclass
            if f.name not in data:
                if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                    raise ValueError(f"{cls.__name__} needs the key {f.name!r}, which this record does not have.")
                continue
            kwargs[f.name] = _decode(data[f.name], f.metadata.get("kind"))
        return cls(**kwargs)


def encode(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, Record):
        return value.to_dict()
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    return str(value)


_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _decode(value: Any, kind: Any) -> Any:
    if kind is float and isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if kind == "float_map" and isinstance(value, Mapping):
        return {k: _decode(v, float) for k, v in value.items()}
    if isinstance(kind, type) and issubclass(kind, Record):
        if isinstance(value, list):
            return tuple(kind.from_dict(v) for v in value)
        return None if value is None else kind.from_dict(value)
    return tuple(_decode(v, kind) for v in value) if isinstance(value, list) else value


def _float(default: Any = dataclasses.MISSING) -> Any:
    return (
        field(metadata={"kind": float})
        if default is dataclasses.MISSING
        else field(default=default, metadata={"kind": float})
    )


def _nested(kind: type[Record], default: Any = dataclasses.MISSING) -> Any:
    return (
        field(metadata={"kind": kind})
        if default is dataclasses.MISSING
        else field(default=default, metadata={"kind": kind})
    )


@dataclass(frozen=True, slots=True)
class Location(Record):
    """A line of the user's source: the innermost frame that is not PyTorch's or ours.

    `cell` is the notebook's cell that the line is in, as the notebook shows it ("In[3]"); None outside notebooks.
    """

    file: str
    line: int
    function: str
    source_line: str
    cell: str | None = None


@dataclass(frozen=True, slots=True)
class TensorStats(Record):
    """Statistics of one tensor. `min`, `max` and `mean` are over its finite values and None where it has none.

    `min_nonzero` is the least non-zero magnitude among the finite values. Counts are in elements; of a complex
    tensor, in real components.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str
    min: float | None = _float(None)
    max: float | None = _float(None)
    mean: float | None = _float(None)
    min_nonzero: float | None = _float(None)
    nan_count: int = 0
    posinf_count: int = 0
    neginf_count: int = 0
    zero_count: int = 0
    negative_count: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bad_count(self) -> int:
        """Number of elements that are NaN, +inf or -inf."""
        return self.nan_count + self.posinf_count + self.neginf_count


@dataclass(frozen=True, slots=True)
class Site(Record):
    """A place that non-finite values passed on their way."""

    op: str
    phase: str
    layer_name: str | None = None
    module_type: str | None = None
    location: Location | None = _nested(Location, None)


@dataclass(frozen=True, slots=True)
class Cause(Record):
    """Why it happened: a code from the closed list, and the numbers that prove it."""

    code: str
    title: str
    explanation: str
    evidence: tuple[str, ...] = ()
    fix: str | None = None


@dataclass(frozen=True, slots=True)
class Trial(Record):
    """The step again with one thing changed, and what came of it."""

    name: str
    question: str
    finite: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LossTerm(Record):
    """A summand of the loss. The sum is that of `weight * value` over the terms.

    What the whole sum is multiplied or divided by (a loss scale, the steps of gradient accumulation) is not part of
    the weights. Of a term with many elements, `value` is their mean, or their sum, as the loss takes it.
    """

    text: str
    value: float = _float()
    finite: bool = True
    weight: float = _float(1.0)
    location: Location | None = _nested(Location, None)


@dataclass(frozen=True, slots=True)
class NaNEvent(Record):
    """A NaN or Inf was born. The first block of fields is the answer; the rest is its proof and its context."""

    record: ClassVar[str] = "event"
    derived: ClassVar[tuple[str, ...]] = (
        "batch_idx",
        "is_backward",
        "input_has_nan",
        "input_has_inf",
        "output_has_nan",
        "output_has_inf",
        "output_shape",
        "output_stats",
    )

    event_id: str
    status: Status
    step: int
    phase: Phase
    severity: Severity
    op: str | None = None
    call: str | None = None
    layer_name: str | None = None
    module_type: str | None = None
    location: Location | None = _nested(Location, None)
    tensor_name: str | None = None
    inputs: tuple[TensorStats, ...] = _nested(TensorStats, ())
    output: TensorStats | None = _nested(TensorStats, None)
    cause: Cause | None = _nested(Cause, None)
    trials: tuple[Trial, ...] = _nested(Trial, ())
    verdict: Verdict = "undecided"
    spread: tuple[Site, ...] = _nested(Site, ())
    before: tuple[str, ...] = ()
    reproduced: Reproduced = "not_tried"
    micro_step: int = 0
    sample_index: tuple[int, ...] = ()
    sample_id: tuple[str, ...] = ()
    rank: int = 0
    weights: str = "clean"
    capsule: str | None = None
    symptom: str = ""
    action: str = ""
    notes: tuple[str, ...] = ()
    loss: float | None = _float(None)
    time: float = 0.0
    loss_terms: tuple[LossTerm, ...] = _nested(LossTerm, ())
    first_use: Location | None = _nested(Location, None)
    bad_buffers: tuple[str, ...] = ()
    derivative: bool | None = None

    @property
    def batch_idx(self) -> int:
        """The step, under its old name."""
        return self.step

    @property
    def is_backward(self) -> bool:
        """True when the birth was in the backward pass."""
        return self.phase == "backward"

    @property
    def input_has_nan(self) -> bool:
        """True when an input of the guilty operation holds NaN."""
        return any(s.nan_count for s in self.inputs)

    @property
    def input_has_inf(self) -> bool:
        """True when an input of the guilty operation holds an infinity."""
        return any(s.posinf_count or s.neginf_count for s in self.inputs)

    @property
    def output_has_nan(self) -> bool:
        """True when the result of the guilty operation holds NaN."""
        return self.output is not None and self.output.nan_count > 0

    @property
    def output_has_inf(self) -> bool:
        """True when the result of the guilty operation holds an infinity."""
        return self.output is not None and self.output.posinf_count + self.output.neginf_count > 0

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of the result of the guilty operation; () where it is not known."""
        return self.output.shape if self.output is not None else ()

    @property
    def output_stats(self) -> dict[str, float | None]:
        """min, max and mean of the finite values of the result."""
        if self.output is None:
            return {}
        return {"min": self.output.min, "max": self.output.max, "mean": self.output.mean}

    def __str__(self) -> str:
        from nan_detector._summary import report

        return report(self)

    def _repr_html_(self) -> str:
        from nan_detector._render import notebook

        return notebook.fragment(self)


@dataclass(frozen=True, slots=True)
class GradEvent(Record):
    """A gradient's L2 norm went beyond the threshold: explosion is near. Units: those of the unscaled gradient."""

    record: ClassVar[str] = "grad"

    batch_idx: int
    layer_name: str
    param_name: str
    grad_norm: float = _float()
    threshold: float = _float()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class WarningRecord(Record):
    """Something that is not an event (yet): `kind` is a short stable word, `message` a sentence for a person."""

    record: ClassVar[str] = "warning"

    kind: str
    step: int
    message: str
    layer_name: str | None = None
    value: float | None = _float(None)
    location: Location | None = _nested(Location, None)
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Hazard(Record):
    """An operation of a healthy step that is near an edge: what `hazards()` gives, nearest first.

    `kind` is a short stable word. `distance` is in decades, as the operation's own scale counts them: 0.0 is the edge
    itself, 0.3 a factor of two from it. `value` is the nearest value and `count` the number of elements about as near.
    """

    kind: str
    distance: float
    op: str
    step: int
    phase: Phase
    message: str
    call: str | None = None
    layer_name: str | None = None
    module_type: str | None = None
    location: Location | None = _nested(Location, None)
    value: float | None = _float(None)
    count: int = 0
    forecast_step: int | None = None

    def __str__(self) -> str:
        where = "no line is known"
        if self.location is not None:
            at = self.location
            where = f"{at.file}:{at.line}" if at.cell is None else f"cell {at.cell}, line {at.line}"
        layer = f"{self.layer_name} " if self.layer_name is not None else ""
        return f"{self.distance:.2f}  {self.kind}  {layer}{self.call or self.op}  {where}: {self.message}"


@dataclass(frozen=True, slots=True)
class OpSeen(Record):
    """One operation of a replay near a birth, in `nan-detector replay --ops`: the values that it took and gave.

    `number` is its place among the operations of the step, `where` its line.
    """

    number: int
    op: str
    phase: str
    layer_name: str | None
    where: str
    inputs: tuple[TensorStats, ...] = _nested(TensorStats, ())
    output: TensorStats | None = _nested(TensorStats, None)
    is_birth: bool = False


@dataclass(frozen=True, slots=True)
class StateProblem(Record):
    """State that is not finite: what `check_state()` gives.

    `kind` is "parameter", "buffer" or "optimizer"; `value` describes a tensor, `number` a hyperparameter.
    """

    kind: str
    tensor_name: str
    layer_name: str | None = None
    value: TensorStats | None = _nested(TensorStats, None)
    number: float | None = _float(None)

    def __str__(self) -> str:
        if self.value is None:
            return f"{self.tensor_name} is {self.number}"
        counts = {"NaN": self.value.nan_count, "+inf": self.value.posinf_count, "-inf": self.value.neginf_count}
        said = ", ".join(f"{n} {name}" for name, n in counts.items() if n)
        return f"{self.tensor_name} is not finite: {said} of {self.value.numel} values"


@dataclass(frozen=True, slots=True)
class Cost(Record):
    """What a watch costs: what `cost()` gives.

    Times are per step, over the last 1000 steps: what the detector's own work took, without what its hooks make the
    rest wait. Memory is what is held at the moment: `recorder_bytes` by the flight recorder and the places that layers
    are measured into, `moment_bytes` by the kept starts of model calls (their inputs, random states, copied buffers),
    `tape_bytes` by other tensors from outside the step, `snapshot_bytes` by the state that "rollback" goes back to,
    `shadow_bytes` by the copies of `protect="full"`. Inputs that the program holds as well are counted all the same.
    """

    derived: ClassVar[tuple[str, ...]] = ("held_bytes",)

    steps: int
    mean_ms: float = _float()
    median_ms: float = _float()
    max_ms: float = _float()
    recorder_bytes: int = 0
    moment_bytes: int = 0
    tape_bytes: int = 0
    snapshot_bytes: int = 0
    shadow_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """All of it together."""
        return self.recorder_bytes + self.moment_bytes + self.tape_bytes + self.snapshot_bytes + self.shadow_bytes

    def __str__(self) -> str:
        held = {
            "recorder": self.recorder_bytes,
            "model calls": self.moment_bytes,
            "tape": self.tape_bytes,
            "snapshots": self.snapshot_bytes,
            "shadows": self.shadow_bytes,
        }
        parts = ", ".join(f"{name} {size:,} B" for name, size in held.items() if size) or "nothing"
        return (
            f"{self.steps} steps, {self.mean_ms:.3f} ms each (median {self.median_ms:.3f}, most {self.max_ms:.3f}); "
            f"held: {parts}"
        )


@dataclass(frozen=True, slots=True)
class LayerPeak(Record):
    """The largest magnitude in what a layer put out, and the largest finite number of its dtype, where known."""

    layer_name: str
    abs_max: float = _float()
    limit: float | None = _float(None)


@dataclass(frozen=True, slots=True)
class StepRow(Record):
    """One row of the flight recorder.

    At `watch="layers"` a step before an event, and one of the last of a run, has a second row, which has `layers`.
    """

    record: ClassVar[str] = "step"

    step: int
    loss: float | None = _float(None)
    grad_norm: float | None = _float(None)
    max_grad_norm: float | None = _float(None)
    lr: float | None = _float(None)
    loss_scale: float | None = _float(None)
    rank: int = 0
    layers: tuple[LayerPeak, ...] = _nested(LayerPeak, ())


@dataclass(frozen=True, slots=True)
class RunRecord(Record):
    """The first line of a log: what was watched, with what."""

    record: ClassVar[str] = "run"

    started: float
    package_version: str
    torch_version: str
    python_version: str
    platform: str
    options: dict[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    rank: int = 0


RECORDS: dict[str, type[Record]] = {r.record: r for r in (NaNEvent, GradEvent, WarningRecord, StepRow, RunRecord)}


def record_from_dict(data: Mapping[str, Any]) -> Record:
    """The record of one log line.

    Raises:
        ValueError: The line names no known record, or lacks one of its keys.
    """
    kind = data.get("record")
    if not isinstance(kind, str) or kind not in RECORDS:
        raise ValueError(f"record={kind!r} is not one of {', '.join(repr(k) for k in RECORDS)}.")
    return RECORDS[kind].from_dict(data)
