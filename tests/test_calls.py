"""What kind of call a torch function is, and the facts about each operation."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from nan_detector._calls import CallKind, kind_of, kinds, public_name
from nan_detector._opinfo import info_of, plain_name

Tensor = torch.Tensor
aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "kind"),
    [
        (torch.Tensor.backward, CallKind.BACKWARD),
        (torch.autograd.backward, CallKind.BACKWARD),
        (torch.Tensor.add, CallKind.PLAIN),
        (torch.Tensor.add_, CallKind.IN_PLACE),
        (torch.Tensor.__iadd__, CallKind.IN_PLACE),
        (torch.Tensor.__setitem__, CallKind.IN_PLACE),
        (torch._foreach_add_, CallKind.IN_PLACE),
        (torch.Tensor.__invert__, CallKind.PLAIN),
        (torch.Tensor.grad.__get__, CallKind.PLAIN),
        (torch.Tensor.grad.__set__, CallKind.IN_PLACE),
        (torch.Tensor.data.__set__, CallKind.IN_PLACE),
        (torch.Tensor.shape.__get__, CallKind.IGNORE),
        (torch.Tensor.size, CallKind.IGNORE),
        (torch.Tensor.requires_grad_, CallKind.STATE),
        (torch.rand_like, CallKind.RANDOM),
        (F.dropout, CallKind.RANDOM),
        (torch.Tensor.normal_, CallKind.RANDOM),
        (F.scaled_dot_product_attention, CallKind.RANDOM),
    ],
)
def test_the_kind_of_a_call(func: Any, kind: CallKind) -> None:
    assert kind_of(func) is kind
    assert kind_of(func) is kind  # looked up


def test_a_callable_that_cannot_be_looked_up_is_plain() -> None:
    class Unhashable:
        __hash__ = None

        def __call__(self) -> None: ...

    assert kind_of(Unhashable()) is CallKind.PLAIN


class Holder:
    """What a library makes for a call of its own, with a batch in it."""

    def double(self) -> None: ...


def in_a_closure(held: Any) -> Any:
    def double_() -> Any:
        return held

    return double_


@pytest.mark.parametrize(
    ("made_of", "kind"),
    [
        (in_a_closure, CallKind.IN_PLACE),
        (lambda held: held.double, CallKind.PLAIN),
        (lambda held: functools.partial(print, held), CallKind.PLAIN),
    ],
)
def test_what_is_made_on_the_spot_is_not_kept(made_of: Callable[[Any], Any], kind: CallKind) -> None:
    held = Holder()
    gone = weakref.ref(held)
    func = made_of(held)
    assert kind_of(func) is kind
    assert kind_of(func) is kind
    del held, func
    assert gone() is None


def test_torchs_own_functions_are_kept_closures_among_them() -> None:
    closures = [f for f in vars(F).values() if getattr(f, "__closure__", None) and f.__module__.startswith("torch")]
    assert closures
    for func in (*closures, torch.add, torch.Tensor.add, torch.Tensor.grad.__get__):
        kind_of(func)
        assert func in kinds


def test_not_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    most = len(kinds) + 3
    monkeypatch.setattr("nan_detector._calls.MOST", most)
    for i in range(20):
        made = types.FunctionType(kind_of.__code__, {}, f"made_{i}")
        assert kind_of(made) is CallKind.PLAIN
        assert len(kinds) <= most
    assert kind_of(torch.Tensor.add_) is CallKind.IN_PLACE


@pytest.mark.parametrize(
    ("func", "name"),
    [
        (torch.Tensor.__truediv__, "div"),
        (torch.Tensor.__rsub__, "sub"),
        (torch.Tensor.__imul__, "mul"),
        (torch.Tensor.sqrt_, "sqrt"),
        (torch.Tensor.grad.__get__, "grad"),
        (F.cross_entropy, "cross_entropy"),
    ],
)
def test_the_name_a_user_knows(func: Any, name: str) -> None:
    assert public_name(func) == name


@pytest.mark.parametrize(
    ("func", "facts"),
    [
        (aten._softmax.default, {"op": "softmax", "mask_aware": True, "mutates": False, "is_view": False}),
        (aten.sqrt_.default, {"op": "sqrt", "mutates": True, "written": ((0, "self"),), "pointwise": True}),
        (aten.add.out, {"op": "add", "mutates": True, "written": ((3, "out"),)}),
        (aten._foreach_mul_.Scalar, {"mutates": True, "written": ((0, "self"),)}),
        (aten.native_batch_norm.default, {"mutates": True, "writes_statistics": True, "contracts": True}),
        (aten.view.default, {"is_view": True, "written": ()}),
        (aten.empty.memory_format, {"uninitialised": True}),
        (aten.new_empty.default, {"uninitialised": True}),
        (aten.full.default, {"literal": True, "uninitialised": False}),
        (aten.masked_fill.Scalar, {"literal": True, "selects": True}),
        (aten.where.self, {"literal": True, "selects": True, "pointwise": True}),
        (aten.mm.default, {"contracts": True, "pointwise": False}),
        (aten.rsqrt.default, {"absorbs": True, "selects": False}),
        (aten.copy_.default, {"overwrites": True}),
        (aten.sum.dim_IntList, {"reduction": True}),
    ],
)
def test_the_facts_about_an_operation(func: Any, facts: dict[str, Any]) -> None:
    info = info_of(func)
    assert {k: getattr(info, k) for k in facts} == facts
    assert info_of(func) is info


def test_statistics_are_what_batch_norm_writes() -> None:
    assert [n for _, n in info_of(aten.native_batch_norm.default).written] == ["running_mean", "running_var"]


@pytest.mark.parametrize(
    ("full", "plain"), [("aten::_softmax", "softmax"), ("aten::sqrt_", "sqrt"), ("aten::__ior__", "ior")]
)
def test_plain_names(full: str, plain: str) -> None:
    assert plain_name(full) == plain
