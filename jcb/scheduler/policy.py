"""Order and limits as plain functions: precedence, refusal at the door, when a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence

from jcb.config import Limits, SchedulerConfig, SchedulingPolicy
from jcb.scheduler.record import Order, Record
from jcb.scheduler.shares import Shares
from jcb.types import FinishReason, Request, RequestError

RETRY_AFTER_SECONDS = 1.0
"""What a caller refused for a full queue is told to wait."""


PROMPT_TOKENS_A_SECOND = 1000.0
"""Policy shortest-prompt: prompt tokens that weigh as much as a second of waiting. So a prompt of n tokens is overtaken
only by those that come within n / 1,000 seconds after it."""

PREFIX_WINDOW = 16
"""Policy longest-prefix: how many of the queue are compared."""

MOST_PASSES = 16
"""Policy longest-prefix: how often the first of the queue may be passed over."""


def precedence(name: SchedulingPolicy, request: Request, number: int) -> Order:
    """Among those that run, smaller runs first and is preempted last; `number` makes every order distinct."""
    if name == "priority":
        return request.priority, request.arrival_time, number
    return 0, 0.0, number


def place(name: SchedulingPolicy, request: Request, number: int, shares: Shares) -> Order:
    """Among those that wait, smaller is let in first. A place never changes, so no queue is sorted anew."""
    if name == "shortest-prompt":
        return 0, request.arrival_time + len(request.prompt_token_ids) / PROMPT_TOKENS_A_SECOND, number
    if name == "fair-share":
        return 0, shares.claim(request.namespace, len(request.prompt_token_ids)), number
    return precedence(name, request, number)


def chunk_half(config: SchedulerConfig) -> int:
    """Position at which a prompt's chunks have lost half their length, 0 where they never do (see `chunk`)."""
    if config.chunk_policy == "fixed":
        return 0
    if not config.chunk_half_position:
        raise ValueError(
            f"chunk_policy={config.chunk_policy!r} needs chunk_half_position: give one, or let `engine.resolve` find it"
        )
    return config.chunk_half_position


def generation_limit(request: Request, limits: Limits) -> int:
    """Most tokens the request may generate; without a `max_tokens` of its own the pool is a limit too."""
    room = limits.max_model_len - len(request.prompt_token_ids)
    if request.params.max_tokens is None:
        room = min(room, limits.usable_pages * limits.page_size - len(request.prompt_token_ids))
    return min(request.max_tokens, room)


def check_can_ever_fit(request: Request, limits: Limits) -> None:
    """RequestError 400, with the numbers, for a request that no empty engine could serve."""
    prompt = len(request.prompt_token_ids)
    if prompt == 0:
        raise RequestError("the prompt is empty: it must hold at least one token", param="prompt", code="empty_prompt")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens={request.max_tokens} must be at least 1", param="max_tokens")
    if prompt + 1 > limits.max_model_len:
        raise RequestError(
            f"the prompt has {prompt:,} tokens and max_tokens is {request.max_tokens:,}, but the model's length is "
            f"{limits.max_model_len:,} tokens; the longest admissible prompt is {limits.max_model_len - 1:,} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    generated = max(generation_limit(request, limits), 1)
    needed = limits.pages_for(prompt + generated)
    if needed > limits.usable_pages:
        longest = limits.usable_pages * limits.page_size - generated
        advice = (
            f"the longest admissible prompt is {longest:,} tokens" if longest > 0 else "ask for fewer output tokens"
        )
        raise RequestError(
            f"{prompt:,} prompt tokens and up to {generated:,} output tokens need {needed:,} pages, "
            f"the pool has {limits.usable_pages:,}; with this max_tokens {advice}",
            param="prompt" if longest > 0 else "max_tokens",
            code="kv_capacity_exceeded",
        )


def check_priority(config: SchedulerConfig, priority: int) -> None:
    """RequestError 400 for a priority that would change nothing."""
    if priority and config.policy != "priority":
        raise RequestError(
            f"priority={priority} has no effect here: this server's scheduler.policy is {config.policy!r}",
            param="priority",
            code="unsupported_field",
        )


def check_can_ever_queue(config: SchedulerConfig, limits: Limits, requests: Sequence[Request]) -> None:
    """RequestError 400, with the numbers, for requests that even an empty queue could not take together."""
    count, tokens = len(requests), sum(len(request.prompt_token_ids) for request in requests)
    most, most_tokens = _queue_size(config, limits)
    if count > most or (count > 1 and tokens > most_tokens):
        raise RequestError(
            f"{count:,} choices with {tokens:,} prompt tokens are asked for at once, the queue holds {most:,} with "
            f"{most_tokens:,}: send fewer prompts, or a smaller n",
            param="n" if requests[0].params.n > 1 else "prompt",
            code="queue_capacity_exceeded",
        )


def check_queue(
    config: SchedulerConfig, limits: Limits, waiting: int, tokens: int, *, count: int = 1, prompt_tokens: int = 1
) -> None:
    """RequestError 429 when `waiting` requests with `tokens` prompt tokens leave no room for `count` more.

    prompt_tokens: of these together; without it the least that anybody can ask for.
    """
    most, most_tokens = _queue_size(config, limits)
    if waiting + count <= most and (waiting + count == 1 or tokens + prompt_tokens <= most_tokens):
        return
    raise RequestError(
        f"the queue is full: {waiting:,} requests with {tokens:,} prompt tokens are waiting",
        status=429,
        code="queue_full",
        retry_after=RETRY_AFTER_SECONDS,
    )


def _queue_size(config: SchedulerConfig, limits: Limits) -> tuple[int, int]:
    """Most requests that may wait, and most prompt tokens of theirs."""
    return (
        config.max_queued or max(4 * config.max_num_seqs, 64),
        config.max_queued_tokens or 8 * limits.usable_pages * limits.page_size,
    )


def stop_ids(request: Request) -> frozenset[int]:
    """Token ids that end the request: its own, and the model's unless they are ignored."""
    own = frozenset(request.params.stop_token_ids)
    return own if request.params.ignore_eos else own.union(request.eos_token_ids)


def end_after(record: Record, token_id: int) -> FinishReason | None:
    """Why the sequence ends with the token it just got, or None. Its first `min_tokens` tokens cannot stop it."""
    generated = len(record.output_token_ids)
    if token_id in record.stop_ids and generated > record.request.params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if generated >= record.limit else None
