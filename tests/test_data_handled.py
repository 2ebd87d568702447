"""Bad values in a batch that the program handles, or handles too late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from _data_programs import born, train
from test_birth_data import INF, NAN, Regressor, Tensor, mse, pairs, rows


class Cleans(Regressor):
    def forward(self, features: Tensor) -> Tensor:
        return super().forward(torch.nan_to_num(features, nan=0.0, posinf=1.0, neginf=-1.0))


class Masks(Regressor):
    def forward(self, features: Tensor) -> Tensor:
        known = torch.isfinite(features)
        return super().forward(torch.where(known, features, torch.zeros_like(features)))


class Attends(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = torch.nn.Linear(4, 6)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        return (self.score(x) + bias).softmax(-1)


@pytest.mark.parametrize("model", [Cleans, Masks])
@pytest.mark.parametrize("watch", ["step", "layers", "ops"])
def test_missing_values_that_the_model_fills_in_are_quiet(model: type[Regressor], watch: str) -> None:
    batches = pairs()
    batches[1][0][2, :2] = NAN
    batches[2][0][0, 1] = INF
    det = train(model(), batches, mse, watch=watch)
    assert [e for e in det.all_events if e.severity != "handled"] == []
    assert not det.triggered


@pytest.mark.parametrize("watch", ["step", "ops"])
def test_an_additive_mask_from_the_batch_is_quiet(watch: str) -> None:
    bias = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -INF)
    det = train(Attends(), [rows(i) for i in range(3)], lambda m, x: m(x, bias).square().sum(), watch=watch)
    assert det.event is None


def test_labels_that_are_missing_and_masked_out_before_use_are_quiet() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        known = ~y.isnan()
        return F.mse_loss(model(x)[known], y[known])

    batches = pairs()
    batches[1][1][:3] = NAN
    assert train(Regressor(), batches, step).event is None


def test_labels_that_are_masked_out_too_late_are_not() -> None:
    """The forward drops the NaN; 0 * NaN in the derivative of the square brings it back."""

    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        error = (model(x) - y) ** 2
        return torch.where(y.isnan(), torch.zeros_like(error), error).mean()

    batches = pairs()
    batches[1][1][1] = NAN
    born(train(Regressor(), batches, step), step=1, phase="data", tensor_name="y", sample_index=(1,))


def test_an_empty_batch_whose_sum_is_taken_is_quiet() -> None:
    def step(model: torch.nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return (model(x) - y).square().sum() / max(len(x), 1)

    batches = pairs()
    batches[1] = (torch.empty(0, 4), torch.empty(0, 1))
    assert train(Regressor(), batches, step).event is None
