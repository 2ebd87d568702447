"""Bad values that are first met by an operation that sees the batch turned: told as the batch itself has them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from nan_detector import NaNDetector, NaNEvent

Tensor = torch.Tensor


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[1][0])


class Channels(nn.Module):
    """Time last, as a convolution likes it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.permute(1, 0, 2) * 2).mean(0)


class TimeFirst(nn.Module):
    """Is given time first: there the batch's own first dimension is time."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).mean(0)


def event_of(model: nn.Module, x: Tensor) -> NaNEvent:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        model(x).sum().backward()
        optimizer.step()
        assert det.triggered
    assert det.event is not None
    return det.event


@pytest.mark.parametrize("make", [Recurrent, Channels])
def test_the_sample_is_the_one_of_the_batch_that_was_given(make: Callable[[], nn.Module]) -> None:
    x = torch.randn(9, 12, 6)
    x[4, :, 3] = torch.nan
    event = event_of(make(), x)
    assert event.cause is not None and event.cause.code == "input_non_finite"
    assert event.sample_index == (4,)
    assert "first at [4, 0, 3]" in event.cause.evidence[0]
    assert event.output is not None and event.output.shape == (9, 12, 6)


def test_a_batch_that_is_not_turned_is_told_as_it_is() -> None:
    x = torch.randn(12, 9, 6)
    x[2:4, 5, 3] = torch.nan
    event = event_of(TimeFirst(), x)
    assert event.sample_index == (2, 3)
    assert event.cause is not None and "first at [2, 5, 3]" in event.cause.evidence[0]


def test_holes_that_are_not_used_are_not_named() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x[:, -1])

    x = torch.randn(9, 12, 6)
    x[1, 0] = torch.nan  # padding
    x[7, -1, 2] = torch.nan
    event = event_of(Last(), x)
    assert event.sample_index == (7,)
