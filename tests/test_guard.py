"""`train_with_nan_guard`: the loop itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nan_detector import train_with_nan_guard
from nan_detector._errors import OptionError


def parts() -> tuple[nn.Module, list[Any], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(5)]
    return model, batches, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.01)


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
