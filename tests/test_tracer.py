"""The op tracer by itself: births, what carries them, what ends them, and what was meant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nan_detector._births import birth_of
from nan_detector._errors import ReplayRefused
from nan_detector._lineage import Gen, key_of
from nan_detector._op_values import set_version
from nan_detector._origin import is_silent, trace_of_line
from nan_detector._trace import BirthKind
from nan_detector._tracer import OpTracer

Tensor = torch.Tensor
NAN, INF = float("nan"), float("inf")


def traced(work: Callable[[], Any], **options: Any) -> tuple[OpTracer, Any]:
    tracer = OpTracer(**options)
    with tracer:
        out = work()
    return tracer, out


def guilty(tracer: OpTracer, out: Tensor) -> list[Gen]:
    return sorted((g for g in tracer.ancestry(out) if not g.intended), key=lambda g: g.order)


def ops(gens: list[Gen]) -> list[str]:
    return [g.record.info.op for g in gens]


def test_a_birth_is_carried_to_what_descends_from_it() -> None:
    x = torch.tensor([1.0, -1.0])
    tracer, out = traced(lambda: (torch.sqrt(x) * 2.0 + 1.0).sum())
    (gen,) = guilty(tracer, out)
    assert gen.record.info.op == "sqrt" and gen.guilty == 1 and gen.first_bad == (1,)
    assert [r.info.op for r in gen.passed] == ["mul", "add", "sum"]
    assert gen.inputs[0].at_guilty is not None and gen.inputs[0].at_guilty.min == -1.0


def test_what_is_finite_has_no_ancestry() -> None:
    x = torch.tensor([1.0, -1.0])
    tracer, out = traced(lambda: torch.where(x > 0, torch.sqrt(x), 0.0).sum())
    assert tracer.ancestry(out) == frozenset()
    (gen,) = tracer.births
    assert [r.info.op for r in gen.ended] == ["where"] and not is_silent(gen)


def test_the_first_of_two_births_comes_first() -> None:
    x = torch.tensor([-1.0])
    tracer, out = traced(lambda: torch.log(x) + torch.sqrt(x))
    assert ops(guilty(tracer, out)) == ["log", "sqrt"]
    assert birth_of(guilty(tracer, out)[0]).op == trace_of_line(tracer, tracer.ancestry(out)).birth.op == "log"


def test_an_element_whose_operands_are_finite_is_a_birth_of_its_own() -> None:
    a, b = torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 0.0])
    tracer, out = traced(lambda: torch.sqrt(a) / b)
    assert ops(guilty(tracer, out)) == ["sqrt", "div"]
    tracer, out = traced(lambda: torch.sqrt(a) / torch.ones(2))
    assert ops(guilty(tracer, out)) == ["sqrt"]


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (lambda x: x.masked_fill(x > 0, -INF), "softmax"),
        (lambda x: torch.full_like(x, -INF), "softmax"),
        (lambda x: torch.where(x > 0, torch.tensor(-INF), x.new_full((), -INF)), "softmax"),
    ],
)
def test_a_row_that_is_masked_whole_is_born_where_it_becomes_nan(make: Callable[[Tensor], Tensor], bad: str) -> None:
    x = torch.ones(1, 3)
    tracer, out = traced(lambda: torch.softmax(make(x), -1))
    (gen,) = guilty(tracer, out)
    assert gen.kind is BirthKind.INTENDED_MET and gen.record.info.op == bad


def test_a_mask_that_softmax_turns_into_zeros_is_no_birth() -> None:
    x = torch.ones(1, 3)
    tracer, out = traced(lambda: torch.softmax(x.masked_fill(torch.tensor([[True, False, False]]), -INF), -1))
    assert tracer.ancestry(out) == frozenset()
    assert all(g.intended for g in tracer.births)


def test_a_literal_nan_is_never_meant() -> None:
    x = torch.ones(3)
    tracer, out = traced(lambda: x.masked_fill(x > 0, NAN) * 2)
    (gen,) = guilty(tracer, out)
    assert gen.kind is BirthKind.CONSTANT and gen.record.info.op == "masked_fill"


def test_a_number_that_is_not_finite_is_a_constant() -> None:
    x = torch.ones(3)
    tracer, out = traced(lambda: x * NAN)
    assert [g.kind for g in guilty(tracer, out)] == [BirthKind.CONSTANT]


def test_a_number_that_was_read_from_a_bad_tensor_goes_on_with_it() -> None:
    x = torch.tensor([-1.0])
    tracer, out = traced(lambda: torch.ones(3) * torch.sqrt(x).sum().item())
    assert ops(guilty(tracer, out)) == ["sqrt"]


def test_uninitialised_memory_is_a_birth_only_where_it_is_used() -> None:
    x = torch.ones(3)
    torch.use_deterministic_algorithms(True)  # fills it with NaN
    try:
        tracer, out = traced(lambda: torch.empty(3).fill_(1.0) + x)
        used, bad = traced(lambda: torch.empty(3) + x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert guilty(tracer, out) == []
    (gen,) = guilty(used, bad)
    assert gen.record.info.op == "empty" and gen.note == "uninitialised memory"


def test_operations_that_return_nothing_are_judged_by_what_they_wrote() -> None:
    def work() -> Tensor:
        a, b = torch.ones(2) * 1.0, torch.ones(2) * -1.0
        torch._foreach_sqrt_([a, b])
        return a + b

    tracer, out = traced(work)
    assert ops(guilty(tracer, out)) == ["foreach_sqrt"]


@pytest.mark.parametrize("kind", [BirthKind.PARAMETER, BirthKind.BUFFER, BirthKind.INPUT, BirthKind.LABEL])
def test_what_comes_in_bad_is_a_source_and_comes_before_operations(kind: BirthKind) -> None:
    x = torch.tensor([NAN, -1.0])
    tracer, out = traced(
        lambda: (torch.sqrt(torch.tensor([-1.0])) + x).sum(), outside=lambda t: (kind, "x") if t is x else None
    )
    first = guilty(tracer, out)[0]
    assert first.kind is kind and first.name == "x" and birth_of(first).tensor_name == "x"
    assert birth_of(first).phase == ("data" if kind in (BirthKind.INPUT, BirthKind.LABEL) else "state")
    assert birth_of(first).location is None


def test_memory_that_nobody_knows_is_opaque() -> None:
    x = torch.tensor([NAN, 1.0])
    tracer, out = traced(lambda: x * 2)
    assert [g.kind for g in guilty(tracer, out)] == [BirthKind.OPAQUE]


def test_a_write_that_torch_does_not_see_is_found_at_the_next_use() -> None:
    def work() -> Tensor:
        y = torch.ones(3) * 2
        y.numpy()[1] = NAN
        return y * 3

    tracer, out = traced(work)
    (gen,) = guilty(tracer, out)
    assert gen.kind is BirthKind.OPAQUE and gen.first_bad == (1,)


def test_in_place_operations_are_judged_by_what_stood_there_before() -> None:
    def work() -> Tensor:
        y = torch.tensor([1.0, -4.0]) * 1.0
        y.sqrt_()
        return y.mul_(2.0)

    tracer, out = traced(work)
    (gen,) = guilty(tracer, out)
    assert gen.record.info.op == "sqrt" and gen.inputs[0].whole.min == -4.0


def test_overwriting_ends_a_line() -> None:
    def work() -> Tensor:
        y = torch.sqrt(torch.tensor([-1.0, -1.0]))
        y.copy_(torch.ones(2))
        y.fill_(INF)
        return torch.log(torch.zeros(2)) * 0 + 1 if False else y * 1.0

    tracer, out = traced(work)
    assert "sqrt" not in ops(guilty(tracer, out))


def test_the_derivative_is_told_by_its_forward_operation() -> None:
    x = torch.tensor([0.0, 4.0], requires_grad=True)
    tracer, _ = traced(lambda: (torch.sqrt(x) * 1.0).sum().backward())
    (gen,) = guilty(tracer, x.grad)
    born = birth_of(gen)
    assert (born.phase, born.op, born.derivative_of) == ("backward", "sqrt", "sqrt")
    assert born.forward_inputs[0].zero_count == 1
    assert born.location is not None and "torch.sqrt(x)" in (born.location.source_line or "")


def test_an_infinity_that_arithmetic_absorbs_is_silent_and_one_that_a_mask_drops_is_not() -> None:
    x = torch.tensor([1e30])
    tracer, _ = traced(lambda: 1.0 / (x * x))
    assert [is_silent(g) for g in tracer.births] == [True]
    tracer, _ = traced(lambda: torch.where(x > 0, x, x * x))
    assert [is_silent(g) for g in tracer.births] == [False]
    tracer, _ = traced(lambda: torch.tanh(1.0 / torch.zeros(1)))
    assert [is_silent(g) for g in tracer.births] == [False]  # a pole, no overflow
    tracer, _ = traced(lambda: torch.softmax(torch.cat([-(x * x), x]), 0))
    assert [is_silent(g) for g in tracer.births] == [False]  # weight 0, as a mask
    tracer, _ = traced(lambda: torch.exp((-x) * x))
    assert [is_silent(g) for g in tracer.births] == [False]  # the same, written by hand
    tracer, _ = traced(lambda: torch.exp(1.0 / (x * x)))
    assert [is_silent(g) for g in tracer.births] == [True]

    def both() -> Tensor:
        h = x * x
        return torch.where(x > 0, x, h) + 1.0 / h

    tracer, _ = traced(both)
    assert [is_silent(g) for g in tracer.births] == [False]  # the author knows: a mask looks after it


def test_views_carry_what_their_memory_holds() -> None:
    x = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
    tracer, (bad, good) = traced(lambda: torch.sqrt(x).unbind(0))
    assert ops(guilty(tracer, bad)) == ["sqrt"]
    assert tracer.ancestry(good) == frozenset()


def test_writes_into_foreign_memory_are_taken_back_with_their_versions() -> None:
    floats, whole, mask = torch.ones(4), torch.zeros(3, dtype=torch.long), torch.zeros(2, dtype=torch.bool)
    stats, count = torch.zeros(2), torch.zeros((), dtype=torch.long)
    view = floats[1:3]
    versions = [t._version for t in (floats, whole, mask, stats)]

    tracer = OpTracer()
    tracer.journal.protected = lambda key: True
    with tracer:
        view.mul_(5.0)
        floats.add_(1.0)
        whole.add_(3)
        mask.fill_(True)
        torch._foreach_add_([floats, stats], 1.0)
        torch.add(torch.ones(4), 1.0, out=floats)
        F.batch_norm(torch.rand(3, 2), stats, torch.ones(2), training=True)
        count.add_(1)
    assert floats.tolist() != [1.0] * 4
    tracer.journal.undo()
    assert floats.tolist() == [1.0] * 4 and whole.tolist() == [0] * 3 and mask.tolist() == [False] * 2
    assert stats.tolist() == [0.0, 0.0] and int(count) == 0
    assert [t._version for t in (floats, whole, mask, stats)] == versions
    assert not tracer.journal.kept


def test_memory_of_the_traces_own_is_not_copied() -> None:
    tracer = OpTracer()
    tracer.journal.protected = lambda key: True
    with tracer:
        y = torch.ones(4) * 2
        y.add_(1.0)
    assert not tracer.journal.kept


def test_what_is_only_read_is_not_copied() -> None:
    a, b = torch.ones(4), torch.ones(4)
    tracer = OpTracer()
    tracer.journal.protected = lambda key: True
    with tracer:
        a.add_(b)
    assert len(tracer.journal.kept) == 1


def test_leaves_are_shown_once_they_take_part_also_through_a_view() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []
    tracer = OpTracer(barrier=test_views_carry_what_their_memory_holds.__code__)
    tracer.on_leaf = seen.append
    with tracer:
        _ = (a * 2) + b.view(1, 2)
    assert any(t is a for t in seen) and any(t is b for t in seen)


def test_a_deadline_ends_the_trace() -> None:
    x = torch.ones(2)
    with pytest.raises(ReplayRefused, match="replay_budget_s"), OpTracer(deadline=0.0):
        for _ in range(200):
            x = x + 1


def test_talking_to_other_processes_is_refused() -> None:
    with pytest.raises(ReplayRefused, match="all_reduce"), OpTracer():
        torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "no such group")


def test_the_version_of_a_tensor_can_be_set() -> None:
    x = torch.ones(2)
    x.add_(1)
    set_version(x, 0)
    assert x._version == 0


def test_the_address_of_memory_that_was_made_and_freed_is_not_given_out_again() -> None:
    """A number that no operation makes (the NaN of ``g[0] = nan``) would else be taken for one of the trace's own."""

    def work() -> list[int]:
        x = torch.zeros(3)
        return [key_of(x + i) for i in range(50)]

    tracer, keys = traced(work)
    assert len(set(keys)) == 50 and tracer.own >= set(keys)
