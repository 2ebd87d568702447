"""The recording of one thread: what goes onto the tape, what does not, and how the mode leaves the stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from nan_detector._entries import Made, Outside
from nan_detector._rng import restore_rng, rng_state
from nan_detector._session import Session
from nan_detector._written_weights import is_worked_out, outside_behind, parameter_behind, targets_of

Tensor = torch.Tensor


@pytest.fixture
def recording() -> Iterator[Session]:
    session = Session()
    session.users = 1
    session.push()
    try:
        yield session
    finally:
        session.close()
        assert torch._C._len_torch_function_stack() == 0


def names(session: Session) -> list[str]:
    return [e.func.__name__ for e in session.tape.entries]


def test_calls_are_written_down_in_order_with_their_line(recording: Session) -> None:
    x = torch.ones(2)
    y = x * 2
    z = torch.sqrt(y)
    assert names(recording) == ["ones", "mul", "sqrt"]
    entry = recording.tape.entries[-1]
    assert entry.mark is not None and entry.mark.code.co_name == "test_calls_are_written_down_in_order_with_their_line"
    assert isinstance(entry.args[0], Made) and entry.args[0].entry is recording.tape.entries[1]
    assert recording.tape.made_by(z) is entry


def test_reading_a_property_is_not_written_down_but_a_bad_number_is(recording: Session) -> None:
    x = torch.tensor(float("nan"))
    before = len(recording.tape.entries)
    _ = x.shape, x.dim(), x.dtype, torch.ones(2).numel(), (x != x).item()
    assert "item" not in names(recording)[before:]
    float(x)
    assert recording.tape.entries[-1].scalar is not None
    count = len(recording.tape.entries)
    float(torch.ones(()))
    assert len(recording.tape.entries) == count + 1  # the ones, not the number


def test_a_call_that_raises_is_the_last_on_the_tape(recording: Session) -> None:
    with pytest.raises(RuntimeError):
        torch.ones(2) @ torch.ones(3)
    assert names(recording)[-1] in ("matmul", "__matmul__")


def test_nothing_is_written_down_while_it_is_off_or_paused(recording: Session) -> None:
    with recording.off():
        torch.ones(2) * 2
        assert torch._C._len_torch_function_stack() == 0
    recording.paused += 1
    torch.ones(2) * 2
    recording.paused -= 1
    assert names(recording) == []
    torch.ones(2)
    assert names(recording) == ["ones"]


def test_a_backward_keeps_the_value_of_its_loss(recording: Session) -> None:
    w = torch.ones(2, requires_grad=True)
    (w * 3).sum().backward()
    (pending,) = recording.tape.pending()
    assert [float(t) for t in pending.losses] == [6.0] and not pending.losses[0].requires_grad


def test_what_a_write_in_place_replaces_is_kept(recording: Session) -> None:
    with recording.off():
        x = torch.ones(4)
    x[:2].mul_(5.0)
    tokens = [t for t in recording.tape.outside.values() if t.stands_for(x)]
    assert len(tokens) == 1 and tokens[0].value.tolist() == [1.0] * 4


def test_random_calls_keep_the_stream(recording: Session) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = torch.rand(2), torch.rand(2, generator=generator)
    first, second = recording.tape.entries
    with recording.off():
        restore_rng(first.rng)
        assert torch.equal(torch.rand(2), a)
        ((g, state),) = second.generators
        g.set_state(state)
        assert torch.equal(torch.rand(2, generator=generator), b)


def test_custom_functions_and_vmapped_calls(recording: Session) -> None:
    x = torch.ones(3, requires_grad=True)
    with recording.off():
        mapped = torch.func.vmap(lambda t: t * 2)
    before = len(recording.tape.entries)
    mapped(x)
    assert all(
        not isinstance(e.args[0], Outside) or e.args[0].tensor.dim() == 1 for e in recording.tape.entries[before:]
    )


class Other(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_mode_is_taken_out_from_under_another(recording: Session) -> None:
    with Other() as other:
        assert not recording.pop()
        recording.close()
        assert torch._C._len_torch_function_stack() == 1
        assert torch._C._get_function_stack_at(0) is other


def test_a_call_that_a_mode_of_the_users_passes_on_stands_where_it_was_made(recording: Session) -> None:
    with Other():
        x = torch.ones(2) * 2
    entry = recording.tape.made_by(x)
    assert entry is not None and entry.mark is not None
    assert entry.mark.code.co_name == "test_a_call_that_a_mode_of_the_users_passes_on_stands_where_it_was_made"


def test_it_is_not_put_on_twice(recording: Session) -> None:
    recording.push()
    assert torch._C._len_torch_function_stack() == 1


def test_the_weights_behind_a_tensor(recording: Session) -> None:
    tape = recording.tape
    with recording.off():
        p, q = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        p.grad = torch.ones(4)
    data, view, grad, copy = p.data, p.data[1:3], p.grad, p.detach().clone()
    with recording.off():
        assert [parameter_behind(tape, t) is p for t in (p, p.detach(), data, view, grad, copy)] == [
            True, False, True, True, False, False,
        ]  # fmt: skip
        write, assign = torch.Tensor.mul_, torch.Tensor.grad.__set__
        made, out = torch.ones(2), {"out": q}
        assert targets_of(torch._foreach_mul_, ([p, q], 2.0), {}) == [p, q]
        assert targets_of(torch.mul, (p, 2.0), out) == [q]
        assert targets_of(assign, (p, None), {}) == []
        assert targets_of(torch.nn.init.normal_, (), {"tensor": p, "std": 1.0}) == [p]
        assert [outside_behind(tape, t) for t in (p, data, view, made)] == [p, p, p, made]
        assert outside_behind(tape, copy) is None
        assert targets_of(write, (grad, 2.0), {}) == [grad] and parameter_behind(tape, grad) is None
        assert [is_worked_out(tape, (p, t), {}) for t in (data, made, copy)] == [False, False, True]


def test_weights_written_before_the_step_uses_them_are_not_on_the_tape(recording: Session) -> None:
    with recording.off():
        p = nn.Parameter(torch.ones(4))
        x = torch.ones(4)
    with torch.no_grad():
        p.mul_(2.0)
        p.data.add_(1.0)
    assert "mul_" not in names(recording) and "add_" not in names(recording)
    _ = p * x
    with torch.no_grad():
        p.mul_(2.0)
    assert names(recording)[-1] == "mul_"
    token = recording.tape.outside[id(p)]
    assert token.value.tolist() == [3.0] * 4


def test_the_state_of_the_generators_is_a_round_trip() -> None:
    state = rng_state()
    a = torch.rand(3)
    restore_rng(state)
    assert torch.equal(torch.rand(3), a)
