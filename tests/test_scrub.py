"""The rolling scrub: it sees everything within its period, costs a slice, and is seen by nobody."""

from __future__ import annotations

import copy
import gc
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nan_detector._scrub import Scrub
from nan_detector._scrub_slots import WALK_EVERY, Slot, StateSlots

NAN, INF = math.nan, math.inf

# The first instance of an optimizer wraps its class's step for good; here, so that no test is blamed for it.
torch.optim.LBFGS([torch.zeros(1)])


def trips(scrub: Scrub, calls: int) -> dict[str, int]:
    """Names that were confirmed bad, with the call that saw them first, as the gate would ask."""
    found: dict[str, int] = {}
    for call in range(calls):
        values = scrub.next_slice()
        names = scrub.names_of_last_slice()
        assert values.shape == (len(names),)
        assert values.dtype is torch.float32
        if not all(map(math.isfinite, values.tolist())):
            bad = scrub.bad_in_last_slice()
            assert set(bad) <= set(names)
            for name in bad:
                found.setdefault(name, call)
    return found


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def train(model: nn.Module, optimizer: Any, *shape: int, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(*shape)).square().mean().backward()
        optimizer.step()


# -- it sees everything ------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn)
SHAPES = ((), (1,), (5,), (5000,), (3, 7), (64, 64), (1, 40_000), (40_000, 1), (300, 301), (2, 3, 4, 5), (0,), (4, 0))


@st.composite
def collections(draw: st.DrawFn) -> list[tuple[str, Tensor]]:
    made = []
    for i in range(draw(st.integers(1, 25))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
        t = torch.full(shape, 0.5, dtype=torch.float32).to(dtype)
        if t.dim() == 2 and draw(st.booleans()):
            t = t.t()
        made.append((f"t{i}", t))
    return made


@settings(max_examples=60)
@given(collections(), st.data())
def test_whatever_is_planted_is_found_within_a_period(tensors: list[tuple[str, Tensor]], data: st.DataObject):
    period = data.draw(st.sampled_from([1, 2, 7, 32]))
    scrub = Scrub(tensors, period=period)
    assert trips(scrub, data.draw(st.integers(0, 2 * period))) == {}
    name, t = data.draw(st.sampled_from(tensors))
    if t.numel() == 0:
        return
    index = tuple(data.draw(st.integers(0, n - 1)) for n in t.shape)
    bad = data.draw(st.sampled_from([NAN] if t.dtype is torch.float8_e4m3fn else [NAN, INF, -INF]))
    t[index] = torch.tensor(bad).to(t.dtype)  # float8_e4m3fn has no infinity
    assert set(trips(scrub, period)) == {name}
    assert scrub.calls_per_sweep == period


@settings(max_examples=30)
@given(collections(), st.sampled_from([1, 3, 32]))
def test_the_sums_are_right(tensors: list[tuple[str, Tensor]], period: int):
    scrub = Scrub(tensors, period=period)
    sums: dict[str, float] = {}
    for _ in range(period):
        values = scrub.next_slice().tolist()
        for name, value in zip(scrub.names_of_last_slice(), values, strict=True):
            sums[name] = sums.get(name, 0.0) + value
    for name, t in tensors:
        if t.numel():
            assert sums.pop(name) == pytest.approx(0.5 * t.numel(), rel=1e-5)
    assert not any(sums.values())  # empty ones


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_large_finite_values_are_no_alarm(dtype: torch.dtype):
    """Their sum overflows, so that the slice is suspicious; the exact look clears them."""
    huge = torch.full((100, 100), torch.finfo(dtype).max, dtype=dtype)
    scrub = Scrub([("huge", huge), ("small", torch.ones(3))], period=4)
    assert trips(scrub, 8) == {}
    if dtype is not torch.float16:
        flat = [v for _ in range(4) for v in scrub.next_slice().tolist()]
        assert not all(map(math.isfinite, flat))
    huge[3, 4] = NAN
    assert set(trips(scrub, 4)) == {"huge"}


def test_half_sums_are_accumulated_in_float32():
    scrub = Scrub([("half", torch.full((1000,), 1000.0, dtype=torch.float16))], period=1)
    assert scrub.next_slice().tolist() == [1e6]


def test_infinities_of_both_signs_do_not_cancel():
    t = torch.ones(10)
    t[0], t[1] = INF, -INF
    assert set(trips(Scrub([("t", t)], period=2), 2)) == {"t"}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_bad_is_passed_over():
    tensors = [
        ("integers", torch.arange(5)),
        ("bools", torch.ones(3, dtype=torch.bool)),
        ("empty", torch.empty(0)),
        ("meta", torch.empty(3, device="meta")),
        ("quantized", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)),
        ("zero tensor", torch._efficientzerotensor((3,))),
    ]
    scrub = Scrub(tensors, period=3)
    for _ in range(6):
        values = scrub.next_slice().tolist()
        assert set(values) <= {0.0}  # what may get values later has its place already
        assert not {"integers", "bools", "quantized"} & set(scrub.names_of_last_slice())
        assert scrub.bad_in_last_slice() == ()


