"""The flight recorder: what it keeps, how little it costs, and that it never reads the device by itself."""

from __future__ import annotations

import csv
import math
import timeit

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nan_detector._before import before_sentences
from nan_detector._recorder import MOST_TABLES, Recorder
from nan_detector._records import StepRow

COLUMNS = ("loss", "grad_norm", "grad_norm:a", "grad_norm:b")


def filled(rows: int, history: int = 1000, **options) -> Recorder:
    recorder = Recorder(history, **options)
    recorder.set_columns(COLUMNS)
    for i in range(rows):
        recorder.append(i, torch.tensor([i + 0.5, i + 1.0, 3.0, float(i)]), 1e-3)
    return recorder


def test_rows_are_records_oldest_first():
    recorder = Recorder(10, rank=3)
    recorder.set_columns(COLUMNS)
    recorder.append(7, torch.tensor([0.5, 5.0, 3.0, 4.0]), 1e-3, 1024.0)
    recorder.append(8, torch.tensor([math.nan, math.inf, math.nan, 4.0]), None)
    first, second = recorder.rows()
    assert first == StepRow(7, loss=0.5, grad_norm=5.0, max_grad_norm=4.0, lr=1e-3, loss_scale=1024.0, rank=3)
    assert math.isnan(second.loss)
    assert second.grad_norm == math.inf
    assert math.isnan(second.max_grad_norm)  # not 4.0: a NaN is the worst
    assert (second.lr, second.loss_scale) == (None, None)


def test_what_has_no_column_is_none():
    recorder = Recorder(10)
    recorder.set_columns(["grad_norm"])
    recorder.append(0, torch.tensor([2.0]), 0.1)
    assert recorder.rows() == [StepRow(0, loss=None, grad_norm=2.0, max_grad_norm=None, lr=0.1)]


def test_a_column_for_the_largest_norm_is_used_where_there_is_one():
    recorder = Recorder(10)
    recorder.set_columns(["max_grad_norm", "grad_norm:a"])
    recorder.append(0, torch.tensor([9.0, 2.0]), 0.1)
    assert recorder.rows()[0].max_grad_norm == 9.0


@pytest.mark.parametrize("rows", [0, 1, 4, 5, 6, 12])
def test_the_last_rows_are_kept(rows: int):
    recorder = filled(rows, history=5)
    kept = list(range(rows))[-5:]
    assert [r.step for r in recorder.rows()] == kept
    assert recorder.column("lr") == [1e-3] * len(kept) if kept else len(recorder) == 0
    assert [r.step for r in recorder.rows(last=2)] == kept[-2:]
    assert recorder.rows(last=0) == []
    assert len(recorder) == len(kept)


def test_bytes_bound_the_rows():
    recorder = filled(100, max_bytes=10 * len(COLUMNS) * 4)
    assert len(recorder) == 10
    assert recorder.nbytes == 160
    assert recorder.column("loss") == [i + 0.5 for i in range(90, 100)]


def test_one_row_is_kept_however_wide():
    assert [r.step for r in filled(3, max_bytes=1).rows()] == [2]


def test_columns_by_name():
    recorder = filled(3)
    assert recorder.column("grad_norm:b") == [0.0, 1.0, 2.0]
    with pytest.raises(KeyError, match=r"name='los' is not a recorded column; there are: loss, grad_norm, .*lr"):
        recorder.column("los")


def test_columns_that_nobody_asks_for_are_left_out():
    recorder = filled(12)
    steps, columns = recorder.columns(5, only=("loss", "grad_norm", "lr", "nothing"))
    assert steps == [7, 8, 9, 10, 11]
    whole = recorder.columns(5)[1]
    assert columns == {name: whole[name] for name in ("loss", "grad_norm", "lr", "loss_scale")} | {
        "loss_scale": pytest.approx(whole["loss_scale"], nan_ok=True)
    }


def test_changed_columns_keep_the_older_rows():
    recorder = filled(3)
    recorder.set_columns(["loss", "grad_norm:c"])
    recorder.append(3, torch.tensor([9.0, 8.0]), 1e-4)
    assert [r.step for r in recorder.rows()] == [0, 1, 2, 3]
    assert recorder.column("loss") == [0.5, 1.5, 2.5, 9.0]
    steps, columns = recorder.columns()
    assert steps == [0, 1, 2, 3]
    assert all(math.isnan(v) for v in columns["grad_norm:c"][:3])
    assert columns["grad_norm:c"][3] == 8.0
    assert columns["grad_norm"][3] == columns["max_grad_norm"][3] == 8.0


