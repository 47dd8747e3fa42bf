"""Words that an answer may not hold, as a grammar that allows everything else.

As in vLLM: a word is the tokens that write it, alone or after a blank, and the last of them may not follow the others.
Another spelling of the same text by other tokens is not caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from jcb.types import Grammar, Matcher, RequestError

Encode = Callable[[str], Sequence[int]]


class BadWords:
    """A `Grammar`: `inner`, or anything where that is None, but for token sequences that write one of `words`.

    RequestError where the first token could be none.
    """

    def __init__(self, words: Iterable[str], encode: Encode, vocab_size: int, inner: Grammar | None = None) -> None:
        self.sequences = sequences_of(words, encode)
        self.size = vocab_size
        self.inner = inner
        self.end_ids = frozenset() if inner is None else inner.end_ids
        if (error := self.start(frozenset()).error) is not None:
            raise error

    def start(self, held_back: frozenset[int]) -> BadWordsMatcher:
        return BadWordsMatcher(self, held_back)


class BadWordsMatcher:
    """One answer's place; see `jcb.types.Matcher`."""

    __slots__ = ("_longest", "_rule", "_tail", "_within", "accepts", "error", "is_complete", "mask")

    def __init__(self, rule: BadWords, held_back: frozenset[int]) -> None:
        self._rule = rule
        self._within: Matcher | None = None if rule.inner is None else rule.inner.start(held_back)
        self._longest = max(map(len, rule.sequences)) - 1
        self._tail: tuple[int, ...] = ()  # the last tokens, as many as a word may need
        self._look(held_back)

    def advance(self, token_id: int, held_back: frozenset[int]) -> None:
        if self._within is not None:
            self._within.advance(token_id, held_back)
        self._tail = (*self._tail, token_id)[-self._longest :] if self._longest else ()
        self._look(held_back)

    def _look(self, held_back: frozenset[int]) -> None:
        within = self._within
        self.accepts = within is None or within.accepts
        self.is_complete = within is not None and within.is_complete
        self.error = None if within is None else within.error
        banned = {ids[-1] for ids in self._rule.sequences if self._tail[len(self._tail) - len(ids) + 1 :] == ids[:-1]}
        mask = _all(self._rule.size) if within is None else within.mask
        self.mask = mask & ~_bits(banned, self._rule.size)
        if within is None and held_back:
            left = self.mask & ~_bits(held_back, self._rule.size)
            self.mask = left if left.any() else self.mask
        if not self.mask.any() and self.error is None and not self.is_complete:
            self.error = RequestError(
                "bad_words leave no token that could come next", param="bad_words", code="no_token"
            )


def sequences_of(words: Iterable[str], encode: Encode) -> list[tuple[int, ...]]:
    """The tokens of each word: as it is, and as it follows a blank."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            if ids := tuple(encode(text)):
                found[ids] = None
    return list(found)


def _all(size: int) -> np.ndarray:
    return ~_bits(range(size, -(-size // 32) * 32), -(-size // 32) * 32)


def _bits(ids: Iterable[int], size: int) -> np.ndarray:
    """i32[words] with the bits of `ids` set."""
    words = np.zeros(-(-size // 32), np.uint32)
    index = np.fromiter(ids, np.int64)
    np.bitwise_or.at(words, index // 32, np.left_shift(np.uint32(1), (index % 32).astype(np.uint32)))
    return words.view(np.int32)
