"""Clipping before unscaling: the threshold meets gradients that are some 65536 times too large."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from nan_detector import NaNDetector, WarningRecord

KIND = "clip_before_unscale"
Clip = Callable[[list[Tensor], Any], None]


def by_norm(parameters: list[Tensor], scaler: Any) -> None:
    clip_grad_norm_(parameters, 0.5)  # <-- the clip


def by_norm_slowly(parameters: list[Tensor], scaler: Any) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=False)  # <-- the clip


def by_value(parameters: list[Tensor], scaler: Any) -> None:
    clip_grad_value_(parameters, 0.5)  # <-- the clip


def by_value_slowly(parameters: list[Tensor], scaler: Any) -> None:
    torch.nn.utils.clip_grad_value_(parameters, 0.5, foreach=False)  # <-- the clip


def in_two_calls(parameters: list[Tensor], scaler: Any) -> None:
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, total)  # <-- the clip


def by_hand(parameters: list[Tensor], scaler: Any) -> None:
    total = torch.sqrt(sum((p.grad**2).sum() for p in parameters if p.grad is not None))
    for p in parameters:
        p.grad.mul_(0.5 / (total + 1e-6))  # <-- the clip


def by_hand_with_numbers(parameters: list[Tensor], scaler: Any) -> None:
    total = sum(float(p.grad.norm()) ** 2 for p in parameters if p.grad is not None) ** 0.5
    if total > 0.5:
        for p in parameters:
            p.grad.data.mul_(0.5 / total)  # <-- the clip


def by_storing(parameters: list[Tensor], scaler: Any) -> None:
    for p in parameters:
        p.grad = p.grad.clamp(-0.5, 0.5)  # <-- the clip


CLIPS: dict[str, Clip] = {
    f.__name__: f
    for f in (
        *(by_norm, by_norm_slowly, by_value, by_value_slowly, in_two_calls),
        *(by_hand, by_hand_with_numbers, by_storing),
    )
}


def line(clip: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(clip)
    return first + next(i for i, text in enumerate(lines) if "# <-- the clip" in text)


def train(
    clip: Clip,
    *,
    unscale: str = "",
    scale: float = 65536.0,
    enabled: bool = True,
    make: Callable[[Iterable[Tensor]], Any] = lambda p: torch.optim.SGD(p, lr=0.01),
    steps: int = 4,
    **options: Any,
) -> tuple[NaNDetector, list[WarningRecord]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    with NaNDetector(model, verbose=False, grad_norm_warn=float("inf"), **options) as det:
        for i in range(steps):
            det.set_batch(i)
            x, y = torch.randn(16, 8), torch.randint(0, 4, (16,))
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if unscale == "before":
                scaler.unscale_(optimizer)
            clip(list(model.parameters()), scaler)
            if unscale == "after":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    assert det.event is None
    return det, [w for w in det.warnings if w.kind == KIND]


@pytest.mark.parametrize("unscale", ["", "after"])
@pytest.mark.parametrize("name", list(CLIPS))
def test_it_is_told_once_with_its_line(name: str, unscale: str) -> None:
    _, told = train(CLIPS[name], unscale=unscale)
    assert [w.step for w in told] == [0]
    assert told[0].location is not None and told[0].location.line == line(CLIPS[name])
    assert told[0].value == 65536.0


@pytest.mark.parametrize("watch", ["layers", "ops"])
def test_at_every_level(watch: str) -> None:
    assert len(train(by_norm, watch=watch)[1]) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_optimizers_that_unscale_by_themselves(fused: bool) -> None:
    assert len(train(by_norm, make=lambda p: torch.optim.Adam(p, lr=1e-3, fused=fused))[1]) == 1


def test_the_message_says_what_to_do() -> None:
    _, told = train(by_norm)
    assert told[0].message == (
        f"step 0: {__file__}:{line(by_norm)} clips gradients to 0.5 that still carry the loss scale of 65536, as if it "
        "were 7.63e-6: call scaler.unscale_(optimizer) before it"
    )


def test_without_a_number_it_is_shorter() -> None:
    _, told = train(by_hand_with_numbers)
    assert told[0].message == (
        f"step 0: {__file__}:{line(by_hand_with_numbers)} clips gradients that still carry the loss scale of 65536: "
        "call scaler.unscale_(optimizer) before it"
    )


# --------------------------------------------------------------------------------------------------------- near misses


@pytest.mark.parametrize("name", list(CLIPS))
@pytest.mark.parametrize("why", ["unscaled first", "scale of 1", "scaler disabled"])
def test_clipping_that_is_right_is_quiet(name: str, why: str) -> None:
    options: dict[str, Any] = {
        "unscaled first": {"unscale": "before"},
        "scale of 1": {"scale": 1.0},
        "scaler disabled": {"enabled": False},
    }[why]
    assert train(CLIPS[name], **options)[1] == []


def knows_the_scale(parameters: list[Tensor], scaler: Any) -> None:
    clip_grad_norm_(parameters, 0.5 * scaler.get_scale())


def knows_it_by_its_size(parameters: list[Tensor], scaler: Any) -> None:
    most = 2.0 * scaler.get_scale()
    clip_grad_norm_(parameters, most)


def unscales_by_hand(parameters: list[Tensor], scaler: Any) -> None:
    _ = [float(p.grad.norm()) for p in parameters]
    inverse = 1.0 / scaler.get_scale()
    for p in parameters:
        p.grad.mul_(inverse)


def measures(parameters: list[Tensor], scaler: Any) -> None:
    torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def adds_noise(parameters: list[Tensor], scaler: Any) -> None:
    for p in parameters:
        p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)


def nothing(parameters: list[Tensor], scaler: Any) -> None:
    return None


@pytest.mark.parametrize(
    "clip", [knows_the_scale, knows_it_by_its_size, unscales_by_hand, measures, adds_noise, nothing]
)
def test_what_is_no_mistake_of_this_kind_is_quiet(clip: Clip) -> None:
    assert train(clip)[1] == []


def test_two_optimizers_and_one_scaler() -> None:
    """Each is unscaled and clipped in its turn, as in a GAN."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 4), nn.Linear(4, 4)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
    scaler = torch.amp.GradScaler("cpu")
    with NaNDetector(models, verbose=False, grad_norm_warn=float("inf")) as det:
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                scaler.scale(models[1](models[0](torch.randn(3, 4))).square().mean()).backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
            scaler.update()
    assert det.event is None and [w for w in det.warnings if w.kind == KIND] == []
