"""State that no step shows to be bad is found in passing: within 32 gates, with the step it was last seen finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nan_detector import NaNDetector, NonFiniteError

GATES = 32
STRAY = 41  # the step after whose update something goes bad


class Words(nn.Module):
    """A table of which most rows are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("table_of_codes", torch.zeros(4))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.table(ids)))


def batch(i: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(i)
    return torch.randint(0, 40, (16,), generator=g), torch.randint(0, 4, (16,), generator=g)


def train(
    harm: Callable[[Words, Any], None],
    steps: int = STRAY + GATES + 8,
    optimizer: Callable[..., Any] = torch.optim.Adam,
    at: int = STRAY,
    **options: Any,
) -> NaNDetector:
    torch.manual_seed(0)
    model = Words()
    opt = optimizer(model.parameters(), lr=1e-2)
    with NaNDetector(model, verbose=False, **options) as det:
        for i in range(steps):
            ids, y = batch(i)
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(ids), y)
            loss.backward()
            opt.step()
            if det.triggered and det.event.action == "stop":
                break
            if i == at:
                with torch.no_grad():
                    harm(model, opt)
    return det


def since(weights: str) -> int:
    return int(weights.rpartition(" ")[2])


def spoil_row(model: Words, opt: Any) -> None:
    model.table.weight[45, 2] = float("nan")  # a row that no batch uses: neither loss nor gradients show it


def spoil_moment(model: Words, opt: Any) -> None:
    opt.state[model.head.bias]["exp_avg_sq"][1] = float("inf")  # the update is 0 there: nothing will ever show it


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_damaged_weight_is_found() -> None:
    det = train(spoil_row)
    event = det.event
    assert event is not None and event.severity == "error" and event.phase == "state"
    assert event.tensor_name == "table.weight" and event.layer_name == "table" and event.module_type == "Embedding"
    assert STRAY < event.step <= STRAY + GATES + 1
    assert event.weights.startswith("damaged since step ")
    # Honest: not later than it was done, and not earlier than the last full turn.
    assert STRAY - GATES <= since(event.weights) <= STRAY
    assert event.cause is not None and event.cause.code == "parameter_non_finite"
    assert event.action == "stop" and len(det.all_events) == 1
    assert any("last seen finite before step" in note for note in event.notes), event.notes
    assert "table.weight" in str(event)


def test_damaged_optimizer_state_is_found() -> None:
    det = train(spoil_moment)
    event = det.event
    assert event is not None and event.severity == "error" and event.phase == "optimizer"
    assert event.tensor_name == "optimizer.state[head.bias]['exp_avg_sq']"
    assert STRAY < event.step <= STRAY + GATES + 1
    assert event.weights == "clean", "the step was not taken, and what it has done before is 0"
    [note] = [n for n in event.notes if n.startswith("the optimizer's state is damaged since step")]
    assert STRAY - GATES <= int(note.split(",")[0].rpartition(" ")[2]) <= STRAY
    assert not any("where it was loaded" in n for n in event.notes)


@pytest.mark.parametrize("large", [True, False])
def test_the_gradient_that_spoilt_the_optimizer_state_is_named(large: bool) -> None:
    model = nn.Linear(4, 2)
    opt = torch.optim.Adam(model.parameters())
    g = torch.Generator().manual_seed(0)
    with NaNDetector(model, verbose=False) as det:
        for i in range(STRAY + GATES + 8):
            x = torch.randn(8, 4, generator=g)
            opt.zero_grad()
            model(x * (1e30 if i == STRAY and large else 1.0)).mean().backward()
            opt.step()
            if det.triggered:
                break
            if i == STRAY and not large:
                opt.state[model.weight]["exp_avg_sq"][0] = float("inf")
    assert det.event is not None and det.event.tensor_name == "optimizer.state[weight]['exp_avg_sq']"
    told = [n for n in det.event.notes if "stood out" in n]
    assert [n.partition(":")[0] for n in told] == [f"the gradient of weight stood out at step {STRAY}"] * large


