"""Which batch sizes are captured, and which one serves a batch: numbers in, numbers out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capture import Bucket, Ladder, Refusal
from capture.errors import LadderError
from capture.ladder import RefusalReason
from graphcache import GraphCacheError


def rows_of(ladder: Ladder) -> list[int]:
    return [bucket.rows for bucket in ladder.buckets]


@pytest.mark.parametrize(
    ("ceiling", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (4, [1, 2, 4]),
        (5, [1, 2, 4, 5]),
        (63, [1, 2, 4, 8, 16, 32, 63]),
        (64, [1, 2, 4, 8, 16, 32, 64]),
        (65, [1, 2, 4, 8, 16, 32, 64, 65]),
    ],
)
def test_powers_of_two_end_in_the_ceiling(ceiling: int, expected: list[int]) -> None:
    assert rows_of(Ladder.powers_of_two(ceiling)) == expected


def test_every_size() -> None:
    assert rows_of(Ladder.every(5)) == [1, 2, 3, 4, 5]


def test_explicit_sizes_are_sorted_and_unique() -> None:
    assert rows_of(Ladder([8, 3, 8, 1])) == [1, 3, 8]
    assert rows_of(Ladder([3, 1], ceiling=6)) == [1, 3, 6]
    assert rows_of(Ladder([6], ceiling=6)) == [6]
    assert rows_of(Ladder([], ceiling=4)) == [4]


sizes = st.lists(st.integers(1, 300), min_size=1, max_size=20)


@given(sizes, st.integers(0, 40), st.integers(1, 4))
def test_the_ceiling_is_always_a_bucket(given_sizes: list[int], above: int, q_len: int) -> None:
    ceiling = max(given_sizes) + above
    ladder = Ladder(given_sizes, ceiling=ceiling, q_len=q_len)
    assert ladder.ceiling == ceiling
    assert Bucket(ceiling, q_len) in ladder.buckets
    assert set(rows_of(ladder)) == {*given_sizes, ceiling}
    assert list(ladder.buckets) == sorted(ladder.buckets)


@given(sizes, st.integers(0, 40), st.integers(-3, 400))
def test_the_smallest_bucket_that_holds_them(given_sizes: list[int], above: int, rows: int) -> None:
    ladder = Ladder(given_sizes, ceiling=max(given_sizes) + above)
    enough = [size for size in [*given_sizes, ladder.ceiling] if size >= rows]
    answer = ladder.bucket_for(rows)
    if rows < 1:
        assert answer == Refusal(RefusalReason.EMPTY, rows, 1, ladder.ceiling)
    elif not enough:
        assert answer == Refusal(RefusalReason.OVER_CEILING, rows, 1, ladder.ceiling)
    else:
        assert answer == Bucket(min(enough), 1)


@given(st.integers(1, 200), st.integers(1, 200))
def test_powers_of_two_pad_less_than_half(ceiling: int, rows: int) -> None:
    answer = Ladder.powers_of_two(ceiling).bucket_for(rows)
    if rows > ceiling:
        assert isinstance(answer, Refusal)
    else:
        assert isinstance(answer, Bucket) and rows <= answer.rows < 2 * rows


def test_no_bucket_is_this_wide() -> None:
    ladder = Ladder([1, 4], q_len=3)
    assert ladder.bucket_for(2, 3) == Bucket(4, 3)
    refusal = ladder.bucket_for(2, 1)
    assert refusal == Refusal(RefusalReason.NO_SUCH_WIDTH, 2, 1, 4)


def test_a_refusal_says_what_was_asked_and_what_there_is() -> None:
    text = str(Ladder([1, 4]).bucket_for(9))
    assert "larger than the ladder's ceiling" in text
    assert "9 rows" in text and "ceiling is 4" in text


def test_a_key_is_frozen_hashable_and_ordered() -> None:
    key = Bucket(4, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        key.rows = 5  # type: ignore[misc]
    assert {key: "x"}[Bucket(4, 2)] == "x"
    assert sorted([Bucket(8), Bucket(1), Bucket(4, 2), Bucket(4)]) == [
        Bucket(1), Bucket(4), Bucket(4, 2), Bucket(8),
    ]  # fmt: skip
    assert (key.tokens, Bucket(4).tokens) == (8, 4)
    assert (str(key), str(Bucket(4))) == ("4 x 2", "4")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Ladder([]), "at least one size"),
        (lambda: Ladder([0, 2]), "at least 1, got 0"),
        (lambda: Ladder([-1]), "at least 1, got -1"),
        (lambda: Ladder([1, 8], ceiling=4), "size 8 lies above the ceiling 4"),
        (lambda: Ladder([1], ceiling=0), "at least 1, got 0"),
        (lambda: Ladder([1.5]), "a size is an int, got 1.5"),
        (lambda: Ladder(["2"]), "a size is an int, got '2'"),
        (lambda: Ladder([1], q_len=0), "q_len is at least 1, got 0"),
        (lambda: Ladder([1], q_len=1.5), "q_len is an int, got 1.5"),
        (lambda: Ladder([1], q_len="2"), "q_len is an int, got '2'"),
        (lambda: Ladder.powers_of_two(0), "at least 1, got 0"),
        (lambda: Ladder.every(-2), "at least 1, got -2"),
        (lambda: Ladder.powers_of_two(2.0), "a size is an int, got 2.0"),
    ],
)
def test_a_ladder_that_can_not_be(make: Any, says: str) -> None:
    with pytest.raises(LadderError, match=says) as caught:
        make()
    assert isinstance(caught.value, GraphCacheError) and isinstance(caught.value, ValueError)


def test_a_ladder_shows_its_sizes() -> None:
    assert repr(Ladder([4, 1])) == "Ladder([1, 4])"
