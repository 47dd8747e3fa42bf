import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcb.text.stop_strings import StopMatcher

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[str, int] | None:
    """By trying every prefix: the stop string completed first, the longest on ties."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return max(found, key=len), end
    return None


def longest_open_suffix(text: str, stops: list[str]) -> int:
    """By trying every suffix: the longest that properly begins a stop string."""
    return max(
        (n for n in range(len(text) + 1) for stop in stops if n < len(stop) and text.endswith(stop[:n])), default=0
    )


@settings(max_examples=500, deadline=None)
@given(TEXTS, STOPS)
def test_finds_the_match_that_is_completed_first(text, stops):
    assert StopMatcher(stops).feed(text) == first_match(text, stops)


@settings(max_examples=300, deadline=None)
@given(TEXTS, STOPS, st.integers(1, 5))
def test_b061_pieces_and_order_do_not_matter(text, stops, step):
    expected = first_match(text, stops)
    for order in itertools.islice(itertools.permutations(stops), 6):
        matcher = StopMatcher(order)
        found = None
        for start in range(0, len(text), step):
            match = matcher.feed(text[start : start + step])
            if match is not None:
                found = (match[0], start + match[1])
                break
        assert found == expected


@settings(max_examples=300, deadline=None)
@given(TEXTS, STOPS)
def test_b057_holds_the_longest_suffix_that_may_become_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    for end, character in enumerate(text, 1):
        if matcher.feed(character) is not None:
            return
        assert matcher.held == longest_open_suffix(text[:end], stops)


def test_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