def test_norms_that_overflow_at_every_step_do_not_hide_the_state() -> None:
    model = nn.Linear(4, 2)
    opt = torch.optim.Adam(model.parameters())
    with NaNDetector(model, verbose=False) as det:
        for _ in range(2 * GATES):
            opt.zero_grad()
            (model(torch.full((8, 4), 1e25)) * 1.0).mean().backward()
            opt.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.step <= GATES + 1
    assert det.event.tensor_name == "optimizer.state[weight]['exp_avg_sq']"
    assert det.event.weights == "clean" and all(bool(p.isfinite().all()) for p in model.parameters())


def test_bad_state_is_never_stepped_with_again() -> None:
    det = train(spoil_moment, on_nan="skip", steps=STRAY + GATES + 20)
    assert len(det.all_events) == 1
    assert det.skipped_steps >= 15, "every step of that optimizer is refused"


def test_a_weight_spoilt_before_the_first_look_has_no_date() -> None:
    det = train(spoil_row, at=0, steps=GATES + 4)
    assert det.event is not None and det.event.tensor_name == "table.weight"
    assert since(det.event.weights) == 0


def test_once_only() -> None:
    for policy in ("warn", "skip"):
        det = train(spoil_row, on_nan=policy, stop_on_first=False, steps=STRAY + 4 * GATES)
        told = [e for e in det.all_events if e.tensor_name == "table.weight"]
        assert len(told) == 1, policy
        assert len(det.all_events) == 1
        assert det.warnings == []


def test_raise() -> None:
    with pytest.raises(NonFiniteError, match=r"table\.weight"):
        train(spoil_row, on_nan="raise")


@pytest.mark.parametrize("watch", ["layers", "ops"])
def test_at_the_other_levels(watch: str) -> None:
    det = train(spoil_row, watch=watch)
    assert det.event is not None and det.event.tensor_name == "table.weight" and det.event.phase == "state"


def test_found_with_sgd_and_without_any_state() -> None:
    det = train(spoil_row, optimizer=torch.optim.SGD)
    assert det.event is not None and det.event.tensor_name == "table.weight"


def test_a_loop_that_updates_by_hand() -> None:
    torch.manual_seed(0)
    model = Words()
    with NaNDetector(model, verbose=False) as det:
        for i in range(STRAY + GATES + 8):
            ids, y = batch(i)
            loss = nn.functional.cross_entropy(model(ids), y)
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.01 * p.grad
                        p.grad = None
                if det.triggered:
                    break
                if i == STRAY:
                    spoil_row(model, None)
    assert det.event is not None and det.event.tensor_name == "table.weight"


def test_with_a_loss_scaler() -> None:
    torch.manual_seed(0)
    model = Words()
    opt = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with NaNDetector(model, verbose=False) as det:
        for i in range(STRAY + GATES + 8):
            ids, y = batch(i)
            opt.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(ids), y)).backward()
            scaler.step(opt)
            scaler.update()
            if det.triggered:
                break
            if i == STRAY:
                with torch.no_grad():
                    spoil_row(model, opt)
    assert det.event is not None and det.event.tensor_name == "table.weight"


@contextmanager
def two_networks() -> Iterator[tuple[list[Words], list[Any]]]:
    torch.manual_seed(0)
    models = [Words(), Words()]
    yield models, [torch.optim.Adam(m.parameters(), lr=1e-2) for m in models]


def test_state_of_the_other_optimizer() -> None:
    with two_networks() as (models, opts), NaNDetector({"a": models[0], "b": models[1]}, verbose=False) as det:
        for i in range(STRAY + GATES + 8):
            ids, y = batch(i)
            for model, opt in zip(models, opts, strict=True):
                opt.zero_grad()
                nn.functional.cross_entropy(model(ids), y).backward()
                opt.step()
            if det.triggered:
                break
            if i == STRAY:
                with torch.no_grad():
                    spoil_moment(models[1], opts[1])
    assert det.event is not None and det.event.tensor_name == "optimizer.state[b.head.bias]['exp_avg_sq']"


