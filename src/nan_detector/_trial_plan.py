"""Which trials make sense for a birth: a pure function, from what is known of the step to questions in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nan_detector._records import Reproduced
from nan_detector._trace import Birth, BirthKind

#: Names of trials, as records carry them.
AGAIN, EAGER, FIX = "again", "eager", "fix"
FLOAT32, FLOAT64, UNSCALED = "float32", "float64", "loss_scale_1"
STATE, DATA, SAMPLES = "finite_state", "finite_data", "samples"

#: Ends the detail of a trial in float64 whose loss no float32 could hold: no number to train with in any format.
BEYOND = "beyond float32"
FLOAT32_MAX = 3.4028234663852886e38

#: Samples that a record names, at most.
MAX_NAMED = 32

_HALVES = ("torch.float16", "torch.bfloat16")
_STATE = (BirthKind.PARAMETER.value, BirthKind.BUFFER.value)
_BATCH = (BirthKind.INPUT.value, BirthKind.LABEL.value)
_COMPUTED = (
    BirthKind.OPERATION.value,
    BirthKind.INTENDED_MET.value,
    BirthKind.INTENDED_REACHED.value,
    BirthKind.OPAQUE.value,
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a step before a trial is run.

    Attributes:
        samples: Size of the batch; 0 where there is none that could be cut.
        uncut: Why it cannot be cut.
        half: Autocast was on, or something that the step was given is in half precision.
        scaled: A loss scale was used.
        compiled: Compiled code took part.
        opaque: What a function computed that the replay cannot call; "" where there is none.
        overwritten: The buffer that the birth was written into.
        batch_norm: Samples are normalised with one another.
        no_float64: Why there is no float64 here.
    """

    samples: int = 0
    uncut: str = ""
    half: bool = False
    scaled: bool = False
    compiled: bool = False
    opaque: str = ""
    batch_norm: bool = False
    overwritten: str = ""
    no_float64: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """A trial to be made, or (`why_not`) one that would be wanted and cannot be."""

    name: str
    question: str
    why_not: str = ""


def plan(birth: Birth | None, reproduced: Reproduced, facts: Facts) -> tuple[Planned, ...]:
    """The trials that would tell something, the most telling first.

    Args:
        birth: What the replay found; None where it found nothing.
        reproduced: Whether the replay did what the step did.
        facts: What is known of the step.
    """
    again = Planned(AGAIN, "Does the same step do the same again, twice?")
    eager = Planned(EAGER, "Is the step finite when nothing is compiled?")
    if reproduced == "not_tried":
        return ()
    if birth is None and facts.opaque:
        return (replace(eager, why_not=f"{facts.opaque} was not recorded: det.run_step replays the step whole"),)
    if birth is None:
        return (again, eager) if facts.compiled else (again,)
    chosen = [again]
    if facts.compiled:
        chosen.append(eager)
    if birth.kind in _STATE:
        name = birth.tensor_name or "the state"
        chosen.append(Planned(STATE, f"Is the step finite with finite values in place of the bad ones in {name}?"))
        return tuple(chosen)
    if birth.kind in _BATCH:
        if 0 < len(birth.sample_index) < min(facts.samples, MAX_NAMED):
            chosen.append(Planned(SAMPLES, "Is the step finite without the samples that hold bad values?"))
        else:
            name = birth.tensor_name or "the batch"
            chosen.append(Planned(DATA, f"Is the step finite with finite values in place of the bad ones in {name}?"))
        return tuple(chosen)
    chosen.append(Planned(FIX, "Does the proposed fix keep the step finite?"))
    if facts.overwritten:
        # Whatever is changed, the step would begin with the bad buffer that it has left.
        why = f"the step has overwritten {facts.overwritten}, so it cannot be run again as it began"
        return (*chosen[:-1], replace(chosen[-1], why_not=why))
    if birth.kind not in _COMPUTED:
        return tuple(chosen)
    if facts.half or _is_half(birth):
        chosen.append(Planned(FLOAT32, "Is the step finite in float32, without autocast?"))
    if not _is_half(birth):
        chosen.append(Planned(FLOAT64, "Is the step finite in float64?", facts.no_float64))
    if facts.scaled:
        chosen.append(Planned(UNSCALED, "Is the step finite at a loss scale of 1?"))
    if facts.samples > 1 or facts.uncut:
        chosen.append(Planned(SAMPLES, "Which samples of the batch do it?", facts.uncut))
    return tuple(chosen)


def _is_half(birth: Birth) -> bool:
    return birth.output is not None and birth.output.dtype in _HALVES