def test_memory_that_was_given_back_is_not_touched():
    """Sharded training frees a parameter's storage between uses; to read it then ends the process."""
    t, small = torch.ones(300, 300), torch.ones(5)
    scrub = Scrub([("t", t), ("small", small), ("other", torch.ones(5))], period=2)
    assert trips(scrub, 3) == {}
    sizes = [x.untyped_storage().nbytes() for x in (t, small)]
    for x in (t, small):
        x.untyped_storage().resize_(0)
    assert trips(scrub, 6) == {}
    assert trips(Scrub([("t", t)], period=2), 3) == {}
    for x, n in zip((t, small), sizes, strict=True):
        x.untyped_storage().resize_(n)
        x.fill_(1)
    t[299, 299] = small[4] = NAN
    assert set(trips(scrub, 2)) == {"t", "small"}


def test_parameters_that_get_their_values_later():
    lazy, meta = nn.LazyLinear(3), nn.Linear(2, 2, device="meta")
    model = nn.ModuleList([lazy, meta])
    scrub = Scrub(StateSlots({"": model}), period=4)
    assert trips(scrub, 5) == {}
    lazy(torch.ones(2, 5))
    meta.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1)
        lazy.weight[2, 4] = meta.bias[1] = NAN
    assert set(trips(scrub, 4)) == {"0.weight", "1.bias"}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_sparse_tensors(convert: Callable[[Tensor], Tensor]):
    good, bad = torch.eye(50), torch.eye(50)
    bad[7, 7] = NAN
    assert set(trips(Scrub([("good", convert(good)), ("bad", convert(bad))], period=4), 4)) == {"bad"}


def test_strided_and_expanded_tensors():
    base = torch.zeros(200, 300)
    tensors = [("columns", base[:, ::3]), ("expanded", torch.ones(1).expand(70_000)), ("turned", base.t()[5:])]
    scrub = Scrub(tensors, period=16)
    assert trips(scrub, 16) == {}
    base[199, 297] = NAN
    assert set(trips(scrub, 16)) == {"columns", "turned"}


def test_nothing_to_look_at():
    scrub = Scrub([], period=5)
    assert [scrub.next_slice().numel() for _ in range(7)] == [0] * 7


# -- what a slice is ---------------------------------------------------------------------------------------------------


def elements_of(scrub: Scrub, sizes: dict[str, int], calls: int) -> list[int]:
    """Elements read by each call, from sums over tensors of ones."""
    return [round(sum(scrub.next_slice().tolist())) for _ in range(calls)]


def test_slices_are_about_equal():
    tensors = [(f"w{i}", torch.ones(n, 64)) for i, n in enumerate([10_000, 3, 500, 2000, 1, 7000, 40])]
    read = elements_of(Scrub(tensors, period=32), {}, 32)
    total = sum(t.numel() for _, t in tensors)
    assert sum(read) == total
    assert max(read) < 1.3 * total / 32
    assert sorted(read)[4] > 0.5 * total / 32


def test_little_work_is_spread_over_the_period():
    scrub = Scrub([(f"w{i}", torch.ones(300, 200)) for i in range(4)], period=32)
    busy = [i for i in range(32) if scrub.next_slice().numel()]
    assert busy == list(range(0, 32, 4))  # two halves of each


def test_one_row_is_cut_too():
    read = elements_of(Scrub([("row", torch.ones(1, 1_000_000))], period=10), {}, 10)
    assert sum(read) == 1_000_000
    assert max(read) < 130_000


def test_parts_tell_slices_apart():
    scrub = Scrub([("big", torch.ones(3000, 300)), ("small", torch.ones(3))], period=8)
    sweeps = []
    for _ in range(2):
        sweeps.append([scrub.parts_of_last_slice() for _ in range(8) if scrub.next_slice().numel()])
    assert sweeps[0] == sweeps[1]
    assert len(set(sweeps[0])) == len(sweeps[0]) > 6
    assert {name for parts in sweeps[0] for name, _ in parts} == {"big", "small"}


