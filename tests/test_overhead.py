"""What the watch costs, with a loose bound that catches a blunder; the benchmark proper is another matter."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nan_detector import NaNDetector

BOUND = 1.25
TRIES = 3  # the machine may be busy with other things


def w1() -> tuple[nn.Module, int]:
    """A small multilayer perceptron: the step is so short that nothing hides."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)), 64


class Residual(nn.Module):
    def __init__(self, depth: int, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * torch.relu(layer(x))
        return self.head(x)


def w3() -> tuple[nn.Module, int]:
    """25 residual layers of width 128: many small gradients."""
    return Residual(25), 128


def step_of(make: Callable[[], tuple[nn.Module, int]]) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    model, width = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(64, width), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    return model, step


def milliseconds(step: Callable[[], None], steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return 1000.0 * (time.perf_counter() - start) / steps


def ratio(make: Callable[[], tuple[nn.Module, int]], watch: str, rounds: int, steps: int) -> tuple[float, float, float]:
    """Median step times, watched over bare, block by block in turn; and the two medians."""
    _, bare = step_of(make)
    model, watched = step_of(make)
    times: dict[str, list[float]] = {"bare": [], "watched": []}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds + 1):
            times["bare"].append(milliseconds(bare, steps))
            # Attached for its own block only, so that the bare one is bare.
            with NaNDetector(model, watch=watch, verbose=False) as det:
                milliseconds(watched, 5)  # the first calls of a model are looked at more closely
                times["watched"].append(milliseconds(watched, steps))
            assert det.event is None
            if i == 0:  # warm-up
                times = {k: [] for k in times}
    finally:
        gc.enable()
    medians = {k: statistics.median(v) for k, v in times.items()}
    return medians["watched"] / medians["bare"], medians["bare"], medians["watched"]


@pytest.mark.parametrize(
    ("make", "watch", "bound"),
    [(w1, "step", BOUND), (w3, "step", BOUND), (w1, "layers", 1.6), (w3, "layers", 1.35)],
    ids=lambda v: getattr(v, "__name__", str(v)),
)
def test_overhead(make: Callable[[], tuple[nn.Module, int]], watch: str, bound: float) -> None:
    found = []
    for _ in range(TRIES):
        value, bare, watched = ratio(make, watch, rounds=11, steps=15 if make is w1 else 5)
        print(f"{make.__name__} {watch}: {value:.3f} ({bare:.3f} ms bare, {watched:.3f} ms watched)")
        found.append(value)
        if value <= bound:
            return
    pytest.fail(f"{make.__name__} at {watch!r}: {', '.join(f'{v:.3f}' for v in found)}, allowed is {bound}")


def test_what_is_said_of_the_overhead_is_of_the_right_size() -> None:
    model, step = step_of(w1)
    with NaNDetector(model, verbose=False) as det:
        milliseconds(step, 40)
        assert 0.0 < det.overhead_ms < milliseconds(step, 20)
