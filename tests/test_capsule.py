"""Capsules of real trainings: what is written, replayed in a new process, and what happens when it cannot be."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import _capsule_programs as programs
from nan_detector import NaNDetector, NaNEvent, Trial
from nan_detector._capsule import layout
from nan_detector._capsule.again import again
from nan_detector._capsule.read import open_capsule
from nan_detector._capsule.write import _write_json
from nan_detector._eventlog import events, read_log

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parent / "src"), "OMP_NUM_THREADS": "1"}


def capsule_of(name: str, folder: Path, **options: Any) -> tuple[NaNEvent, Path]:
    """The event of the program, and the path of its capsule."""
    det = programs.train_watched(name, capsule=True, log_dir=folder, **options)
    assert det.event is not None and det.event.capsule is not None
    return det.event, Path(det.event.capsule)


def replayed(capsule: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """``nan-detector replay`` in a process of its own."""
    command = [sys.executable, "-m", "nan_detector", "replay", str(capsule), *more]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE, env=ENVIRONMENT, check=False)


# -- there and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "op", "layer", "phase", "cause"),
    [
        ("classifier", "sqrt", "1", "forward", "sqrt_negative"),
        ("gpt", "softmax", "blocks.0", "forward", "all_masked_softmax"),
        ("cnn", "div", None, "loss", "division_by_zero"),
    ],
)
def test_a_new_process_finds_the_same_event(
    name: str, op: str, layer: str | None, phase: str, cause: str, tmp_path: Path
):
    event, capsule = capsule_of(name, tmp_path)
    assert event.cause is not None
    assert (event.op, event.layer_name, event.phase) == (op, layer, phase)
    done = replayed(capsule, "--model", f"_capsule_programs:{name}", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["same"] and found["differences"] == [] and found["notes"] == []
    again_ = NaNEvent.from_dict(found["event"])
    same = "op call layer_name module_type location phase cause output inputs spread tensor_name verdict".split()
    for field in same:
        assert getattr(again_, field) == getattr(event, field), field
    assert [outcome(t) for t in again_.trials] == [outcome(t) for t in event.trials]


def outcome(trial: Trial) -> tuple[str, bool | None, str]:
    """What came of a trial. Of a fix without its text: a line of the loop, whose code the other process lacks, is not
    rewritten there, and the general form stands for it."""
    return trial.name, trial.finite, trial.detail.rpartition(": ")[2] if trial.name == "fix" else trial.detail


def test_each_guilty_operation_fails_alone(tmp_path: Path):
    expected, paths = [], []
    for name in programs.PROGRAMS:
        event, capsule = capsule_of(name, tmp_path / name)
        repro = capsule / layout.REPRO
        assert len(repro.read_text().splitlines()) <= 40
        assert "nan_detector" not in repro.read_text()
        output = event.output
        assert output is not None and output.bad_count
        expected.append(
            f"NaN {output.nan_count}, +inf {output.posinf_count}, -inf {output.neginf_count} of {output.numel} values"
        )
        paths.append(str(repro))
    run_each = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path)\n"
    run_each += "assert 'nan_detector' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", run_each, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


def test_the_derivative_is_shown_by_its_forward_operation(tmp_path: Path):
    event, capsule = capsule_of("distance", tmp_path)
    assert event.phase == "backward"
    text = (capsule / layout.REPRO).read_text()
    assert 'out = torch.sqrt(t["input_0"])' in text
    assert 'torch.autograd.grad([out], inputs, [t["gradient_0"]], allow_unused=True)[0]' in text


def test_the_files_and_who_may_read_them(tmp_path: Path):
    event, capsule = capsule_of("gpt", tmp_path)
    assert capsule.parent == tmp_path / layout.FOLDER
    assert capsule.name == f"step-000002-{event.event_id[:8]}"
    assert capsule.stat().st_mode & 0o777 == 0o700
    assert {p.name for p in capsule.iterdir()} == {
        *("event.json", "step.json", "step.safetensors", "state.safetensors"),
        *("gradients.json", "gradients.safetensors", "repro.py", "repro.safetensors"),
    }
    assert [p.name for p in capsule.parent.iterdir()] == [capsule.name]
    assert NaNEvent.from_dict(json.loads((capsule / "event.json").read_text())).to_dict() == event.to_dict()
    assert [e.to_dict() for e in events(read_log(tmp_path))] == [event.to_dict()]


def test_operations_around_the_birth(tmp_path: Path):
    _, capsule = capsule_of("classifier", tmp_path)
    result = again(open_capsule(capsule), programs.classifier, operations=True)
    ops = [o.op for o in result.operations]
    born = [o for o in result.operations if o.is_birth]
    assert [o.op for o in born] == ["sqrt"]
    assert ops[ops.index("sqrt") - 1] in ("sub", "mean") and ops[ops.index("sqrt") + 1] == "div"
    assert born[0].inputs[0].negative_count == born[0].output.nan_count > 0  # type: ignore[union-attr]  # a birth
    assert born[0].where.endswith(":24") and born[0].layer_name == "1"


# -- a loss that a capsule cannot hold --------------------------------------------------------------------------------


def test_gradients_at_the_output_stand_for_a_loss_that_is_not_kept(tmp_path: Path):
    _, capsule = capsule_of("doubled", tmp_path)
    result = again(open_capsule(capsule), programs.classifier)
    assert result.same
    assert result.notes == (
        "the loss is not in the capsule (Doubled.apply is no function of PyTorch): the gradients that arrived at the "
        "model's output took its place; --loss runs the loss itself",
    )


def test_a_loss_that_is_named(tmp_path: Path):
    _, capsule = capsule_of("doubled", tmp_path)
    result = again(open_capsule(capsule), programs.classifier, programs.loss_of_output)
    assert result.same and result.notes == ()
    assert any(site.phase == "loss" for site in result.event.spread)


def test_a_loss_that_fails_is_told(tmp_path: Path):
    _, capsule = capsule_of("cnn", tmp_path)
    result = again(open_capsule(capsule), programs.cnn, programs.loss_without_labels)
    assert result.differences == ("nothing non-finite was found this time",)
    assert any("KeyError" in n and "labels" in n for n in result.event.notes)


# -- what the model of another day does -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            programs.other_model,
            "parameter '0.weight' has shape [8, 4] in the capsule and [9, 4] in the model of --model: name the factory "
            "that makes the model which was trained.",
        ),
        (
            programs.shorter_model,
            "the model of --model lacks parameters '3.weight', '3.bias': name the factory that makes the model "
            "which was trained.",
        ),
        (
            programs.not_a_model,
            "--model gave no model: model must be a torch.nn.Module, or a list or dict of them, not int.",
        ),
    ],
)
def test_another_model_is_refused(factory: Any, message: str, tmp_path: Path):
    _, capsule = capsule_of("classifier", tmp_path)
    with pytest.raises(ValueError) as refused:
        again(open_capsule(capsule), factory)
    assert str(refused.value) == message


def test_the_callers_settings_are_left_as_they_were(tmp_path: Path):
    _, capsule = capsule_of("classifier", tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        assert again(open_capsule(capsule), programs.classifier).same
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_leave_their_statistics(tmp_path: Path):
    event, capsule = capsule_of("gpt", tmp_path, capsule_bytes=3_000)
    assert not (capsule / layout.STATE_TENSORS).exists()
    state = json.loads((capsule / layout.STEP).read_text())["state"]
    assert state["kept"] is False and state["parameters"]["words.weight"]["stats"]["shape"] == [11, 8]
    result = again(open_capsule(capsule), programs.gpt)  # a mask does its harm whatever the weights are
    assert result.same and result.event.op == event.op
    assert result.notes == (
        "the capsule has no weights (they were larger than capsule_bytes): those of --model are used",
    )


def test_a_batch_that_does_not_fit_is_named(tmp_path: Path):
    _, capsule = capsule_of("classifier", tmp_path, capsule_bytes=100)
    assert json.loads((capsule / layout.STEP).read_text())["missing"]
    result = again(open_capsule(capsule), programs.classifier)
    assert not result.same
    assert any(n.startswith("not in the capsule: ") for n in result.notes)


def test_one_folder_holds_so_many_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for i in range(layout.MAX_CAPSULES):
        (tmp_path / layout.FOLDER / f"step-{i:06d}-old").mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        det = programs.train_watched("cnn", capsule=True, log_dir=tmp_path)
    assert det.event.capsule is None and det.event.op == "div"
    assert f"no capsule: {tmp_path / layout.FOLDER} holds 8 already" in det.event.notes
    assert sum("holds 8 capsules, and no more are written there" in r.message for r in caplog.records) == 1


def test_a_file_in_the_way_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / layout.FOLDER).write_text("")
    with caplog.at_level(logging.WARNING):
        det = programs.train_watched("cnn", capsule=True, log_dir=tmp_path)
    assert det.event.op == "div" and det.event.capsule is None and det.event.weights == "clean"
    warned = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warned == [
        f"A capsule cannot be written to {tmp_path / layout.FOLDER} (File exists). Training goes on without it; make "
        "room there, or give another log_dir to the next run."
    ]


def test_what_cannot_be_written_is_one_warning_in_a_run_and_a_note_in_each_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """The folder of the log is a file, and so nothing can be written into it at any event."""
    folder = tmp_path / "runs"
    folder.write_text("")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    det = NaNDetector(model, verbose=False, on_nan="skip", capsule=True, log_dir=folder)
    with caplog.at_level(logging.WARNING), det:
        for i in range(8):
            optimizer.zero_grad()
            model(torch.full((2, 4), torch.nan if i in (2, 4, 5) else 1.0)).sum().backward()
            optimizer.step()
    assert [e.step for e in det.all_events] == [2, 4, 5]
    note = f"no capsule: {folder / layout.FOLDER} cannot be written (Not a directory)"
    assert all(e.capsule is None and e.notes.count(note) == 1 for e in det.all_events)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [w.partition(")")[0] for w in warned] == [
        f"The event log {folder / 'events-rank0.jsonl'} cannot be written (File exists",
        f"A capsule cannot be written to {folder / layout.FOLDER} (Not a directory",
    ]


def test_a_file_that_could_not_be_written_leaves_no_draft(tmp_path: Path):
    (tmp_path / layout.EVENT).mkdir()  # in the way of the file
    with pytest.raises(OSError):
        _write_json(tmp_path / layout.EVENT, {"a": 1})
    assert [p.name for p in tmp_path.iterdir()] == [layout.EVENT]


def test_a_full_disk_is_a_warning_and_leaves_no_half_capsule(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))  # no file may grow beyond: as on a disk that is full
    try:
        with caplog.at_level(logging.WARNING):
            det = programs.train_watched("cnn", capsule=True, log_dir=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert det.event.op == "div" and det.event.capsule is None
    assert sum("A capsule cannot be written" in r.message for r in caplog.records) == 1
    assert list((tmp_path / layout.FOLDER).iterdir()) == []


def test_nothing_is_written_unless_asked(tmp_path: Path):
    det = programs.train_watched("cnn", log_dir=tmp_path)
    assert det.event.capsule is None
    assert [p.name for p in tmp_path.iterdir()] == ["events-rank0.jsonl"]


def test_without_log_dir_it_is_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    det = programs.train_watched("cnn", capsule=True)
    path = Path(det.event.capsule)
    assert path.is_dir() and path.is_absolute()
    assert path.relative_to(tmp_path).parts[0] == "nan-detector-runs"


# -- it changes nothing -----------------------------------------------------------------------------------------------


def skipping(capsule: bool, folder: Path) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = [(torch.randn(8, 4), torch.randint(0, 3, (8,))) for _ in range(6)]
    with NaNDetector(model, on_nan="skip", stop_on_first=False, verbose=False, capsule=capsule, log_dir=folder) as det:
        for i, (x, y) in enumerate(batches):
            det.set_batch(i)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / 0.0 if i in (2, 4) else loss).backward()
            optimizer.step()
    assert [e.step for e in det.all_events] == [2, 4]
    assert all((e.capsule is not None) is capsule for e in det.all_events)
    return [*model.state_dict().values(), torch.get_rng_state()]


def test_training_goes_on_bit_for_bit_as_without_a_capsule(tmp_path: Path):
    with_it, without = skipping(True, tmp_path / "a"), skipping(False, tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
