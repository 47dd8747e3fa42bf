"""One choice of an answer, gathered from its outputs: the same for the offline and the HTTP front."""

from __future__ import annotations

from dataclasses import dataclass, field

from jcb.engine.output import RequestOutput
from jcb.types import FinishReason, Logprobs, RequestError


@dataclass(slots=True)
class Choice:
    """Everything one choice produced. `error` is set when it ended by a failure."""

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    error: RequestError | None = None

    def absorb(self, output: RequestOutput) -> None:
        """Adds one increment."""
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.prompt_logprobs += output.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            self.error = output.error