def test_a_limit_makes_the_sweep_longer():
    t = torch.ones(1000, 1000)
    scrub = Scrub([("t", t)], period=4, max_elements=50_000)
    assert scrub.calls_per_sweep == 0
    read = elements_of(scrub, {}, 20)
    assert scrub.calls_per_sweep == 20
    assert set(read) == {50_000}
    t[999, 999] = NAN
    assert set(trips(scrub, 20)) == {"t"}


@pytest.mark.parametrize(
    ("options", "text"),
    [({"period": 0}, "period=0"), ({"max_elements": 4095}, "max_elements=4095 must be at least 4096")],
)
def test_options_are_checked(options: dict[str, int], text: str):
    with pytest.raises(ValueError, match=text):
        Scrub([], **options)


# -- models and optimizers ---------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 1e-3, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, centered=True, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-3),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-3),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_tensor_of_a_model_and_its_optimizer(name: str):
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 300))
    optimizer = OPTIMIZERS[name](model.parameters())
    scrub = Scrub(StateSlots({"": model}, [optimizer]), period=8)
    assert trips(scrub, 3) == {}
    train(model, optimizer, 5, 1, 4, 4, steps=2)
    assert trips(scrub, 16) == {}
    places = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_floating_point()}
    for n, p in model.named_parameters():
        places |= {f"{n}.{k}": v for k, v in optimizer.state[p].items() if isinstance(v, Tensor)}
    assert len(places) >= 8 + len(list(model.parameters()))
    for place, t in places.items():
        kept = t.detach().clone()
        with torch.no_grad():
            t.view(-1)[-1] = NAN
        assert set(trips(scrub, 8)) == {place}
        with torch.no_grad():
            t.copy_(kept)
    assert trips(scrub, 8) == {}


