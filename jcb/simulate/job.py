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

    at: seconds when it is sent. prompt: token ids (a range will do). first_output: the answer's tokens are this and
    the numbers after it, so that a later turn can hold them. max_tokens: what the client allows, at least
    output_tokens. session: requests of one conversation; turn: its number in it. abort_after: the client leaves after
    so many tokens. first_token: when another pool, from which the prompt's pages come, gave the first token.
    """

    number: int
    at: float
    prompt: Seq[int]
    output_tokens: int
    max_tokens: int = 0
    first_output: int = 0
    session: int = -1
    turn: int = 0
    priority: int = 0
    namespace: str = ""
    abort_after: int | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        if not self.prompt or self.output_tokens < 1:
            raise ValueError(f"job {self.number}: {len(self.prompt)} prompt and {self.output_tokens} output tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimRequest(Request):
    """A request that knows its answer."""

    job: Job
    stops_at: int  # number of the token that is a stop; 0: the answer runs to its limit
    first_output: int


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
        job=job,
        stops_at=job.output_tokens if limit > job.output_tokens else 0,
        first_output=job.first_output,
    )


def known_token(row: ScheduledRow) -> int:
    """The token that a row of a SimRequest samples."""
    request = row.sequence.request
    assert isinstance(request, SimRequest)
    number = row.num_output
    return STOP_TOKEN if number + 1 == request.stops_at else request.first_output + number
