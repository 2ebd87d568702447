"""Modules that no step uses: `also_watch=`, and at "ops" whatever an operation between two steps leaves in one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from _programs import marked_line
from nan_detector import NaNDetector, NaNEvent, OptionError

Tensor = torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def batches(count: int) -> Iterator[Tensor]:
    g = torch.Generator().manual_seed(0)
    return (torch.randn(8, 3, generator=g) * torch.tensor([1.0, 3000.0, 1.0]) for _ in range(count))


def average(ema: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for a, b in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
            if a.is_floating_point():
                a.mul_(0.5).add_(b, alpha=0.5)


def round_trip(ema: nn.Module) -> None:
    ema.half()  # <-- birth
    ema.float()


def overflowing_scale(ema: Any) -> None:
    ema.norm.running_var = ema.norm.running_var * 1e38  # <-- birth


def train(
    spoil: Any, *, steps: int = 40, at: int = 5, set_batch: bool = True, ema: Any = None, **options: Any
) -> tuple[list[NaNEvent], NaNDetector]:
    """The plain loop with a copy of averaged weights, which `spoil` spoils after step `at`."""
    model = Net()
    ema = copy.deepcopy(model) if ema is None else ema
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    if "also_watch" in options:
        options["also_watch"] = options["also_watch"](ema)
    with NaNDetector(model, verbose=False, grad_norm_warn=float("inf"), **options) as det:
        for i, x in enumerate(batches(steps)):
            if set_batch:
                det.set_batch(i)
            opt.zero_grad()
            F.mse_loss(model(x), x[:, :1]).backward()
            opt.step()
            average(ema, model)
            if i == at and spoil is not None:
                spoil(ema)
        assert not det.triggered
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return det.all_events, det


def nan_in_weight(ema: Any) -> None:
    ema.head.weight.data[0, 1] = float("nan")


# -- also_watch, at the cheap level -----------------------------------------------------------------------------------


@pytest.mark.parametrize("watch", ["step", "layers"])
@pytest.mark.parametrize(
    ("wrap", "key"),
    [
        (lambda m: m, "also_watch"),
        (lambda m: [nn.Linear(2, 2), m], "also_watch[1]"),
        (lambda m: {"ema": m}, "ema"),
    ],
    ids=["module", "list", "dict"],
)
def test_a_copy_that_goes_bad_is_a_silent_event_within_a_sweep(watch: str, wrap: Any, key: str) -> None:
    events, det = train(nan_in_weight, steps=76, at=36, also_watch=wrap, watch=watch)
    (event,) = events
    assert (event.severity, event.phase, event.status) == ("silent", "state", "final")
    assert (event.tensor_name, event.layer_name, event.module_type) == (f"{key}.head.weight", f"{key}.head", "Linear")
    assert 36 < event.step <= 36 + 33
    assert event.output is not None and event.output.nan_count == 1
    assert any("it was finite at step" in n for n in event.notes), event.notes
    assert det.check_state() is not None


def test_an_overflowed_buffer_is_seen_once() -> None:
    events, _ = train(round_trip, steps=120, also_watch=lambda m: {"ema": m})
    assert [e.tensor_name for e in events] == ["ema.norm.running_var"]


def test_what_the_slices_did_not_come_to_is_seen_at_the_end() -> None:
    events, _ = train(nan_in_weight, steps=6, also_watch=lambda m: {"ema": m})
    (event,) = events
    assert event.tensor_name == "ema.head.weight" and "when the watch ended" in event.notes[0]


def test_a_healthy_copy_a_mask_and_what_was_bad_before_are_no_events() -> None:
    ema = Net()
    ema.register_buffer("mask", torch.full((3,), float("-inf")))
    model = Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-9)
    old = Net()
    nan_in_weight(old)
    with NaNDetector(model, verbose=False, also_watch=[ema, old], grad_norm_warn=float("inf")) as det:
        for x in batches(70):
            opt.zero_grad()
            model(x).mean().backward()
            opt.step()
    assert det.event is None


def test_a_bad_step_is_still_an_event_of_its_own() -> None:
    model, ema = Net(), Net()
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)
    with NaNDetector(model, verbose=False, also_watch=ema, grad_norm_warn=float("inf")) as det:
        for i, x in enumerate(batches(4)):
            det.set_batch(i)
            opt.zero_grad()
            out = model(x)
            (torch.log(-out.abs()) if i == 2 else out).mean().backward()
            opt.step()
            if det.triggered:
                break
    assert det.event is not None and (det.event.op, det.event.severity, det.event.step) == ("log", "error", 2)


def test_training_with_further_modules_is_bit_for_bit_the_same() -> None:
    def weights(**options: Any) -> list[Tensor]:
        model = Net()
        opt = torch.optim.Adam(model.parameters())
        with NaNDetector(model, verbose=False, grad_norm_warn=float("inf"), **options):
            for x in batches(5):
                opt.zero_grad()
                model(x).mean().backward()
                opt.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(), weights(also_watch=Net()), strict=True))


@pytest.mark.parametrize("value", ["ema", 3, nn.Linear, [1], {"ema": None}])
def test_only_modules_can_be_watched(value: Any) -> None:
    with pytest.raises(OptionError, match=r"^also_watch=.*must be a torch\.nn\.Module, or a list or dict of them"):
        NaNDetector(Net(), also_watch=value)


# -- at "ops": the line, and the step in which it happened ------------------------------------------------------------


@pytest.mark.parametrize("set_batch", [True, False])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    ("spoil", "op", "cause"), [(round_trip, "to_copy", "half_overflow"), (overflowing_scale, "mul", None)]
)
def test_the_line_that_spoiled_a_copy_nobody_watches(
    spoil: Any, op: str, cause: str | None, last: bool, set_batch: bool
) -> None:
    events, _ = train(spoil, watch="ops", steps=4 if last else 6, at=3, set_batch=set_batch)
    (event,) = events
    assert (event.step, event.phase, event.severity, event.op) == (3, "state", "silent", op)
    assert event.location is not None
    assert (event.location.file, event.location.line) == marked_line(spoil)
    assert event.tensor_name == "norm.running_var" and event.module_type == "BatchNorm1d"
    assert cause is None or (event.cause is not None and event.cause.code == cause)
    assert "of a Net that is not watched" in event.symptom


def test_a_copy_in_also_watch_has_its_key_and_one_event() -> None:
    events, _ = train(round_trip, watch="ops", steps=40, at=2, also_watch=lambda m: {"ema": m})
    (event,) = events
    assert (event.step, event.tensor_name, event.layer_name) == (2, "ema.norm.running_var", "ema.norm")
    assert event.location is not None and (event.location.file, event.location.line) == marked_line(round_trip)


def test_what_overflows_between_two_steps_and_is_not_kept_is_no_event() -> None:
    def look(ema: Any) -> None:
        assert not bool(torch.isfinite(ema.norm.running_var * 1e38).all())

    events, _ = train(look, watch="ops", steps=6, at=3)
    assert events == []


def test_what_is_put_right_before_the_next_gate_is_no_event() -> None:
    def put_right(ema: Any) -> None:
        kept = ema.norm.running_var.clone()
        round_trip(ema)
        ema.norm.running_var.copy_(kept)

    events, _ = train(put_right, watch="ops", steps=6, at=3)
    assert events == []
