"""The short way through the gate: it must see, record and warn of the same as the long way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from nan_detector import NaNDetector, NonFiniteError
from nan_detector._glance import Glance

STEPS = 40


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, steps: int = STEPS, lr: Callable[[int], float] = lambda i: 0.05, **options: Any) -> Any:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with NaNDetector(model, verbose=False, **options) as det:
        for i in range(steps):
            optimizer.param_groups[0]["lr"] = lr(i)
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, 6)), torch.randint(0, 3, (4,))).backward()
            optimizer.step()
    return det


@pytest.fixture
def short_ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each gate went the short way."""
    answers: list[bool] = []
    original = Glance.passes

    def counted(self: Glance, *args: Any) -> bool:
        answers.append(original(self, *args))
        return answers[-1]

    monkeypatch.setattr(Glance, "passes", counted)
    return answers


@pytest.mark.parametrize("watch", ["step", "layers"])
def test_nearly_all_steps_of_an_ordinary_run_go_the_short_way(watch: str, short_ways: list[bool]) -> None:
    det = train(net(), watch=watch)
    # The first gate of an optimizer does not ask, and the next learns its groups.
    assert sum(short_ways) >= STEPS - 3 and det.event is None


@pytest.mark.parametrize("watch", ["step", "layers"])
def test_both_ways_record_the_same(watch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = train(net(), watch=watch).history
    monkeypatch.setattr(Glance, "passes", lambda *_: False)
    long = train(net(), watch=watch).history
    assert short.steps.tolist() == long.steps.tolist() == list(range(STEPS))
    assert set(short.columns) == set(long.columns)
    for name in short.columns:
        assert short.values[name].tolist() == pytest.approx(long.values[name].tolist(), rel=1e-6, nan_ok=True), name


def test_a_schedule_goes_the_short_way_too(short_ways: list[bool]) -> None:
    det = train(net(), lr=lambda i: 0.05 / (1 + i))
    assert sum(short_ways) >= STEPS - 3
    assert det.history.values["lr"].tolist() == pytest.approx([0.05 / (1 + i) for i in range(STEPS)])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_rate_that_goes_bad_on_the_way_is_an_event(bad: float) -> None:
    model = net()
    det = train(model, lr=lambda i: bad if i == 20 else 0.05, stop_on_first=False)
    assert [e.step for e in det.all_events] == [20]
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_rate_in_a_tensor_is_looked_at_in_each_step() -> None:
    model = net()
    rate = torch.tensor(0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with NaNDetector(model, verbose=False) as det:
        for i in range(30):
            if i == 20:
                rate.fill_(math.nan)  # the same object all the time
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, 6)), torch.randint(0, 3, (4,))).backward()
            optimizer.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.step == 20 and det.event.phase == "optimizer"


def test_a_parameter_added_on_the_way_is_judged() -> None:
    model = nn.ModuleDict({"a": nn.Linear(6, 3), "b": nn.Linear(6, 3)})
    optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.05)
    with NaNDetector(model, verbose=False, stop_on_first=False) as det:
        for i in range(30):
            if i == 10:
                optimizer.param_groups[0]["params"].extend(model["b"].parameters())
            optimizer.zero_grad()
            x = torch.randn(4, 6)
            loss = F.cross_entropy(model["a"](x) + model["b"](x), torch.randint(0, 3, (4,)))
            loss.backward()
            if i == 20:
                model["b"].weight.grad[0, 0] = math.nan
            optimizer.step()
    assert [e.step for e in det.all_events] == [20]


@pytest.mark.parametrize("how", ["in its place", "by a new list"])
def test_a_parameter_replaced_on_the_way_is_judged(how: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    group = optimizer.param_groups[0]
    with NaNDetector(model, verbose=False, stop_on_first=False) as det:
        for i in range(30):
            if i == 10:
                model[2].weight = new = nn.Parameter(torch.ones(3, 8))
                if how == "in its place":
                    group["params"][2] = new
                else:
                    group["params"] = list(model.parameters())
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(4, 6)), torch.randint(0, 3, (4,))).backward()
            if i == 20:
                model[2].weight.grad[0, 0] = math.nan
            optimizer.step()
    assert [e.step for e in det.all_events] == [20]
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_spike_is_told_in_its_own_step_although_others_wait() -> None:
    told: list[tuple[int, int]] = []
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    at = -1
    with NaNDetector(model, verbose=False, on_warning=lambda r: told.append((r.step, at))) as det:
        torch.manual_seed(0)
        for i in range(200):
            at = i
            optimizer.zero_grad()
            loss = F.cross_entropy(model(torch.randn(32, 6)), torch.randint(0, 3, (32,)))
            (loss * (1e4 if i == 171 else 1.0)).backward()
            optimizer.step()
    assert det.event is None
    assert told and all(step == at_step == 171 for step, at_step in told)