def test_totals_that_a_row_does_not_carry_are_worked_out_when_it_is_read():
    recorder = Recorder(8)
    recorder.set_columns(["loss", "grad_norm:a", "grad_norm:b"])
    recorder.append(0, torch.tensor([1.0, 3.0, 4.0]), 0.1)
    recorder.append(1, torch.tensor([1.0, 3.0, math.inf]), 0.1)
    rows = recorder.rows()
    assert (rows[0].grad_norm, rows[0].max_grad_norm) == (5.0, 4.0)
    assert rows[1].grad_norm == rows[1].max_grad_norm == math.inf


def test_two_optimizers_in_turn():
    recorder = Recorder(6)
    for i in range(20):
        name = "ab"[i % 2]
        recorder.set_columns(["loss", f"grad_norm:{name}"])
        recorder.append(i, torch.tensor([float(i), 1.0]), 0.1)
    assert recorder.column("loss") == [14.0, 15.0, 16.0, 17.0, 18.0, 19.0]
    assert len(recorder) == 6


def test_memory_stays_bounded_and_rows_right_whatever_the_columns_do():
    limit = 64 * 4 * 3
    recorder = Recorder(50, max_bytes=limit)
    for i in range(400):
        width = 1 + (i // 7) % 9
        recorder.set_columns([f"c{j}" for j in range(width)])
        recorder.append(i, torch.full((width,), float(i)), 0.1)
        assert recorder.nbytes <= limit
        assert len(recorder._tables) <= MOST_TABLES
        rows = recorder.columns()
        assert rows[0][-1] == i
        assert rows[1]["c0"] == [float(s) for s in rows[0]]
        assert len(recorder) == len(rows[0]) <= 50


def test_a_ring_that_is_done_with_gives_its_memory_back():
    recorder = Recorder(10, max_bytes=10 * 4 * 4)
    recorder.set_columns(["w", "x", "y", "z"])
    recorder.append(0, torch.zeros(4), None)
    recorder.set_columns(["a", "b", "c", "d"])
    for i in range(1, 40):
        recorder.append(i, torch.full((4,), float(i)), None)
    assert recorder.nbytes == 160
    assert recorder.column("a") == [float(i) for i in range(30, 40)]


@given(
    history=st.integers(1, 12),
    room=st.integers(1, 40),
    plan=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=12),
)
def test_it_always_holds_the_newest_rows_in_order(history: int, room: int, plan: list[tuple[str, int]]):
    recorder, step = Recorder(history, max_bytes=room * 8), 0
    for name, times in plan:
        recorder.set_columns(["value", name])
        for _ in range(times):
            recorder.append(step, torch.tensor([float(step), 0.0]), float(step))
            step += 1
    steps, columns = recorder.columns()
    assert steps == sorted(steps)
    assert len(steps) <= history
    assert columns.get("value", []) == columns["lr"] == [float(s) for s in steps]
    assert steps[-1:] == list(range(step))[-1:]


def test_doubles_are_kept_as_doubles_and_halves_exactly():
    recorder = Recorder(10)
    recorder.set_columns(["loss"])
    recorder.append(0, torch.tensor([1e300], dtype=torch.float64), 0.1)
    assert recorder.column("loss") == [1e300]
    half = Recorder(10)
    half.set_columns(["loss"])
    half.append(0, torch.tensor([65504.0], dtype=torch.float16), 0.1)
    assert half.column("loss") == [65504.0]


def test_it_can_move_to_another_device():
    recorder = filled(2)
    recorder.append(2, torch.zeros(4, device="meta"), 1e-3)
    assert len(recorder) == 3


class NoRead(TorchDispatchMode):
    """Refuses what would wait for the device; counts what runs."""

    REFUSED = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item")

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        devices = {a.device.type for a in args if isinstance(a, torch.Tensor)}
        assert name not in self.REFUSED and len(devices) <= 1, name
        self.calls.append(name)
        return func(*args, **(kwargs or {}))


def test_an_append_is_one_copy_and_reads_nothing():
    recorder = Recorder(8)
    values = torch.zeros(4, device="meta")  # a device whose values cannot be read at all
    with NoRead() as mode:
        recorder.set_columns(COLUMNS)
        recorder.append(0, values, 0.1)
        mode.calls.clear()
        for i in range(1, 20):
            recorder.set_columns(COLUMNS)
            recorder.append(i, values, 0.1, 2.0)
        assert mode.calls == ["copy_"] * 19
        # Changing columns moves rows about on the device, and reads nothing either.
        for i in range(40):
            recorder.set_columns([f"c{j}" for j in range(i % 3 + 1)])
            recorder.append(i, torch.zeros(i % 3 + 1, device="meta"), 0.1)


