"""Bad values that a loop's own code writes down: what people do first to see whether the watch works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nan_detector import NaNDetector, NaNEvent

NAN = float("nan")


def run(spoil: Callable[[Tensor, nn.Sequential], Tensor]) -> tuple[NaNEvent | None, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    with NaNDetector(model, verbose=False) as det:
        for i in range(4):
            det.set_batch(i)
            x, y = torch.randn(6, 4), torch.randint(0, 2, (6,))
            if i == 2:
                x = spoil(x, model)
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if det.triggered:
                break
    return det.event, model


def one_element(x: Tensor, model: nn.Module) -> Tensor:
    x[1, 2] = NAN
    return x


def by_mask(x: Tensor, model: nn.Module) -> Tensor:
    x[x > 1] = NAN
    return x


def product(x: Tensor, model: nn.Module) -> Tensor:
    return x * NAN


def filled(x: Tensor, model: nn.Module) -> Tensor:
    return x.fill_(NAN)


def appended(x: Tensor, model: nn.Module) -> Tensor:
    return torch.cat([x[:3], torch.full((3, 4), NAN)])


@pytest.mark.parametrize("spoil", [one_element, by_mask, product, filled, appended], ids=lambda f: f.__name__)
def test_a_literal_in_the_batch(spoil: Callable[[Tensor, nn.Sequential], Tensor]) -> None:
    event, model = run(spoil)
    assert event is not None and (event.step, event.phase, event.layer_name) == (2, "loss", None)
    assert event.cause is not None and event.cause.code == "literal_nan"
    assert event.location is not None and "NAN" in event.location.source_line
    assert event.location.function == spoil.__name__
    assert event.weights == "clean" and all(bool(p.isfinite().all()) for p in model.parameters())


def in_place(x: Tensor, model: nn.Sequential) -> Tensor:
    with torch.no_grad():
        model[0].weight[0, 0] = NAN
    return x


def through_data(x: Tensor, model: nn.Sequential) -> Tensor:
    model[0].weight.data[0, 0] = NAN
    return x


@pytest.mark.parametrize("spoil", [in_place, through_data], ids=lambda f: f.__name__)
def test_a_weight_that_the_loop_itself_spoils_is_not_put_down_to_the_optimizer(
    spoil: Callable[[Tensor, nn.Sequential], Tensor],
) -> None:
    event, _ = run(spoil)
    assert event is not None and (event.step, event.phase, event.tensor_name) == (2, "state", "0.weight")
    assert event.cause is not None and event.cause.code == "parameter_non_finite"


def test_a_literal_that_is_overwritten_before_it_is_read_is_nobodys_business() -> None:
    def overwritten(x: Tensor, model: nn.Module) -> Tensor:
        kept = x.clone()
        x[1] = NAN
        x[1] = kept[1]
        return x

    event, _ = run(overwritten)
    assert event is None


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_an_infinity_in_the_batch_is_no_masked_logit(value: float) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        x = torch.ones(3, 2)
        x[1, 1] = value
        model(x).mean().backward()
        optimizer.step()
    assert det.event is not None and det.event.cause is not None and det.event.cause.code == "literal_nan"
    assert bool(model.weight.isfinite().all())


def test_weights_spoilt_in_mid_run_were_finite_until_then() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with NaNDetector(model, verbose=False) as det:
        for i in range(12):
            if i == 7:
                with torch.no_grad():
                    model[0].weight[0, 0] = NAN
            optimizer.zero_grad()
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.weights) == (6, "damaged since step 6")
    assert event.location is not None and event.location.source_line == "model[0].weight[0, 0] = NAN"
    assert event.sample_index == (), "every sample meets a bad weight"


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, bad: bool, interrupted: bool = False) -> Tensor:
        out = self.head(self.body(x))
        if interrupted:
            raise KeyboardInterrupt
        return torch.log(out - 100) if bad else out


def test_a_head_that_is_replaced_with_its_optimizer_is_watched() -> None:
    torch.manual_seed(0)
    model = Headed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for i in range(12):
            if i == 5:
                model.head = nn.Linear(8, 2)
                optimizer = torch.optim.SGD(model.head.parameters(), lr=0.01)
            optimizer.zero_grad()
            model(torch.randn(3, 8), i == 8).square().mean().backward()
            optimizer.step()
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.step, event.op, event.layer_name) == (8, "log", "root")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_an_interrupt_within_the_model_does_not_end_the_watch() -> None:
    torch.manual_seed(0)
    model = Headed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with NaNDetector(model, verbose=False) as det:
        for i in range(12):
            try:
                optimizer.zero_grad()
                model(torch.randn(3, 8), i == 8, interrupted=i == 4).square().mean().backward()
                optimizer.step()
            except KeyboardInterrupt:
                continue
            if det.triggered:
                break
    event = det.event
    assert event is not None and (event.op, event.layer_name, event.reproduced) == ("log", "root", "yes")


def test_gradients_that_were_bad_before_the_step_are_called_that() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.weight.grad = torch.full_like(model.weight, NAN)
    with NaNDetector(model, verbose=False) as det:
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert det.event is not None and any("zero_grad" in note for note in det.event.notes)
