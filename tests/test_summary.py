"""The report of an event, word for word, and what no event may do to it.

Golden files are in `golden/`; after a wanted change, run with NAN_DETECTOR_UPDATE_GOLDEN=1 and read the difference.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nan_detector._records import Cause, Location, LossTerm, NaNEvent, Site, TensorStats, Trial
from nan_detector._summary import SOURCE, Row, describe, report, rows
from nan_detector._summary_title import headline, story, title, where

GOLDEN = Path(__file__).parent / "golden"

SOURCES = {
    "models/norm.py": """\
import torch


class CustomNorm(torch.nn.Module):
    def forward(self, x):
        var = (x * x).mean(-1, keepdim=True) - x.mean(-1, keepdim=True) ** 2
        return (x - x.mean(-1, keepdim=True)) / torch.sqrt(var) * self.gain
""",
    "train.py": """\
def distance(a, b):

    return torch.sqrt(
        ((a - b) ** 2)
        .sum(-1)
    )


def step(model, x, y):
    out = model(x)
    loss = (out - y).abs().sum() / mask.sum()
    return loss
""",
    "模型.py": """\
def 前向(x):
    权重 = 10 * x
    return 权重.exp()  # 🤖 溢出
""",
}


def line(file: str, number: int, function: str = "forward") -> Location:
    return Location(os.path.abspath(file), number, function, SOURCES[file].splitlines()[number - 1].strip())


def stats(*shape: int, **values: float | str) -> TensorStats:
    return TensorStats(**{"shape": shape, "dtype": "torch.float32", "device": "cpu", **values})


def event(**fields) -> NaNEvent:
    defaults = {"event_id": "e1", "status": "final", "step": 87, "phase": "forward", "severity": "error"}
    return NaNEvent(**{**defaults, **fields})


def forward_op() -> NaNEvent:
    return event(
        op="sqrt",
        call="torch.sqrt",
        layer_name="encoder.norm2",
        module_type="CustomNorm",
        location=line("models/norm.py", 7),
        inputs=(stats(64, 1, min=-10.0, max=3.2, mean=0.1, negative_count=22),),
        output=stats(64, 1, min=0.0, max=1.8, mean=0.9, nan_count=22),
        cause=Cause(
            code="sqrt_of_negative",
            title="square root of a negative number",
            explanation="E[x²] - E[x]² lost its digits: the mean is 5.0e+03, the spread 3.0e-01.",
            evidence=("22 of 64 inputs are below 0 (least -10.0)",),
            fix="torch.var(x, -1, correction=0)",
        ),
        trials=(Trial("fix", "Does the fix keep the step finite?", True, "loss 0.734"),),
        spread=(
            Site("sqrt", "forward", "encoder.norm2"),
            Site("div", "forward", "encoder.norm2"),
            Site("addmm", "forward", "encoder.layer3"),
            Site("addmm", "forward", "head"),
            Site("nll_loss", "loss"),
        ),
        before=(
            "learning rate 3e-4 → 0.03 at step 80",
            "|activations| of encoder.norm2 doubled every 2 steps since step 80",
        ),
        reproduced="yes",
        action="stop",
    )


def in_the_loss() -> NaNEvent:
    return event(
        phase="loss",
        op="div",
        call="(out - y).abs().sum() / mask.sum()",
        location=line("train.py", 11, "step"),
        inputs=(stats(min=0.0, max=0.0, mean=0.0, zero_count=1), stats(min=0.0, max=0.0, mean=0.0, zero_count=1)),
        output=stats(nan_count=1),
        cause=Cause(
            "division_by_zero", "division of zero by zero", "The mask selects nothing.", ("mask.sum() is 0",), None
        ),
        reproduced="yes",
        action="skip",
        loss=math.nan,
    )


def sum_of_terms() -> NaNEvent:
    return event(
        phase="loss",
        op="exp",
        call="out.exp",
        location=line("train.py", 11, "step"),
        output=stats(posinf_count=1),
        cause=Cause("exp_overflow", "exponential beyond the range of its dtype", "", ("the input is 103",)),
        reproduced="yes",
        action="stop",
        loss=math.inf,
        loss_terms=(
            LossTerm("recon", 0.6912, True, 1.0, line("train.py", 10, "step")),
            LossTerm("kl", math.nan, False, 0.1, line("train.py", 11, "step")),
            LossTerm("beta * entropy", 3.25, True, -1.0, line("train.py", 11, "step")),
        ),
    )


def sum_of_many_terms() -> NaNEvent:
    values = [0.5 * i if i not in (2, 11) else math.inf for i in range(14)]
    return event(
        phase="loss",
        call="sum(losses)",
        location=line("train.py", 12, "step"),
        output=stats(posinf_count=1),
        reproduced="yes",
        loss=math.inf,
        loss_terms=tuple(
            LossTerm(
                f"criterion(heads[{i}](out), targets[{i}])", v, math.isfinite(v), 1.0, line("train.py", 11, "step")
            )
            for i, v in enumerate(values)
        ),
    )


def backward_of_sqrt() -> NaNEvent:
    return event(
        step=3,
        micro_step=2,
        rank=1,
        phase="backward",
        op="sqrt",
        call="torch.sqrt",
        layer_name="geometry",
        module_type="Distance",
        location=line("train.py", 3, "distance"),
        output=stats(8, nan_count=1, posinf_count=2),
        cause=Cause(
            "sqrt_gradient_at_zero",
            "infinite slope of the square root at 0",
            "1 / (2·sqrt(x)) has no value at 0.",
            ("2 of 8 inputs are 0", "the gradient that arrives there is 0"),
            "torch.sqrt(x.clamp_min(eps))\nor a squared distance",
        ),
        trials=(
            Trial("fix", "", False, "gradient of encoder.weight"),
            Trial("same_again", "", False),
            Trial("float32", "", None, "the step is in float32"),
        ),
        verdict="formula",
        spread=(Site("sqrt", "backward", "geometry"), Site("mm", "backward", "encoder")),
        reproduced="no",
        action="raise",
    )


def bad_data() -> NaNEvent:
    return event(
        step=12,
        phase="data",
        tensor_name='x["pixel_values"]',
        output=stats(8, 3, 4, min=-1.0, max=1.5, mean=0.25, nan_count=12),
        sample_index=(3, 5),
        sample_id=("cats/0012.png", "dogs/0400.png"),
        cause=Cause(
            "input_non_finite",
            "the batch brought it",
            "The input was bad before the model ran.",
            ("12 of 96 values are NaN",),
        ),
        verdict="data",
        spread=(Site("convolution", "forward", "stem.conv"), Site("nll_loss", "loss")),
        reproduced="yes",
        action="skip",
        capsule="runs/step12.capsule",
    )


def bad_state() -> NaNEvent:
    return event(
        step=0,
        phase="state",
        tensor_name="encoder.norm2.gain",
        layer_name="encoder.norm2",
        module_type="CustomNorm",
        output=stats(64, min=0.5, max=2.0, mean=1.0, posinf_count=3),
        cause=Cause("parameter_non_finite", "a parameter was bad before the step", "", ("3 of 64 values are +Inf",)),
        verdict="state",
        weights="damaged since step 0",
        action="the step was not taken.",
        notes=("The checkpoint was loaded at step 0.", "Its file is older than the run."),
    )


def silent() -> NaNEvent:
    return event(
        severity="silent",
        op="exp",
        call="torch.exp",
        layer_name="root",
        module_type="Gate",
        output=stats(4, 4, min=0.1, max=9e30, mean=3e30, posinf_count=1),
        cause=Cause(
            "exp_overflow", "exp of a large number", "", ("its input reaches 103.0, and float32 ends at 88.7",)
        ),
        spread=(Site("exp", "forward", "root"), Site("reciprocal", "forward", "root")),
        action="warn",
    )


def provisional() -> NaNEvent:
    return event(
        status="provisional", phase="loss", symptom="the loss is NaN; 4 of 6 gradients are not finite", loss=math.nan
    )


def without_cause() -> NaNEvent:
    return event(
        op="frobnicate",
        location=Location("/elsewhere/model.py", 5, "forward", "return frobnicate(x, *others)"),
        inputs=tuple(stats(2, 3, min=float(i), max=5.0, mean=4.0) for i in range(6)),
        output=stats(2, 3, nan_count=1, neginf_count=1, min=2.0, max=2.0, mean=2.0),
        symptom="the loss is NaN",
        reproduced="yes",
    )


def wide_unicode() -> NaNEvent:
    return event(
        op="exp",
        layer_name="编码器.层1",
        module_type="前馈网络",
        location=line("模型.py", 3, "前向"),
        output=stats(2, posinf_count=1, min=1.0, max=1.0, mean=1.0),
        cause=Cause("exp_overflow", "exp 溢出", "", ("输入最大为 103.0",), "权重.clamp(max=80).exp()"),
        spread=(Site("exp", "forward", "编码器.层1"), Site("addmm", "forward", "输出")),
        reproduced="yes",
    )


EVENTS = {
    f.__name__: f
    for f in (
        forward_op,
        in_the_loss,
        sum_of_terms,
        sum_of_many_terms,
        backward_of_sqrt,
        bad_data,
        bad_state,
        silent,
        provisional,
        without_cause,
        wide_unicode,
    )
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's project, which is also the current folder."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", EVENTS)
@pytest.mark.usefixtures("project")
def test_report_is_word_for_word_as_in_the_golden_file(name: str):
    said = report(EVENTS[name]()) + "\n"
    golden = GOLDEN / f"report_{name}.txt"
    if os.environ.get("NAN_DETECTOR_UPDATE_GOLDEN"):
        golden.write_text(said, encoding="utf-8")
    assert said == golden.read_text(encoding="utf-8")


@pytest.mark.usefixtures("project")
def test_every_golden_file_is_used():
    assert {p.name for p in GOLDEN.glob("report_*.txt")} == {f"report_{name}.txt" for name in EVENTS}


@pytest.mark.usefixtures("project")
def test_printing_an_event_shows_its_report():
    assert str(forward_op()) == report(forward_op())


@pytest.mark.usefixtures("project")
def test_an_event_read_from_a_log_has_the_same_report():
    for make in EVENTS.values():
        assert report(NaNEvent.from_dict(make().to_dict())) == report(make())


@pytest.mark.usefixtures("project")
def test_headline_is_one_line_with_the_whole_answer():
    assert headline(forward_op()) == (
        "NaN born at step 87, in the forward pass: encoder.norm2 (CustomNorm)  ·  torch.sqrt  ·  "
        "models/norm.py:7 (square root of a negative number)"
    )
    assert headline(event()) == "NaN or Inf seen at step 87, in the forward pass"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"output": stats(2, nan_count=1)}, "NaN seen"),
        ({"output": stats(2, posinf_count=1)}, "Inf seen"),
        ({"output": stats(2, neginf_count=1)}, "Inf seen"),
        ({"output": stats(2, nan_count=1, neginf_count=1)}, "NaN and Inf seen"),
        # The result counts before the inputs: here an infinity put in on purpose became a NaN.
        ({"output": stats(2, nan_count=1), "inputs": (stats(2, neginf_count=2),)}, "NaN seen"),
        ({"output": stats(2), "inputs": (stats(2), stats(2, posinf_count=1))}, "Inf seen"),
        ({"loss": math.inf}, "Inf seen"),
        ({"loss": math.nan}, "NaN seen"),
        ({"loss": 1.0}, "NaN or Inf seen"),
        ({"loss": math.nan, "op": "log"}, "NaN born"),
        ({"loss": math.nan, "op": "log", "status": "provisional"}, "NaN seen"),
        ({"loss": math.nan, "phase": "data"}, "NaN found"),
        ({"loss": math.nan, "phase": "state", "tensor_name": "w"}, "NaN found"),
    ],
)
def test_title_says_what_was_seen_and_how_much_is_known(fields: dict, said: str):
    assert title(event(**fields)).startswith(said + " at step 87")


@pytest.mark.parametrize(
    ("phase", "said"),
    [
        ("data", "in the data"),
        ("forward", "in the forward pass"),
        ("loss", "in the loss"),
        ("backward", "in the backward pass"),
        ("optimizer", "in the optimizer"),
        ("state", "in the state (bad before the step)"),
    ],
)
def test_title_names_the_phase(phase: str, said: str):
    assert title(event(phase=phase)).endswith(f"at step 87, {said}")


@pytest.mark.parametrize(("derivative", "said"), [(True, "derivative of g / g.norm()"), (False, "g / g.norm()")])
def test_code_of_the_users_in_the_backward_is_no_derivative(derivative: bool, said: str):
    hook = Location("a.py", 3, "unit", "return g / g.norm()")
    found = event(phase="backward", op="div", call="g / g.norm()", location=hook, derivative=derivative)
    assert where(found) == f"{said}  ·  a.py:3"


def test_a_derivative_is_named_as_one_unless_the_user_wrote_the_backward():
    derived = event(phase="backward", op="sqrt", location=Location("a.py", 3, "Net.forward", "x.sqrt()"))
    own = event(
        phase="backward", op="div", call="g / n", location=Location("a.py", 9, "Scale.backward", "return g / n")
    )
    assert where(derived) == "derivative of sqrt  ·  a.py:3"
    assert where(own) == "g / n  ·  a.py:9"


def test_a_file_is_named_from_the_current_folder_only_where_it_is_inside(project: Path):
    def place(file: object) -> str:
        return where(event(location=Location(str(file), 2, "f", "x")))

    assert place(project / "models" / "norm.py") == "models/norm.py:2"
    assert place(project.parent / "other.py") == f"{project.parent / 'other.py'}:2"
    assert place("<ipython-input-3>") == "<ipython-input-3>:2"
    assert place("nul\0byte.py") == "nul\N{REPLACEMENT CHARACTER}byte.py:2"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not delete the current folder")
def test_the_current_folder_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert where(event(location=Location("/a/b.py", 2, "f", "x"))) == "/a/b.py:2"


def source_of(made: NaNEvent) -> tuple[str, ...]:
    return next((row.lines for row in rows(made) if row.label == SOURCE), ())


def test_an_edited_file_is_not_quoted(project: Path):
    here = event(location=line("train.py", 11))
    assert source_of(here)[0].startswith("  10 |")
    (project / "other.py").write_text("a = 1\nb = 2\n")
    edited = event(location=Location(str(project / "other.py"), 2, "f", "b = x.log()"))
    assert source_of(edited) == ("> 2 |   b = x.log()",)


@pytest.mark.usefixtures("project")
def test_lines_that_belong_to_an_open_bracket_are_shown():
    assert [text[:5].split()[0] for text in source_of(event(location=line("train.py", 3)))] == [">", "4", "5", "6"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_log_cannot_make_us_read_a_pipe_or_a_network_share(project: Path):
    os.mkfifo(project / "pipe.py")  # reading it would wait for ever
    assert source_of(event(location=Location(str(project / "pipe.py"), 1, "f", "x"))) == ("> 1 |   x",)
    # Two slashes are a share on Windows; here they are the same file, so that its neighbours would be seen.
    share = "/" + str(project / "train.py")
    assert os.path.isfile(share)
    found = dataclasses.replace(line("train.py", 11), file=share)
    assert len(source_of(event(location=found))) == 1


def test_what_is_not_known_is_left_out():
    assert report(event(weights="")) == (
        " NaN or Inf seen at step 87, in the forward pass\n\n   state   reproduced: not tried"
    )


OPTIONAL = {
    "op": "log",
    "layer_name": "a.b",
    "module_type": "Net",
    "location": Location("x.py", 3, "f", ""),
    "tensor_name": "w",
    "output": stats(3, nan_count=3),
    "cause": Cause("unknown", "not known", ""),
    "spread": (Site("log", "forward"),),
    "loss": math.nan,
}


@pytest.mark.parametrize("known", list(itertools.combinations(OPTIONAL, 2)))
def test_no_report_says_none(known: tuple[str, ...]):
    made = event(**{name: OPTIONAL[name] for name in known})
    assert "None" not in report(made) + headline(made)


def test_long_lists_are_cut_and_the_cut_is_said():
    sites = (*(Site("mm", "forward", f"layer{i}") for i in range(40)), Site("mean", "loss"))
    made = event(sample_index=tuple(range(100)), spread=sites)
    lines = {row.label: row.lines[0] for row in rows(made)}
    assert lines["sample"] == "0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
    assert lines["spread"] == (
        "layer0 → layer1 → layer2 → layer3 → layer4 → layer5 → … 32 more … → layer38 → layer39 → loss"
    )


def test_spread_begins_at_the_birthplace_and_says_where_it_turns_back():
    sites = (
        Site("mul", "forward", "head"),
        Site("mean", "loss"),
        Site("mm", "backward", "head"),
        Site("mm", "backward", "stem"),
    )
    made = event(layer_name="norm", spread=sites)
    assert {row.label: row.lines[0] for row in rows(made)}["spread"] == "norm → head → loss → backward: head → stem"


@pytest.mark.parametrize(
    ("trial", "said"),
    [
        (Trial("fix", "", True), "x.clamp(0)      tried on this step: all finite"),
        (Trial("fix", "", True, "loss 0.7, all finite."), "x.clamp(0)      tried on this step: loss 0.7, all finite"),
        (Trial("fix_at_op", "", False, "loss nan"), "x.clamp(0)      tried on this step, and not enough: loss nan"),
        (Trial("fix", "", None, "no time was left"), "x.clamp(0)      not tried: no time was left"),
        (Trial("float32", "", True), "x.clamp(0)"),
    ],
)
def test_a_fix_says_whether_it_was_tried(trial: Trial, said: str):
    made = event(cause=Cause("c", "t", "", fix="x.clamp(0)"), trials=(trial,))
    assert {row.label: row.lines for row in rows(made)}["fix"] == (said,)


@pytest.mark.parametrize(
    ("general", "detail", "said"),
    [
        (
            "x / n.clamp_min(1): a sum over nothing stays 0",
            "total / n.clamp_min(1): loss 3.7, all gradients finite",
            ("total / n.clamp_min(1)      tried on this step: loss 3.7, all gradients finite",),
        ),
        (
            "torch.acos(x.clamp(-1, 1)), or torch.atan2(s, c)",
            "torch.acos(cos.clamp(-1, 1)): all finite",
            (
                "torch.acos(cos.clamp(-1, 1))      tried on this step: all finite",
                "in general: torch.acos(x.clamp(-1, 1)), or torch.atan2(s, c)",
            ),
        ),
        (
            "Find why it is 0.",
            f"torch.where({'x' * 80} == 0, 0.0, y): all finite",
            (
                f"torch.where({'x' * 80} == 0, 0.0, y)",
                "tried on this step: all finite",
                "in general: Find why it is 0.",
            ),
        ),
    ],
)
def test_the_form_that_worked_comes_before_the_advice_that_it_follows(general: str, detail: str, said: tuple[str, ...]):
    made = event(cause=Cause("c", "t", "", fix=general), trials=(Trial("fix", "", True, detail),))
    assert {row.label: row.lines for row in rows(made)}["fix"] == said


SAME = Trial("again", "", False, "twice the same, bit for bit")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"action": "stop"}, "weights are clean: the step was not taken, and training stops here."),
        ({"action": "raise"}, "weights are clean: the step was not taken, and NonFiniteError is raised."),
        ({"action": "skip"}, "weights are clean: the step was skipped, and training goes on."),
        (
            {"action": "rollback", "weights": "restored"},
            "weights were restored: the run was rolled back, and training goes on.",
        ),
        (
            {"action": "warn", "weights": "damaged since step 87"},
            "weights are damaged since step 87; the step was taken, and training goes on.",
        ),
        ({"action": "raised by the training"}, "weights are clean: raised by the training."),
    ],
)
def test_the_state_says_what_happens_next(fields: dict[str, str], said: str):
    state = {row.label: row.lines for row in rows(event(**fields))}["state"]
    assert state == (f"{said}        reproduced: not tried",)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"weights": "damaged since step 87", "phase": "optimizer"},
            (
                "weights are damaged since step 87; training stops here.        reproduced: yes",
                "load a checkpoint from before step 87 before training goes on.",
            ),
        ),
        (
            {"weights": "damaged since step 87", "phase": "state", "tensor_name": "head.bias"},
            (
                "weights are damaged: head.bias was not finite before step 87 began; training stops here."
                "        reproduced: yes",
                "mend head.bias, or load a checkpoint in which it is finite, before training goes on.",
            ),
        ),
        (
            {"phase": "optimizer", "tensor_name": "optimizer.state[w]['exp_avg_sq']"},
            (
                "the parameters are clean, the optimizer's state is not: the step was not taken, and training stops "
                "here.        reproduced: yes",
                "the optimizer's state is damaged: clear it (optimizer.state.clear()), or load it from a checkpoint.",
            ),
        ),
        (
            {
                "phase": "optimizer",
                "tensor_name": "optimizer.state[w]['exp_avg_sq']",
                "bad_buffers": ("bn.running_mean",),
            },
            (
                "the parameters are clean, a buffer and the optimizer's state are not: the step was not taken, and "
                "training stops here.        reproduced: yes",
                "the optimizer's state is damaged: clear it (optimizer.state.clear()), or load it from a checkpoint.",
                "buffer bn.running_mean is not finite: restore it before an evaluation or a checkpoint.",
            ),
        ),
        (
            {"phase": "optimizer", "tensor_name": "optimizer.state[w]['exp_avg_sq']", "weights": "restored"},
            ("weights were restored: the step was not taken, and training stops here.        reproduced: yes",),
        ),
        (
            {"weights": "damaged since step 86", "phase": "state", "tensor_name": "head.bias"},
            (
                "weights are damaged since step 86: head.bias was not finite before step 87 began; training stops here."
                "        reproduced: yes",
                "mend head.bias, or load a checkpoint in which it is finite, before training goes on.",
            ),
        ),
        (
            {"weights": "damaged since step 0", "phase": "state", "tensor_name": "embed.weight"},
            (
                "weights are damaged: embed.weight was not finite before step 87 began; training stops here."
                "        reproduced: yes",
                "mend embed.weight, or load a checkpoint in which it is finite, before training goes on.",
            ),
        ),
        (
            {"phase": "state", "tensor_name": "ema.head.bias"},
            (
                "the parameters are clean, ema.head.bias is not: the step was not taken, and training stops here."
                "        reproduced: yes",
            ),
        ),
        (
            {"bad_buffers": ("bn.running_mean",)},
            (
                "the parameters are clean, a buffer is not: the step was not taken, and training stops here."
                "        reproduced: yes",
                "buffer bn.running_mean is not finite: restore it before an evaluation or a checkpoint.",
            ),
        ),
        (
            {"bad_buffers": tuple("abcdef"), "trials": (SAME,)},
            (
                "the parameters are clean, buffers are not: the step was not taken, and training stops here.        "
                "reproduced: yes, twice, bit for bit",
                "buffers a, b, c, d and 2 more are not finite: restore them before an evaluation or a checkpoint.",
            ),
        ),
    ],
)
def test_what_is_damaged_is_named_with_the_way_out(fields: dict[str, object], said: tuple[str, ...]):
    made = event(**{"action": "stop", "reproduced": "yes", **fields})
    assert {row.label: row.lines for row in rows(made)}["state"] == said


def test_a_step_that_did_the_same_again_is_told_once():
    made = event(reproduced="yes", trials=(SAME, Trial("float64", "", False)))
    assert {row.label: row.lines for row in rows(made)}["tried"] == ("in float64: not finite",)
    finite = event(reproduced="yes", trials=(dataclasses.replace(SAME, finite=True),))
    assert "again: twice the same" in {row.label: row.lines[0] for row in rows(finite)}["tried"]


@pytest.mark.parametrize(
    ("index", "detail", "said"),
    [
        ((6,), "without sample 6 the step is finite", "without sample 6 the step is finite"),
        (
            tuple(range(5)),
            "without samples 0 to 4 the step is finite; BatchNorm's statistics change with the batch",
            "without those samples the step is finite; BatchNorm's statistics change with the batch",
        ),
        (
            tuple(range(0, 24, 2)),
            "without samples 0, 2, 4, 6, 8, 10, 12, 14 and 4 more the step is finite",
            "without those samples the step is finite",
        ),
        ((), "each quarter of the batch does it", "each quarter of the batch does it"),
    ],
)
def test_samples_that_have_a_row_are_not_listed_twice(index: tuple[int, ...], detail: str, said: str):
    made = event(sample_index=index, trials=(Trial("samples", "", True, detail),))
    assert {row.label: row.lines[0] for row in rows(made)}["tried"] == said


def test_growth_is_not_a_matter_of_samples_or_formats():
    grown = Cause("learning_rate_too_high", "t", "")
    trials = (
        Trial("float64", "", True, "loss 3.11e+281"),
        Trial("samples", "", False, "every part of the batch does it"),
    )
    said = {row.label: row.lines[0] for row in rows(event(cause=grown, trials=trials, verdict="formula"))}
    assert "tried" not in said
    assert said["verdict"] == "formula: the growth has to stop; a wider number format only puts it off"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "learning_rate_non_finite",
            "optimizer: loss and gradients are finite, a setting of the optimizer is not",
        ),
        ("sqrt_of_negative", "optimizer: the gradients were finite, the step itself was not"),
    ],
)
def test_the_optimizers_settings_are_not_its_arithmetic(code: str, said: str):
    made = event(phase="optimizer", verdict="optimizer", cause=Cause(code, "t", ""))
    assert {row.label: row.lines[0] for row in rows(made)}["verdict"] == said


def test_what_was_bad_before_the_step_is_told_with_its_first_use():
    used = line("train.py", 10, "step")
    batch = event(phase="data", tensor_name="x", op="addmm", first_use=used)
    assert where(batch) == "x  ·  first used at train.py:10"
    state = event(phase="state", tensor_name="head.bias", layer_name="head", op="addmm", first_use=used)
    assert where(state) == "head.bias  ·  first used at train.py:10"


def test_a_place_is_passed_once_in_each_direction():
    names = ("a", "b", "a", "b")
    forward = tuple(Site("mul", "forward", n) for n in names)
    backward = tuple(Site("mul", "backward", n) for n in names)
    made = event(layer_name="a", spread=(*forward, *backward, Site("foreach_norm", "backward")))
    assert {row.label: row.lines[0] for row in rows(made)}["spread"] == "a → b → backward: a → b → gradient norm"


def test_a_story_that_was_told_is_told_in_short():
    told = forward_op()
    again = dataclasses.replace(told, step=94, action="skip", sample_index=(3,))
    assert story(again) == story(told) != story(dataclasses.replace(told, op="div"))
    assert report(again, told_at=87) == (
        " NaN born at step 94, in the forward pass\n\n"
        "   where   encoder.norm2 (CustomNorm)  ·  torch.sqrt  ·  models/norm.py:7\n"
        "   sample  3\n"
        "   why     as at step 87: square root of a negative number.\n"
        "   state   weights are clean: the step was skipped, and training goes on.        reproduced: yes"
    )


def test_evidence_shares_a_line_only_where_it_fits():
    def why(*evidence: str) -> tuple[str, ...]:
        return next(row.lines for row in rows(event(cause=Cause("c", "title", "", evidence))) if row.label == "why")

    assert why() == ("title.",)
    assert why("a is 1", "b is 2") == ("title: a is 1; b is 2.",)
    assert why("A is 1.", "B is 2.") == ("title: A is 1. B is 2.",)
    assert why("a" * 60, "b" * 60) == (f"title: {'a' * 60}.", "b" * 60 + ".")


def test_describe_says_range_and_counts():
    assert describe(stats(2, 3, min=-1.0, max=2.0, mean=0.5, nan_count=1, zero_count=2)) == (
        "float32 2×3, finite values -1 to 2, mean 0.5; of 6: 1 NaN, 2 zero"
    )
    assert describe(stats(nan_count=1)) == "float32 scalar; of 1: 1 NaN"


ANY_TEXT = st.text(max_size=30) | st.sampled_from(
    ["\x1b[2J", "a\nb\rc", "\u202egnp.exe", "\ud800", "\x00", "\u2028", "\x9b31m"]
)


@given(
    texts=st.lists(ANY_TEXT, min_size=12, max_size=12), phase=st.sampled_from(["data", "forward", "backward", "x\x1b"])
)
def test_no_string_of_an_event_can_steer_the_terminal(texts: list[str], phase: str):
    a, b, c, d, e, f, g, h, i, j, k, m = texts
    made = event(
        phase=phase,
        op=a,
        call=b,
        layer_name=c,
        module_type=d,
        location=Location(e, 3, f, g),
        tensor_name=h,
        sample_index=(1,),
        sample_id=(i,),
        cause=Cause("unknown", j, k, (m, a), b),
        trials=(Trial(c, d, True, e), Trial("fix", f, False, g)),
        output=dataclasses.replace(stats(2, nan_count=1), dtype=a),
        spread=(Site(h, i, j), Site(k, "backward", None)),
        before=(m, a),
        weights=b,
        capsule=c,
        symptom=d,
        action=e,
        notes=(f, g),
    )
    said = report(made)
    said.encode("utf-8")
    assert all(text.isprintable() for text in said.split("\n"))
    assert headline(made).isprintable()
    for row in rows(made):
        assert isinstance(row, Row)
        assert row.lines
        assert len(row.label) <= 7
        assert all(text and len(text) <= 240 for text in row.lines)


def test_the_report_needs_neither_torch_nor_rich():
    code = (
        "import sys; import nan_detector._summary, nan_detector._before; "
        "print(*({'torch', 'rich', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment(), check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
