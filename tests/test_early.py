"""Early warnings: said where a run warrants them, and silent through long ordinary runs."""

from __future__ import annotations

import itertools
import math
import random
import timeit
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import lr_scheduler

from nan_detector._early import AGAIN_AFTER, KINDS, EarlyWarnings
from nan_detector._early_layers import DEAD_AFTER, dtype_named, zero_streaks
from nan_detector._early_scale import FLOOR, WINDOW
from nan_detector._early_scale import WARM_UP as SCALE_WARM_UP
from nan_detector._early_spikes import CLEAR_LOSS, CLIP, KEPT, LEAST_DEVIATION, WARM_UP, WEIGHT, Chart
from nan_detector._recorder import Recorder
from nan_detector._records import WarningRecord, record_from_dict

NAN, INF = math.nan, math.inf
HALF_MAX = 65504.0


def noise(rows: int, level: float = 0.5, sigma: float = 0.1, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, sigma)) for _ in range(rows)]


def told(rows: Iterable[dict[str, Any]], early: EarlyWarnings | None = None) -> list[WarningRecord]:
    """Warnings of a run; each row holds the arguments of `feed` that are not None."""
    early = early or EarlyWarnings()
    usual: dict[str, Any] = {"loss": None, "grad_norm": None, "lr": None}
    return [w for i, row in enumerate(rows) for w in early.feed(i, **{**usual, **row})]


def losses(values: Iterable[float]) -> list[WarningRecord]:
    return told({"loss": v} for v in values)


def kinds(warnings: Iterable[WarningRecord]) -> list[str]:
    return [w.kind for w in warnings]


# -- spikes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "kind"), [("loss", "loss_spike"), ("grad_norm", "grad_norm_spike")])
def test_a_spike_is_told_in_its_step(key: str, kind: str):
    values = noise(1000)
    values[612] = 12.0
    found = told({key: v} for v in values)
    assert [(w.kind, w.step, w.value) for w in found] == [(kind, 612, 12.0)]
    what = "loss" if key == "loss" else "gradient norm"
    assert found[0].message.startswith(f"step 612: the {what} is 12, ")
    assert "times its recent average of 0." in found[0].message
    assert "standard deviations of its logarithm" in found[0].message


def test_the_numbers_of_a_message_are_right():
    values = noise(400, level=2.0, sigma=0.1, seed=3)
    chart = Chart(CLEAR_LOSS)
    assert not any(map(chart.feed, values))
    spike = chart.feed(40.0)
    assert spike is not None
    assert spike.level == pytest.approx(2.0, rel=0.05)
    assert spike.score == pytest.approx(math.log(20) / 0.1, rel=0.25)
    assert not spike.signed


def test_mean_and_variance_are_exponentially_weighted():
    """Against the definition: a weighted sum over all values, oldest weights last; nothing here is clipped."""
    rng = random.Random(1)
    logs = [rng.uniform(-1, 1) * 0.3 for _ in range(500)]
    chart = Chart(CLEAR_LOSS)
    for y in logs:
        chart.feed(math.exp(y))
    first = logs[:WARM_UP]
    weights = [1.0]
    for count in range(2, WARM_UP + 1):
        a = max(WEIGHT, 1 / count)
        weights = [w * (1 - a) for w in weights] + [a]
    for _ in logs[WARM_UP:]:
        weights = [w * (1 - WEIGHT) for w in weights] + [WEIGHT]
    mean = math.fsum(w * y for w, y in zip(weights, logs, strict=True))
    assert math.fsum(weights) == pytest.approx(1)
    assert chart._mean == pytest.approx(mean, rel=1e-9)
    # Uniform values reach 1.73 standard deviations: the clip does not bind, only its correction widens the variance.
    variance = math.fsum(w * (y - mean) ** 2 for w, y in zip(weights, logs, strict=True))
    assert variance <= chart._variance <= variance / KEPT * 1.001
    assert len(first) == WARM_UP


def test_what_the_clip_keeps_is_what_the_normal_distribution_says():
    density = math.exp(-CLIP * CLIP / 2) / math.sqrt(2 * math.pi)
    beyond = math.erfc(CLIP / math.sqrt(2)) / 2
    assert pytest.approx(1 - 2 * (CLIP * density + beyond) + 2 * CLIP**2 * beyond, abs=1e-4) == KEPT


