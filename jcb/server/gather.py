"""Outputs gathered into fewer, larger ones: `stream_interval`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from jcb.engine.output import RequestOutput


class Gatherer:
    """Lets a choice's first token and its end through at once, and `interval` tokens together between them."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[int, RequestOutput] = {}
        self._begun: set[int] = set()

    def take(self, outputs: Iterable[RequestOutput]) -> Iterator[RequestOutput]:
        """What of `outputs` and of those held is to be written now."""
        for output in outputs:
            if self._interval == 1 or output.error is not None:
                yield output
                continue
            held = self._held.pop(output.index, None)
            whole = output if held is None else _join(held, output)
            is_first = output.index not in self._begun
            self._begun.add(output.index)
            if is_first or whole.finish_reason is not None or len(whole.token_ids) >= self._interval:
                yield whole
            else:
                self._held[output.index] = whole


def _join(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    return dataclasses.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
    )
