"""How many steps may be dropped: counted, and ended where it is enough."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from _rescue import Net, batch, detector, seed_all
from nan_detector import NaNDetector, NonFiniteError
from nan_detector._ledger import WINDOW, Ledger


def run(steps: int, bad: Iterable[int], *, told: bool = False, **options: Any) -> tuple[NaNDetector, int]:
    """Train; gives the detector and how many steps were begun."""
    seed_all()
    model = Net(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bad, begun = set(bad), 0
    with detector(model, replay="off", **options) as det:
        for i in range(steps):
            if told:
                det.set_batch(0)  # one batch an epoch: the number is always the same
            begun = i + 1
            x, y = batch(i % 12, bad=i in bad)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            try:
                optimizer.step()
            except NonFiniteError as error:
                assert error.event in det.all_events
                det.error = error
                break
    assert options.get("on_nan") == "warn" or all(bool(p.isfinite().all()) for p in model.parameters())
    return det, begun


@pytest.mark.parametrize("on_nan", ["skip", "rollback", lambda event: "skip"])
@pytest.mark.parametrize("stop_on_first", [True, False])
@pytest.mark.parametrize("told", [True, False])
def test_so_many_in_a_row_are_enough(on_nan: Any, stop_on_first: bool, told: bool) -> None:
    options = {"on_nan": on_nan, "stop_on_first": stop_on_first, "told": told}
    det, begun = run(20, [2, 3, 4, 6, 7, 9, 10, 11, 12, 13], max_skips=3, **options)
    assert begun == 13, "three in a row are let pass, the fourth is not"
    error = det.error
    message = str(error)
    assert "4 steps in a row were dropped: more than max_skips=3 allows (9 in all)" in message, message
    assert "allow more with max_skips" in message
    assert error.event.action == "raise" and det.skipped_steps == 9


@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
def test_a_share_of_the_last_hundred_steps(on_nan: str) -> None:
    # Two of the first hundred, and then three within a hundred.
    bad = [10, 90, 115, 195, 200]
    det, begun = run(300, bad, on_nan=on_nan, max_skips=0.02)
    assert begun == 201
    assert "3 steps of the last 100 were dropped: more than max_skips=0.02 allows" in str(det.error)


def test_a_share_is_of_a_hundred_steps_from_the_first_on() -> None:
    det, begun = run(30, [0, 1, 5], on_nan="skip", max_skips=0.03)
    assert begun == 30 and det.skipped_steps == 3


@pytest.mark.parametrize("on_nan", ["skip", "rollback", None])
def test_without_a_limit_it_goes_on(on_nan: Any) -> None:
    det, begun = run(12, range(2, 12), on_nan=on_nan, stop_on_first=False)
    assert begun == 12 and det.skipped_steps == 10


@pytest.mark.parametrize("on_nan", ["skip", "rollback"])
@pytest.mark.parametrize("stop_on_first", [True, False])
def test_each_dropped_step_is_recorded(on_nan: str, stop_on_first: bool) -> None:
    """Who chose to go on wants to know of each, not of the first."""
    det, _ = run(12, [2, 3, 7], on_nan=on_nan, stop_on_first=stop_on_first)
    assert [e.step for e in det.all_events] == [2, 3, 7] and det.skipped_steps == 3


def test_the_weights_are_those_of_the_last_good_state_when_it_ends() -> None:
    seed_all()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    kept: list[Any] = []
    with detector(model, on_nan="rollback", max_skips=1) as det, pytest.raises(NonFiniteError) as caught:
        for i in range(6):
            x, y = batch(i, bad=i >= 4)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if not kept:
                kept = [t.clone() for t in model.state_dict().values()]
            optimizer.step()
    assert caught.value.event is not None and caught.value.event.weights == "restored"
    assert det.skipped_steps == 2
    assert all(torch.equal(a, b) for a, b in zip(kept, model.state_dict().values(), strict=True))


def test_with_a_closure_a_step_is_dropped_once() -> None:
    """Its first evaluation is sound and its second is not: still a row of dropped steps."""
    seed_all()
    model = Net(batch_norm=False)
    model.eval()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with detector(model, on_nan="skip", max_skips=2, replay="off") as det, pytest.raises(NonFiniteError) as caught:
        for i in range(9):
            calls = []

            def closure() -> Tensor:
                calls.append(1)  # noqa: B023  # called within the iteration
                x, y = batch(i, bad=i >= 3 and len(calls) > 1)  # noqa: B023
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert "3 steps in a row" in str(caught.value) and det.skipped_steps == 3


def test_one_of_two_optimizers_that_never_steps_is_seen() -> None:
    seed_all()
    good, bad = nn.Linear(6, 1), nn.Linear(6, 1)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (good, bad))
    steps = 0
    det = detector([good, bad], on_nan="skip", max_skips=3, replay="off")
    with det, pytest.raises(NonFiniteError, match="4 steps"):
        for i in range(20):
            steps = i
            for model, optimizer, scale in ((good, first, 1.0), (bad, second, float("nan"))):
                optimizer.zero_grad()
                (model(batch(i % 12)[0]).mean() * scale).backward()
                optimizer.step()
    assert steps == 3


def test_two_optimizers_of_one_backward_drop_one_step() -> None:
    seed_all()
    model = Net(batch_norm=False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model.first, model.second)]
    with detector(model, on_nan="skip", stop_on_first=False, replay="off") as det:
        for i in range(4):
            det.set_batch(i)
            x, y = batch(i, bad=i == 2)
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
    assert det.skipped_steps == 1


def test_a_loop_without_an_optimizer() -> None:
    seed_all()
    model = nn.Linear(6, 3)
    det = detector(model, on_nan="skip", max_skips=2, replay="off")
    with det, pytest.raises(NonFiniteError, match="3 steps"):
        for i in range(12):
            x, y = batch(i, bad=i in (2, 3, 6, 7, 8))
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    assert det.skipped_steps == 5


def test_attaching_again_counts_afresh() -> None:
    det, _ = run(4, [1, 2], on_nan="skip")
    assert (det.skipped_steps, det.last_good_step) == (2, 3)
    det.attach()
    assert (det.skipped_steps, det.last_good_step) == (0, None)
    det.detach()


def test_the_last_good_step() -> None:
    seed_all()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    det = detector(model, on_nan="skip")
    assert det.last_good_step is None
    with det:
        for i in range(10, 16):
            det.set_batch(i)
            x, y = batch(i % 12, bad=i >= 13)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            assert det.last_good_step == (None if i == 10 else min(i - 1, 12))
            optimizer.step()
            assert det.last_good_step == min(i, 12)
    assert det.last_good_step == 12


def test_an_overflow_that_a_scaler_skips_is_no_good_step_and_not_dropped_by_us() -> None:
    seed_all()
    model = Net(batch_norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-25)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, backoff_factor=2.0**-100)
    seen = []
    with detector(model, on_nan="skip", max_skips=1) as det:
        for i in range(4):
            x, y = batch(i)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x * 1e10), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            seen.append(det.last_good_step)
    assert det.skipped_steps == 0 and det.event is None
    assert seen[0] is None and seen[-1] == 3


# -------------------------------------------------------------------------------------------------- the ledger itself


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 5))
def test_a_row_is_what_a_plain_count_says(dropped: list[bool], limit: int) -> None:
    ledger, row, total = Ledger(), 0, 0
    for position, drop in enumerate(dropped):
        if drop:
            row, total = row + 1, total + 1
            ledger.dropped(position, position, 7)
            assert bool(ledger.excess(limit, position, 7)) == (row > limit)
        else:
            row = 0
        ledger.stepped(position, 7)
    assert ledger.skipped_steps == total


@given(st.lists(st.booleans(), max_size=400), st.floats(0.01, 0.99))
def test_a_share_is_what_a_plain_count_says(dropped: list[bool], share: float) -> None:
    ledger = Ledger()
    for position, drop in enumerate(dropped):
        if drop:
            count = sum(dropped[max(0, position - WINDOW + 1) : position + 1])
            ledger.dropped(position, position)
            assert bool(ledger.excess(share, position)) == (count > share * WINDOW)


@pytest.mark.parametrize("limit", [None, 5, 0.5])
def test_nothing_is_too_much_at_first(limit: float | int | None) -> None:
    ledger = Ledger()
    assert ledger.excess(limit, 0) == ""