def test_the_variance_of_normal_noise_is_not_biased_by_the_clip():
    total, runs = 0.0, 40
    for seed in range(runs):
        chart = Chart(CLEAR_LOSS)
        for v in noise(1500, sigma=0.3, seed=seed):
            chart.feed(v)
        total += chart._variance
    assert math.sqrt(total / runs) == pytest.approx(0.3, rel=0.06)


def test_a_spike_does_not_poison_the_average():
    clean, spiked = Chart(CLEAR_LOSS), Chart(CLEAR_LOSS)
    values = noise(600)
    for i, v in enumerate(values):
        clean.feed(v)
        spiked.feed(1e12 if i == 500 else v)
    assert spiked._mean == pytest.approx(clean._mean, abs=0.02)
    assert math.sqrt(spiked._variance) < 1.2 * math.sqrt(clean._variance)


def test_a_worse_spike_soon_after_is_told_and_the_same_again_is_not():
    values = noise(1000)
    for i, v in ((500, 10.0), (510, 11.0), (520, 12.0), (530, 400.0), (540, 500.0)):
        values[i] = v
    assert [w.step for w in losses(values)] == [500, 530]


def test_a_spike_is_told_again_when_the_last_one_is_long_past():
    values = noise(6000)
    values[500] = values[5000] = 20.0
    assert [w.step for w in losses(values)] == [500, 5000]


def test_what_returns_is_no_news():
    """A hard batch in every epoch of 50 steps: the first is a surprise at most, the tenth is not."""
    values = [v * (30 if i % 50 == 49 else 1) for i, v in enumerate(noise(5000))]
    assert losses(values) == []


def test_divergence_is_told_while_it_lasts_not_in_every_step():
    values = [*noise(300), *(0.5 * 1.5**i for i in range(1, 60))]
    found = losses(values)
    assert found[0].step < 315
    assert 2 <= len(found) <= 10  # once for each factor of 10, of which there are ten
    assert set(kinds(found)) == {"loss_spike"}


def chart_of(logs: Iterable[float]) -> Chart:
    chart = Chart(CLEAR_LOSS)
    assert not any(chart.feed(math.exp(y)) for y in logs)
    return chart


def test_a_spike_must_lie_far_out():
    logs = [0.2, -0.2] * 300
    assert chart_of(logs).feed(math.exp(1.3)) is None  # 6 and a half standard deviations, 3 times the largest
    spike = chart_of(logs).feed(math.exp(1.5))
    assert spike is not None
    assert spike.score == pytest.approx(7.5, abs=0.2)


def test_a_spike_must_stand_clear_of_the_largest_by_the_noise():
    """Where values vary widely, twice the largest of the last steps is soon reached."""
    logs = [2.8 if i % 60 == 0 else 0.5 if i % 2 else -0.5 for i in range(1200)]
    assert chart_of(logs).feed(math.exp(4.3)) is None
    assert chart_of(logs).feed(math.exp(5.0)) is not None


def test_the_first_steps_show_no_level():
    values = noise(300)
    values[WARM_UP - 20] = 1e6
    assert losses(values) == []


def test_a_new_level_below_is_learnt():
    """A rate that drops by 10: the loss falls at once, and a spike above the new level is still a spike later."""
    values = [*noise(600, 1.0), *noise(3000, 0.1, seed=1)]
    assert losses(values) == []
    values[3000] = 5.0
    assert [w.step for w in losses(values)] == [3000]


@pytest.mark.parametrize("odd", [NAN, INF, -INF, 0.0])
def test_what_has_no_logarithm_is_passed_over(odd: float):
    values = noise(1000)
    with_odd = list(itertools.chain.from_iterable((v, odd) for v in values))
    assert losses(with_odd) == []
    spiked = [*with_odd, 30.0]
    assert [w.step for w in losses(spiked)] == [2000]


def test_losses_below_zero_are_charted_as_they_are():
    rng = random.Random(0)
    values = [rng.gauss(-50, 3) for _ in range(3000)]
    assert losses(values) == []
    values[2000] = 700.0
    found = losses(values)
    assert [(w.kind, w.step) for w in found] == [("loss_spike", 2000)]
    assert "700, far from its recent average of -" in found[0].message
    values[2000] = -5000.0  # it runs away downwards
    assert [w.step for w in losses(values)] == [2000]


def test_a_loss_that_turns_negative_later_starts_anew():
    rng = random.Random(0)
    values = [4 - i / 200 + rng.gauss(0, 0.3) for i in range(4000)]
    assert losses(values) == []


def test_policy_losses_around_zero_are_left_alone():
    rng = random.Random(0)
    values = [rng.gauss(0, 1) * rng.choice([0.3, 1, 3]) for _ in range(20_000)]
    assert losses(values) == []


