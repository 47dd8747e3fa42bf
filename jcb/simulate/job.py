"""What the simulator is asked: prompts with answers whose length is known."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from jcb.types import Request, SamplingParams, ScheduledRow

VOCAB_SIZE = (1 << 31) - 1
"""Pretended tokens are 31-bit numbers, so that different prompts share no page by accident."""

STOP_TOKEN = VOCAB_SIZE - 1
"""Ends an answer that stops before its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One prompt and the answer it will get.

    at: seconds when it is sent. prompt, answer: token ids (a range will do), so that a later turn can hold both.
    max_tokens: what the client allows, at least the answer's length. session: requests of one conversation; turn: its
    number in it. abort_after: the client leaves after so many tokens. first_token: when another pool, from which the
    prompt's pages come, gave the first token.
    """

    number: int
    at: float
    prompt: Seq[int]
    answer: Seq[int]
    max_tokens: int = 0
    session: int = -1
    turn: int = 0
    priority: int = 0
    namespace: str = ""
    abort_after: int | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt or not self.answer:
            raise ValueError(f"job {self.number}: {len(self.prompt)} prompt and {len(self.answer)} output tokens")

    @property
    def output_tokens(self) -> int:
        """Length of the answer."""
        return len(self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest(Request):
    """A request that knows its answer."""

    answer: Seq[int]
    stops_at: int  # number of the token that is a stop; 0: the answer runs to its limit


def request_of(job: Job, request_id: str) -> SimRequest:
    """What the engine is asked for `job`."""
    limit = max(job.max_tokens, job.output_tokens)
    return SimRequest(
        request_id=request_id,
        prompt_token_ids=job.prompt,  # ty: ignore[invalid-argument-type] (any sequence of whole numbers will do)
        params=SamplingParams(max_tokens=limit, stop_token_ids=(STOP_TOKEN,) if limit > job.output_tokens else ()),
        arrival_time=job.at,
        priority=job.priority,
        namespace=job.namespace,
        max_tokens=limit,
        answer=job.answer,
        stops_at=job.output_tokens if limit > job.output_tokens else 0,
    )


def known_token(row: ScheduledRow) -> int:
    """The token that a row of a SimRequest samples."""
    request = row.sequence.request
    assert isinstance(request, SimRequest)
    number = row.num_output
    if number + 1 == request.stops_at:
        return STOP_TOKEN
    return request.answer[number] if number < len(request.answer) else 0  # one step too many, under overlap
