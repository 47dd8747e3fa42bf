"""Words that may not be said."""

import numpy as np
import pytest

from jcb.engine.admission import ModelInfo, validate
from jcb.structured.bad_words import BadWords, sequences_of
from jcb.types import RequestError, SamplingParams

IDS = {"fox": [7], " fox": [3, 7], "own fox": [1, 2, 3, 7], " own fox": [9, 2, 3, 7], "x": [4], " x": [4]}
SIZE = 40
HELD_NONE = frozenset()


def rule(*words, inner=None):
    return BadWords(words, lambda text: IDS[text], SIZE, inner)


def ids(matcher):
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    assert not bits[SIZE:].any()
    return set(np.flatnonzero(bits))


def test_a_word_is_its_tokens_alone_and_after_a_blank():
    assert sequences_of(["fox", "x"], lambda text: IDS[text]) == [(7,), (3, 7), (4,)]


def test_the_last_token_may_not_follow_the_others():
    matcher = rule("own fox").start(HELD_NONE)
    everything = set(range(SIZE))
    for token, banned in ((1, set()), (2, set()), (3, {7}), (5, set()), (9, set()), (2, set()), (3, {7}), (3, set())):
        before = matcher.mask.copy()
        given = matcher.mask
        matcher.advance(token, HELD_NONE)
        assert ids(matcher) == everything - banned, token
        assert (given == before).all(), "a mask that was given out has changed"
        assert matcher.accepts
        assert not matcher.is_complete


def test_single_tokens_are_never_allowed_and_ends_can_be_held_back():
    matcher = rule("x", "fox").start(frozenset({0}))
    assert ids(matcher) == set(range(SIZE)) - {0, 4, 7}
    matcher.advance(3, HELD_NONE)
    assert ids(matcher) == set(range(SIZE)) - {4, 7}


class Inner:
    """Allows two tokens."""

    end_ids = frozenset({2})
    accepts, is_complete, error = False, True, None

    def __init__(self, *allowed):
        self.mask = np.array([sum(1 << i for i in allowed), 0], np.int64).astype(np.int32)

    def start(self, held_back):
        return self

    def advance(self, token_id, held_back):
        pass


def test_a_grammar_within_stays_in_force():
    grammar = rule("x", inner=Inner(4, 5))
    matcher = grammar.start(HELD_NONE)
    assert ids(matcher) == {5}
    assert (matcher.accepts, matcher.is_complete, grammar.end_ids) == (False, True, {2})
    stuck = Inner(4)
    stuck.is_complete = False
    with pytest.raises(RequestError, match="leave no token"):
        rule("x", inner=stuck)


@pytest.mark.parametrize("words", [("",), ("a" * 257,), ("a",) * 65, "word", (5,)])
def test_what_cannot_be_a_word_is_refused(words):
    model = ModelInfo(name="m", vocab_size=SIZE, max_model_len=64, eos_token_ids=(2,))
    with pytest.raises(RequestError) as caught:
        validate(SamplingParams(bad_words=words), model)
    assert caught.value.param == "bad_words"
    with pytest.raises(RequestError):
        validate(SamplingParams(bad_words=("a",), allowed_token_ids=(1,)), model)