def test_gradients_of_a_skipped_step_are_not_looked_at():
    rows = [{"grad_norm": v, "scaler_skipped": False} for v in noise(500)]
    rows[400] = {"grad_norm": 1e6, "scaler_skipped": True}
    assert told(rows) == []
    rows[400]["scaler_skipped"] = False
    assert kinds(told(rows)) == ["grad_norm_spike"]


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.floats(1e-12, 1e12))
def test_units_do_not_matter(seed: int, factor: float):
    values = noise(400, sigma=0.2, seed=seed)
    values[350] *= 200
    scaled = losses([v * factor for v in values])
    assert [w.step for w in scaled] == [w.step for w in losses(values)] == [350]


# -- learning rates ----------------------------------------------------------------------------------------------------


def rates(values: Iterable[float], ceiling: float | None = None) -> list[WarningRecord]:
    return told({"lr": v, "lr_ceiling": ceiling} for v in values)


def test_a_jump_of_the_rate_is_told():
    found = rates([3e-4] * 80 + [0.03] * 80)
    assert [(w.kind, w.step, w.value) for w in found] == [("lr_jump", 80, 0.03)]
    assert found[0].message == "step 80: the learning rate jumped 3e-4 → 0.03 (100x), above every rate used before"


def test_a_jump_above_the_schedules_own_peak_is_told():
    assert kinds(rates([1e-3 * (1 - i / 100) for i in range(90)] + [0.5], ceiling=1e-3)) == ["lr_jump"]


def test_a_jump_from_zero_is_measured_against_the_rates_used_before():
    assert kinds(rates([1e-3] * 50 + [0.0] * 50 + [0.02] * 5)) == ["lr_jump"]
    assert rates([1e-3] * 50 + [0.0] * 50 + [0.002] * 5) == []


def test_a_factor_of_ten_is_no_jump():
    assert rates([1e-3] * 50 + [0.01] * 50) == []


def test_a_rate_below_zero_is_told_once():
    found = rates([1e-3 - 1e-5 * i for i in range(150)])
    assert kinds(found) == ["lr_negative"]
    assert found[0].step == 101
    assert "below 0: each step goes uphill" in found[0].message


def test_rounding_below_zero_is_not_a_negative_rate():
    assert rates([1e-3, 5e-4, -1e-20, 5e-4]) == []


def test_a_rate_that_is_not_finite_is_passed_over():
    assert rates([1e-3] * 20 + [NAN, 1e-3, INF, 1e-3, -INF]) == []


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 300),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=1001),
    "steps down": lambda o: lr_scheduler.StepLR(o, 200, 0.1),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 50, 2),
    "warm-up": lambda o: lr_scheduler.LinearLR(o, 1e-6, 1.0, 400),
    "warm-up from 0": lambda o: lr_scheduler.LambdaLR(o, lambda s: min(1.0, s / 300)),
    "warm-up by epochs": lambda o: lr_scheduler.LambdaLR(o, lambda s: max(1e-6, min(1.0, (s // 100) / 5))),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 0.1, step_size_up=2, cycle_momentum=False),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.98),
    "range test": lambda o: lr_scheduler.ExponentialLR(o, 1.02),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 900),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.01, 1.0, 100), lr_scheduler.CosineAnnealingLR(o, 800)], [100]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_do_not_jump(name: str):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    scheduler = SCHEDULES[name](optimizer)
    early, found = EarlyWarnings(), []
    group = optimizer.param_groups[0]
    for i in range(1000):
        ceiling = max(group.get("initial_lr", 0.0), group.get("max_lr", 0.0))
        found += early.feed(i, None, None, group["lr"], lr_ceiling=ceiling)
        optimizer.step()
        scheduler.step()
    assert found == []


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"warm-up by epochs"}))
def test_schedules_do_not_jump_where_their_peak_is_not_known(name: str):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    scheduler = SCHEDULES[name](optimizer)
    values = []
    for _ in range(1000):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(values) == []


def test_a_restart_starts_the_charts_anew():
    """What a warm restart does to the loss is ordinary; without the rate it would be a spike."""
    loss = [*noise(500, 0.05, 0.1), *noise(500, 0.9, 0.1, seed=1)]
    lr = [
        *(0.1 * math.cos(math.pi * i / 1010) for i in range(500)),
        *(0.1 * math.cos(math.pi * i / 1010) for i in range(500)),
    ]
    assert kinds(losses(loss)) == ["loss_spike"]
    assert told({"loss": a, "lr": b} for a, b in zip(loss, lr, strict=True)) == []