# -- warnings ----------------------------------------------------------------------------------------------------------


def spoil_buffer(model: Words, opt: Any) -> None:
    model.table_of_codes[1] = float("nan")


def spoil_frozen(model: Words, opt: Any) -> None:
    model.frozen[1] = float("nan")


@pytest.mark.parametrize(("harm", "name"), [(spoil_buffer, "table_of_codes"), (spoil_frozen, "frozen")])
def test_what_training_does_not_reach_is_a_warning(harm: Callable[[Words, Any], None], name: str) -> None:
    det = train(harm, steps=STRAY + 3 * GATES)
    assert det.all_events == []
    [warning] = det.warnings
    assert warning.kind == "state" and name in warning.message and STRAY < warning.step <= STRAY + GATES + 1


def spoil_statistics(model: Words, opt: Any) -> None:
    model.norm.running_var[0] = float("nan")  # in training mode the batch's own are used


def test_running_statistics() -> None:
    det = train(spoil_statistics)
    assert det.all_events == [] and [w.kind for w in det.warnings] == ["state"]
    assert det.warnings[0].layer_name == "norm" and "norm.running_var" in det.warnings[0].message


# -- silence -----------------------------------------------------------------------------------------------------------


def test_masks_and_sentinels_are_meant() -> None:
    class Masked(Words):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((5, 5), float("-inf")).triu(1))
            self.register_buffer("least", torch.tensor(float("inf")))
            self.register_buffer("unset", torch.full((3,), float("nan")))
            self.prior = nn.Parameter(torch.tensor([0.0, float("-inf")]), requires_grad=False)

    torch.manual_seed(0)
    model = Masked()
    opt = torch.optim.Adam(model.parameters())
    with NaNDetector(model, verbose=False) as det:
        for i in range(3 * GATES):
            ids, y = batch(i)
            opt.zero_grad()
            nn.functional.cross_entropy(model(ids), y).backward()
            opt.step()
            model.least.fill_(float(i))
    assert det.all_events == [] and det.warnings == []


def test_sums_that_overflow_are_no_damage() -> None:
    def enlarge(model: Words, opt: Any) -> None:
        model.table.weight[44:49] = 2e38  # finite, though not their sum

    det = train(enlarge)
    assert det.all_events == [] and det.warnings == []


def test_mended_in_time_is_forgiven() -> None:
    torch.manual_seed(0)
    model = Words()
    opt = torch.optim.Adam(model.parameters())
    with NaNDetector(model, verbose=False) as det:
        for i in range(4 * GATES):
            ids, y = batch(i)
            opt.zero_grad()
            nn.functional.cross_entropy(model(ids), y).backward()
            opt.step()
            with torch.no_grad():
                spoil_buffer(model, opt)
                model.table_of_codes.zero_()
    assert det.all_events == [] and det.warnings == []


class Trust(torch.optim.Optimizer):
    """A trust ratio by hand: 0/0 for a layer that got no gradient, in its momentum and in its weight."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad * (p.norm() / p.grad.norm()))
            p.sub_(momentum, alpha=0.01)


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        return self.used(x) + self.spare(x) if spare else self.used(x)


def test_weights_that_went_bad_with_their_momentum_are_dated_to_where_both_were_last_seen_finite() -> None:
    torch.manual_seed(0)
    model = Spare()
    optimizer = Trust(model.parameters())
    with NaNDetector(model, verbose=False) as det:
        for i in range(120):
            x = torch.randn(8, 4)
            optimizer.zero_grad(set_to_none=False)
            (model(x, i < 40) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and event.phase == "optimizer" and event.step > 40
    since = next(int(n.split("step ")[1].split(",")[0]) for n in event.notes if n.endswith("or a later one"))
    assert since <= 40 and event.weights == f"damaged since step {since}"
