"""What a replay saw, as plain data: the input of the diagnosis.

No tensor is kept, so that a log can be diagnosed again on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nan_detector._record import Record, nested_field
from nan_detector._records import Location, Site, TensorStats

#: In the note of a birth: the infinities that reached it were logarithms of masked classes.
THROUGH_LOG_SOFTMAX = "(through log_softmax)"
#: How the note begins on a birth that met a 0 which had underflowed.
UNDERFLOWED = "underflow:"


class BirthKind(str, Enum):
    """How a non-finite value came to be."""

    OPERATION = "operation"  # finite inputs, non-finite output
    INTENDED_MET = "intended_met"  # an intended infinity met an operation that made NaN of it
    INTENDED_REACHED = "intended_reached"  # only intended infinities reached the loss or a gradient
    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    LABEL = "label"
    OPAQUE = "opaque"  # written by code that the dispatcher does not see
    CONSTANT = "constant"  # a literal NaN, or a non-finite Python number
    GRADIENT = "gradient"  # a gradient handed in from outside (backward(gradient=...), a user's hook)


@dataclass(frozen=True, slots=True)
class GuiltyInput(Record):
    """The values of one input at the guilty elements: those where the result is non-finite and should not be.

    `stats` is over these elements alone, after broadcasting to the result's shape; None where input and result
    do not correspond element by element (matmul, reductions: then over the elements of the guilty slices where known).
    """

    position: int
    whole: TensorStats = nested_field(TensorStats)
    at_guilty: TensorStats | None = nested_field(TensorStats, None)


@dataclass(frozen=True, slots=True)
class Birth(Record):
    """One birth of non-finite values.

    Attributes:
        number: Order of birth within the step; sources (parameters, inputs) come before operations.
        kind: See `BirthKind` (the enum's value).
        op: aten name without namespace, overload or outer underscores, such as "sqrt".
        aten: Full name, such as "aten.sqrt.default".
        call: What the user wrote there, such as "torch.sqrt" or "x / n"; None where not known.
        phase: One of the record's phases.
        derivative_of: In the backward pass: the forward operation whose derivative this is (its plain name).
        forward_inputs: Inputs of that forward operation.
        in_library: True when the birth is inside a composite function of the library (`call` names it).
        args: Non-tensor arguments as `repr` strings, by position or name ("dim=-1", "eps=1e-12").
        guilty_count: How many elements of the result are guilty.
        guilty_rows: Where along the first dimension of the result they are, at most 32.
        bad_column: Of a matrix that was bad before the step: the one column that holds all its bad values.
        first_use: Of what was bad before the step: the line of the user's source that first used it.
    """

    number: int
    kind: str
    op: str
    aten: str
    phase: str
    call: str | None = None
    layer_name: str | None = None
    module_type: str | None = None
    location: Location | None = nested_field(Location, None)
    tensor_name: str | None = None
    inputs: tuple[GuiltyInput, ...] = nested_field(GuiltyInput, ())
    output: TensorStats | None = nested_field(TensorStats, None)
    guilty_count: int = 0
    args: tuple[str, ...] = ()
    derivative_of: str | None = None
    forward_inputs: tuple[TensorStats, ...] = nested_field(TensorStats, ())
    in_library: bool = False
    first_bad_index: tuple[int, ...] = ()
    sample_index: tuple[int, ...] = ()
    guilty_rows: tuple[int, ...] = ()
    note: str = ""
    first_use: Location | None = nested_field(Location, None)
    bad_column: int | None = None


@dataclass(frozen=True, slots=True)
class Trace(Record):
    """The lineage of a step: its births in order, the one to blame, and what it passed.

    Attributes:
        birth: The birth that the step's harm goes back to; None when the replay was finite or nothing was found.
        others: Further births that reached the loss or a gradient, in order.
        spread: Sites the lineage of `birth` passed, in order.
        dtype: The dtype of the result at the birth, such as "torch.float16".
        reached: What it reached: "loss", "gradient", "parameter", "buffer", "output".
        grad_norms: Total gradient norm of recent steps, oldest first, from the flight recorder.
        losses: Loss of recent steps, oldest first.
        learning_rates: Learning rate of recent steps, oldest first.
    """

    birth: Birth | None = nested_field(Birth, None)
    others: tuple[Birth, ...] = nested_field(Birth, ())
    spread: tuple[Site, ...] = nested_field(Site, ())
    reached: tuple[str, ...] = ()
    autocast: bool = False
    grad_norms: tuple[float, ...] = field(default=(), metadata={"kind": float})
    losses: tuple[float, ...] = field(default=(), metadata={"kind": float})
    learning_rates: tuple[float, ...] = field(default=(), metadata={"kind": float})
