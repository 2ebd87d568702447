"""What the detector writes into its log, as plain frozen data: no tensors, JSON in and out.

Field names are a public contract (see `docs/records.md` and `schema/`): other programs read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from nan_detector._record import Record, float_field, nested_field

Phase = Literal["data", "forward", "loss", "backward", "optimizer", "state"]
Severity = Literal["error", "silent", "handled"]
Reproduced = Literal["yes", "no", "not_tried"]
Status = Literal["provisional", "final"]
Verdict = Literal["data", "precision", "formula", "state", "optimizer", "compiler", "not_reproducible", "undecided"]


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
    min: float | None = float_field(None)
    max: float | None = float_field(None)
    mean: float | None = float_field(None)
    min_nonzero: float | None = float_field(None)
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
    location: Location | None = nested_field(Location, None)


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
    value: float = float_field()
    finite: bool = True
    weight: float = float_field(1.0)
    location: Location | None = nested_field(Location, None)


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
    location: Location | None = nested_field(Location, None)
    tensor_name: str | None = None
    inputs: tuple[TensorStats, ...] = nested_field(TensorStats, ())
    output: TensorStats | None = nested_field(TensorStats, None)
    cause: Cause | None = nested_field(Cause, None)
    trials: tuple[Trial, ...] = nested_field(Trial, ())
    verdict: Verdict = "undecided"
    spread: tuple[Site, ...] = nested_field(Site, ())
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
    loss: float | None = float_field(None)
    time: float = 0.0
    loss_terms: tuple[LossTerm, ...] = nested_field(LossTerm, ())
    first_use: Location | None = nested_field(Location, None)
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
    grad_norm: float = float_field()
    threshold: float = float_field()
    rank: int = 0


@dataclass(frozen=True, slots=True)
class WarningRecord(Record):
    """Something that is not an event (yet): `kind` is a short stable word, `message` a sentence for a person."""

    record: ClassVar[str] = "warning"

    kind: str
    step: int
    message: str
    layer_name: str | None = None
    value: float | None = float_field(None)
    location: Location | None = nested_field(Location, None)
    rank: int = 0


@dataclass(frozen=True, slots=True)
class LayerPeak(Record):
    """The largest magnitude in what a layer put out, and the largest finite number of its dtype, where known."""

    layer_name: str
    abs_max: float = float_field()
    limit: float | None = float_field(None)


@dataclass(frozen=True, slots=True)
class StepRow(Record):
    """One row of the flight recorder.

    At `watch="layers"` a step before an event, and one of the last of a run, has a second row, which has `layers`.
    """

    record: ClassVar[str] = "step"

    step: int
    loss: float | None = float_field(None)
    grad_norm: float | None = float_field(None)
    max_grad_norm: float | None = float_field(None)
    lr: float | None = float_field(None)
    loss_scale: float | None = float_field(None)
    rank: int = 0
    layers: tuple[LayerPeak, ...] = nested_field(LayerPeak, ())


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
