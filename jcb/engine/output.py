"""From token ids to what a caller reads: text by increments, stop strings, one end a request.

Runs in the engine's thread. A stop string ends a request here, before the scheduler knows of it; the loop
then aborts it there, and whatever the scheduler still says about it is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jcb.metrics import EngineMetrics
from jcb.text.detokenize import IncrementalDetokenizer
from jcb.text.tokenizer import Tokenizer
from jcb.types import FinishReason, Logprobs, Request, RequestError, SequenceOutput


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a choice began to run, had its first token and ended: seconds from its arrival."""

    started: float
    first_token: float
    ended: float


@dataclass(slots=True)
class RequestOutput:
    """What one choice gained in a step; `text`, `token_ids` and `logprobs` are increments.

    stop_reason: the stop string or stop token id that ended it; None for the model's own end and for length.
    prompt_logprobs: entry i belongs to prompt token i + 1, given once, with the first output. times: with the end.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: RequestError | None = None
    times: RequestTimes | None = None


@dataclass(slots=True)
class _Progress:
    """One choice on its way."""

    request: Request
    index: int
    detokenizer: IncrementalDetokenizer
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    first_scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float = 0.0


class OutputProcessor:
    """Turns SequenceOutputs into RequestOutputs and keeps the request histograms."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        metrics: EngineMetrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics or EngineMetrics()
        self._clock = clock
        self._progress: dict[str, _Progress] = {}

    def __len__(self) -> int:
        return len(self._progress)

    def add(self, request: Request, index: int = 0) -> None:
        """Expects outputs of `request`, which is choice `index` of its caller's request."""
        params = request.params
        detokenizer = IncrementalDetokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            shown=params.shown_token_ids,
        )
        self._progress[request.request_id] = _Progress(request, index, detokenizer)

    def remove(self, request_id: str) -> None:
        """Forgets a request; later outputs of it are dropped."""
        self._progress.pop(request_id, None)

    def process(self, outputs: list[SequenceOutput]) -> tuple[list[RequestOutput], list[str]]:
        """What callers get, and the ids that a stop string has ended (the loop aborts those).

        Every result holds a token or an end: scores of a prompt's earlier chunks wait for its first token.
        """
        now = self._clock()
        results: list[RequestOutput] = []
        stopped: list[str] = []
        for output in outputs:
            progress = self._progress.get(output.request_id)
            if progress is None:
                continue
            result = self._advance(progress, output, now)
            if result.finish_reason is not None:
                del self._progress[output.request_id]
                if output.finish_reason is None:
                    stopped.append(output.request_id)
                self._count_end(progress, result, now)
            if result.token_ids or result.finish_reason is not None:
                results.append(result)
        return results, stopped

    def _advance(self, progress: _Progress, output: SequenceOutput, now: float) -> RequestOutput:
        params = progress.request.params
        progress.num_cached = max(progress.num_cached, output.num_cached_tokens)
        progress.prompt_logprobs += output.prompt_logprobs
        result = RequestOutput(
            request_id=output.request_id,
            index=progress.index,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            finish_reason=output.finish_reason,
            num_prompt_tokens=len(progress.request.prompt_token_ids),
            num_cached_tokens=progress.num_cached,
            error=output.error,
        )
        hide_last = output.stop_token_id is not None and not params.include_stop_str_in_output
        shown = output.token_ids[:-1] if hide_last else output.token_ids
        delta = progress.detokenizer.push(shown, may_stop=output.may_stop)
        result.text = delta.text
        if delta.stop_string is not None:
            result.token_ids = output.token_ids[: delta.tokens_used]
            result.logprobs = output.logprobs[: delta.tokens_used]
            result.finish_reason, result.stop_reason = FinishReason.STOP, delta.stop_string
            result.error = None
        elif output.finish_reason is not None:
            result.text += progress.detokenizer.finish()
            if output.stop_token_id in params.stop_token_ids:
                result.stop_reason = output.stop_token_id
        if result.token_ids or result.finish_reason is not None:
            result.prompt_logprobs = tuple(progress.prompt_logprobs)
            progress.prompt_logprobs = []
        self._count_tokens(progress, len(result.token_ids), now, output.first_scheduled_time)
        return result

    def _count_tokens(self, progress: _Progress, count: int, now: float, scheduled: float | None) -> None:
        if not count:
            return
        metrics = self._metrics
        if not progress.num_tokens:
            progress.first_token_time = now
            progress.first_scheduled_time = min(scheduled or now, now)
            metrics.time_to_first_token_seconds.observe(now - progress.request.arrival_time)
            metrics.prompt_tokens.inc(len(progress.request.prompt_token_ids))
        else:
            metrics.inter_token_latency_seconds.observe((now - progress.last_token_time) / count, count)
        progress.last_token_time = now
        progress.num_tokens += count
        metrics.generation_tokens.inc(count)

    def _count_end(self, progress: _Progress, result: RequestOutput, now: float) -> None:
        metrics, request = self._metrics, progress.request
        reason = result.finish_reason or FinishReason.ERROR
        metrics.request_success.inc(label=reason.value)
        if result.error is not None:
            metrics.request_errors.inc(label=str(result.error.status))
        if reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return
        started, first = progress.first_scheduled_time, progress.first_token_time
        decode = now - first
        arrival = request.arrival_time
        result.times = RequestTimes(max(started - arrival, 0.0), max(first - arrival, 0.0), max(now - arrival, 0.0))
        metrics.e2e_request_latency_seconds.observe(now - arrival)
        metrics.request_prefill_time_seconds.observe(first - started)
        metrics.request_decode_time_seconds.observe(decode)
        metrics.request_inference_time_seconds.observe(now - started)
        metrics.request_prompt_tokens.observe(len(request.prompt_token_ids))
        metrics.request_generation_tokens.observe(progress.num_tokens)
        metrics.request_params_max_tokens.observe(request.max_tokens)
        metrics.request_params_n.observe(request.params.n)
        if progress.num_tokens > 1:
            metrics.request_time_per_output_token_seconds.observe(decode / (progress.num_tokens - 1))
