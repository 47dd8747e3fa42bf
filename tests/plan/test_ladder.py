"""The dynamic program against every ladder there is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcb.plan.ladder import best_ladders


def padded(counts, sizes, least=2):
    return sum(count * min(b for b in sizes if b >= max(size, least)) for size, count in counts.items())


def brute_force(counts, top, most, least):
    """The least padding of any `most` sizes up to `top`, tried one by one."""
    top = max(top, least)
    ladders = (
        (*chosen, top) for n in range(most) for chosen in itertools.combinations(range(least, top), n)
    )  # fmt: skip
    return min(padded(counts, ladder, least) for ladder in ladders)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_ladder_is_better(data):
    top = data.draw(st.integers(1, 11))
    counts = data.draw(st.dictionaries(st.integers(1, top), st.integers(0, 9)))
    most, least = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    for number, ladder in enumerate(best_ladders(counts, top, most, least), 1):
        assert ladder.padded == brute_force(counts, top, number, least)
        assert ladder.padded == padded(counts, ladder.sizes, least)
        assert len(ladder.sizes) <= number
        assert list(ladder.sizes) == sorted(set(ladder.sizes))
        assert ladder.sizes[-1] == max(top, least)


def test_by_hand():
    """10 steps of 3, 1 of 100: two buckets put the boundary at 3; a third has nothing to gain but 7's step."""
    ladders = best_ladders({3: 10, 7: 1, 100: 1}, 128, 4)
    assert [ladder.sizes for ladder in ladders] == [(128,), (7, 128), (3, 7, 128), (3, 7, 100, 128)]
    assert [ladder.padded for ladder in ladders] == [12 * 128, 11 * 7 + 128, 30 + 7 + 128, 30 + 7 + 100]


def test_nothing_seen_is_one_bucket():
    assert [ladder.sizes for ladder in best_ladders({}, 64, 3)] == [(64,)] * 3


def test_thousands_of_sizes_are_quick():
    counts = {size: 1 + size % 7 for size in range(1, 4097)}
    ladder = best_ladders(counts, 4096, 8)[-1]
    assert len(ladder.sizes) == 8
    assert ladder.padded < 1.15 * sum(size * count for size, count in counts.items())


@pytest.mark.parametrize(
    ("counts", "most", "message"), [({9: 1}, 1, "size 9"), ({0: 1}, 1, "size 0"), ({}, 0, "most=0")]
)
def test_impossible_questions(counts, most, message):
    with pytest.raises(ValueError, match=message):
        best_ladders(counts, 8, most)