# -- the loss scale ----------------------------------------------------------------------------------------------------


def scales(values: Iterable[float], skipped: Callable[[int], bool] | None = None) -> list[WarningRecord]:
    """Warnings of these loss scales; a step after which the scale is lower was skipped, if nothing else is said."""
    values = list(values)
    rows = []
    for i, v in enumerate(values):
        fell = i > 0 and v < values[i - 1]
        rows.append({"loss_scale": v, "scaler_skipped": fell if skipped is None else skipped(i)})
    return told(rows)


def scaler_run(
    steps: int, log2_overflow: Callable[[int], float], start: float = 2.0**16, grow: int = 2000
) -> Iterator[dict[str, Any]]:
    """The scales of torch's GradScaler when a step overflows at any scale above 2**log2_overflow(step)."""
    scale, since = start, 0
    for i in range(steps):
        if math.log2(scale) > log2_overflow(i):
            scale, since, skipped = scale / 2, 0, True
        else:
            since, skipped = since + 1, False
            if since == grow:
                scale, since = scale * 2, 0
        yield {"loss_scale": scale, "scaler_skipped": skipped}


def test_the_search_for_a_scale_is_no_fall():
    assert told(scaler_run(1000, lambda i: 3.0)) == []  # from 65536 to 8 in the first steps


def test_a_scale_that_keeps_falling_is_told():
    found = told(scaler_run(1000, lambda i: 16.0 if i < 500 else 16 - (i - 500) / 10))
    assert kinds(found)[0] == "loss_scale_falling"
    assert 550 <= found[0].step <= 570
    assert found[0].value == 1024.0
    assert "the loss scale fell 65536 → 1024 within " in found[0].message


def test_a_fall_that_is_made_good_is_not_told():
    dip = [1024.0] * 300 + [512.0] * 20 + [256.0] * 20 + [512.0] * 20 + [256.0] * 20 + [128.0] * 20
    assert scales(dip + [64.0] * 10 + [32.0] * 10 + [16.0] * 10) == []
    assert kinds(scales([*dip, 64.0, 32.0, 16.0, 8.0])) == ["loss_scale_falling"]


