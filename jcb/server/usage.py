"""Token counts of one response, as the `usage` object."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jcb.engine.output import RequestOutput


class UsageCounter:
    """Counts each prompt once, whatever n, and every generated token."""

    def __init__(self, prompt_lengths: Sequence[int], n: int) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._n = n
        self._cached = [0] * len(prompt_lengths)
        self._completion_tokens = 0

    def add(self, output: RequestOutput) -> None:
        self._completion_tokens += len(output.token_ids)
        if output.index % self._n == 0:  # choices 1 … n-1 find the pages of choice 0: no saving of the caller's
            self._cached[output.index // self._n] = output.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