def test_lists_in_an_optimizers_state():
    """LBFGS keeps its history in lists that grow and turn over."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=3)
    scrub = Scrub(StateSlots({"": model}, [optimizer]), period=8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 3)) - 1).square().sum() + model.weight.pow(4).sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
        assert trips(scrub, 8) == {}
    optimizer.state[model.weight]["old_dirs"][-1][0] = NAN
    assert set(trips(scrub, 8)) == {"weight.old_dirs"}


def test_state_is_known_in_the_call_after_it_appeared():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    scrub = Scrub(StateSlots({"": model}, [optimizer]), period=32)
    trips(scrub, 5)
    train(model, optimizer, 4, 64)
    optimizer.state[model[2].weight]["exp_avg_sq"][255, 255] = INF
    assert set(trips(scrub, 32)) == {"2.weight.exp_avg_sq"}


def test_a_checkpoint_replaces_the_state():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 4, 64)
    scrub = Scrub(StateSlots({"": model}, [optimizer]), period=8)
    trips(scrub, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"][0, 0] = NAN
    optimizer.load_state_dict(saved)
    assert set(trips(scrub, 8)) == {"0.weight.exp_avg"}


def test_a_second_optimizer_may_come_later():
    model = nn.Linear(2, 2)
    slots = StateSlots({"": model})
    scrub = Scrub(slots, period=4)
    trips(scrub, 6)
    optimizer = torch.optim.SGD([*model.parameters(), extra := nn.Parameter(torch.ones(2))], 0.1, momentum=0.5)
    slots.add(optimizer)
    slots.add(optimizer)
    train(model, optimizer, 2, 2)
    with torch.no_grad():
        extra[0] = NAN
    assert set(trips(scrub, 4)) == {"optimizer parameter 2"}
    assert len(slots()) == len({s.name for s in slots()}) == 5


def test_a_tensor_put_in_place_of_another_is_seen():
    model = nn.BatchNorm1d(3)
    scrub = Scrub(StateSlots({"": model}), period=4)
    trips(scrub, 5)
    model.running_mean = torch.tensor([0.0, NAN, 0.0])
    assert set(trips(scrub, 4)) == {"running_mean"}
    model.running_mean = torch.zeros(3)
    model.weight = nn.Parameter(torch.full((3,), NAN))
    assert set(trips(scrub, 4)) == {"weight"}
    model.weight.data = torch.ones(3)
    assert trips(scrub, 4) == {}


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(700, 300),
        torch.ones(50_000),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(200, 300, dtype=torch.float64),
        torch.eye(40).to_sparse(),
        torch.tensor(1.0),
    ],
)
def test_a_tensor_of_another_kind_put_in_place_of_a_large_one(other: Tensor):
    holder: dict[str, Any] = {"t": torch.ones(200, 300), "u": torch.ones(4)}
    slots = [Slot("t", holder, "t"), Slot("u", holder, "u")]
    scrub = Scrub(lambda: slots, period=4)
    trips(scrub, 6)
    holder["t"] = other
    assert trips(scrub, 8) == {}
    bad = other.to_dense().clone()
    bad.view(-1)[-1] = NAN
    holder["t"] = bad.to_sparse() if other.is_sparse else bad
    assert set(trips(scrub, 4)) == {"t"}
    holder["t"] = None
    assert trips(scrub, 8) == {}
    del holder["t"]
    assert trips(scrub, 8) == {}


def test_a_small_one_may_change_its_shape():
    holder = {k: torch.ones(5) for k in "abc"}
    slots = [Slot(k, holder, k) for k in "abc"]
    scrub = Scrub(lambda: slots, period=1)
    assert scrub.next_slice().tolist() == [5.0, 5.0, 5.0]
    holder["b"] = torch.ones(7)
    plan = scrub._shares
    assert scrub.next_slice().tolist() == [5.0, 7.0, 5.0]  # at once, one by one
    assert sorted(scrub.next_slice().tolist()) == [5.0, 5.0, 7.0]
    assert scrub._shares is not plan  # and from then on at full speed again


def test_new_modules_are_found():
    model = nn.Sequential(nn.Linear(2, 2))
    scrub = Scrub(StateSlots({"": model}), period=4)
    trips(scrub, 2)
    model.append(nn.Linear(2, 2))
    with torch.no_grad():
        model[1].bias[0] = NAN
    assert set(trips(scrub, WALK_EVERY + 4)) == {"1.bias"}


def test_plans_that_change_all_the_time_still_come_round():
    tensors = [Slot(f"t{i}", (torch.ones(1000, 100),), 0) for i in range(10)]
    scrub = Scrub(lambda: list(tensors), period=20)  # another list in each call
    names = {name for _ in range(40) if scrub.next_slice().numel() for name in scrub.names_of_last_slice()}
    assert names == {f"t{i}" for i in range(10)}


def test_names_of_several_models():
    model = nn.Linear(2, 2)
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    names = [s.name for s in StateSlots({"gen": model, "dis": wrapped, "again": model})()]
    assert names == ["gen.weight", "gen.bias", "dis.weight", "dis.bias"]


def test_tied_weights_are_looked_at_once():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    scrub = Scrub(StateSlots({"": model}), period=1)
    scrub.next_slice()
    assert scrub.names_of_last_slice() == ("0.weight",)


# -- masks -------------------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((n, n), -INF).triu(1))
        self.register_buffer("late", None)
        self.register_buffer("mean", torch.zeros(n))
        self.weight = nn.Parameter(torch.ones(n))


@pytest.mark.parametrize("n", [4, 700])
def test_a_mask_of_minus_infinity_is_meant(n: int):
    model = Masked(n)
    scrub = Scrub(StateSlots({"": model}), period=8)
    assert trips(scrub, 24) == {}
    quiet_sweep = [v for _ in range(8) for v in scrub.next_slice().tolist()]
    assert all(map(math.isfinite, quiet_sweep))  # known: it costs no further look
    model.mask[0, 0] = NAN
    assert set(trips(scrub, 8)) == {"mask"}
    model.mask[0, 0] = INF
    assert set(trips(scrub, 8)) == {"mask"}
    model.late = torch.full((n, n), -INF)
    model.mask[0, 0] = 0
    assert trips(scrub, 24) == {}


def test_a_mask_may_begin_with_what_is_finite():
    """It is looked at in parts, of which the first have nothing to show."""
    model = Masked(3)
    model.mask = torch.zeros(700, 700)
    model.mask[500:] = -INF
    scrub = Scrub(StateSlots({"": model}), period=8)
    assert trips(scrub, 24) == {}


@pytest.mark.parametrize("n", [4, 400_000])
def test_minus_infinity_in_a_buffer_that_was_finite_is_not(n: int):
    model = Masked(3)
    model.mean = torch.zeros(n)
    scrub = Scrub(StateSlots({"": model}), period=8)
    assert trips(scrub, 9) == {}
    model.mean[-1] = -INF
    assert set(trips(scrub, 8)) == {"mean"}


def test_minus_infinity_in_a_parameter_is_never_meant():
    model = Masked(3)
    with torch.no_grad():
        model.weight[0] = -INF
    assert set(trips(Scrub(StateSlots({"": model}), period=8), 8)) == {"weight"}


# -- seen by nobody ----------------------------------------------------------------------------------------------------


class NoFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"seen by a function mode: {func}")


class NoDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"seen by a dispatch mode: {func}")


class OnDevice(TorchDispatchMode):
    """Refuses what reads a tensor to the host or writes one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert not func._schema.is_mutable, name
        assert not any(s in name for s in ("_local_scalar_dense", "nonzero", "equal", "_to_copy", "copy_")), name
        return func(*args, **(kwargs or {}))