def test_falls_far_apart_do_not_add_up():
    steps = [2.0 ** (16 - i // (WINDOW // 4)) for i in range(WINDOW // 4 * 14)]
    assert scales(steps) == []


@pytest.mark.parametrize("first", [50, 500])
def test_a_scale_at_its_floor_is_told(first: int):
    found = told(scaler_run(first + 200, lambda i: 16.0 if i < first else -30.0))
    floor = [w for w in found if w.kind == "loss_scale_floor"]
    assert floor
    # In the first steps the search may come down to 1 exactly, but not below.
    assert floor[0].value == (FLOOR if first > SCALE_WARM_UP else FLOOR / 2)
    assert "overflow half precision even unscaled" in floor[0].message


def test_a_scale_of_zero_is_told():
    found = scales([1024.0] * 300 + [0.0])
    assert set(kinds(found)) == {"loss_scale_falling", "loss_scale_floor"}


def test_a_constant_scale_of_one_is_the_users_choice():
    assert scales([1.0] * 1000) == []


def test_a_scaler_that_skips_every_fourth_step_is_told():
    found = scales([64.0] * 1000, skipped=lambda i: i > 300 and i % 4 == 0)
    assert set(kinds(found)) == {"scaler_skipping"}
    assert found[0].message.startswith(f"step {found[0].step}: the GradScaler skipped 21 of the last 100 steps")
    assert len(found) <= 1 + 700 // AGAIN_AFTER
    assert scales([64.0] * 1000, skipped=lambda i: i > 300 and i % 12 == 0) == []
    assert scales([64.0] * 1000, skipped=lambda i: i < 60) == []


@pytest.mark.parametrize("grow", [2000, 100, 20, 10])
@pytest.mark.parametrize("seed", range(5))
def test_an_ordinary_scaler_is_silent(grow: int, seed: int):
    rng = random.Random(seed)
    level, sigma = rng.uniform(4, 20), rng.uniform(0, 1)
    assert told(scaler_run(20_000, lambda i: level + rng.gauss(0, sigma), grow=grow)) == []


# -- layers ------------------------------------------------------------------------------------------------------------


def layers(rows: Iterable[dict[str, float]], limit: float = HALF_MAX) -> list[WarningRecord]:
    limits: dict[str, float] = {}

    def arguments() -> Iterator[dict[str, Any]]:
        for row in rows:
            for name in row:
                limits.setdefault(name, limit)
            yield {"layer_abs_max": row, "layer_dtype_max": limits}

    return told(arguments())


@pytest.mark.parametrize("limit", [HALF_MAX, 3.3895e38, 3.4028e38])
@pytest.mark.parametrize("doubling", [0.5, 1.0, 2.0, 5.0, 10.0])
def test_the_forecast_is_right(doubling: float, limit: float):
    values = noise(100, limit / 1e4, 0.05) + [limit / 1e4 * 2 ** (i / doubling) for i in range(200)]
    overflow = next(i for i, v in enumerate(values) if v > limit)
    found = layers(({"encoder.norm": v, "head": 1.0} for v in values[:overflow]), limit)
    assert kinds(found)[0] == "headroom"
    first = found[0]
    assert first.layer_name == "encoder.norm"
    assert first.value == values[first.step]
    steps = int(first.message.split("in about ")[1].split()[0])
    assert steps == pytest.approx(overflow - first.step, rel=0.25, abs=1.5)
    assert steps <= 50


def test_the_message_of_a_forecast():
    values = [300.0] * 40 + [300.0 * 2 ** (i / 3) for i in range(10)]
    found = layers({"encoder.norm": v} for v in values)
    assert found[0].message == (
        f"step {found[0].step}: the output of encoder.norm has reached {found[0].value:.0f} and doubles every 3 steps: "
        f"it overflows float16 (65504) in about {math.log2(HALF_MAX / found[0].value) * 3:.0f} steps"
    )


def test_the_layer_that_overflows_first_is_named():
    """Ten layers that come above 1 % of the range in the same step, each faster than the one before."""
    rows = [{f"l{k}": 650 * math.exp((0.1 + 0.02 * k) * (i - 39.9)) for k in range(10)} for i in range(45)]
    found = layers(rows)
    assert set(kinds(found)) == {"headroom"}
    assert found[0].layer_name == "l9"


@pytest.mark.parametrize("level", [0.005, 0.02, 0.1, 0.4, 0.9])
@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.3])
def test_a_layer_that_sits_high_is_no_trend(level: float, sigma: float):
    seeds = itertools.count()
    columns = [noise(3000, level * HALF_MAX, sigma, next(seeds)) for _ in range(4)]
    assert layers({f"l{k}": min(v, HALF_MAX) for k, v in enumerate(row)} for row in zip(*columns, strict=True)) == []


def test_growth_that_levels_off_early_is_no_warning():
    values = [50 + 550 / (1 + math.exp(-(i - 100) / 8)) for i in range(1000)]  # up to 600: 1 % of the range is 655
    assert layers({"a": v} for v in values) == []


def test_float32_has_room():
    values = [50 * 2 ** (i / 3) for i in range(60)]
    assert layers(({"a": v} for v in values), limit=3.4028e38) == []


def test_layers_without_a_limit_and_masks_are_passed_over():
    early = EarlyWarnings()
    rows = ({"mask": INF, "integer": 10.0 * 2**i, "nan": NAN, "zero": 0.0} for i in range(60))
    limits = {"mask": HALF_MAX, "nan": HALF_MAX, "zero": HALF_MAX}
    assert told(({"layer_abs_max": r, "layer_dtype_max": limits} for r in rows), early) == []


def test_layers_may_come_and_go():
    rows = [{"a": 1000.0 * 1.5**i} if i % 2 else {"b": 1.0} for i in range(20)]
    assert layers(rows) == []
    rows = [{"b": 1.0}] * 20 + [{"a": 300.0 * 1.3**i, "b": 1.0} for i in range(18)]
    assert {w.layer_name for w in layers(rows)} == {"a"}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "float16"), (torch.bfloat16, "bfloat16"), (torch.float32, "float32"), (torch.float64, "float64")],
)
def test_dtypes_are_known_by_their_range(dtype: torch.dtype, name: str):
    assert dtype_named(torch.finfo(dtype).max) == name
    assert dtype_named(123.0) == "its dtype"


def test_a_parameter_without_gradient_is_told_once():
    early = EarlyWarnings()
    found = told(({"loss": 1.0, "zero_streaks": {"a.weight": n, "b": 3}} for n in range(1, 600)), early)
    assert [(w.kind, w.step, w.layer_name) for w in found] == [("dead_parameter", DEAD_AFTER - 1, "a")]
    assert (
        found[0].message
        == f"step 199: the gradient of a.weight has been exactly 0 for {DEAD_AFTER} steps: nothing is learnt there"
    )
    again = early.feed(600, 1.0, 0.0, None, zero_streaks={"a.weight": 600, "b": DEAD_AFTER})
    assert [w.layer_name for w in again] == [None]  # another one is news at once


