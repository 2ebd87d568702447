"""The committed schema is the one the records give, and real lines keep to it."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from _strategies import records_of
from nan_detector._record import Record
from nan_detector._records import RECORDS, Cause, GradEvent, Location, LossTerm, NaNEvent, Site, TensorStats, Trial
from nan_detector._schema import main, mismatch, schema, schema_text

ROOT = Path(__file__).parent.parent
COMMITTED = ROOT / "schema" / "records.schema.json"
VALIDATOR = Draft202012Validator(schema())

EVENT = NaNEvent(
    event_id="a",
    status="final",
    step=87,
    phase="forward",
    severity="error",
    op="sqrt",
    layer_name="encoder.norm2",
    location=Location("norm.py", 41, "forward", "return x / torch.sqrt(var)"),
    inputs=(TensorStats((4, 16), "torch.float32", "cpu", min=-math.inf, max=math.nan, mean=0.5, negative_count=22),),
    cause=Cause("sqrt_of_negative", "square root of a negative number", "why", ("22 of 64",), "torch.var(x)"),
    trials=(Trial("fix", "does the fix help?", True, "loss 0.734"),),
    spread=(Site("sqrt", "forward", "encoder.norm2", "CustomNorm"),),
    loss=math.nan,
    loss_terms=(LossTerm("kl", math.inf, False, 0.1, Location("train.py", 4, "step", "kl = loss(mu)")),),
)


def test_the_committed_schema_is_the_generated_one():
    assert COMMITTED.read_text(encoding="utf-8") == schema_text(), "the records have changed: run `make schema`"


def test_it_is_a_valid_schema():
    Draft202012Validator.check_schema(schema())


@given(st.one_of([records_of(kind) for kind in RECORDS.values()]))
def test_every_record_keeps_to_it(record: Record):
    VALIDATOR.validate(json.loads(json.dumps(record.to_dict(), allow_nan=False)))
    assert mismatch(record) is None


def test_a_full_event_keeps_to_it():
    VALIDATOR.validate(json.loads(json.dumps(EVENT.to_dict(), allow_nan=False)))


@pytest.mark.parametrize("kind", RECORDS.values())
@given(data=st.data())
def test_it_names_exactly_the_keys_that_are_written(kind: type[Record], data: st.DataObject):
    definition = schema()["$defs"][kind.__name__]
    assert list(definition["properties"]) == list(data.draw(records_of(kind)).to_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"record": "grad"},
        {"record": None},
        {"phase": "sampling"},
        {"step": "87"},
        {"step": 87.5},
        {"loss": "infinity"},
        {"loss": True},
        {"inputs": None},
        {"inputs": [{"dtype": "torch.float32", "device": "cpu"}]},
        {"cause": {"code": "x"}},
        {"location": {"file": "a.py", "line": "41", "function": "f", "source_line": ""}},
        {"spread": ["encoder"]},
        {"output_stats": {"min": "least"}},
        {"is_backward": 0},
    ],
)
def test_a_wrong_line_is_refused(change: dict[str, Any]):
    with pytest.raises(ValidationError):
        VALIDATOR.validate({**EVENT.to_dict(), **change})


@pytest.mark.parametrize("key", ["event_id", "status", "step", "phase", "severity", "schema_version", "record"])
def test_a_line_without_a_required_key_is_refused(key: str):
    line = EVENT.to_dict()
    del line[key]
    with pytest.raises(ValidationError):
        VALIDATOR.validate(line)


def test_keys_of_a_later_release_are_allowed():
    VALIDATOR.validate({**EVENT.to_dict(), "new_key": {"a": [1]}})


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        (dataclasses.replace(EVENT, step=1.5), "step=1.5 is not a whole number"),
        (dataclasses.replace(EVENT, status=3), "status=3 is not a string"),
        (dataclasses.replace(EVENT, spread=[]), "spread=[] is not a list, each an object"),
        (
            dataclasses.replace(EVENT, location=Location("a.py", "41", "f", "")),
            "location.line='41' is not a whole number",
        ),
        (dataclasses.replace(EVENT, op="x", call=b"x" * 99), f"call=b'{'x' * 55}... is not a string or null"),
        (dataclasses.replace(EVENT, step=10**400), f"step=1{'0' * 56}... is not a whole number"),
        (GradEvent(1, "fc", "w", 10**400, 1.0), f"grad_norm=1{'0' * 56}... is not a number"),
        (GradEvent(1, "fc", "w", False, 1.0), "grad_norm=False is not a number"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(record: Record, wrong: str):
    assert mismatch(record) == wrong


def test_the_command_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(tmp_path / "schema.json")]) == 0
    assert (tmp_path / "schema.json").read_text(encoding="utf-8") == schema_text()
    assert main([]) == 2
    assert "usage: " in capsys.readouterr().err


def test_the_command_runs_as_a_module(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "nan_detector._schema", str(tmp_path / "schema.json")],
        cwd=ROOT / "src",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "schema.json").read_text(encoding="utf-8") == COMMITTED.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [*RECORDS.values(), Location, TensorStats, Site, Cause, Trial, LossTerm])
def test_the_documentation_describes_each_field(kind: type[Record]):
    text = (ROOT / "docs" / "records.md").read_text(encoding="utf-8")
    section = re.search(rf"^##+ `{kind.__name__}`.*?(?=^##+ |\Z)", text, re.DOTALL | re.MULTILINE)
    assert section, f"docs/records.md has no section on {kind.__name__}"
    rows = re.findall(r"^\| (`[^|]+`) \|", section[0], re.MULTILINE)
    described = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    fields = [f.name for f in dataclasses.fields(kind)]
    assert sorted(described) == sorted([*fields, *kind.derived])
