"""Records: into JSON and back without loss, and the names that other programs read."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import pickle
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from _strategies import records_of, same
from nan_detector._record import SCHEMA_VERSION, Record, encode
from nan_detector._records import (
    RECORDS,
    Cause,
    GradEvent,
    Location,
    LossTerm,
    NaNEvent,
    RunRecord,
    Site,
    StepRow,
    TensorStats,
    Trial,
    WarningRecord,
    record_from_dict,
)
from nan_detector._trace import Birth, GuiltyInput, Trace

KINDS: tuple[type[Record], ...] = (
    *RECORDS.values(),
    Cause,
    Location,
    Site,
    TensorStats,
    Trial,
    LossTerm,
    Birth,
    GuiltyInput,
    Trace,
)
ANY_RECORD = st.one_of([records_of(kind) for kind in KINDS])
ANY_LINE = st.one_of([records_of(kind) for kind in RECORDS.values()])

STATS = TensorStats(
    shape=(4, 16),
    dtype="torch.float32",
    device="cpu",
    min=-10.0,
    max=3.5,
    mean=0.25,
    min_nonzero=1e-3,
    nan_count=22,
    posinf_count=1,
    neginf_count=2,
)
MINIMAL: dict[str, Any] = {"event_id": "a", "status": "final", "step": 3, "phase": "loss", "severity": "error"}


def through_json(record: Record) -> dict[str, Any]:
    """As a reader gets it: strict JSON, which has no NaN."""
    return json.loads(json.dumps(record.to_dict(), allow_nan=False))


@given(ANY_RECORD)
def test_a_record_comes_back_from_json_as_it_was(record: Record):
    assert same(type(record).from_dict(through_json(record)), record)


@given(ANY_LINE)
def test_a_log_line_says_what_it_is(record: Record):
    line = through_json(record)
    assert line["schema_version"] == SCHEMA_VERSION
    assert same(record_from_dict(line), record)


@given(ANY_RECORD, st.text(), st.integers())
def test_unknown_keys_are_ignored(record: Record, key: str, value: int):
    line = through_json(record)
    line.setdefault(f"new in a later release: {key}", value)
    assert same(type(record).from_dict(line), record)


@given(ANY_RECORD)
def test_keys_with_a_default_may_be_missing(record: Record):
    kept = {f.name for f in required(type(record))}
    back = type(record).from_dict({k: v for k, v in through_json(record).items() if k in kept})
    for f in dataclasses.fields(record):
        if f.name in kept:
            assert same(getattr(back, f.name), getattr(record, f.name))
        elif f.default is not dataclasses.MISSING:
            assert same(getattr(back, f.name), f.default)


def required(kind: type[Record]) -> list[dataclasses.Field[Any]]:
    return [
        f
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]


@pytest.mark.parametrize(("kind", "key"), [(k, f.name) for k in KINDS for f in required(k)])
@settings(max_examples=10)
@given(data=st.data())
def test_a_missing_key_is_named(kind: type[Record], key: str, data: st.DataObject):
    line = through_json(data.draw(records_of(kind)))
    del line[key]
    with pytest.raises(ValueError) as caught:
        kind.from_dict(line)
    assert str(caught.value) == f"{kind.__name__} needs the key {key!r}, which this record does not have."


@pytest.mark.parametrize("word", ["metric", "", None, 3, ["event"]])
def test_an_unknown_kind_of_line_is_refused(word: object):
    with pytest.raises(ValueError) as caught:
        record_from_dict({**MINIMAL, "record": word})
    assert str(caught.value) == f"record={word!r} is not one of 'event', 'grad', 'warning', 'step', 'run'."


def test_a_line_without_a_kind_is_refused():
    with pytest.raises(ValueError, match=r"^record=None is not one of 'event', "):
        record_from_dict(MINIMAL)


@pytest.mark.parametrize(
    ("value", "text"),
    [(math.nan, "nan"), (-math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"), (0.5, 0.5), (-0.0, -0.0), (1, 1)],
)
def test_non_finite_floats_are_words(value: float, text: object):
    assert same(GradEvent(0, "fc", "weight", value, 1.0).to_dict()["grad_norm"], text)


class Colour(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ((1, (2.0, math.inf)), [1, [2.0, "inf"]]),
        ({"a": (math.nan,), 3: None}, {"a": ["nan"], "3": None}),
        (PurePosixPath("runs/a"), "runs/a"),
        (Colour.RED, "Colour.RED"),
        (True, True),
        (Location("a.py", 1, "f", "x"), {"file": "a.py", "line": 1, "function": "f", "source_line": "x", "cell": None}),
    ],
)
def test_anything_becomes_json(value: object, encoded: object):
    assert same(encode(value), encoded)


def test_the_old_names_of_an_event_are_derived():
    event = NaNEvent(**MINIMAL, inputs=(TensorStats((2,), "torch.float32", "cpu", neginf_count=1),), output=STATS)
    assert event.batch_idx == 3
    assert (event.input_has_nan, event.input_has_inf) == (False, True)
    assert (event.output_has_nan, event.output_has_inf) == (True, True)
    assert event.output_shape == (4, 16)
    assert event.output_stats == {"min": -10.0, "max": 3.5, "mean": 0.25}
    assert event.is_backward is False
    assert dataclasses.replace(event, phase="backward").is_backward is True


def test_an_event_without_tensors_has_quiet_old_names():
    event = NaNEvent(**MINIMAL)
    assert not any((event.input_has_nan, event.input_has_inf, event.output_has_nan, event.output_has_inf))
    assert event.output_shape == ()
    assert event.output_stats == {}


def test_the_old_names_are_in_the_log_line():
    line = through_json(NaNEvent(**MINIMAL, output=STATS))
    assert {name: line[name] for name in NaNEvent.derived} == {
        "batch_idx": 3,
        "is_backward": False,
        "input_has_nan": False,
        "input_has_inf": False,
        "output_has_nan": True,
        "output_has_inf": True,
        "output_shape": [4, 16],
        "output_stats": {"min": -10.0, "max": 3.5, "mean": 0.25},
    }


def test_stats_count_elements():
    assert (STATS.numel, STATS.bad_count) == (64, 25)
    assert TensorStats((), "torch.float32", "cpu").numel == 1
    assert TensorStats((3, 0), "torch.float32", "cpu").numel == 0


@given(ANY_RECORD)
def test_records_are_frozen_and_can_be_pickled(record: Record):
    assert same(pickle.loads(pickle.dumps(record)), record)
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)


def test_each_kind_of_line_has_its_word():
    assert {
        "event": NaNEvent,
        "grad": GradEvent,
        "warning": WarningRecord,
        "step": StepRow,
        "run": RunRecord,
    } == RECORDS