def everything() -> tuple[nn.Module, Any, Scrub]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 600), nn.BatchNorm1d(600), nn.Linear(600, 4))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 6, 8)
    return model, optimizer, Scrub(StateSlots({"": model}, [optimizer]), period=6)


def test_modes_see_nothing():
    _, _, scrub = everything()
    with NoFunction(), NoDispatch():
        slices = [(scrub.next_slice(), scrub.bad_in_last_slice()) for _ in range(12)]
    assert all(bad == () for _, bad in slices)
    assert sum(values.numel() for values, _ in slices) > 30


def test_nothing_is_read_to_the_host_or_written(monkeypatch: pytest.MonkeyPatch):
    from nan_detector import _scrub

    class Loud:
        """Stands in for `quiet`, which would hide everything from the mode below."""

        def __enter__(self) -> None:
            self.grad = torch.no_grad()
            self.grad.__enter__()

        def __exit__(self, *_: Any) -> None:
            self.grad.__exit__(None, None, None)

    model, _, scrub = everything()
    versions = {id(t): t._version for t in [*model.parameters(), *model.buffers()]}
    monkeypatch.setattr(_scrub, "quiet", Loud)
    with OnDevice():
        for _ in range(12):
            scrub.next_slice()
    assert versions == {id(t): t._version for t in [*model.parameters(), *model.buffers()]}


def test_nothing_is_recorded_or_counted():
    model, _, scrub = everything()
    state = torch.get_rng_state()
    for _ in range(6):
        assert not scrub.next_slice().requires_grad
    assert torch.equal(state, torch.get_rng_state())
    with torch.inference_mode():
        assert trips(scrub, 6) == {}
    assert trips(scrub, 6) == {}
    assert all(p.grad is not None for p in model.parameters())


# -- what it keeps -----------------------------------------------------------------------------------------------------


def test_a_dead_optimizer_leaves_nothing_behind():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    scrub = Scrub(StateSlots({"": model}, [optimizer]), period=4)
    train(model, optimizer, 4, 64)
    trips(scrub, 6)
    moment = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    del optimizer
    gc.collect()
    assert moment() is None
    assert scrub.names_of_last_slice() == scrub.bad_in_last_slice() == ()
    assert trips(scrub, 4) == {}
    names = {n for _ in range(4) if scrub.next_slice() is not None for n in scrub.names_of_last_slice()}
    assert names == {n for n, _ in model.named_parameters()}


def test_a_replaced_tensor_is_not_kept():
    model = nn.BatchNorm1d(3)
    scrub = Scrub(StateSlots({"": model}), period=2)
    trips(scrub, 3)
    old = weakref.ref(model.running_mean)
    model.running_mean = torch.zeros(3)
    gc.collect()
    assert old() is None


def test_objects_do_not_pile_up():
    *kept, scrub = everything()
    trips(scrub, 2 * WALK_EVERY)
    gc.collect()
    before, blocks = len(gc.get_objects()), sys.getallocatedblocks()
    for _ in range(2 * WALK_EVERY):
        scrub.next_slice()
    gc.collect()
    assert kept
    assert len(gc.get_objects()) - before < 50
    assert sys.getallocatedblocks() - blocks < 300


def test_the_same_list_while_nothing_changes():
    model, optimizer, _ = everything()
    slots = StateSlots({"": model}, [optimizer])
    first = slots()
    seen: Sequence[Slot] = first
    for _ in range(2 * WALK_EVERY + 2):
        seen = slots()
        assert seen is first
    train(model, optimizer, 6, 8)
    assert slots() is first
