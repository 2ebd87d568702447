"""Logs for tests, written by the log's own writer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nan_detector._digest import Digest, digest_of
from nan_detector._eventlog import EventLog
from nan_detector._reading import Problem
from nan_detector._record import Record
from nan_detector._records import (
    Cause,
    GradEvent,
    LayerPeak,
    Location,
    LossTerm,
    NaNEvent,
    RunRecord,
    Site,
    StepRow,
    TensorStats,
    Trial,
    WarningRecord,
)

#: What a stranger may have put into a log: it must neither run, nor steer a terminal, nor turn what is read around.
EVIL = "</script><img src=x onerror=alert(1)>\x1b[2J\x1b]0;owned\x07\x00\r\u202egnp.exe\u2066"

RUN = RunRecord(
    started=1_700_000_000.0,
    package_version="0.1.0",
    torch_version="2.13.0",
    python_version="3.11.7",
    platform="Linux-6",
    options={"watch": "layers", "on_nan": "stop"},
    models=("Transformer",),
)

NORM = Location(
    "models/norm.py", 41, "CustomNorm.forward", "return (x - x.mean(-1, keepdim=True)) / torch.sqrt(var) * self.gain"
)
LAYERS = ("encoder.norm2", "encoder.layer3", "head")

EVENT = NaNEvent(
    event_id="e1",
    status="final",
    step=87,
    phase="forward",
    severity="error",
    op="sqrt",
    call="torch.sqrt",
    layer_name="encoder.norm2",
    module_type="CustomNorm",
    location=NORM,
    inputs=(TensorStats((64, 1), "torch.float32", "cpu", -10.0, 2.5, 0.31, 1e-3, negative_count=22),),
    output=TensorStats((64, 1), "torch.float32", "cpu", 0.03, 1.58, 0.7, 0.03, nan_count=22),
    cause=Cause(
        "sqrt_of_negative",
        "square root of a negative number",
        "E[x²] - E[x]² lost its digits: the mean is 5.0e+03, the spread 3.0e-01, and float32 resolves 2.0 there.",
        ("22 of 64 inputs are below 0 (least -10.0)",),
        "torch.var(x, -1, correction=0)",
    ),
    trials=(
        Trial("again", "Does it happen again?", False, "the same 22 values"),
        Trial("samples", "Is it one sample?", False, "without sample 7 still not finite"),
        Trial("float64", "Is it the precision?", True, "loss 0.734"),
        Trial("fix", "Does the fix help?", True, "loss 0.734"),
        Trial("eager", "Is it the compiler?", None, "nothing is compiled"),
    ),
    verdict="formula",
    spread=(
        Site("div", "forward", "encoder.norm2", "CustomNorm", NORM),
        Site("addmm", "forward", "encoder.layer3", "Linear", Location("models/net.py", 12, "forward", "layer3(x)")),
        Site("addmm", "forward", "head", "Linear"),
        Site("nll_loss", "loss", None, None, Location("train.py", 30, "step", "loss = criterion(model(x), y)")),
    ),
    before=("learning rate 3e-4 → 0.03 at step 80", "|activations| of encoder.norm2 doubled every 2 steps since then"),
    reproduced="yes",
    sample_index=(7,),
    symptom="the loss is inf",
    action="stop",
    loss=float("inf"),  # an infinity is equal to itself
    time=1_700_000_100.0,
)

WARNINGS = (
    WarningRecord("loss_spike", 81, "the loss rose to 9.1, 12 times its spread above its median of 0.8", value=9.1),
    WarningRecord("layer_overflow", 84, "will overflow in about 3 steps", layer_name="encoder.norm2"),
    WarningRecord("layer_overflow", 86, "will overflow in about 1 step", layer_name="encoder.norm2"),
)
GRADS = (
    GradEvent(84, "encoder.layer3", "weight", 140.0, 100.0),
    GradEvent(86, "encoder.layer3", "weight", 5300.0, 100.0),
)


def step_row(step: int, *, bad: bool = False, rank: int = 0) -> StepRow:
    """A row of a run whose loss falls until step 80 and then explodes."""
    late = max(0, step - 80)
    loss = 2.0 / (1 + 0.05 * step) * 1.5**late
    nan = float("nan")
    norm = 0.8 * 2.2**late
    return StepRow(
        step,
        loss=nan if bad else loss,
        grad_norm=nan if bad else norm,
        max_grad_norm=nan if bad else 0.6 * norm,
        lr=0.03 if late else 3e-4,
        loss_scale=None,
        rank=rank,
    )


def peak_row(step: int) -> StepRow:
    """The second row of a step at `watch="layers"`."""
    peaks = [10.0 * (i + 1) * 2.0 ** max(0, step - 78) for i in range(len(LAYERS))]
    layers = tuple(LayerPeak(name, peak, 65504.0) for name, peak in zip(LAYERS, peaks, strict=True))
    return StepRow(step, loss=1.0, layers=layers)


def records() -> list[Record]:
    """A run of 88 steps that went NaN."""
    steps: list[Record] = [RUN, *(step_row(s) for s in range(87))]
    steps += WARNINGS
    steps += GRADS
    steps += [replace(EVENT, status="provisional", trials=(), spread=(), cause=None), EVENT]
    return [*steps, *(peak_row(s) for s in range(60, 87)), step_row(87, bad=True)]


def write(folder: Path, lines: list[Record] | None = None, rank: int = 0) -> Path:
    """Write a log for one rank; gives its file."""
    with EventLog(folder, rank=rank) as log:
        for record in records() if lines is None else lines:
            log.write(record)
    return log.path


def digest(*runs: list[Record], problems: tuple[Problem, ...] = ()) -> Digest:
    """The log that these lines of files make."""
    return Digest((Path("events-rank0.jsonl"),), tuple(d for lines in runs for d in digest_of(lines)), problems)


def evil_log() -> Digest:
    """A log whose every string is a stranger's."""
    evil = EVIL
    where = replace(NORM, file=evil, function=evil, source_line=evil + "y" * 5000)
    cause = EVENT.cause
    assert cause is not None
    event = replace(
        EVENT,
        layer_name=evil,
        module_type=evil,
        call=evil,
        op=evil,
        location=where,
        cause=replace(cause, title=evil, explanation=evil, fix=evil, evidence=(evil,)),
        trials=(replace(EVENT.trials[0], name=evil, question=evil, detail=evil),),
        spread=(Site(evil, evil, evil, evil, where), Site(evil, evil, f"a.{evil}", evil, where)),
        inputs=(replace(EVENT.inputs[0], dtype=evil, device=evil),),
        loss_terms=(LossTerm(evil, 1.0, True, 1.0, where), LossTerm(evil, float("nan"), False)),
        before=(evil,),
        notes=(evil, "z" * 100_000),
        weights=evil,
        action=evil,
        symptom=evil,
        capsule=evil,
        sample_id=(evil,),
    )
    run = replace(RUN, platform=evil, torch_version=evil, models=(evil,), options={evil: {evil: [evil]}})
    peaks: list[Record] = [StepRow(s, layers=(LayerPeak(evil, 1.0 + s, 65504.0),)) for s in range(3)]
    lines = [run, *(step_row(s) for s in range(3)), *peaks, event, WarningRecord(evil, 1, evil, evil)]
    return digest(lines, problems=(Problem(Path(evil.replace("\x00", "")), 1, evil),))
