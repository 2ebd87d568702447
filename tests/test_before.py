"""Sentences about what had been changing: found where it was, silent where nothing was."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nan_detector._before import RECENT, WINDOW, before_sentences, number
from nan_detector._trend import fit_growth


def say(values: list[float], name: str = "loss", layer: str | None = None, first: int = 0) -> tuple[str, ...]:
    return before_sentences({name: values}, list(range(first, first + len(values))), layer=layer)


def flat(rows: int, level: float = 1.0, seed: int = 0, noise: float = 0.1) -> list[float]:
    rng = random.Random(seed)
    return [level * math.exp(rng.gauss(0, noise)) for _ in range(rows)]


def growth(rows: int, doubling: float, level: float = 1.0, seed: int = 1, noise: float = 0.05) -> list[float]:
    rng = random.Random(seed)
    return [level * 2 ** (i / doubling) * math.exp(rng.gauss(0, noise)) for i in range(rows)]


def ordinary_run(seed: int) -> list[float]:
    """A run without any trouble, of a kind and length that the seed draws."""
    rng = random.Random(seed)
    rows = rng.choice([1, 3, 6, 8, 12, 20, 50, 100, 200, 400])
    noise, memory, decay = rng.uniform(0, 0.35), rng.choice([0, 0, 0.5, 0.8, 0.9]), rng.uniform(-0.02, 0)
    spikes, heavy = rng.choice([0, 0, 0.01, 0.05]), rng.random() < 0.3
    state, run = 0.0, []
    for i in range(rows):
        draw = rng.gauss(0, 1) / (math.sqrt(rng.gammavariate(2, 0.5)) if heavy else 1)
        state = memory * state + math.sqrt(1 - memory**2) * noise * draw
        run.append(math.exp(state + decay * i + (rng.uniform(1, 3) if rng.random() < spikes else 0)))
    return run


@settings(max_examples=300, derandomize=True)
@given(seed=st.integers(0, 10**9), name=st.sampled_from(["loss", "grad_norm", "grad_norm:a.weight", "abs_max:a"]))
def test_an_ordinary_run_gives_no_sentence(seed: int, name: str):
    assert say(ordinary_run(seed), name) == ()


def test_a_thousand_ordinary_runs_give_no_sentence():
    loud = [seed for seed in range(1000) if say(ordinary_run(seed))]
    assert loud == []


@pytest.mark.parametrize("doubling", [3, 10])
@pytest.mark.parametrize("before", [3, 20, 150])
def test_growth_is_told_with_its_pace_and_its_start(doubling: int, before: int):
    values = [*flat(before, noise=0.05), *growth(doubling * 5, doubling)]
    (sentence,) = say(values, first=40)
    words, start = sentence.rsplit(" ", 1)
    pace = int(words.split()[3])
    assert words == f"loss doubled every {pace} steps since step"
    assert abs(pace - doubling) <= doubling // 10
    assert abs(int(start) - (40 + before)) <= max(2, doubling // 2)


def test_fast_growth_is_told_as_a_factor():
    assert say([*flat(30, noise=0.02), *(3.1**i for i in range(1, 8))]) == ("loss grew 3.1x per step since step 29",)


def test_growth_from_the_very_first_step():
    assert say([2.0**i for i in range(8)]) == ("loss grew 2x per step since step 0",)


def test_growth_longer_than_the_window_is_said_to_be():
    assert say(growth(WINDOW + 100, 20)) == (f"loss doubled every 20 steps over the last {WINDOW} steps",)


def test_a_loss_that_fell_first_and_rose_later():
    fell = [3.0 * math.exp(-i / 30) for i in range(100)]
    rose = growth(13, 2, level=fell[-1])
    (sentence,) = say([*fell, *rose])
    assert sentence.startswith("loss doubled every 2 steps since step ")
    assert abs(int(sentence.rsplit(" ", 1)[1]) - 100) <= 2


def test_the_event_itself_is_no_trend_and_hides_none():
    calm = flat(40)
    assert say([*calm, math.nan, math.inf]) == ()
    rising = [*calm, *growth(15, 2)]
    assert say([*rising, math.inf]) == say([*rising, math.inf, math.nan]) == say(rising) != ()


def test_only_rows_since_the_last_bad_one_count():
    assert say([*growth(20, 2), math.nan, *flat(20)]) == ()
    assert say([*flat(20), math.nan, *growth(20, 2, noise=0)]) == ("loss doubled every 2 steps since step 21",)


def test_a_loss_below_zero():
    assert say([-v for v in [2.0**i for i in range(8)]]) == ("|loss| grew 2x per step since step 0",)


def test_a_sudden_leap_that_stays():
    assert say([*flat(30, noise=0), 5e12, 4e12]) == ("loss 1 → 5e12 at step 30",)
    assert say([*flat(30), 5e12, *flat(5)]) == ()
    assert say([*flat(30), 5e12, 1e12] + [1e12] * RECENT) == ()


def test_a_spike_is_no_trend():
    for place in range(40):
        values = flat(40, seed=place)
        values[place] *= 30
        assert say(values) == ()


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ([3e-4] * 80 + [0.03] * 7, "learning rate 3e-4 → 0.03 at step 80"),
        ([3e-4] * 80 + [0.03], "learning rate 3e-4 → 0.03 at step 80"),
        ([0.1] * 10 + [math.nan] * 2, "learning rate 0.1 → NaN at step 10"),
        ([0.1] * 10 + [math.inf], "learning rate 0.1 → Inf at step 10"),
        ([1e-5] * 10 + [1e-2] * 10 + [1.0] * 5, "learning rate 0.01 → 1 at step 20"),
        ([0.0] * 10 + [0.1] * 5, "learning rate 0 → 0.1 at step 10"),
    ],
)
def test_a_learning_rate_that_leapt(rates: list[float], said: str):
    assert say(rates, "lr") == (said,)


WARM_UP = [1e-3 * i / 100 for i in range(100)]
COSINE = [1e-3 * (1 + math.cos(math.pi * i / 200)) / 2 for i in range(200)]


@pytest.mark.parametrize(
    "rates",
    [
        [1e-3] * 100,
        [1e-3 * 0.1 ** (i // 30) for i in range(100)],
        WARM_UP + COSINE,
        [1e-6 * 1.2**i for i in range(60)],
        [1e-4, 4e-4] * 50,  # two optimizers in turn
        [3e-4] * 20 + [0.03] * (RECENT + 1),  # long past
        [math.nan] * 50,  # no learning rate is known
        [0.0, 1e-5],
        [],
    ],
)
def test_a_schedule_is_no_news(rates: list[float]):
    assert say(rates, "lr") == ()


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_warm_up_is_no_news_wherever_it_is_cut(cut: int):
    assert say(WARM_UP[:cut], "lr") == ()


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ([65536.0] * 20 + [65536.0 / 2**i for i in range(1, 18)], ("loss scale 65536 → 0.5 since step 19",)),
        ([65536.0] * 5 + [65536.0 / 2**i for i in range(1, 9)], ("loss scale 65536 → 256 since step 4",)),
        ([65536.0 / 2**i for i in range(5)] + [4096.0] * 30, ()),
        ([1024.0] * 30 + [2048.0] * 30, ()),
        ([0.5] * 30, ()),
        ([math.nan] * 30, ()),
    ],
)
def test_a_loss_scale_that_collapsed(scales: list[float], said: tuple[str, ...]):
    assert say(scales, "loss_scale") == said


def test_the_guilty_layer_is_told_first_and_once_per_kind():
    columns = {
        "loss": [*flat(30), *growth(12, 1)],
        "grad_norm": [*flat(30), *growth(12, 0.5)],
        "grad_norm:encoder.norm2.gain": [*flat(30), *growth(12, 2)],
        "grad_norm:encoder.norm20.gain": [*flat(30), *growth(12, 0.25)],
        "abs_max:encoder.norm2": [*flat(30), *growth(12, 3)],
        "abs_max:head": [*flat(30), *growth(12, 1)],
        "lr": [3e-4] * 29 + [0.03] * 13,
    }
    steps = list(range(42))
    guilty = before_sentences(columns, steps, layer="encoder.norm2")
    assert guilty == (
        "gradient norm of encoder.norm2 doubled every 2 steps since step 29, when the learning rate went from 3e-4 to "
        "0.03",
        "|activations| of encoder.norm2 doubled every 3 steps since step 29",
        "loss grew 2x per step since step 29",
    )
    unknown = before_sentences(columns, steps, layer=None)
    assert unknown[0].startswith("loss grew 2x per step")
    assert unknown[1].startswith("gradient norm grew 4x per step")


def test_without_a_total_the_worst_parameter_speaks():
    columns = {f"grad_norm:p{i}": [*flat(30, seed=i), *growth(12, 1 + i)] for i in range(3)}
    (sentence,) = before_sentences(columns, list(range(42)), layer="elsewhere")
    assert sentence.startswith("gradient norm of p0 grew")


def test_order_of_columns_does_not_matter():
    columns = {
        "loss": [*flat(30), *growth(12, 1)],
        "grad_norm": [*flat(30), *growth(12, 2)],
        "lr": [1e-3] * 40 + [1.0] * 2,
    }
    said = {
        before_sentences(dict(order), list(range(42)), layer=None) for order in itertools.permutations(columns.items())
    }
    assert len(said) == 1


def test_a_column_of_another_length_is_refused_by_name():
    with pytest.raises(ValueError, match=r"columns\['loss'\] has 1 values for 2 steps; give one per step"):
        before_sentences({"loss": [1.0]}, [0, 1], layer=None)


@given(
    values=st.lists(st.floats(), max_size=60), name=st.sampled_from(["loss", "lr", "loss_scale", "grad_norm", "odd:"])
)
def test_no_column_makes_it_fail(values: list[float], name: str):
    assert len(say(values, name)) <= 1


@given(
    start=st.integers(1, 60),
    rises=st.integers(5, 40),
    rate=st.floats(0.7, 5.0),
    pre=st.floats(-0.1, 0.0),
)
def test_a_clean_broken_line_is_found_exactly(start: int, rises: int, rate: float, pre: float):
    logs = [pre * i + (rate - pre) * max(0, i - start) for i in range(start + rises + 1)]
    found = fit_growth(logs)
    assert found is not None
    assert abs(found[0] - start) <= 1
    assert found[1] == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0003, "3e-4"),
        (0.03, "0.03"),
        (65536.0, "65536"),
        (5e12, "5e12"),
        (-2.5e-7, "-2.5e-7"),
        (0.0, "0"),
        (1234.5, "1234"),
        (12345.6, "1.23e4"),
        (0.123456, "0.123"),
        (math.nan, "NaN"),
        (-math.inf, "-Inf"),
    ],
)
def test_numbers_are_written_as_people_write_them(value: float, said: str):
    assert number(value) == said


def test_growth_that_the_fit_places_just_before_a_rate_jump_is_told_from_the_jump_on():
    rate = [1e-3] * 60 + [1e-1] * 20
    loss = [1.0] * 57 + [1.05, 1.2, 1.3] + [1.5 * 2.0**i for i in range(20)]
    sentences = before_sentences({"loss": loss, "lr": rate}, list(range(80)), layer=None)
    assert len(sentences) == 1
    assert sentences[0].endswith("since step 60, when the learning rate went from 0.001 to 0.1")
    alone = before_sentences({"loss": loss}, list(range(80)), layer=None)
    assert not alone[0].endswith("since step 60")


@pytest.mark.parametrize("start", range(56, 63))
def test_growth_and_a_leap_are_one_sentence_where_they_begin_together(start: int):
    rates = [3e-4] * 60 + [0.03] * 25
    columns = {"loss": [1.0] * start + [2.0 ** (i / 2) for i in range(1, 86 - start)], "lr": rates}
    said = before_sentences(columns, list(range(85)), layer=None)
    together = "loss doubled every 2 steps since step 60, when the learning rate went from 3e-4 to 0.03"
    assert said == (together,)


@pytest.mark.parametrize("start", [30, 45, 70])
def test_growth_and_a_leap_elsewhere_are_two(start: int):
    rates = [3e-4] * 60 + [0.03] * 25
    columns = {"loss": [1.0] * start + [2.0 ** (i / 2) for i in range(1, 86 - start)], "lr": rates}
    said = before_sentences(columns, list(range(85)), layer=None)
    assert said[0] == "learning rate 3e-4 → 0.03 at step 60"
    assert said[1].startswith("loss doubled every 2 steps since step ") and "when" not in said[1]


def test_growth_long_after_the_leap_began_is_still_told_with_it():
    rates = [1e-3] * 60 + [1e-2] * 120
    columns = {"loss": [*flat(60), *growth(120, 10)], "lr": rates}
    (said,) = before_sentences(columns, list(range(180)), layer=None)
    assert said == "loss doubled every 10 steps since step 60, when the learning rate went from 0.001 to 0.01"


def test_growth_that_began_with_a_change_of_the_loss_scale():
    columns = {"grad_norm": [1.0] * 40 + [2.0**i for i in range(1, 13)], "loss_scale": [1024.0] * 40 + [2048.0] * 12}
    (said,) = before_sentences(columns, list(range(52)), layer=None)
    assert said == "gradient norm grew 2x per step since step 40, when the loss scale went from 1024 to 2048"


def test_a_leap_of_the_learning_rate_is_told_rather_than_one_of_the_loss_scale():
    columns = {
        "loss": [1.0] * 40 + [2.0**i for i in range(1, 13)],
        "lr": [1e-3] * 40 + [1e-1] * 12,
        "loss_scale": [1024.0] * 40 + [2048.0] * 12,
    }
    (said,) = before_sentences(columns, list(range(52)), layer=None)
    assert said.endswith("when the learning rate went from 0.001 to 0.1")


@given(seed=st.integers(0, 10**6), parameters=st.integers(1, 4), doubling=st.sampled_from([1, 2, 3, 8]))
@settings(max_examples=40, derandomize=True)
def test_parameters_of_a_layer_are_taken_together(seed: int, parameters: int, doubling: int):
    rows = 30 + 6 * doubling
    columns = {
        f"grad_norm:net.norm.p{i}": [*flat(30, seed=seed + i), *growth(6 * doubling, doubling, seed=seed + 9 + i)]
        for i in range(parameters)
    }
    columns["grad_norm:net.other.weight"] = flat(rows, seed=seed + 5)
    said = before_sentences(columns, list(range(rows)), layer="net.norm")
    assert len(said) == 1 and said[0].startswith("gradient norm of net.norm ")


def test_a_parameter_that_was_frozen_on_the_way_takes_nothing_from_its_layer():
    rising = [*flat(30), *growth(12, 1)]
    frozen = [*flat(20, seed=3), *[math.nan] * 22]
    said = before_sentences({"grad_norm:a.w": rising, "grad_norm:a.b": frozen}, list(range(42)), layer=None)
    assert len(said) == 1 and said[0].startswith("gradient norm of a grew ")


@settings(max_examples=100, derandomize=True)
@given(seed=st.integers(0, 10**9), every=st.integers(1, 40))
def test_an_ordinary_run_with_a_schedule_gives_no_sentence(seed: int, every: int):
    norms = ordinary_run(seed)
    columns = {
        "grad_norm:a.weight": norms,
        "lr": [1e-3 * min(1.0, (i + 1) / 50) for i in range(len(norms))],
        "loss_scale": [1024.0 * 2 ** (i // every % 2) for i in range(len(norms))],
    }
    assert before_sentences(columns, list(range(len(norms))), layer="a") == ()
