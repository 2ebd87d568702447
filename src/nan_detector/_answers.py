"""What the methods of a detector answer, as records: they stand in no log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nan_detector._record import Record, float_field, nested_field
from nan_detector._records import Location, Phase, TensorStats


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
    location: Location | None = nested_field(Location, None)
    value: float | None = float_field(None)
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
    inputs: tuple[TensorStats, ...] = nested_field(TensorStats, ())
    output: TensorStats | None = nested_field(TensorStats, None)
    is_birth: bool = False


@dataclass(frozen=True, slots=True)
class StateProblem(Record):
    """State that is not finite: what `check_state()` gives.

    `kind` is "parameter", "buffer" or "optimizer"; `value` describes a tensor, `number` a hyperparameter.
    """

    kind: str
    tensor_name: str
    layer_name: str | None = None
    value: TensorStats | None = nested_field(TensorStats, None)
    number: float | None = float_field(None)

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
    mean_ms: float = float_field()
    median_ms: float = float_field()
    max_ms: float = float_field()
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
