"""GradScaler on the CPU: its overflows are its own business, a NaN of the training is ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from _sacred import LEVELS, blobs, marked_line
from nan_detector import NaNDetector

BAD = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.sqrt(100.0 + x.float().mean())  # <-- root
        return self.head(torch.relu(self.body(x))) * scale / 10.0


def train(
    model: nn.Module,
    det: NaNDetector | None,
    *,
    dtype: torch.dtype = torch.float16,
    init_scale: float = 2.0**24,
    steps: int = 16,
    bad: tuple[int, ...] = (),
    unscale: bool = True,
    optimizer: Any = None,
) -> list[float]:
    """The loop of PyTorch's own AMP recipe; gives the scale after each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    scales = []
    for i in range(steps):
        if det is not None:
            det.set_batch(i)
        x, y = blobs(seed=i)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            out = model(x - 1e4 if i in bad else x)
            loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("unscale", [True, False])
@pytest.mark.parametrize("watch", LEVELS)
def test_the_warm_up_is_quiet(watch: str, unscale: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    with NaNDetector(model, watch=watch, on_nan="raise", verbose=False) as det:
        scales = train(model, det, unscale=unscale)
    assert scales[0] < 2.0**24, "the scale was meant to be too large"
    assert scales != sorted(scales, reverse=True), "and to be found in the end"
    assert det.event is None and not det.triggered
    assert det.grad_events == [], "norms are those of the unscaled gradients"


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("watch", LEVELS)
def test_a_nan_of_the_forward_is_an_event_although_the_scaler_skips_it(watch: str, fused: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=fused)
    with NaNDetector(model, watch=watch, on_nan="skip", stop_on_first=False, verbose=False) as det:
        train(model, det, init_scale=2.0**4, bad=(BAD,), optimizer=optimizer)
    assert [e.step for e in det.all_events] == [BAD], "the healthy step after it is none"
    event = det.all_events[0]
    assert (event.phase, event.layer_name, event.op) == ("forward", "root", "sqrt")
    assert event.location is not None and event.location.line == marked_line(Net, "root")
    assert (event.reproduced, event.weights) == ("yes", "clean")
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_disabled_scaler_changes_nothing() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    with NaNDetector(model, on_nan="skip", verbose=False) as det:
        for i in range(4):
            det.set_batch(i)
            x, y = blobs(seed=i)
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x - 1e4 if i == 2 else x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [(e.step, e.op, e.weights) for e in det.all_events] == [(2, "sqrt", "clean")]


def test_norms_are_compared_without_the_scale() -> None:
    model = Net()
    with NaNDetector(model, grad_norm_warn=50.0, verbose=False) as det:
        train(model, det, init_scale=2.0**12, unscale=False)
    assert det.event is None and det.grad_events == []
