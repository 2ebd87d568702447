"""Mixed precision with a GradScaler: what is its own business, what is counted, and what is worth a warning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nan_detector import NaNDetector

OPTIMIZERS: list[Any] = [
    lambda p: torch.optim.SGD(p, lr=1e-2),
    lambda p: torch.optim.Adam(p, lr=1e-3),
    lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
]
IDS = ["sgd", "adam", "adam fused"]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


class Steep(torch.autograd.Function):
    """The identity; its gradient is multiplied, as a division by something small would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * ctx.factor).half().to(grad.dtype), None


def train(
    scaler: torch.amp.GradScaler,
    n: int,
    *,
    factor: Callable[[int], float] = lambda i: 1.0,
    spoil: int | None = None,
    make: Callable[[Any], Any] = OPTIMIZERS[0],
    clip: bool = False,
    **options: Any,
) -> tuple[NaNDetector, int]:
    """A run, and how many of its steps the scaler skipped, counted by hand."""
    model = mlp()
    opt = make(model.parameters())
    skips = 0
    g = torch.Generator().manual_seed(0)
    with NaNDetector(model, verbose=False, **options) as det:
        for i in range(n):
            x = torch.randn(16, 8, generator=g)
            y = x[:, :4].argmax(1)
            if i == spoil:
                x = x / 0.0
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = model(Steep.apply(x.requires_grad_(), 1.0))
            loss = F.cross_entropy(Steep.apply(out.float(), factor(i)), y)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            skips += scaler.get_scale() < before
            if det.triggered:
                break
    return det, skips


@pytest.mark.parametrize("clip", [False, True], ids=["", "unscaled and clipped"])
@pytest.mark.parametrize("make", OPTIMIZERS, ids=IDS)
def test_the_warm_up_is_quiet_and_counted(make: Any, clip: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28, growth_interval=10_000)
    det, skips = train(scaler, 60, make=make, clip=clip)
    assert skips > 3, "it was meant to start too high"
    assert det.scaler_skips == skips and det.skipped_steps == 0
    assert det.all_events == [] and det.warnings == []
    assert det.grad_events == [], "the threshold is for unscaled norms"


@pytest.mark.parametrize("make", OPTIMIZERS, ids=IDS)
def test_infinite_gradients_of_a_finite_loss_are_no_event(make: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
    det, skips = train(scaler, 50, factor=lambda i: 1e6 if i in (20, 35) else 1.0, make=make)
    assert skips == 2 == det.scaler_skips
    assert det.all_events == [] and det.warnings == [] and det.grad_events == []


@pytest.mark.parametrize("make", OPTIMIZERS, ids=IDS)
def test_a_nan_of_the_forward_is_an_event(make: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    det, _ = train(scaler, 20, spoil=7, make=make)
    assert det.event is not None and det.event.step == 7 and det.event.weights == "clean"


@pytest.mark.parametrize("make", OPTIMIZERS, ids=IDS)
def test_norms_are_those_of_the_unscaled_gradients(make: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10_000)
    det, _ = train(scaler, 20, make=make)
    with_scale = det.history.values["grad_norm"]
    det, _ = train(torch.amp.GradScaler("cpu", enabled=False), 20, make=make)
    assert det.history.values["grad_norm"] == pytest.approx(with_scale, rel=0.05)
    assert with_scale.max() < 10


def test_the_scale_is_recorded() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10)
    det, _ = train(scaler, 25)
    assert det.history.values["loss_scale"].tolist() == [2.0**10] * 10 + [2.0**11] * 10 + [2.0**12] * 5


def test_a_scale_that_keeps_falling_is_a_warning() -> None:
    """Gradients double every 4 steps after 220: the scale falls with them, and nothing else shows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10_000)
    slow = lambda p: torch.optim.SGD(p, lr=1e-6)  # noqa: E731
    det, skips = train(
        scaler, 262, factor=lambda i: 16.0 * 2.0 ** (max(0, i - 220) / 4), make=slow, grad_norm_warn=1e30
    )
    assert skips >= 6 and det.scaler_skips == skips
    assert det.all_events == []
    kinds = {w.kind for w in det.warnings}
    assert "loss_scale_falling" in kinds
    [falling] = [w for w in det.warnings if w.kind == "loss_scale_falling"]
    assert falling.step > 220 and falling.value is not None and falling.value <= 2.0**8


def test_a_scale_at_its_floor_is_a_warning() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10_000)
    det, _ = train(scaler, 260, factor=lambda i: 1e6 if i in (210, 220, 230) else 1.0)
    floor = [w for w in det.warnings if w.kind == "loss_scale_floor"]
    assert [w.step for w in floor] == [231]  # the first step with it
    assert floor[0].value is not None and floor[0].value <= 1.0
    assert det.all_events == []


def test_a_balanced_scaler_stays_silent_for_long() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=50)
    det, skips = train(scaler, 700, factor=lambda i: 64.0, grad_norm_warn=1e9)
    assert skips >= 5 and det.scaler_skips == skips
    assert det.all_events == [] and det.warnings == []
