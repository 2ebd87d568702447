"""The tape by itself: tokens, what is needed, what is dropped, what is held."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from nan_detector._entries import Entry, Made, Outside, Packed, tensors_in, tokens_in
from nan_detector._errors import ReplayRefused
from nan_detector._tape import ALWAYS_HELD, Tape

Tensor = torch.Tensor
LARGE = ALWAYS_HELD  # floats: four times the bytes that are always kept


def call(tape: Tape, *args: Any, out: Any = None, kind: str = "call", writes: bool = False) -> Entry:
    entry = Entry(torch.add, tape.encode(args), {}, None, True, kind=kind, writes=writes)
    return tape.add(entry, out)


def test_a_tensor_has_one_token_and_what_an_entry_made_is_told_by_entry_and_position() -> None:
    tape, x = Tape(), torch.ones(2)
    assert tape.token(x) is tape.token(x)
    y, z = torch.ones(2), torch.ones(2)
    entry = call(tape, x, out=(y, {"z": z}))
    token = tape.token(z)
    assert isinstance(token, Made) and (token.entry, token.position) == (entry, 1)
    assert tape.made_by(y) is entry and tape.made_by(x) is None


def test_what_an_entry_made_is_not_kept_alive() -> None:
    tape, y = Tape(), torch.ones(2)
    call(tape, out=y)
    ref = weakref.ref(y)
    del y
    assert ref() is None


def test_a_token_with_the_id_of_a_dead_tensor_is_not_taken_for_another() -> None:
    tape = Tape()
    y = torch.ones(2)
    call(tape, out=y)
    ident = id(y)
    del y
    for _ in range(100):
        other = torch.zeros(2)
        if id(other) == ident:
            assert isinstance(tape.token(other), Outside)
            break


class Pair(NamedTuple):
    a: Tensor
    b: int


@dataclass
class Batch:
    x: Tensor
    n: int


@pytest.mark.parametrize("wrap", [
    lambda t: [t, 1], lambda t: (t, None), lambda t: {"x": [t]}, lambda t: Pair(t, 1), lambda t: Batch(t, 1),
    lambda t: OrderedDict(x=t),
])  # fmt: skip
def test_tensors_are_found_in_structures(wrap: Any) -> None:
    tape, x = Tape(), torch.ones(2)
    value = wrap(x)
    (token,) = tokens_in(tape.encode((value,)))
    assert isinstance(token, Outside) and token.value is x
    assert [t is x for t in tensors_in(value)] == [True]
    packed = tape.encode(value)
    if isinstance(packed, Packed):
        y = torch.zeros(2)
        again = packed.rebuild(lambda v: y if v is token else v)
        assert type(again) is type(value) and next(tensors_in(again)) is y


def test_a_gate_forgets_all_but_what_still_lives_with_gradients() -> None:
    tape, x = Tape(), torch.ones(2, requires_grad=True)
    y = x * 2
    first = call(tape, x, out=y)
    z = y.detach()
    call(tape, y, out=z)
    back = call(tape, y, kind="backward")
    assert tape.pending() == [back]
    tape.judged(keep_alive=True)
    assert tape.entries == [first] and tape.pending() == [] and tape.boundary == 3
    tape.judged(keep_alive=False)
    assert tape.entries == [] and tape.outside == {} and tape.held_bytes == 0


def test_what_lives_for_many_gates_is_forgotten() -> None:
    tape, x = Tape(), torch.ones(2, requires_grad=True)
    y = x * 2
    call(tape, x, out=y)
    for _ in range(8):
        tape.judged(keep_alive=True)
    assert len(tape.entries) == 1
    tape.judged(keep_alive=True)
    assert tape.entries == []


def test_needed_follows_what_was_made_and_what_was_written_into_it() -> None:
    tape, x, unrelated = Tape(), torch.ones(2), torch.ones(2)
    y, z = torch.ones(2), torch.ones(2)
    first = call(tape, x, out=y)
    write = call(tape, y, out=y, writes=True)
    other = call(tape, unrelated, out=unrelated, writes=True)
    outer = call(tape, x, writes=True)
    last = call(tape, y, out=z)
    assert tape.needed([last]) == {first, write, outer, last}
    assert other not in tape.needed([last])


def test_large_tensors_beyond_the_bound_are_held_weakly_and_that_is_said() -> None:
    tape = Tape()
    tape.max_held = 5 * LARGE
    a, b, small, weight = torch.ones(LARGE), torch.ones(LARGE), torch.ones(2), torch.nn.Parameter(torch.ones(LARGE))
    tokens = [tape.token(t) for t in (a, b, small, weight)]
    assert tape.held_bytes == 4 * LARGE + 8
    refs = [weakref.ref(t) for t in (a, b, small, weight)]
    del a, b, small, weight
    assert [r() is None for r in refs] == [False, True, False, False]
    assert [t.gone for t in tokens if isinstance(t, Outside)] == [False, True, False, False]
    assert tape.dropped == [f"tensors from outside the step beyond max_hold_bytes={5 * LARGE}"]
    assert isinstance(tokens[1], Outside) and not tokens[1].changed
    with pytest.raises(ReplayRefused, match="max_hold_bytes"):
        _ = tokens[1].tensor


def test_arguments_of_root_calls_are_held_whatever_their_size() -> None:
    tape, x = Tape(), torch.ones(LARGE)
    tape.max_held, tape.unbounded = 0, True
    token = tape.token(x)
    ref = weakref.ref(x)
    del x
    assert ref() is not None and isinstance(token, Outside) and not token.gone and not tape.dropped


def test_a_weak_token_stands_for_its_tensor_while_it_lives() -> None:
    tape, x = Tape(), torch.ones(LARGE)
    tape.max_held = 0
    token = tape.token(x)
    assert tape.token(x) is token and isinstance(token, Outside) and token.value is x
    x.add_(1)
    assert token.changed


def test_earlier_values_are_copied_once_within_the_bound() -> None:
    tape, x, big = Tape(), torch.ones(4), torch.ones(LARGE)
    token = tape.token(x)
    assert isinstance(token, Outside)
    tape.keep_earlier(token)
    x.add_(1)
    tape.keep_earlier(token)
    assert token.value.tolist() == [1.0] * 4 and not token.changed
    tape.max_held = 0
    large = tape.token(big)
    assert isinstance(large, Outside)
    tape.keep_earlier(large)
    assert large.snapshot is None and any("earlier values" in d for d in tape.dropped)


def test_forgetting_what_is_older_cuts_the_chain_behind_it() -> None:
    """A running sum made without gradients: each entry needs the one before."""
    tape, total = Tape(), torch.zeros(())
    refs = []
    for _ in range(20):
        x = torch.ones(3)
        refs.append(weakref.ref(x))
        call(tape, total, x, out=total)
    del x
    tape.forget_before(tape.entries[-3].number)
    assert len(tape.entries) == 3
    assert sum(r() is not None for r in refs) == 3


def test_a_step_of_too_many_calls_drops_the_oldest_and_says_which_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nan_detector._tape.MAX_ENTRIES", 10)
    tape, x = Tape(), torch.ones(2)
    call(tape, x, kind="backward")
    for _ in range(12):
        call(tape, x)
    assert len(tape.entries) <= 10 and tape.backwards == 0
    assert any("1 backward passes" in d for d in tape.dropped)


def test_weights_are_in_use_once_a_call_has_had_them() -> None:
    tape = Tape()
    call(tape, torch.ones(2))
    assert not tape.begun
    call(tape, torch.nn.Parameter(torch.ones(2)))
    assert tape.begun
    tape.judged(keep_alive=True)
    assert not tape.begun
    call(tape, torch.ones(2), kind="root")
    assert tape.begun
