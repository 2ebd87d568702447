"""Finite checks against NumPy, for every dtype and layout, and unseen by the run that they look into."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nan_detector import _finite
from nan_detector._finite import (
    bad_column,
    bad_mask,
    bad_rows,
    checkable,
    first_bad_index,
    is_finite,
    norms,
    pack,
    quiet,
    read,
    scalar,
    stats,
    stats_where,
)

NAN, INF = math.nan, math.inf
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def special(dtype: torch.dtype) -> list[float]:
    """The edges of a dtype: largest, least normal, least subnormal, and what is no number."""
    info = torch.finfo(dtype)
    least = torch.tensor(info.smallest_normal, dtype=dtype) * info.eps
    edges = [info.max, info.min, info.smallest_normal, least.item(), 0.0, -0.0, 1.0, -1.5, math.sqrt(info.max)]
    return [*edges, NAN, INF, -INF]


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = FLOATS, finite: bool = False) -> torch.Tensor:
    """Tensors of 0 to 3 dimensions, empty ones, large enough for vector code, in every kind of stride."""
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple) | st.sampled_from([(67,), (3, 40), (2, 3, 17)]))
    edges = [v for v in special(dtype) if math.isfinite(v) or not finite]
    width = {torch.float16: 16, torch.bfloat16: 32, torch.float32: 32, torch.float64: 64}[dtype]
    few = st.sampled_from(edges) | st.floats(width=width, allow_nan=False, allow_infinity=False)
    values = draw(st.lists(few, min_size=1, max_size=12))
    at = draw(st.integers(0, 200))
    n = math.prod(shape)
    t = torch.ones(n, dtype=torch.float64)
    for i, v in enumerate(values[:n]):
        t[(at + 7 * i) % n] = v
    t = t.to(dtype)
    if finite:
        t = torch.where(t.isfinite(), t, torch.ones((), dtype=dtype))  # bfloat16 rounds the largest float32 to inf
    t = t.reshape(shape)
    how = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "offset", "flipped"]))
    if how == "transposed" and t.dim() >= 2:
        return t.transpose(0, -1)
    if how == "strided" and t.dim() >= 1:
        return torch.stack([t, torch.full_like(t, NAN)], -1)[..., 0]  # its neighbours in memory are NaN
    if how == "expanded":
        return t.unsqueeze(0).expand(3, *t.shape)
    if how == "offset" and n:
        return torch.cat([torch.full((1,), INF, dtype=dtype), t.flatten()])[1:].view(t.shape)
    return t


def as_numpy(t: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(t.detach().to(torch.float64).tolist(), dtype=np.float64).reshape(t.shape)


# ------------------------------------------------------------------------------------------------ against NumPy


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([[NAN, 1.0], [INF, 2.0]], 0),
        ([[1.0, NAN], [2.0, 3.0]], None),  # one value is no column
        ([[1.0, NAN], [NAN, 3.0]], None),
        ([[1.0, 2.0], [3.0, 4.0]], None),
        ([[NAN], [NAN]], None),
        ([NAN, NAN], None),
    ],
)
def test_a_bad_column_holds_all_of_several_bad_values(rows: list[object], found: int | None):
    assert bad_column(torch.tensor(rows)) == found


@given(tensors())
def test_is_finite_and_masks_agree_with_numpy(t: torch.Tensor):
    a = as_numpy(t)
    bad = ~np.isfinite(a)
    assert checkable(t) is (a.size > 0)
    assert is_finite(t) is (not bad.any())
    mask = bad_mask(t)
    assert mask.dtype is torch.bool and mask.shape == t.shape
    assert np.array_equal(mask.numpy(), bad)
    where = np.argwhere(bad)
    assert first_bad_index(t) == (tuple(where[0]) if len(where) else ())
    rows = np.unique(where[:, 0]) if t.dim() and len(where) else np.array([], dtype=int)
    assert bad_rows(t) == tuple(rows[:32])
    assert bad_rows(t, limit=1) == tuple(rows[:1])


@given(tensors())
def test_stats_agree_with_numpy(t: torch.Tensor):
    check_stats(stats(t), t, tuple(t.shape))


@given(tensors(), st.integers(0, 2**32))
def test_stats_of_chosen_elements_agree_with_numpy(t: torch.Tensor, seed: int):
    mask = torch.rand(t.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    chosen = torch.tensor(as_numpy(t)[mask.numpy()], dtype=t.dtype)
    check_stats(stats_where(t, mask), chosen, (int(mask.sum()),))


def check_stats(found: Any, t: torch.Tensor, shape: tuple[int, ...]) -> None:
    a = as_numpy(t)
    finite = a[np.isfinite(a)]
    nonzero = np.abs(finite[finite != 0])
    assert (found.shape, found.dtype, found.device) == (shape, str(t.dtype), "cpu")
    assert found.nan_count == np.isnan(a).sum()
    assert found.posinf_count == (a == INF).sum()
    assert found.neginf_count == (a == -INF).sum()
    assert found.zero_count == (a == 0).sum()
    assert found.negative_count == (a < 0).sum()
    assert found.min == (finite.min() if finite.size else None)
    assert found.max == (finite.max() if finite.size else None)
    assert found.min_nonzero == (nonzero.min() if nonzero.size else None)
    if finite.size:
        exact = float(sum(map(Fraction, finite.tolist()), Fraction()) / finite.size)
        assert found.mean == pytest.approx(exact, rel=1e-9, abs=1e-12 * np.abs(finite).max())
    else:
        assert found.mean is None


@given(st.lists(tensors(), min_size=1, max_size=6))
def test_norms_agree_with_numpy(grads: list[torch.Tensor]):
    check_norms(grads)


@given(st.lists(tensors((torch.float32,), finite=True), min_size=1, max_size=4), st.integers(8, 20))
def test_norms_of_many_tensors_agree_with_numpy(some: list[torch.Tensor], times: int):
    # Enough tensors of one shape that the small ones are stacked.
    check_norms([t * (1 if i % 2 else 0.5) for i in range(times) for t in some] + [torch.ones(3)] * 32)


def check_norms(grads: list[torch.Tensor]) -> None:
    found = norms(grads)
    assert found.shape == (len(grads),)
    assert found.dtype is (torch.float64 if any(g.dtype is torch.float64 for g in grads) else torch.float32)
    for norm, g in zip(found.tolist(), grads, strict=True):
        a = as_numpy(g)
        if not np.isfinite(a).all():
            assert not math.isfinite(norm)
            continue
        with np.errstate(over="ignore"):
            exact = float(
                np.linalg.norm((a / 1e160).ravel()) * 1e160
                if np.abs(a).max(initial=0) > 1e150
                else np.linalg.norm(a.ravel())
            )
        limit = 1e150 if g.dtype is torch.float64 else 1e18
        if exact > limit:  # squares overflow: a false alarm is allowed, a wrong number is not
            assert norm == INF or norm == pytest.approx(exact, rel=1e-3)
        elif 0 < exact < 1 / limit:
            assert 0 <= norm <= exact * 1.001
        else:
            assert norm == pytest.approx(exact, rel=1e-3)


# ------------------------------------------------------------------------------------------------ every kind of tensor


@dataclass(frozen=True)
class Kind:
    """A tensor that is not an ordinary one, and what is to be said about it."""

    make: Callable[[], torch.Tensor]
    checkable: bool
    finite: bool
    bad: tuple[int, ...] = ()  # index of the first bad element


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def sharded() -> torch.Tensor:
    """Something like a distributed tensor: the local part is an attribute, and operations on the whole are refused."""

    class Sharded(torch.Tensor):
        _local_tensor: torch.Tensor

        @classmethod
        def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} on the whole tensor would wait for the other ranks")

    whole = torch.Tensor._make_wrapper_subclass(Sharded, (4, 2), dtype=torch.float32)
    whole._local_tensor = torch.tensor([[1.0, 2.0], [NAN, 4.0]])
    return whole


def pairs(*values: complex, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


KINDS = {
    "empty": Kind(lambda: torch.empty(0, 3), False, True),
    "integers": Kind(lambda: torch.arange(3), False, True),
    "bools": Kind(lambda: torch.tensor([True, False]), False, True),
    "meta": Kind(lambda: torch.ones(3, device="meta"), False, True),
    "fake": Kind(fake, False, True),
    "zero tensor": Kind(lambda: torch._efficientzerotensor((3,)), False, True),
    "quantised": Kind(lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), False, True),
    "nested": Kind(lambda: torch.nested.nested_tensor([torch.ones(2), torch.tensor([NAN])]), False, True),
    "jagged": Kind(lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), False, True),
    "complex": Kind(lambda: pairs(1 + 2j, complex(1, -INF)), True, False, (1,)),
    "complex, finite": Kind(lambda: pairs(1 + 2j, -3j), True, True),
    "conjugate": Kind(lambda: pairs(1 + 2j, complex(NAN, 0)).conj(), True, False, (1,)),
    "half complex": Kind(lambda: pairs(1 + 2j, complex(0, INF)).to(torch.complex32), True, False, (1,)),
    "negative view": Kind(lambda: pairs(1 + 2j, complex(0, INF)).conj().imag, True, False, (1,)),
    "coo": Kind(lambda: torch.tensor([[0, INF], [1, 0]]).to_sparse(), True, False, (0, 1)),
    "coo, finite": Kind(lambda: torch.eye(3).to_sparse(), True, True),
    "coo, nothing stored": Kind(lambda: torch.zeros(3, 2).to_sparse(), True, True),
    "coo, uncoalesced": Kind(
        lambda: torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([1.0, NAN]), (3,), check_invariants=False),
        True,
        False,
        (1,),
    ),
    "coo, rows": Kind(lambda: torch.tensor([[0, 0], [1, NAN]]).to_sparse(1), True, False, (1, 1)),
    "csr": Kind(lambda: torch.tensor([[0, 1.0], [-INF, 0]]).to_sparse_csr(), True, False, (1, 0)),
    "csc": Kind(lambda: torch.tensor([[0, 1.0], [NAN, 0]]).to_sparse_csc(), True, False, (1, 0)),
    "bsr": Kind(lambda: torch.tensor([[0, 1.0], [NAN, 0]]).to_sparse_bsr((1, 1)), True, False, (1, 0)),
    "e4m3fn": Kind(lambda: torch.tensor([1.0, NAN]).to(torch.float8_e4m3fn), True, False, (1,)),
    "e5m2": Kind(lambda: torch.tensor([1.0, INF]).to(torch.float8_e5m2), True, False, (1,)),
    "e5m2, finite": Kind(lambda: torch.tensor([1.0, 2.0]).to(torch.float8_e5m2), True, True),
    "sharded": Kind(sharded, True, False, (1, 0)),
    "parameter": Kind(lambda: torch.nn.Parameter(torch.tensor([1.0, NAN])), True, False, (1,)),
}
if torch.backends.mkldnn.is_available():
    KINDS["mkldnn"] = Kind(lambda: torch.tensor([[0, 1.0], [NAN, 0]]).to_mkldnn(), True, False, (1, 0))


@pytest.fixture(params=KINDS, name="kind")
def any_kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def make(kind: Kind) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sparse rows, nested tensors: "in beta"
        return kind.make()


def test_every_kind_of_tensor_is_judged(kind: Kind):
    t = make(kind)
    assert checkable(t) is kind.checkable
    assert is_finite(t) is kind.finite
    assert first_bad_index(t) == kind.bad
    assert bad_rows(t) == kind.bad[:1]
    found = stats(t)
    assert (found.bad_count > 0) is (not kind.finite)
    assert found.dtype == str(t.dtype)
    assert stats_where(t, torch.ones((), dtype=torch.bool)).bad_count == found.bad_count


def test_every_kind_has_a_mask(kind: Kind):
    t = make(kind)
    mask = bad_mask(t)
    assert mask.dtype is torch.bool and mask.layout is torch.strided
    if not mask.is_meta and type(t) is torch.Tensor:
        assert bool(mask.any()) is (not kind.finite)


def test_every_kind_has_a_norm_beside_ordinary_ones(kind: Kind):
    t = make(kind)
    grads = [torch.full((2,), 3.0), *([t] * 2), torch.full((4,), 2.0)]
    found = norms(grads).tolist()
    assert (found[0], found[3]) == (pytest.approx(math.sqrt(18)), 4.0)
    assert math.isfinite(found[1]) is kind.finite
    if not kind.checkable:
        assert found[1] == 0.0


def test_statistics_of_what_is_not_a_float():
    found = stats(torch.tensor([-3, 0, 5]))
    assert (found.min, found.max, found.mean, found.min_nonzero) == (-3.0, 5.0, pytest.approx(2 / 3), 3.0)
    assert (found.zero_count, found.negative_count, found.dtype, found.shape) == (1, 1, "torch.int64", (3,))
    found = stats(torch.tensor([[True, False]]))
    assert (found.min, found.max, found.mean, found.zero_count, found.shape) == (0.0, 1.0, 0.5, 1, (1, 2))
    assert isinstance(found.min, float)


def test_statistics_of_complex_are_of_components():
    found = stats(pairs(1 - 2j, complex(NAN, INF)))
    assert (found.min, found.max, found.nan_count, found.posinf_count, found.negative_count) == (-2.0, 1.0, 1, 1, 1)
    assert found.shape == (2,)
    assert stats_where(pairs(1 - 2j, complex(NAN, INF)), torch.tensor([True, False])).shape == (1,)


def test_a_mean_does_not_overflow():
    assert stats(torch.full((1000,), 65504.0, dtype=torch.float16)).mean == 65504.0
    assert stats(torch.full((1000,), 3.4e38, dtype=torch.float32)).mean == pytest.approx(3.4e38)
    assert stats(torch.full((1000,), 1.7e308, dtype=torch.float64)).mean == pytest.approx(1.7e308)


def test_a_large_tensor_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_finite, "_CHUNK", 8)
    t = torch.arange(-30.0, 60.0).reshape(3, 5, 6)
    t[1, 2, 3], t[2, 4, 5] = NAN, INF
    for view in (t, t.transpose(0, 2), t[:, ::2], t.unsqueeze(0).expand(2, -1, -1, -1)):
        sizes = [piece.numel() for piece in _finite._pieces(view)]
        assert max(sizes) <= 8 and sum(sizes) == view.numel() and len(sizes) > 1
        check_stats(stats(view), view, tuple(view.shape))


def test_the_mean_of_pieces_does_not_overflow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_finite, "_CHUNK", 8)
    # Each piece's sum is finite; that of all is not.
    assert stats(torch.full((80,), 1e307, dtype=torch.float64)).mean == pytest.approx(1e307)
    assert stats(torch.tensor([1.7e308] * 16 + [-1.7e308] * 16, dtype=torch.float64)).mean == 0.0


def test_a_mask_is_broadcast_like_an_operand():
    bias = torch.tensor([1.0, -1.0, 0.0])
    mask = torch.tensor([[True, False, True], [False, False, True]])
    found = stats_where(bias, mask)
    assert (found.shape, found.zero_count, found.max) == ((3,), 2, 1.0)
    column = torch.tensor([[True], [False]])
    assert stats_where(torch.ones(2, 3), column).shape == (3,)


def test_a_mask_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"mask of shape \(2,\) does not fit a tensor of shape \(3,\); give one that"):
        stats_where(torch.ones(3), torch.tensor([True, False]))


def test_scalars():
    assert scalar(torch.tensor([[2.5]])) == 2.5
    assert math.isnan(scalar(torch.tensor(NAN, dtype=torch.bfloat16)))
    assert scalar(torch.tensor(3)) == 3.0 and isinstance(scalar(torch.tensor(3)), float)
    assert scalar(torch.tensor(3 + 4j)) == 5.0
    assert scalar(torch.tensor(2.0).to(torch.float8_e5m2)) == 2.0
    with pytest.raises(ValueError, match=r"a tensor of shape \(2,\) has no single value; give one with one element"):
        scalar(torch.ones(2))


def test_a_tensor_like_that_cannot_sum_is_not_judged():
    class Odd(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise NotImplementedError(f"{func} is not for this tensor")

    odd = torch.Tensor._make_wrapper_subclass(Odd, (2,), dtype=torch.float32)
    assert is_finite(odd)


def test_only_the_asked_rows_are_named():
    t = torch.zeros(100, 2)
    t[::2, 1] = NAN
    assert bad_rows(t) == tuple(range(0, 64, 2))
    assert bad_rows(t, limit=3) == (0, 2, 4)


# ------------------------------------------------------------------------------------------------ norms and packing


def test_norms_of_nothing():
    found = norms([])
    assert found.shape == (0,) and found.dtype is torch.float32


def test_a_half_does_not_overflow_and_a_double_is_not_narrowed():
    half = norms([torch.full((100,), 60000.0, dtype=torch.float16)])
    assert half.tolist() == [pytest.approx(600_000, rel=1e-3)]
    double = norms([torch.ones(2), torch.full((4,), 1e100, dtype=torch.float64), torch.ones(1, dtype=torch.float16)])
    assert double.tolist() == [pytest.approx(math.sqrt(2)), pytest.approx(2e100), 1.0]


def test_gradients_of_equal_size_and_other_shape_do_not_mix():
    first = [torch.full((2, 6), float(i)) for i in range(40)]
    second = [torch.full((2, 6) if i % 3 else (12,), float(i)) for i in range(40)]  # the same plan, which cannot hold
    for grads in (first, second, first):
        assert norms(grads).tolist() == pytest.approx([i * math.sqrt(12) for i in range(40)], rel=1e-5)


def test_norms_keep_the_order_of_their_gradients():
    sizes = [3, 5000, 7, 3, 20000, 0, 3, 7, 1] * 12
    grads = [torch.full((n,), float(i + 1)) for i, n in enumerate(sizes)]
    expected = [(i + 1) * math.sqrt(n) for i, n in enumerate(sizes)]
    assert norms(grads).tolist() == pytest.approx(expected, rel=1e-4)
    grads[58] = grads[58].to_sparse()
    grads[60] = grads[60].double()
    assert norms(grads).tolist() == pytest.approx(expected, rel=1e-4)


def test_norms_run_without_a_read_on_a_device_that_has_none():
    grads = [torch.ones(n % 5 + 1, device="meta") for n in range(50)]
    found = norms(grads)
    assert found.is_meta and found.shape == (50,)
    assert pack([found, torch.ones((), device="meta")]).shape == (51,)


def test_gradients_on_other_devices_are_taken_along():
    found = norms([torch.full((4,), 2.0), torch.ones(3, device="meta")])
    assert found.device.type == "cpu" and found.tolist() == [4.0, 0.0]


@given(st.lists(tensors(), max_size=5))
def test_pack_and_read_keep_every_value(parts: list[torch.Tensor]):
    expected = [v for part in parts for v in as_numpy(part).ravel().tolist()]
    assert np.array_equal(read(pack(parts)), expected, equal_nan=True)


def test_pack_takes_complex_apart():
    assert read(pack([torch.tensor(1 + 2j), torch.tensor(3.0)])) == [1.0, 2.0, 3.0]


# ------------------------------------------------------------------------------------------------ unseen

MASK = torch.tensor([True, False, True])
USES: dict[str, Callable[[torch.Tensor], object]] = {
    "checkable": checkable,
    "is_finite": is_finite,
    "bad_mask": bad_mask,
    "stats": stats,
    "stats_where": lambda t: stats_where(t, MASK),
    "first_bad_index": first_bad_index,
    "bad_column": bad_column,
    "bad_rows": bad_rows,
    "scalar": lambda t: scalar(t[:1]) if not t.requires_grad else scalar(t.detach()[:1]),
    "norms": lambda t: norms([t, t]),
    "norms of many": lambda t: norms([t] * 40),
    "norms of a mixture": lambda t: norms([t, COMPLEX]),
    "pack": lambda t: read(pack([t, t])),
}
COMPLEX = torch.tensor([1 + 2j])
BAD = (1.0, NAN, INF)


@pytest.fixture(params=USES, name="use")
def any_use(request: pytest.FixtureRequest) -> Callable[[torch.Tensor], object]:
    return USES[request.param]


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in USES if name != "scalar"])  # whose lambda itself slices
@pytest.mark.parametrize("mode", [Functions, Dispatched])
def test_no_mode_sees_it(name: str, mode: Callable[[], Any]):
    t = torch.tensor(BAD)
    with mode() as watching, mode() as outer:
        USES[name](t)
        seen = list(watching.seen), list(outer.seen)
        torch.exp(t)  # both are in force again
    assert seen == ([], [])
    assert len(watching.seen) == len(outer.seen) == 1


def test_scalar_is_seen_by_no_mode():
    t = torch.ones(1)
    with Functions() as functions, Dispatched() as dispatched:
        scalar(t)
        seen = list(functions.seen), list(dispatched.seen)
    assert seen == ([], [])


def test_no_subclass_sees_it(use: Callable[[torch.Tensor], object]):
    seen: list[str] = []

    class Logged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return super().__torch_function__(func, kinds, args, kwargs or {})

    t = torch.tensor(BAD).as_subclass(Logged)
    seen.clear()
    with torch._C.DisableTorchFunctionSubclass():  # for the slicing in the test's own code
        use(t)
    assert seen == []


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_about_the_tensor_or_the_run_changes(use: Callable[[torch.Tensor], object], enabled: bool):
    t = torch.tensor(BAD, requires_grad=True)
    bits = t.detach().clone().view(torch.int32)
    version, rng = t._version, torch.get_rng_state()
    with torch.set_grad_enabled(enabled):
        out = use(t)
        assert torch.is_grad_enabled() is enabled
    assert t._version == version and t.grad is None
    assert torch.equal(t.detach().view(torch.int32), bits)
    assert torch.equal(torch.get_rng_state(), rng)
    if isinstance(out, torch.Tensor):
        assert not out.requires_grad


def test_it_works_in_inference_mode(use: Callable[[torch.Tensor], object]):
    outside = torch.tensor(BAD)
    with torch.inference_mode():
        inside = torch.tensor(BAD)
        found, other = use(inside), use(outside)
        assert torch.is_inference_mode_enabled()
    late = use(inside)
    for result in (other, late):
        same = (
            torch.equal(torch.nan_to_num(found), torch.nan_to_num(result)) if isinstance(found, torch.Tensor) else None
        )
        assert same or repr(found) == repr(result)


def test_it_works_under_a_default_device_and_autocast(use: Callable[[torch.Tensor], object]):
    t = torch.tensor(BAD)
    expected = repr(use(t))
    with torch.device("meta"), torch.autocast("cpu", dtype=torch.bfloat16):
        found = repr(use(t))
    assert found == expected


def test_what_is_inside_a_transform_is_left_alone():
    seen: list[tuple[bool, bool, int]] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        seen.append((checkable(x), is_finite(x), stats(x).nan_count))
        return x * 2

    torch.vmap(f)(torch.tensor([[1.0], [NAN]]))
    torch.func.grad(lambda x: f(x).sum())(torch.tensor([NAN]))
    assert seen == [(False, True, 0), (False, True, 0)]


def test_quiet_restores_the_run_when_its_body_raises():
    with Functions() as functions, Dispatched() as dispatched:
        with pytest.raises(KeyError), quiet():
            assert not torch.is_grad_enabled()
            raise KeyError
        assert torch.is_grad_enabled()
        functions.seen.clear()
        dispatched.seen.clear()
        torch.exp(torch.ones(1))
    assert functions.seen == ["ones", "exp"]
    assert dispatched.seen == ["aten.ones.default", "aten.exp.default"]


def test_quiet_inside_quiet():
    t = torch.ones(1, requires_grad=True)
    with Functions() as functions, quiet():
        with quiet():
            pass
        assert not (t * 2).requires_grad
        seen = list(functions.seen)
    assert seen == []


def test_a_tensor_inside_a_double_backward_can_be_looked_at():
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                found.append((checkable(out), is_finite(out)))
            return out

    found: list[tuple[bool, bool]] = []
    x = torch.ones(3, requires_grad=True)
    with Looks():
        y = torch.linalg.vector_norm(x * x)
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        g.sum().backward()
    assert found and all(finite for _, finite in found)
