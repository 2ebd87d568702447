"""The verdict and the plan of trials, as tables: pure functions of what was found."""

from __future__ import annotations

import pytest

from nan_detector._causes import CAUSES
from nan_detector._records import Cause, NaNEvent, TensorStats, Trial
from nan_detector._trace import Birth, BirthKind
from nan_detector._trial_plan import BEYOND, Facts, plan
from nan_detector._trials import RUNNERS
from nan_detector._verdict import shown_by, verdict


def birth(kind: str = "operation", phase: str = "forward", dtype: str = "torch.float32", **fields: object) -> Birth:
    output = TensorStats((8, 4), dtype, "cpu", nan_count=1)
    return Birth(0, kind, "sqrt", "aten.sqrt.default", phase, output=output, **fields)


def cause(code: str) -> Cause:
    return Cause(code, CAUSES[code].title, "")


def trials(**finite: bool | None) -> tuple[Trial, ...]:
    return tuple(Trial(name, "?", value) for name, value in {"again": False, **finite}.items())


@pytest.mark.parametrize(
    ("found", "code", "tried", "reproduced", "expected"),
    [
        # Nothing found.
        (None, None, {}, "not_tried", "undecided"),
        (None, None, {}, "no", "not_reproducible"),
        (None, None, {"again": True}, "no", "not_reproducible"),
        (None, None, {"again": True, "eager": True}, "no", "compiler"),
        (None, None, {"again": True, "eager": None}, "no", "not_reproducible"),
        # Bad before any operation.
        (birth("input", "data"), "input_non_finite", {}, "yes", "data"),
        (birth("label", "data"), "label_non_finite", {"samples": True}, "yes", "data"),
        (birth("parameter", "state"), "parameter_non_finite", {"finite_state": True}, "yes", "state"),
        (birth("buffer", "state"), "buffer_non_finite", {}, "yes", "state"),
        # An operation did it.
        (birth(), "sqrt_of_negative", {}, "yes", "formula"),
        (birth(), "sqrt_of_negative", {"float64": False}, "yes", "formula"),
        (birth(), "sqrt_of_negative", {"float64": True}, "yes", "precision"),
        (birth(), "sqrt_of_negative", {"float64": True, "fix": True}, "yes", "formula"),
        (birth(), "sqrt_of_negative", {"float64": True, "fix": False}, "yes", "precision"),
        (birth(), "exp_overflow", {"float64": True}, "yes", "formula"),
        (birth(), "learning_rate_too_high", {"float64": True}, "yes", "formula"),
        (birth(dtype="torch.float16"), "half_overflow", {}, "yes", "precision"),
        (birth(dtype="torch.float16"), "sqrt_of_negative", {"float32": True}, "yes", "precision"),
        (birth(dtype="torch.float16"), "sqrt_of_negative", {"float32": False}, "yes", "formula"),
        (birth(phase="backward"), None, {"loss_scale_1": True}, "yes", "precision"),
        (birth("intended_met"), "softmax_fully_masked", {}, "yes", "formula"),
        (birth("opaque"), "opaque_kernel", {}, "yes", "undecided"),
        (birth("opaque"), "opaque_kernel", {"samples": True}, "yes", "undecided"),
        (birth(phase="optimizer"), "sqrt_of_negative", {}, "yes", "optimizer"),
        # Without a replay that does what the step did, nothing else counts.
        (birth(), "sqrt_of_negative", {"again": True}, "yes", "not_reproducible"),
        (birth(), "sqrt_of_negative", {"again": None}, "yes", "formula"),
    ],
)
def test_the_verdict(
    found: Birth | None, code: str | None, tried: dict[str, bool | None], reproduced: str, expected: str
):
    assert verdict(found, cause(code) if code else None, trials(**tried), reproduced) == expected


def test_a_loss_that_no_float32_holds_does_not_speak_for_a_wider_format():
    beyond = Trial("float64", "?", True, f"loss 4e+128, {BEYOND}")
    assert verdict(birth(), cause("log_of_zero"), (beyond,), "yes") == "formula"
    event = NaNEvent("e", "final", 0, "forward", "error", verdict="precision", trials=(beyond,))
    assert shown_by(event) is None