class TwoFaced(nn.Module):
    """Its output changes its dtype, its layout and its number on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.face = 0

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return (y, y.double(), y.bfloat16(), (y, y[:0]), y)[self.face % 5]


def test_layers_whose_outputs_change_their_kind() -> None:
    model = TwoFaced()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False, watch="layers") as det:
        for i in range(40):
            model.face = i // 2
            optimizer.zero_grad()
            out = model(torch.randn(4, 6))
            (out[0] if isinstance(out, tuple) else out).float().square().mean().backward()
            optimizer.step()
    assert det.event is None and not det.warnings
    reached = det.history.values["abs_max:linear"]
    assert len(reached) == 40 and (reached > 0).all()


class Varied(nn.Module):
    """A layer that gives a tensor with values at times, and at others one without, or not as an array."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear, self.aside, self.calls = nn.Linear(6, 3), nn.Identity(), first

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        others = torch.empty(3, device="meta"), torch.ones(3), y.to_sparse(), y.to_mkldnn(), torch.empty(0)
        self.aside(others[self.calls % 5])
        self.calls += 1
        return y


@pytest.mark.parametrize("first", [0, 1])
def test_layers_whose_outputs_have_no_values(first: int) -> None:
    model = Varied(first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False, watch="layers", stop_on_first=False) as det:
        for i in range(30):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            if i == 20:
                model.linear.bias.grad[0] = math.nan
            optimizer.step()
    assert [e.step for e in det.all_events] == [20] and not det.warnings
    assert (det.history.values["abs_max:linear"] > 0).all()


def test_doubles_beyond_the_range_of_float_are_no_infinities() -> None:
    model = nn.Linear(6, 3).double()
    with NaNDetector(model, verbose=False, watch="layers") as det:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for _ in range(10):
            optimizer.zero_grad()
            (model(torch.full((4, 6), 1e200, dtype=torch.float64)) * 1e-200).sum().backward()
            optimizer.step()
    assert det.event is None and det.all_events == []


def test_a_module_called_twice_in_a_step_keeps_its_extremes() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with NaNDetector(model, verbose=False, watch="layers") as det:
        for _ in range(6):
            optimizer.zero_grad()
            big, small = model(torch.full((2, 4), 50.0)), model(torch.zeros(2, 4))
            (big.mean() + small.mean()).backward()
            optimizer.step()
        largest = float(model(torch.full((2, 4), 50.0)).detach().abs().max())
    assert det.history.values["abs_max:0"].tolist() == pytest.approx([largest] * 6)


# Its derivatives are written in TorchScript, which torch itself calls deprecated.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_outputs_with_a_tangent_are_looked_at() -> None:
    """Forward-mode differentiation refuses operations that write into a given tensor."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False, watch="layers") as det:
        for _ in range(6):
            optimizer.zero_grad()
            with forward_ad.dual_level():
                out = model(forward_ad.make_dual(torch.full((4, 6), 7.0), torch.ones(4, 6)))
                assert forward_ad.unpack_dual(out).tangent is not None
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
    assert det.history.values["abs_max:root input"].tolist() == [7.0] * 6


@pytest.mark.parametrize("watch", ["step", "layers"])
@pytest.mark.parametrize("deep", [1, 8])  # few gradients are measured in another place than many
def test_a_bad_step_that_raises_spoils_no_row_of_the_history(watch: str, deep: int) -> None:
    model = nn.Sequential(*[m for _ in range(deep) for m in (nn.Linear(6, 6), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        pytest.raises(NonFiniteError),
        NaNDetector(model, verbose=False, watch=watch, history=5, on_nan="raise") as det,
    ):
        for i in range(13):
            optimizer.zero_grad()
            (model(torch.randn(4, 6)).square().mean() * (math.nan if i == 12 else 1.0)).backward()
            optimizer.step()
    history = det.history
    assert history.steps.tolist() in ([7, 8, 9, 10, 11], [8, 9, 10, 11])
    assert all(math.isfinite(v) for name in history.columns if name != "loss_scale" for v in history.values[name])