def test_many_parameters_are_one_warning():
    found = told([{"loss": 1.0, "zero_streaks": {f"l{i}.weight": 250 for i in range(10)}}])
    assert len(found) == 1
    assert "l0.weight, l1.weight, l2.weight and 7 more has been exactly 0 for 250 steps" in found[0].message


def test_at_a_loss_of_zero_nothing_is_left_to_learn():
    assert told([{"loss": 0.0, "zero_streaks": {"a": 1000}}]) == []


def test_streaks_come_from_the_recorders_columns():
    columns = {
        "loss": [0.0] * 5,
        "grad_norm:a": [1.0, 0.0, 0.0, 0.0, 0.0],
        "grad_norm:b.c": [0.0] * 5,
        "grad_norm:d": [0.0, 0.0, 0.0, 0.0, 1e-30],
        "grad_norm:e": [NAN] * 5,
        "grad_norm:f": [],
    }
    assert zero_streaks(columns) == {"a": 4, "b.c": 5}


# -- real trainings ----------------------------------------------------------------------------------------------------


class Digits:
    """A small training on scikit-learn's digits that feeds the warnings as the gate would."""

    def __init__(
        self, seed: int, optimizer: Callable[[Any], Any], model: nn.Module | None = None, schedule: Any = None
    ):
        torch.manual_seed(seed)
        data = load_digits()
        self.x = torch.tensor(data.data / 16, dtype=torch.float32)
        self.y = torch.tensor(data.target)
        self.model = model or nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = schedule(self.optimizer) if schedule is not None else None
        self.recorder = Recorder(DEAD_AFTER)
        self.names = [f"grad_norm:{n}" for n, _ in self.model.named_parameters()]
        self.recorder.set_columns(self.names)
        self.early = EarlyWarnings()
        self.layers: dict[str, float] = {}
        self.limits: dict[str, float] = {}
        self.limit: float | None = None
        self.step = 0

    def watch_layers(self, limit: float | None = None) -> None:
        self.limit = limit
        for name, module in self.model.named_modules():
            module.register_forward_hook(lambda m, a, out, name=name or "root": self._note(name, out))

    def _note(self, name: str, out: torch.Tensor) -> None:
        self.layers[name] = float(out.detach().abs().max())
        self.limits[name] = self.limit or torch.finfo(out.dtype).max

    def train(
        self, steps: int, batch: int = 32, damage: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    ) -> list[WarningRecord]:
        found: list[WarningRecord] = []
        parameters = list(self.model.parameters())
        generator = torch.Generator().manual_seed(self.step)
        for _ in range(steps):
            rows = torch.randint(len(self.x), (batch,), generator=generator)
            x = self.x[rows] if damage is None else damage(self.step, self.x[rows])
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), self.y[rows])
            loss.backward()
            norms = torch.stack(torch._foreach_norm([p.grad for p in parameters], 2))
            group = self.optimizer.param_groups[0]
            self.recorder.append(self.step, norms, group["lr"])
            streaks = zero_streaks(self.recorder.columns(DEAD_AFTER)[1]) if self.step % 50 == 49 else {}
            layers, self.layers = self.layers, {}
            found += self.early.feed(
                self.step,
                loss.item(),
                float(norms.norm()),
                group["lr"],
                layer_abs_max=layers,
                layer_dtype_max=self.limits,
                zero_streaks=streaks,
                lr_ceiling=max(group.get("initial_lr", 0.0), group.get("max_lr", 0.0)) or None,
            )
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.step += 1
        return found


def sgd(lr: float, **options: Any) -> Callable[[Any], Any]:
    return lambda p: torch.optim.SGD(p, lr, **options)


def test_a_bad_batch_in_a_real_training():
    """Pixels from 0 to 255 in one batch, from 0 to 1 in all others."""
    run = Digits(0, sgd(0.1))
    found = run.train(700, batch=128, damage=lambda step, x: x * 255 if step == 600 else x)
    at = [w for w in found if w.step in (600, 601)]
    assert set(kinds(at)) == {"loss_spike", "grad_norm_spike"}
    assert found[0].step == 600


def test_a_rate_set_too_high_in_a_real_training():
    run = Digits(1, sgd(0.05))
    assert run.train(200) == []
    run.optimizer.param_groups[0]["lr"] = 20.0
    assert kinds(run.train(3))[0] == "lr_jump"


