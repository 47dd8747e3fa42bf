"""A compiled grammar and the matchers that follow it, over llguidance.

Masks are filled on the engine's thread, so the limits below keep every one of them short; what goes beyond ends its own
request with an error.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from typing import Any

import numpy as np

from jcb.structured.vocab import Vocab
from jcb.types import RequestError, Structured

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 4_000,
    "max_lexer_states": 30_000,
    "verbose_errors": False,
}
"""llguidance's own bounds on one step and on what a grammar may grow to."""

JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \t]?|\n[ \t]{0,32}", "lenient": False}
"""Whitespace as people and models write it, and no more: a model may not fill its answer with blanks."""

TRIAL_TOKENS = 32
MAX_TOKEN_SECONDS = 0.01
"""Processor time that a token of one answer may take, on the average."""

GRACE_SECONDS = 0.3
"""What an answer may take beyond that."""

_DUMP = re.compile(r"<(?:state|non-verbose)")


class GrammarError(Exception):
    """Text that is no grammar, or one that allows nothing. The message is for the caller."""


def translate(structured: Structured) -> str:
    """`structured` in llguidance's own form; it is checked by `CompiledGrammar` only."""
    from llguidance import LLMatcher

    kind, source = structured.kind, structured.source
    if kind == "json":
        if source.strip() == "false":
            raise GrammarError("no answer fits the schema false")
        source = "{}" if source.strip() == "true" else source
        return LLMatcher.grammar_from_json_schema(source, overrides=JSON_OPTIONS)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        choices = dict.fromkeys(json.loads(source))
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    if "::=" not in source:
        return LLMatcher.grammar_from_lark(source)
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(source))
    except Exception as error:
        raise GrammarError(f"the grammar cannot be read: {error}") from error


class CompiledGrammar:
    """A grammar ready to follow: `start` makes a matcher in microseconds.

    tokenizer: `make_tokenizer(vocab)`. grammar: what `translate` gave; GrammarError when no answer fits it.
    """

    def __init__(self, tokenizer: Any, vocab: Vocab, grammar: str, param: str) -> None:
        from llguidance import LLMatcher, LLParserLimits

        self.end_ids = frozenset(vocab.end_ids)
        self.param = param
        self.vocab = vocab
        self.ends = vocab.bits(vocab.end_ids)
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if self._matcher.is_error():
            raise GrammarError(self._matcher.get_error())
        self._first = GrammarMatcher(self, self._matcher)
        if self._first.error is not None:
            raise GrammarError(self._first.reason)
        if self._first.is_complete:
            raise GrammarError("the only answer that fits is an empty one")

    def start(self, held_back: frozenset[int]) -> GrammarMatcher:
        return self._first.copy(held_back)


class GrammarMatcher:
    """One answer's place in a grammar; see `jcb.types.Matcher`."""

    __slots__ = ("_grammar", "_matcher", "_seconds", "accepts", "error", "is_complete", "mask")

    def __init__(self, grammar: CompiledGrammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._seconds = GRACE_SECONDS  # left to this answer
        self.accepts = self.is_complete = False
        self.error: RequestError | None = None
        self.mask = self._look()

    def advance(self, token_id: int, held_back: frozenset[int]) -> None:
        begin = time.thread_time()
        self._matcher.consume_token(token_id)
        self.mask = self._without(held_back, self._look())
        self._seconds += MAX_TOKEN_SECONDS - (time.thread_time() - begin)
        if self._seconds < 0 and not self.is_complete:
            self.error = self._failure(f"its tokens take more than {1e3 * MAX_TOKEN_SECONDS:.0f} ms")

    def copy(self, held_back: frozenset[int]) -> GrammarMatcher:
        """Another answer that stands where this one does; its mask is not computed again."""
        other = GrammarMatcher.__new__(GrammarMatcher)
        other._grammar, other._matcher = self._grammar, self._matcher.deep_copy()
        other._seconds = self._seconds
        other.accepts, other.is_complete, other.error = self.accepts, self.is_complete, self.error
        other.mask = self._without(held_back, self.mask)
        return other

    def _look(self) -> np.ndarray:
        """What may come next, as a mask; sets the rest accordingly."""
        matcher, grammar = self._matcher, self._grammar
        words = np.zeros(len(grammar.ends), np.uint32)
        if not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            words &= grammar.vocab.usable
        self.accepts = matcher.is_accepting()
        if matcher.is_error():
            self.accepts, self.error = False, self._failure(self.reason)
        elif not (words & ~grammar.ends).any():
            self.is_complete = self.accepts
            self.error = None if self.accepts else self._failure(self.reason)
        return words.view(np.int32)

    def _without(self, held_back: frozenset[int], mask: np.ndarray) -> np.ndarray:
        if not held_back:
            return mask
        left = mask & ~self._grammar.vocab.bits(sorted(held_back)).view(np.int32)
        return left if left.any() else mask

    @property
    def reason(self) -> str:
        """Why it cannot go on."""
        return plain(self._matcher.get_error()).replace("NoExtensionBias", "") or "no token fits"

    def _failure(self, reason: str) -> RequestError:
        return RequestError(
            f"{self._grammar.param} cannot be followed any further: {reason}",
            param=self._grammar.param,
            code="grammar_failed",
        )


def try_out(grammar: CompiledGrammar) -> None:
    """A short random answer. GrammarError when it fails, or when most of its tokens take too much of a step."""
    rng, matcher, seconds = random.Random(0), grammar.start(frozenset()), [0.0]
    while len(seconds) <= TRIAL_TOKENS and not matcher.is_complete:
        ids = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
        token_id = int(rng.choice(ids))
        if token_id in grammar.end_ids:
            break
        begin = time.thread_time()
        matcher.advance(token_id, frozenset())
        seconds.append(time.thread_time() - begin)
        if matcher.error is not None:
            raise GrammarError(matcher.error.message.partition(": ")[2])
    usual = statistics.median(seconds)
    if usual > MAX_TOKEN_SECONDS:
        raise GrammarError(f"a token takes {1e3 * usual:.0f} ms, more than {1e3 * MAX_TOKEN_SECONDS:.0f} ms")


def plain(text: str) -> str:
    """An error message on one line, without llguidance's dumps."""
    return " ".join(_DUMP.split(text)[0].split())[:300]
