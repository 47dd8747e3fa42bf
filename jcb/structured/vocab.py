"""The tokens of a model as a grammar sees them: bytes, marks that stand for no text, and ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jcb.text.tokenizer import Tokenizer
from jcb.types import RequestError

INSTALL = "structured output needs the package llguidance: pip install 'llguidance>=1.9,<2'"


@dataclass(frozen=True)
class Vocab:
    """pieces: the bytes of each token, empty where there is none. special_ids: tokens that are no text.
    encode: the model's own way to write text; None takes the longest token that fits, again and again.
    """

    pieces: Sequence[bytes]
    special_ids: Sequence[int]
    end_ids: Sequence[int]
    encode: Callable[[str], Sequence[int]] | None = None

    @property
    def size(self) -> int:
        return len(self.pieces)

    @cached_property
    def usable(self) -> np.ndarray:
        """u32[words]: ids that a token has."""
        return self.bits([i for i, piece in enumerate(self.pieces) if piece])

    def bits(self, ids: Sequence[int]) -> np.ndarray:
        """u32[words] with the bits of `ids` set."""
        words = np.zeros(-(-self.size // 32), np.uint32)
        index = np.asarray(ids, np.int64)
        np.bitwise_or.at(words, index // 32, np.left_shift(np.uint32(1), (index % 32).astype(np.uint32)))
        return words


def vocab_of(tokenizer: Tokenizer, size: int) -> Vocab | None:
    """What grammars need of a model's tokenizer whose ids are below `size`; None when its exact bytes are not known."""
    if not tokenizer.vocabulary.exact or not tokenizer.eos_token_ids:
        return None
    pieces = tokenizer.vocabulary.pieces[:size]
    special = sorted(index for index in tokenizer.special_tokens.values() if index < size)
    return Vocab(
        pieces + (b"",) * (size - len(pieces)),
        special,
        tokenizer.eos_token_ids,
        lambda text: tokenizer.encode(text, add_special_tokens=False, parse_special=False),
    )


def make_tokenizer(vocab: Vocab) -> Any:
    """llguidance's view of `vocab`. RequestError 501 where llguidance is not installed."""
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError:
        raise RequestError(INSTALL, status=501, code="not_installed") from None
    source = _Source(vocab)
    tokenizer = LLTokenizer(TokenizerWrapper(source), n_vocab=vocab.size, eos_token=list(vocab.end_ids))
    source.greedy = tokenizer.greedy_tokenize
    return tokenizer


class _Source:
    """What llguidance asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, vocab: Vocab) -> None:
        self.eos_token_id = vocab.end_ids[0]
        self.tokens = list(vocab.pieces)
        self.special_token_ids = sorted({*vocab.special_ids, *vocab.end_ids})
        self.greedy: Callable[[str], Sequence[int]] | None = None
        self._encode = vocab.encode

    def __call__(self, text: bytes) -> list[int]:
        encode = self._encode or self.greedy
        return [] if encode is None else list(encode(text.decode("utf-8", "ignore")))