def test_activations_that_run_away_in_a_real_training():
    """Weight decay with the wrong sign: all is well for a long time, and float16 would overflow in the end."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(torch.float64)
    run = Digits(2, sgd(0.1), model)
    run.x = run.x.double()
    run.watch_layers(limit=HALF_MAX)
    assert run.train(200) == []
    found, overflow = [], None
    while overflow is None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.05)
        found += run.train(1)
        with torch.no_grad():
            overflow = run.step if float(model(run.x).abs().max()) > HALF_MAX else None
        assert run.step < 1000
    headroom = [w for w in found if w.kind == "headroom"]
    assert headroom
    assert headroom[0].step < overflow - 5
    assert "overflows float16 (65504) in about" in headroom[0].message


def test_a_dead_layer_in_a_real_training():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    nn.init.constant_(model[0].bias, -1e3)
    found = Digits(3, sgd(0.1), model).train(400)
    assert kinds(found) == ["dead_parameter"]
    assert "0.weight, 0.bias, 2.weight has been exactly 0" in found[0].message
    assert found[0].layer_name == "0"


def test_gradients_that_grow_under_a_real_scaler():
    """float16 gradients under torch's GradScaler, whose inputs grow by a tenth a step from step 300 on."""
    torch.manual_seed(0)
    model = nn.Linear(16, 1).to(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    early, found = EarlyWarnings(), []
    x = torch.rand(8, 16)
    for step in range(420):
        factor = 1.1 ** max(0, step - 300)
        optimizer.zero_grad()
        out = model(torch.ones(8, 16, dtype=torch.float16))
        loss = (out.float().mean() * factor).abs() * float(x.mean())
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        for p in model.parameters():  # a scaler refuses to unscale float16 gradients in place
            p.grad = p.grad.float().to(p.dtype)
        bad = not all(bool(torch.isfinite(p.grad).all()) for p in model.parameters())
        optimizer_found = torch.tensor(1.0 if bad else 0.0)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {torch.device("cpu"): optimizer_found}
        scaler.update()
        found += early.feed(step, None, None, None, scaler.get_scale(), bool(scaler.get_scale() < before))
    assert kinds(found)[0] == "loss_scale_falling"
    assert found[0].step > 300


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": sgd(0.1),
    "momentum": sgd(0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, 3e-3, weight_decay=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_real_ordinary_trainings_are_silent(name: str):
    run = Digits(5, OPTIMIZERS[name])
    run.watch_layers()
    assert run.train(1000) == []


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("name", ["one cycle", "warm restarts", "steps down", "warm-up, then cosine"])
def test_real_trainings_under_schedules_are_silent(name: str):
    assert Digits(6, sgd(0.1, momentum=0.5), schedule=SCHEDULES[name]).train(1000) == []


def test_dropout_and_batch_norm_are_silent():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10))
    assert Digits(7, OPTIMIZERS["adam"], model).train(1500, batch=8) == []


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("batch", [1, 4, 32, 256])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_long_real_trainings_are_silent(name: str, batch: int, seed: int):
    run = Digits(100 + seed, OPTIMIZERS[name])
    assert run.train(5000, batch=batch) == []


# -- long ordinary runs ------------------------------------------------------------------------------------------------


