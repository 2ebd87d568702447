"""Which samples do it: the search by halves, held against batches of which the answer is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nan_detector._trial_samples import MAX_PARTS, Guilty, Untold, find_guilty, spell


class Step:
    """Bad where one of `alone` is among the samples, or all of `together` are."""

    def __init__(self, alone: set[int], together: set[int] = frozenset()) -> None:
        self.alone, self.together = alone, together
        self.runs: list[tuple[int, ...]] = []

    def __call__(self, rows: tuple[int, ...]) -> bool:
        assert rows and list(rows) == sorted(set(rows))
        self.runs.append(rows)
        return bool(self.alone & set(rows)) or bool(self.together and self.together <= set(rows))


@given(st.integers(5, 300), st.data())
def test_a_few_samples_are_found_exactly(size: int, data: st.DataObject):
    guilty = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=MAX_PARTS))
    step = Step(guilty)
    found = find_guilty(size, (), step)
    assert set(found.rows) == guilty
    assert found.finite_without
    assert len(step.runs) <= 2 * MAX_PARTS * size.bit_length() + 1


@given(st.integers(5, 300), st.data())
def test_suspects_that_do_it_cost_one_run(size: int, data: st.DataObject):
    guilty = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1))
    step = Step(guilty)
    assert find_guilty(size, tuple(guilty), step) == Guilty(
        tuple(sorted(guilty)), f"without {spell(tuple(sorted(guilty)))} the step is finite", finite_without=True
    )
    assert len(step.runs) == 1


def test_wrong_suspects_do_not_mislead():
    assert find_guilty(64, (3,), Step({17})).rows == (17,)


def test_suspects_that_are_out_of_range_are_no_suspects():
    assert find_guilty(4, (9, -1), Step({2})).rows == (2,)


@given(st.integers(5, 300))
def test_where_every_sample_does_it_no_sample_is_blamed(size: int):
    step = Step(set(range(size)))
    found = find_guilty(size, (), step)
    assert found == Guilty(everywhere=True, shown="each quarter of the batch does it")
    assert len(step.runs) == 6


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_batches_in_which_each_sample_does_it(size: int):
    found = find_guilty(size, (), Step(set(range(size))))
    assert found.everywhere and not found.rows and found.shown == "each sample of the batch does it"


def test_two_that_do_it_only_together():
    found = find_guilty(8, (), Step(set(), {4, 5}))
    assert found.rows == (4, 5) and found.finite_without


def test_two_of_different_halves_that_do_it_only_together():
    assert find_guilty(8, (), Step(set(), {0, 7})) == Guilty(shown="no part of the batch does it alone")


def test_most_of_the_batch():
    found = find_guilty(16, (), Step({0, 3, 4, 8, 9, 11}))
    assert found.everywhere and not found.rows


def test_a_run_that_cannot_tell_ends_the_search():
    def bad(rows: tuple[int, ...]) -> bool:
        raise Untold("a shape is fixed")

    with pytest.raises(Untold, match="a shape is fixed"):
        find_guilty(8, (), bad)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ((3,), "sample 3"),
        ((1, 2), "samples 1 and 2"),
        ((1, 2, 5), "samples 1, 2 and 5"),
        (tuple(range(32)), "samples 0 to 31"),
        (tuple(range(0, 24, 2)), "samples 0, 2, 4, 6, 8, 10, 12, 14 and 4 more"),
    ],
)
def test_how_samples_are_spelled(rows: tuple[int, ...], text: str):
    assert spell(rows) == text
