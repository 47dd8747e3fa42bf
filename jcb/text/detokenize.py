"""Token ids of one answer to text, as they come, with stop strings.

What has been emitted is never taken back and never sent twice: text that could still change (half a UTF-8 character,
the beginning of a stop string) is held until it is decided. Every token is looked at once, so an answer costs time
in proportion to its length.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from jcb.text.stop_strings import StopMatcher
from jcb.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character, so also the most tokens that can share one."""


class TextDelta(NamedTuple):
    """What one push brought.

    text: new text, safe to send. stop_string: the stop string that ended the answer, if one did.
    tokens_used: how many of the pushed tokens belong to the answer (those up to the end of the stop string).
    """

    text: str
    stop_string: str | None
    tokens_used: int


class IncrementalDetokenizer:
    """The text of one answer. Joined deltas and `finish()` equal `tokenizer.decode(ids, continuation=True)`.

    include_stop: the stop string itself is part of the text. min_tokens: stop strings are looked for only in the text
    of the tokens after the first `min_tokens`. After a stop string nothing more is read. shown: special tokens that
    are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        shown: Sequence[int] = (),
    ) -> None:
        if tokenizer.vocabulary.exact:
            self._decoder: _ByteDecoder | _WindowDecoder = _ByteDecoder(tokenizer, skip_special_tokens, shown)
        else:
            self._decoder = _WindowDecoder(tokenizer, skip_special_tokens)
        self._matcher = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._unchecked_tokens = min_tokens
        self._emitted: list[str] = []
        self._held = ""
        self._stopped = False

    @property
    def text(self) -> str:
        """Everything emitted so far."""
        return "".join(self._emitted)

    def push(self, token_ids: Sequence[int], *, may_stop: bool = True) -> TextDelta:
        """Read the next tokens; the answer is the same however they are grouped. may_stop: False does not look for
        stop strings in their text.
        """
        if self._stopped:
            return TextDelta("", None, 0)
        parts: list[str] = []
        for used, token_id in enumerate(token_ids, 1):
            text = self._decoder.push(token_id)
            if self._matcher is None:
                parts.append(text)
            elif self._unchecked_tokens > 0 or not may_stop:
                self._unchecked_tokens -= 1
                parts.append(self._held + text)
                self._held = ""
                self._matcher.restart()
            elif text:
                stop = self._read_checked(text, parts)
                if stop is not None:
                    return TextDelta(self._emit(parts), stop, used)
        return TextDelta(self._emit(parts), None, len(token_ids))

    def finish(self) -> str:
        """The end of the answer: releases what was held. A character that was never completed becomes U+FFFD."""
        if self._stopped:
            return ""
        self._stopped = True
        text = self._held + self._decoder.finish()
        self._held = ""
        return self._emit([text])

    def _read_checked(self, text: str, parts: list[str]) -> str | None:
        """Append to `parts` what `text` makes certain; the stop string if it completes one."""
        matcher = self._matcher
        assert matcher is not None
        match = matcher.feed(text)
        if match is None:
            pending = self._held + text
            certain = len(pending) - matcher.held
            parts.append(pending[:certain])
            self._held = pending[certain:]
            return None
        stop, end = match
        before = self._held + text[:end]
        parts.append(before if self._include_stop else before.removesuffix(stop))
        self._held = ""
        self._stopped = True
        return stop

    def _emit(self, parts: list[str]) -> str:
        text = parts[0] if len(parts) == 1 else "".join(parts)
        if text:
            self._emitted.append(text)
        return text


class _ByteDecoder:
    """Text from the exact bytes of tokens: looks each token up once, keeps at most three bytes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, shown: Sequence[int]) -> None:
        self._pieces = tokenizer.visible_pieces(skip_special_tokens)
        self._shown = {index: tokenizer.token_bytes(index) for index in shown}
        self._rest = b""

    def push(self, token_id: int) -> str:
        if token_id < 0:
            raise ValueError(f"{token_id=} is negative")
        piece = self._rest + (self._shown.get(token_id) or self._pieces[token_id])
        text, used = codecs.utf_8_decode(piece, "replace", False)
        self._rest = piece[used:]
        return text

    def finish(self) -> str:
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace")


class _WindowDecoder:
    """Text through the tokenizer's own decoder, for decoders of which nothing is known.

    Decodes a short window of tokens twice, with and without the new ones, and takes the difference; a text that ends
    in U+FFFD may be half a character, so it waits.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._read = 0  # tokens of the window whose text has been emitted

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        before, now = self._decode(self._window[: self._read]), self._decode(self._window)
        waits = now.endswith("\ufffd") and len(self._window) - self._read < _LONGEST_CHARACTER
        if len(now) <= len(before) or waits:
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        return now[len(before) :]

    def finish(self) -> str:
        before, now = self._decode(self._window[: self._read]), self._decode(self._window)
        self._read = len(self._window)
        return now[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
