"""What the watch costs, with a loose bound that catches a blunder; `benchmarks/` is where it is measured."""

from __future__ import annotations

import pytest

from nan_detector import NaNDetector
from nan_detector._bench.figures import ratios, spread
from nan_detector._bench.results import BARE
from nan_detector._bench.timing import in_turns
from nan_detector._bench.variants import LAYERS, STEP, variant
from nan_detector._bench.workloads import made, named

pytestmark = pytest.mark.alone  # times of a step, which anything beside it makes longer

BOUND = 1.25
#: W1's step takes 1 ms, in which a fifth of a millisecond of watching does not hide: 1.19 to 1.22 was seen, but more
#: than 1.25 five times in a row where the machine was half as fast. 1.10 is the aim; this catches a blunder until then.
BOUND_W1 = 1.35
TRIES = 5  # the machine may be busy with other things


@pytest.mark.parametrize(
    ("workload", "watch", "bound"),
    [("W1", STEP, BOUND_W1), ("W3-25", STEP, BOUND), ("W1", LAYERS, 1.6), ("W3-25", LAYERS, 1.35)],
)
def test_overhead(workload: str, watch: str, bound: float) -> None:
    found = []
    task = made(named(workload))
    contestants = [variant(name).contestant(task, 96 if workload == "W1" else 6) for name in (BARE, watch)]
    for _ in range(TRIES):
        blocks = in_turns(contestants, rounds=11, budget_s=20.0)
        bare, watched = ([None if b is None else b.mean_s for b in blocks[name]] for name in (BARE, watch))
        found.append(spread(ratios(watched, bare)).median)
        print(f"{workload}, {watch}: {found[-1]:.3f}")
        if found[-1] <= bound:
            return
    pytest.fail(f"{workload}, {watch}: {', '.join(f'{v:.3f}' for v in found)}, allowed is {bound}")


def test_what_is_said_of_the_overhead_is_of_the_right_size() -> None:
    task = made(named("W1"))
    (bare,) = in_turns([variant(BARE).contestant(task, 40)], rounds=1, budget_s=5.0)[BARE]
    with NaNDetector(task.model, verbose=False) as det:
        for _ in range(40):
            task.step()
    assert bare is not None
    assert 0.0 < det.overhead_ms < 1e3 * bare.mean_s
