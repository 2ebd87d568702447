"""The public faces as a user has them: the oldest loop, the unattached detector, the guarded loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector, train_with_nan_guard, watch_for_nans
from nan_detector._errors import OptionError


def parts() -> tuple[nn.Module, list[Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
    return model, batches, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01)


def test_the_oldest_loop_runs_as_it_stands() -> None:
    model, loader, criterion, optimizer = parts()
    loader[3][0][0, 0] = float("inf")
    with NaNDetector(model, verbose=False) as det:
        for batch_idx, (x, y) in enumerate(loader):
            det.set_batch(batch_idx)
            loss = criterion(model(x), y)
            loss.backward()
            assert det.check_grad_norms() is False
            optimizer.step()
            if det.triggered:
                break
    assert batch_idx == 3 and det.event is not None
    event = det.event
    assert (event.step, event.batch_idx, event.phase, event.tensor_name) == (3, 3, "data", "input")
    assert (event.sample_index, event.weights, event.reproduced, event.is_backward) == ((0,), "clean", "yes", False)
    assert det.all_events == [event] and det.grad_events == [] and det.overhead_ms > 0.0
    assert bool(model.weight.isfinite().all())


def test_a_detector_that_is_not_attached_sees_nothing_until_it_is() -> None:
    model, loader, criterion, optimizer = parts()
    det = watch_for_nans(model, verbose=False, on_nan="skip")
    bad = torch.full((4, 3), float("nan"))
    criterion(model(bad), loader[0][1])
    assert det.event is None and not det.triggered
    with det:
        criterion(model(bad), loader[0][1]).backward()
        optimizer.step()
    assert det.triggered and det.skipped_steps == 1


@pytest.mark.parametrize(("most", "steps"), [(None, 5), (0, 0), (2, 2), (5, 5), (99, 5)])
def test_so_many_batches(most: int | None, steps: int) -> None:
    losses, event = train_with_nan_guard(*parts(), max_batches=most)
    assert len(losses) == steps and event is None


@pytest.mark.parametrize("most", [-1, -100, 2.0, True, "3"])
def test_a_number_of_batches_that_cannot_be_meant_is_refused_before_anything_is_trained(most: Any) -> None:
    model, batches, criterion, optimizer = parts()
    before = model.weight.detach().clone()
    with pytest.raises(OptionError) as caught:
        train_with_nan_guard(model, batches, criterion, optimizer, max_batches=most)
    assert str(caught.value) == f"max_batches={most!r} must be a whole number of at least 0, or None for all batches."
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("on_first", [True, False])
def test_the_bad_step_is_among_the_losses(on_first: bool) -> None:
    model, batches, criterion, optimizer = parts()
    batches[2][0][1, 0] = float("nan")
    losses, event = train_with_nan_guard(model, batches, criterion, optimizer, stop_on_first=on_first, verbose=False)
    assert len(losses) == (3 if on_first else 5) and losses[2] != losses[2]
    assert event is not None and event.step == 2 and event.weights == "clean"
    assert bool(model.weight.isfinite().all())


@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_a_model_whose_modules_are_lazy_is_watched_from_the_beginning(watch: str) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(1))
    with NaNDetector(model, verbose=False, watch=watch, stop_on_first=False) as det:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        model(torch.randn(2, 3))
        for i in range(8):
            if i == 5:
                with torch.no_grad():
                    model[0].weight[0, 0] = float("nan")
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            if det.triggered:
                break
    assert det.event is not None and det.event.step == 4  # the last that had called the model when it was written
    assert det.event.tensor_name == "0.weight" and det.event.phase == "state"
