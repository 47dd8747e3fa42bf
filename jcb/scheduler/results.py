"""What the rows of a `StepResult` mean for their sequences."""

from __future__ import annotations

from functools import cached_property

from jcb.config import SchedulerConfig
from jcb.scheduler import guided
from jcb.scheduler.policy import RETRY_AFTER_SECONDS
from jcb.scheduler.record import Record
from jcb.types import FinishReason, Logprobs, RequestError, ScheduledRow, SequenceOutput, StepResult


class ResultView:
    """A step's result as Python values. Arrays are converted whole, and log-probabilities only if asked for."""

    def __init__(self, result: StepResult) -> None:
        self._result = result
        self.token_ids: list[int] = result.token_ids.tolist()
        self._finite: list[bool] = result.finite.tolist()
        self.has_prompt_logprobs = bool(result.prompt_logprobs)

    def row_error(self, index: int, row: ScheduledRow, vocab_size: int) -> RequestError | None:
        """Why the row must end its sequence, or None."""
        if not self._finite[index]:
            return RequestError("the model's output is not finite", status=500, code="non_finite_logits")
        if row.samples and not 0 <= self.token_ids[index] < vocab_size:
            return RequestError("the sampled token is not in the vocabulary", status=500, code="invalid_token")
        return None

    def logprobs(self, index: int, record: Record) -> tuple[Logprobs, ...]:
        """Log-probabilities of the row's sampled token, where they were asked for."""
        count = record.request.params.logprobs
        if count is None:
            return ()
        chosen, top_ids, top_logprobs = self._logprobs
        top = tuple(top_ids[index][:count]), tuple(top_logprobs[index][:count])
        return (Logprobs(self.token_ids[index], chosen[index], *top),)

    def prompt_logprobs(self, index: int, row: ScheduledRow, record: Record) -> tuple[Logprobs, ...]:
        """Entries for prompt positions not delivered so far; a sequence computed again repeats the others."""
        entries = self._result.prompt_logprobs.get(index)
        if entries is None:
            return ()
        first = row.start + 1  # the position that entries[0] is about
        start = max(record.num_prompt_logprobs + 1, first)
        stop = min(first + len(entries), len(record.request.prompt_token_ids))
        if start >= stop:
            return ()
        record.num_prompt_logprobs = stop - 1
        return tuple(entries[start - first : stop - first])

    @cached_property
    def _logprobs(self) -> tuple[list[float], list[list[int]], list[list[float]]]:
        result = self._result
        return result.logprobs.tolist(), result.top_ids.tolist(), result.top_logprobs.tolist()


def step_failed(error: Exception) -> RequestError:
    """500 that names the kind of failure only: its text may hold what other requests sent."""
    return RequestError(f"the step of this request failed ({type(error).__name__})", status=500, code="step_failed")


def timed_out(config: SchedulerConfig, *, started: bool) -> RequestError:
    """504 for a request that ran too long, 503 for one that never started."""
    if started:
        return RequestError(f"the request ran longer than {config.run_timeout:g} s", status=504, code="run_timeout")
    return RequestError(
        f"the request waited longer than {config.queue_timeout:g} s",
        status=503,
        code="queue_timeout",
        retry_after=RETRY_AFTER_SECONDS,
    )


def prompt_output(record: Record, prompt_logprobs: tuple[Logprobs, ...]) -> SequenceOutput:
    """Log-probabilities of prompt tokens, from a chunk that samples nothing."""
    return SequenceOutput(record.request_id, prompt_logprobs=prompt_logprobs, num_cached_tokens=record.num_cached)


def token_output(
    record: Record, token_id: int, logprobs: tuple[Logprobs, ...], prompt_logprobs: tuple[Logprobs, ...]
) -> SequenceOutput:
    """The token just taken, and the end if it was the last."""
    reason = record.finish_reason
    by_stop_id = reason is FinishReason.STOP and not (record.matcher is not None and record.matcher.is_complete)
    return SequenceOutput(
        record.request.request_id,
        (token_id,),
        logprobs,
        prompt_logprobs,
        reason,
        token_id if by_stop_id else None,
        None,
        record.num_cached,
        record.first_scheduled_time,
        record.matcher is None or guided.may_stop(record),
    )