def test_reading_is_one_read_of_the_device():
    recorder = filled(20, history=8)
    recorder.set_columns(["loss"])
    recorder.append(20, torch.zeros(1), 0.1)
    reads = []

    class Reads(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in ("tolist", "item", "cpu", "to", "numpy"):
                reads.append(func)
            return func(*args, **(kwargs or {}))

    for read in (recorder.rows, recorder.history, lambda: recorder.column("loss")):
        reads.clear()
        with Reads():
            read()
        assert len(reads) == 1


def test_values_that_require_grad_leave_no_graph():
    recorder = Recorder(3)
    recorder.set_columns(["loss"])
    loss = torch.ones(1, requires_grad=True)
    for i in range(5):
        recorder.append(i, loss * i, 0.1)
    assert all(not table.ring.requires_grad for table in recorder._tables)
    assert recorder.column("loss") == [2.0, 3.0, 4.0]


def test_it_works_in_and_after_inference_mode():
    recorder = Recorder(4)
    recorder.set_columns(["loss"])
    with torch.inference_mode():
        recorder.append(0, torch.ones(1), 0.1)
    recorder.append(1, torch.ones(1), 0.1)
    with torch.inference_mode():
        recorder.append(2, torch.ones(1), 0.1)
        assert len(recorder.rows()) == 3


def test_later_changes_of_the_values_do_not_reach_the_ring():
    recorder = Recorder(4)
    recorder.set_columns(["loss"])
    values = torch.ones(1)
    recorder.append(0, values, 0.1)
    values.zero_()
    assert recorder.column("loss") == [1.0]


def test_history_is_arrays_that_say_what_was_recorded(tmp_path):
    recorder = filled(2)
    recorder.set_columns(["loss", "extra"])
    recorder.append(2, torch.tensor([math.nan, -math.inf]), None, 2.0)
    history = recorder.history()
    assert history.columns == (*COLUMNS, "extra", "lr", "loss_scale")
    assert len(history) == 3
    assert history.steps.dtype == np.int64
    np.testing.assert_array_equal(history.values["loss"], [0.5, 1.5, math.nan])
    np.testing.assert_array_equal(history.recorded["loss"], [True, True, True])
    np.testing.assert_array_equal(history.values["extra"], [math.nan, math.nan, -math.inf])
    np.testing.assert_array_equal(history.recorded["extra"], [False, False, True])
    history.to_csv(tmp_path / "run.csv")
    with open(tmp_path / "run.csv", newline="", encoding="utf-8") as file:
        table = list(csv.reader(file))
    assert table[0] == ["step", *history.columns]
    assert table[1] == ["0", "0.5", "1.0", "3.0", "0.0", "", "0.001", ""]
    assert table[3] == ["2", "nan", "", "", "", "-inf", "", "2.0"]


def test_an_empty_history():
    history = Recorder(3).history()
    assert (len(history), history.columns) == (0, ("lr", "loss_scale"))


def test_what_it_kept_is_what_the_sentences_need():
    recorder = Recorder(100)
    recorder.set_columns(["loss", "grad_norm:a.weight"])
    for i in range(40):
        rate = 1e-3 if i < 30 else 0.1
        norm = 2.0 ** max(0, i - 30)
        recorder.append(i, torch.tensor([1.0 if i < 39 else math.inf, norm]), rate)
    steps, columns = recorder.columns()
    assert before_sentences(columns, steps, layer="a") == (
        "gradient norm of a grew 2x per step since step 30, when the learning rate went from 0.001 to 0.1",
    )


@pytest.mark.parametrize("names", [["a", "a"], ["loss", "lr"], ["loss_scale"]])
def test_a_name_taken_twice_is_refused(names: list[str]):
    with pytest.raises(ValueError, match="each column needs its own name"):
        Recorder(3).set_columns(names)


def test_wrong_vectors_are_refused_and_leave_no_row():
    recorder = Recorder(3)
    with pytest.raises(ValueError, match=r"call set_columns\(\)"):
        recorder.append(0, torch.zeros(2), 0.1)
    recorder.set_columns(["loss"])
    # One value for several columns would be spread over them by broadcasting.
    with pytest.raises(ValueError, match="values has 2 entries for 1 columns"):
        recorder.append(0, torch.zeros(2), 0.1)
    assert len(recorder) == 0
    with pytest.raises(ValueError, match="history=0"):
        Recorder(0)


@pytest.mark.campaign
def test_an_append_costs_a_few_microseconds():
    recorder = Recorder(1000)
    recorder.set_columns([f"c{i}" for i in range(10)])
    values = torch.zeros(10)
    best = min(timeit.repeat(lambda: recorder.append(1, values, 0.1), number=20_000, repeat=5)) / 20_000
    assert best < 4e-6