@pytest.mark.parametrize(
    ("said", "tried", "name"),
    [
        ("precision", {"float64": True}, "float64"),
        ("precision", {"float32": False, "float64": True}, "float64"),
        ("precision", {}, None),
        ("data", {"samples": True}, "samples"),
        ("formula", {"fix": True, "float64": True}, "fix"),
        ("formula", {"float64": True}, None),
        ("compiler", {"eager": True}, "eager"),
    ],
)
def test_the_trial_that_shows_it(said: str, tried: dict[str, bool], name: str | None):
    event = NaNEvent("e", "final", 0, "forward", "error", verdict=said, trials=trials(**tried))
    shown = shown_by(event)
    assert (shown.name if shown is not None else None) == name


EVERYTHING = Facts(samples=8, half=True, scaled=True)


@pytest.mark.parametrize(
    ("found", "reproduced", "facts", "names"),
    [
        (None, "not_tried", EVERYTHING, []),
        (birth(), "not_tried", EVERYTHING, []),
        (None, "no", Facts(samples=8), ["again"]),
        (None, "no", Facts(compiled=True), ["again", "eager"]),
        (None, "no", Facts(opaque="the loss"), ["eager"]),
        (birth(), "yes", Facts(), ["again", "fix", "float64"]),
        (birth(), "yes", Facts(samples=1), ["again", "fix", "float64"]),
        (birth(), "yes", Facts(samples=8), ["again", "fix", "float64", "samples"]),
        (birth(dtype="torch.float16"), "yes", EVERYTHING, ["again", "fix", "float32", "loss_scale_1", "samples"]),
        (birth(), "yes", EVERYTHING, ["again", "fix", "float32", "float64", "loss_scale_1", "samples"]),
        (birth(), "yes", Facts(compiled=True), ["again", "eager", "fix", "float64"]),
        (birth("parameter"), "yes", EVERYTHING, ["again", "finite_state"]),
        (birth("buffer"), "yes", EVERYTHING, ["again", "finite_state"]),
        (birth("input", sample_index=(3,)), "yes", EVERYTHING, ["again", "samples"]),
        (birth("input", sample_index=tuple(range(8))), "yes", EVERYTHING, ["again", "finite_data"]),
        (birth("input"), "yes", EVERYTHING, ["again", "finite_data"]),
        (birth("label", sample_index=(0,)), "yes", Facts(), ["again", "finite_data"]),
        (birth("constant"), "yes", EVERYTHING, ["again", "fix"]),
        (birth("gradient"), "yes", EVERYTHING, ["again", "fix"]),
    ],
)
def test_what_is_planned(found: Birth | None, reproduced: str, facts: Facts, names: list[str]):
    assert [p.name for p in plan(found, reproduced, facts)] == names


@pytest.mark.parametrize("kind", BirthKind)
def test_the_same_again_comes_first_whatever_was_born(kind: BirthKind):
    planned = plan(birth(kind.value), "yes", EVERYTHING)
    assert planned[0].name == "again"
    assert all(p.question.endswith("?") for p in planned)


@pytest.mark.parametrize(
    ("facts", "name", "why"),
    [
        (Facts(no_float64="this device has no float64"), "float64", "this device has no float64"),
        (Facts(uncut="part of the batch was let go"), "samples", "part of the batch was let go"),
    ],
)
def test_what_cannot_be_tried_is_planned_with_its_reason(facts: Facts, name: str, why: str):
    assert {p.name: p.why_not for p in plan(birth(), "yes", facts)}[name] == why


def test_a_reason_names_what_was_not_recorded():
    (eager,) = plan(None, "no", Facts(opaque="loss"))
    assert eager.why_not == "loss was not recorded: det.run_step replays the step whole"


def test_every_trial_that_is_planned_can_be_made():
    names = {
        p.name
        for kind in BirthKind
        for facts in (EVERYTHING, Facts(compiled=True))
        for p in plan(birth(kind.value), "yes", facts)
    }
    assert names == set(RUNNERS)
