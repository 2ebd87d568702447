"""Which trials make sense for a birth: a pure function, from what is known of the step to questions in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nan_detector._records import Reproduced
from nan_detector._trace import Birth, BirthKind

#: Names of trials, as records carry them.
AGAIN, EAGER, FIX = "again", "eager", "fix"
FLOAT32, FLOAT64, UNSCALED = "float32", "float64", "loss_scale_1"
STATE, DATA, SAMPLES = "finite_state", "finite_data", "samples"
#: Of an optimizer's step.
RATE, OPTION, EPS, CLIPPED, UNFUSED = "rate", "option", "eps", "clipped", "unfused"

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
        why = (
            f"the step has written what is bad into {facts.overwritten}, and what was there before is gone, so a "
            "repaired step would still begin with it"
        )
        return (*chosen[:-1], replace(chosen[-1], why_not=why))
    if birth.kind not in _COMPUTED:
        return tuple(chosen)
    if facts.half or _is_half(birth):
        chosen.append(Planned(FLOAT32, "Is the step finite in float32, without autocast?"))
    if not _is_half(birth):
        chosen.append(Planned(FLOAT64, "Is the step finite in float64?", facts.no_float64))
    if facts.scaled:
        chosen.append(Planned(UNSCALED, "Is the step finite at a loss scale of 1?"))
    # What was written into the weights before the step is no sample's doing.
    if (facts.samples > 1 or facts.uncut) and birth.phase != "state":
        chosen.append(Planned(SAMPLES, "Which samples of the batch do it?", facts.uncut))
    return tuple(chosen)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What is known of an optimizer's step before a trial is run.

    Attributes:
        cause: Code of the event's cause.
        option: The setting that is not finite; "" where all are.
        rate: The last learning rate above 0 that was finite; None where none is known.
        state: State was not finite before the step.
        fixable: There is a change that follows the cause's advice.
        eps: A parameter group has an epsilon, and the guilty operation may have needed a larger one.
        half: Parameters or state are in half precision.
        fast: Multi-tensor or fused kernels take the step.
    """

    cause: str = ""
    option: str = ""
    rate: float | None = None
    state: bool = False
    fixable: bool = False
    eps: bool = False
    half: bool = False
    fast: bool = False


def plan_of_step(facts: StepFacts) -> tuple[Planned, ...]:
    """The trials of an optimizer's step that would tell something, the most telling first."""
    chosen = [Planned(AGAIN, "Does the optimizer's step do the same again, on a copy?")]
    if facts.option == "lr":
        why = "" if facts.rate is not None else "no step before had a learning rate that is finite and above 0"
        return (*chosen, Planned(RATE, "Is the step finite with the last finite learning rate?", why))
    if facts.option:
        said = f"Is the step finite with the {facts.option} that the optimizer was made with?"
        return (*chosen, Planned(OPTION, said))
    if facts.fixable:
        chosen.append(Planned(FIX, "Does the proposed fix keep the step finite?"))
    if facts.state:
        return (*chosen, Planned(STATE, "Is the step finite with zeros in place of the bad values of its state?"))
    if facts.eps and facts.cause != "eps_underflow":
        chosen.append(Planned(EPS, "Is the step finite with a larger eps?"))
    if not facts.fixable:  # any step is tamer for it, which says little where the mechanism is known
        chosen.append(Planned(CLIPPED, "Is the step finite when the gradients are clipped to norm 1?"))
    if facts.half:
        chosen.append(Planned(FLOAT32, "Is the step finite with weights, gradients and state in float32?"))
    if facts.fast:
        chosen.append(Planned(UNFUSED, "Is the step finite without multi-tensor and fused kernels?"))
    return tuple(chosen)


def _is_half(birth: Birth) -> bool:
    return birth.output is not None and birth.output.dtype in _HALVES
