"""The gate's numbers: what makes it look closer, and what an exact look then confirms."""

from __future__ import annotations

import math

import pytest
import torch

from nan_detector._gate import Suspicion, column_names, confirm, in_full, take

NAN, INF = float("nan"), float("inf")


def t(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["loss", "gradient", "nowhere"])
def test_one_bad_value_anywhere_is_suspicious(where: str, bad: float, many: bool) -> None:
    grads = [t(1.0, 2.0) for _ in range(100 if many else 3)]
    loss = torch.tensor(bad if where == "loss" else 1.0)
    if where == "gradient":
        grads[-1][1] = bad
    reading, extra = take(grads, [loss])
    assert reading.suspicious == (where != "nowhere")
    assert extra == []
    found = confirm([f"p{i}" for i in range(len(grads))], grads, [loss])
    assert bool(found) == (where != "nowhere")
    assert found.losses == ((0,) if where == "loss" else ())
    assert found.gradients == ((f"p{len(grads) - 1}",) if where == "gradient" else ())


@pytest.mark.parametrize("count", [1, 3, 100])
def test_norms_are_those_of_the_gradients(count: int) -> None:
    grads = [torch.full((4,), float(i + 1)) for i in range(count)]
    reading, _ = take(grads, [torch.tensor(2.5)])
    each = [2.0 * (i + 1) for i in range(count)]
    assert reading.loss == 2.5
    assert reading.total == pytest.approx(math.sqrt(sum(n * n for n in each)))
    assert reading.largest == pytest.approx(each[-1])
    assert reading.norms.tolist() == pytest.approx(each)
    assert reading.row.numel() == len(column_names([f"p{i}" for i in range(count)], True, reading.row.numel()))


def test_a_norm_beyond_its_dtype_is_looked_at_and_found_innocent() -> None:
    grads, loss = [t(1e30, 1e30)], torch.tensor(1.0)
    reading, _ = take(grads, [loss])
    assert reading.suspicious
    assert not confirm(["p"], grads, [loss])


@pytest.mark.parametrize("count", [2, 100])
@pytest.mark.parametrize("scale", [None, 4.0])
def test_norms_beyond_their_dtype_are_worked_out_once_they_are_known_to_be_finite(
    count: int, scale: float | None
) -> None:
    grads = [t(3e30, 4e30), *(t(3.0, 4.0) for _ in range(count - 1))]
    reading, _ = take(grads, [torch.tensor(1.0)])
    full, factor = in_full(reading, grads, scale), scale or 1.0
    assert full.loss == 1.0 and full.total == full.largest == pytest.approx(5e30 / factor)
    assert full.norms.tolist() == pytest.approx([5e30 / factor, *[5.0 / factor] * (count - 1)])
    assert not full.suspicious and full.row.shape == reading.row.shape and full.row.dtype == reading.row.dtype
    assert full.row[0] == 1.0 and full.row.isfinite().all()


def test_a_norm_that_no_float32_holds_is_a_number_all_the_same() -> None:
    grads = [torch.full((4,), 3e38)]
    reading, _ = take(grads, [torch.tensor(1.0)])
    assert in_full(reading, grads).largest == pytest.approx(6e38)
    ordinary, _ = take([t(1.0)], [torch.tensor(1.0)])
    assert in_full(ordinary, [t(1.0)]) is ordinary
    for bad in (NAN, INF):
        grads = [t(1e30), t(1.0, bad)]
        reading, _ = take(grads, [torch.tensor(1.0)])
        assert in_full(reading, grads) is reading and reading.suspicious


def test_several_losses_are_averaged_and_each_is_judged() -> None:
    losses = [torch.tensor(1.0), torch.tensor(NAN), torch.tensor(3.0)]
    reading, _ = take([t(1.0)], losses)
    assert reading.suspicious
    found = confirm(["p"], [t(1.0)], losses)
    assert found.losses == (1,) and math.isnan(found.loss or 0.0)
    healthy, _ = take([t(1.0)], [losses[0], losses[2]])
    assert healthy.loss == 2.0 and not healthy.suspicious


def test_without_gradients_or_without_a_loss() -> None:
    reading, _ = take([], [torch.tensor(INF)])
    assert reading.suspicious and reading.total is None and reading.largest is None
    reading, _ = take([t(3.0, 4.0)], [])
    assert not reading.suspicious and reading.loss is None and reading.total == 5.0
    reading, _ = take([], [])
    assert not reading.suspicious


def test_further_numbers_are_read_along() -> None:
    reading, extra = take([t(1.0)], [torch.tensor(1.0)], t(-INF, 7.0))
    assert extra == [-INF, 7.0] and not reading.suspicious


def test_a_complex_loss_and_a_loss_in_half_precision() -> None:
    reading, _ = take([t(1.0)], [torch.tensor(3.0 + 4.0j)])
    assert reading.loss == 5.0
    reading, _ = take([t(1.0)], [torch.tensor(NAN, dtype=torch.float16)])
    assert reading.suspicious


@pytest.mark.parametrize(
    "grad",
    [
        torch.tensor([1.0, NAN], dtype=torch.float16),
        torch.tensor([1.0, NAN], dtype=torch.bfloat16),
        torch.tensor([1.0, NAN], dtype=torch.float64),
        torch.tensor([1.0, complex(NAN, 0.0)], dtype=torch.complex64),
        torch.tensor([[1.0, NAN]]).to_sparse(),
        torch.tensor([NAN]).expand(3),
    ],
    ids=["half", "bfloat16", "double", "complex", "sparse", "expanded"],
)
def test_every_kind_of_gradient_is_judged(grad: torch.Tensor) -> None:
    grads = [t(1.0), grad]
    assert take(grads, [torch.tensor(1.0)])[0].suspicious
    assert confirm(["a", "b"], grads, []).gradients == ("b",)


def test_the_symptom_names_what_was_seen() -> None:
    assert Suspicion((0,), (), NAN).symptom() == "the loss is nan"
    assert Suspicion((), ("a", "b", "c", "d", "e"), 1.0).symptom() == "non-finite gradients of a, b, c and 2 more"
    assert Suspicion((0,), ("a",), INF).symptom() == "the loss is inf; non-finite gradients of a"
    assert not Suspicion() and Suspicion(hyper=object())
