"""Rules with numeric edges, held against torch at the very numbers beside them: what goes bad there is named."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from _births import born, traced
from nan_detector._diagnosis import diagnose

Tensor = torch.Tensor

#: Per function: its edges, and the cause below, at and above each; None where the value is finite.
EDGES: dict[str, list[tuple[float, str | None, str | None, str | None]]] = {
    "log": [(0.0, "log_of_negative", "log_of_zero", None)],
    "log2": [(0.0, "log_of_negative", "log_of_zero", None)],
    "log10": [(0.0, "log_of_negative", "log_of_zero", None)],
    "log1p": [(-1.0, "log_of_negative", "log_of_zero", None)],
    "logit": [(0.0, "log_of_negative", "log_of_zero", None), (1.0, None, "log_of_zero", "log_of_negative")],
    "sqrt": [(0.0, "sqrt_of_negative", None, None)],
    "rsqrt": [(0.0, "sqrt_of_negative", "division_by_zero", None)],
    "acos": [(-1.0, "outside_domain", None, None), (1.0, None, None, "outside_domain")],
    "asin": [(-1.0, "outside_domain", None, None), (1.0, None, None, "outside_domain")],
    "atanh": [
        (-1.0, "outside_domain", "boundary_of_domain", None),
        (1.0, None, "boundary_of_domain", "outside_domain"),
    ],
    "acosh": [(1.0, "outside_domain", None, None)],
    "erfinv": [
        (-1.0, "outside_domain", "boundary_of_domain", None),
        (1.0, None, "boundary_of_domain", "outside_domain"),
    ],
}


def named(op: str, inputs: list[Tensor], out: Tensor, **fields: object) -> str | None:
    """The code of what `op` made of `inputs`; None where all of it is finite."""
    if bool(torch.isfinite(out).all()):
        return None
    found, _ = diagnose(traced(born(op, inputs, out, **fields)))
    return None if found is None else found.code


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("op", EDGES)
def test_the_numbers_beside_an_edge(op: str, dtype: torch.dtype):
    for edge, *codes in EDGES[op]:
        at = torch.tensor(edge, dtype=dtype)
        numbers = [torch.nextafter(at, at - 1), at, torch.nextafter(at, at + 1)]
        said = [named(op, [n.reshape(1)], getattr(torch, op)(n).reshape(1)) for n in numbers]
        assert said == codes, edge


@pytest.mark.parametrize("op", EDGES)
@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=6))
def test_what_leaves_the_domain_is_always_named(op: str, values: list[float]):
    x = torch.tensor(values)
    said = named(op, [x], getattr(torch, op)(x))
    if said == "underflow_to_zero":  # a 0 beside the last numbers before it
        assert op == "rsqrt" and any(0 < abs(v) < 1e-28 for v in values)
    else:
        assert said in (None, *(code for _, *codes in EDGES[op] for code in codes))


@settings(max_examples=100, deadline=None)
@given(base=st.floats(-8, 8, width=32), exponent=st.sampled_from([-2.0, -0.5, 0.45, 0.5, 2.0, 3.0]))
def test_a_power_at_and_below_zero(base: float, exponent: float):
    x = torch.tensor([base])
    said = named("pow", [x], x.pow(exponent), args=(f"exponent={exponent}",))
    whole = exponent == int(exponent)
    if base < 0 and not whole:
        assert said == "pow_of_negative"
    elif base == 0 and exponent < 0:
        assert said == "pow_of_zero"
    elif said is not None:  # a tiny base to a negative power
        assert said == "overflow" and abs(base) < 1e-15


@settings(max_examples=100, deadline=None)
@given(above=st.floats(-1e3, 1e3, width=32), below=st.sampled_from([0.0, -0.0, 1.0, -2.0, 1e-30]))
def test_a_quotient_is_a_division_by_zero_exactly_where_the_divisor_is_zero(above: float, below: float):
    inputs = [torch.tensor([above]), torch.tensor([below])]
    said = named("div", inputs, inputs[0] / inputs[1])
    assert (said in ("division_by_zero", "underflow_to_zero")) == (below == 0)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 4), correction=st.integers(0, 3))
def test_a_deviation_needs_more_elements_than_its_correction(rows: int, correction: int):
    x = torch.arange(3.0 * rows).reshape(rows, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = x.std(0, correction=correction)
    said = named("std", [x], out, args=("dim=[0]", f"correction={correction}"), elementwise=False)
    assert (said == "std_of_one") == (not bool(torch.isfinite(out).all()))


@settings(max_examples=60, deadline=None)
@given(score=st.floats(-(2.0**120), 2.0**120, width=32), share=st.sampled_from([1.0, 0.5]))
def test_a_mask_value_overflows_only_with_something_large_below_zero(score: float, share: float):
    mask, scores = torch.tensor([torch.finfo(torch.float32).min * share]), torch.tensor([score])
    said = named("add", [scores, mask], scores + mask)
    assert said in (None, "mask_value_overflow")
    assert (said is None) == math.isfinite((scores + mask).item())


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.sampled_from([-math.inf, 0.0, 3.0]), min_size=2, max_size=4))
def test_a_softmax_is_fully_masked_where_every_logit_is(values: list[float]):
    x = torch.tensor([values])
    out = x.softmax(-1)
    said = named("softmax", [x], out, kind="intended_met", args=("dim=-1",), elementwise=False)
    assert said == ("softmax_fully_masked" if set(values) == {-math.inf} else None)
