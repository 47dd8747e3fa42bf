"""Keeps a user from writing special tokens: marks their strings in untrusted text so that they stay text.

The mark is a pair of Unicode noncharacters put inside the string. Tokens are looked for in the marked text, then the
mark is taken out, then words are cut and merged: the string is encoded exactly as if no such token existed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as Pipeline

MARK = "\U0010fffe\U0010ffff"
"""Never valid in text for interchange; where a caller sends it all the same, it is dropped."""

_REPLACEMENT = "\ufffd"


class SpecialTokenGuard:
    """Marks the strings of special tokens in untrusted text."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        tokens = sorted(special_tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._prefixes = {token[:length] for token in tokens for length in range(1, len(token))}
        self._longest_prefix = max(map(len, self._prefixes), default=0)

    def mark(self, text: str) -> str:
        """`text` with every special-token string marked (one of a single character becomes U+FFFD)."""
        if self._pattern is None:
            return text
        while self._pattern.search(text):  # again, since tokens may overlap
            text = self._pattern.sub(_mark_match, text)
        return text

    def mark_value(self, value: Any) -> Any:
        """A copy of JSON-like `value` with all its strings marked, keys too.

        A string that ends like the beginning of a special token gets a mark at its end, so that no token is made
        together with what a template writes behind it.
        """
        if isinstance(value, str):
            marked = self.mark(value)
            return marked + MARK if self._ends_open(marked) else marked
        if isinstance(value, list | tuple):
            return [self.mark_value(each) for each in value]
        if isinstance(value, dict):
            return {self.mark_value(key): self.mark_value(each) for key, each in value.items()}
        return value

    def _ends_open(self, text: str) -> bool:
        longest = min(self._longest_prefix, len(text))
        return any(text[-length:] in self._prefixes for length in range(1, longest + 1))


def _mark_match(match: re.Match[str]) -> str:
    token = match[0]
    return token[0] + MARK + token[1:] if len(token) > 1 else _REPLACEMENT


def marked_pipeline(pipeline: Pipeline, special_tokens: Iterable[str]) -> Pipeline:
    """A copy of `pipeline` for marked text: it looks for special tokens first and takes the marks out after."""
    content = json.loads(pipeline.to_str())
    special = set(special_tokens)
    for token in content["added_tokens"]:
        token["normalized"] = token["normalized"] and token["content"] not in special
    unmark = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}
    before = content["normalizer"]
    content["normalizer"] = {"type": "Sequence", "normalizers": [unmark, *([before] if before else [])]}
    return Pipeline.from_str(json.dumps(content))