def ordinary_run(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Loss, gradient norm, rate, loss scale and layers of a run in which nothing is wrong."""
    rng = random.Random(seed)
    schedule = rng.choice(["constant", "cosine", "one cycle", "steps", "restarts", "warm-up"])
    floor, pace, power = rng.uniform(0.01, 1), rng.uniform(20, 500), rng.uniform(0, 1.2)
    sigma = [rng.choice([0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7]) for _ in range(2)]
    memory, hard = rng.choice([0, 0, 0.5, 0.9]), rng.choice([0.0, 0.0, 0.01])
    fits, spread = rng.uniform(5, 18), rng.uniform(0, 0.5)
    scale = scaler_run(steps, lambda i: fits + rng.gauss(0, spread))
    state = [0.0, 0.0]
    limits = {"a": HALF_MAX, "b": 3.4e38}
    for i in range(steps):
        lr = {
            "constant": 1e-3,
            "cosine": 1e-3 * (1 + math.cos(math.pi * i / steps)) / 2,
            "one cycle": 1e-3 * (0.04 + math.sin(math.pi * i / steps) ** 2),
            "steps": 1e-3 * 0.1 ** (3 * i // steps),
            "restarts": 1e-3 * (1 + math.cos(math.pi * (i % 500) / 500)) / 2,
            "warm-up": 1e-3 * min(1, i / 300),
        }[schedule]
        base = floor + (1 - floor) * (1 + i / pace) ** -power
        if schedule == "steps":
            base *= 0.5 ** (3 * i // steps)
        if schedule == "restarts":
            base *= 0.2 + 0.8 * lr / 1e-3
        extra = rng.uniform(2, 6) if rng.random() < hard else 0.0  # a batch harder by so many deviations
        for k in range(2):
            state[k] = memory * state[k] + math.sqrt(1 - memory**2) * rng.gauss(0, 1)
        loss, norm = (base * math.exp(sigma[k] * state[k]) * (1 + sigma[k] * extra) for k in range(2))
        level = {"a": min(HALF_MAX, 3000 * math.exp(0.2 * state[0])), "b": 50 * base}
        yield {
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "layer_abs_max": level,
            "layer_dtype_max": limits,
            **next(scale),
        }


def false_alarms(runs: int, steps: int, first: int = 0) -> Counter[str]:
    return Counter(k for seed in range(first, first + runs) for k in kinds(told(ordinary_run(seed, steps))))


def test_long_ordinary_runs_are_silent():
    """At most 1 in these 120,000 steps; `test_the_rate_of_false_alarms` looks at more."""
    assert sum(false_alarms(60, 2000).values()) <= 1


@pytest.mark.campaign
def test_the_rate_of_false_alarms():
    runs, steps = 500, 4000
    found = false_alarms(runs, steps, first=1000)
    assert sum(found.values()) / (runs * steps) < 1e-5, found


# -- the records, and the cost -----------------------------------------------------------------------------------------

ANY = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "loss": st.none() | ANY,
                "grad_norm": st.none() | ANY,
                "lr": st.none() | ANY,
                "loss_scale": st.none() | ANY,
                "scaler_skipped": st.booleans(),
                "layer_abs_max": st.dictionaries(st.sampled_from("ab"), ANY),
                "layer_dtype_max": st.dictionaries(st.sampled_from("ab"), st.sampled_from([HALF_MAX, 3.4e38])),
                "zero_streaks": st.dictionaries(st.sampled_from("ab"), st.integers(0, 1000)),
                "lr_ceiling": st.none() | ANY,
            }
        ),
        max_size=300,
    )
)
def test_no_numbers_break_it(rows: list[dict[str, Any]]):
    for warning in told(rows, EarlyWarnings(rank=3)):
        assert warning.kind in KINDS
        assert warning.rank == 3
        assert warning.message.startswith(f"step {warning.step}: ")
        assert "nan" not in warning.message.lower()
        assert record_from_dict(warning.to_dict()) == warning


def test_edges_of_numbers():
    tiny, huge = 5e-324, 1.7e308
    values = [v for pair in zip([tiny, huge] * 300, [1.0] * 600, strict=True) for v in pair]
    told({"loss": v, "grad_norm": v, "lr": v, "loss_scale": v} for v in values)
    told({"loss": -v, "grad_norm": v, "lr": -v, "loss_scale": -v} for v in values)


def test_what_is_kept_is_bounded():
    early = EarlyWarnings()
    told(ordinary_run(1, 3000), early)
    assert len(early._headroom._rows) <= 32
    assert len(early._scale._skips) <= 100
    assert len(early._scale._falls) <= WINDOW


def test_every_kind_is_documented():
    text = (Path(__file__).parent.parent / "docs" / "warnings.md").read_text(encoding="utf-8")
    assert all(f"## `{kind}`\n" in text for kind in KINDS)


def test_a_step_costs_microseconds():
    """2 µs on an idle core; the bound leaves room for a busy machine, and not for a list or a sort."""
    early, values = EarlyWarnings(), noise(2000)
    numbers = itertools.cycle(values)

    def feed() -> None:
        v = next(numbers)
        early.feed(0, v, v, 1e-3, 65536.0, False)

    assert min(timeit.repeat(feed, number=500, repeat=20)) / 500 < 10e-6


def test_charts_of_constant_values_do_not_divide_by_zero():
    chart = Chart(CLEAR_LOSS)
    assert not any(chart.feed(1.0) for _ in range(500))
    assert chart.feed(math.exp(LEAST_DEVIATION)) is None
    spike = chart.feed(3.0)
    assert spike is not None
    assert spike.score == pytest.approx(math.log(3) / LEAST_DEVIATION, rel=0.05)
