"""What the rows of a `StepResult` mean for their sequences."""

from __future__ import annotations

from collections.abc import Sequence as Items

from jcb.config import SchedulerConfig
from jcb.scheduler.policy import RETRY_AFTER_SECONDS
from jcb.scheduler.record import Record
from jcb.types import FinishReason, Logprobs, RequestError, ScheduledRow, SequenceOutput, StepResult


def row_error(token_id: int, finite: bool, samples: bool, vocab_size: int) -> RequestError | None:
    """Why a row must end its sequence, or None."""
    if not finite:
        return RequestError("the model produced values that are not finite", status=500, code="non_finite_logits")
    if samples and not 0 <= token_id < vocab_size:
        return RequestError("the sampler produced an invalid token", status=500, code="invalid_token")
    return None


def step_failed(error: Exception) -> RequestError:
    """500 that names the kind of failure; its text may hold what other requests sent."""
    return RequestError(f"the step of this request failed ({type(error).__name__})", status=500, code="step_failed")


def queue_timeout(config: SchedulerConfig) -> RequestError:
    return RequestError(
        f"the request waited longer than {config.queue_timeout:g} s",
        status=503,
        code="queue_timeout",
        retry_after=RETRY_AFTER_SECONDS,
    )


def run_timeout(config: SchedulerConfig) -> RequestError:
    return RequestError(f"the request ran longer than {config.run_timeout:g} s", status=504, code="run_timeout")


def logprobs_of(record: Record, index: int, result: StepResult) -> tuple[Logprobs, ...]:
    """Log-probabilities of the sampled token of one row, where they were asked for."""
    count = record.request.params.logprobs
    if count is None:
        return ()
    return (
        Logprobs(
            int(result.token_ids[index]),
            float(result.logprobs[index]),
            tuple(result.top_ids[index, :count].tolist()),
            tuple(result.top_logprobs[index, :count].tolist()),
        ),
    )


def fresh_prompt_logprobs(record: Record, row: ScheduledRow, entries: Items[Logprobs] | None) -> tuple[Logprobs, ...]:
    """Entries for prompt positions that were not delivered yet; a sequence computed again repeats the others."""
    if entries is None:
        return ()
    first = row.start + 1
    start = max(record.num_prompt_logprobs + 1, first)
    stop = min(first + len(entries), len(record.request.prompt_token_ids))
    if start >= stop:
        return ()
    record.num_prompt_logprobs = stop - 1
    return tuple(entries[start - first : stop - first])


def prompt_output(record: Record, prompt_logprobs: tuple[Logprobs, ...]) -> SequenceOutput:
    return SequenceOutput(record.request_id, prompt_logprobs=prompt_logprobs, num_cached_tokens=record.num_cached)


def token_output(
    record: Record, token_id: int, logprobs: tuple[Logprobs, ...], prompt_logprobs: tuple[Logprobs, ...]
) -> SequenceOutput:
    """The token just taken, and the end if it was the last."""
    reason = record.finish_reason
    return SequenceOutput(
        record.request.request_id,
        (token_id,),
        logprobs,
        prompt_logprobs,
        reason,
        token_id if reason is FinishReason.STOP else None,
        None,
        record.num_cached,
    )
