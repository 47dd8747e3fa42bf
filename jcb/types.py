"""The nouns shared by every part of jcb: what is asked, what is planned, what came back.

Host half: plain Python and numpy, no JAX. A `Request` is what a caller asks for and never changes.
A `Sequence` is the scheduler's record of its progress. A `StepPlan` says what one forward pass does,
a `StepResult` what it produced, and a `SequenceOutput` what one sequence gained from it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

MAX_LOGPROBS = 20
"""Most alternatives a request may ask for, per token."""

MAX_STOP_TOKEN_IDS = 64
"""Most `stop_token_ids` a request may name; end-of-sequence ids of the model come on top."""

MAX_BAD_WORDS = 64
"""Most `bad_words` of one request."""

MAX_LOGIT_BIAS = 1024
"""Most `logit_bias` entries of one request."""

GREEDY_EPSILON = 1e-4
"""Temperatures below this are greedy (they would overflow half precision elsewhere)."""


class FinishReason(enum.StrEnum):
    """Why a sequence ended; the values are OpenAI's where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestError(Exception):
    """A request that cannot be served, with the HTTP status and the field at fault.

    `code` is a stable word for programs ("context_length_exceeded", "queue_full", ...),
    `retry_after` seconds for 429 and 503.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True, kw_only=True)
class Structured:
    """What an answer must look like, as text that `jcb.structured` compiles.

    kind: "json" (a JSON schema), "regex", "choice" (a JSON list of strings) or "grammar" (Lark or GBNF).
    param: the request field it came from, for refusals.
    """

    kind: Literal["json", "regex", "choice", "grammar"]
    source: str
    param: str = "structured_outputs"


class Matcher(Protocol):
    """How far one answer has followed its grammar. A copy belongs to one sequence and knows nothing of the device.

    accepts: the answer could end here. is_complete: it must end here. mask: i32[ceil(V / 32)], bit i of word w is set
    where token 32 w + i may come next; never changed once given out. error: why it cannot go on, or None.
    """

    accepts: bool
    is_complete: bool
    mask: np.ndarray
    error: RequestError | None

    def advance(self, token_id: int, held_back: frozenset[int]) -> None:
        """Take in the next token; those of `held_back` are then left out of the mask, unless nothing else is left."""
        ...


class Grammar(Protocol):
    """A compiled `Structured`, shared by every sequence that follows it. end_ids: tokens that end an answer."""

    end_ids: frozenset[int]

    def start(self, held_back: frozenset[int]) -> Matcher:
        """A matcher at the beginning of an answer."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Validated once, by `jcb.engine.admission.validate`.

    temperature: 0 (or below 1e-4) is greedy. top_k: 0 or -1 is off. seed: None draws fresh entropy.
    logprobs / prompt_logprobs: None is off, else the number of alternatives (0 = the chosen token only).
    allowed_token_ids: None allows all. max_tokens: None means up to the model's length. structured: None is free text.
    bad_words: texts whose last token may not follow the tokens before it.
    shown_token_ids: special tokens that are part of the text all the same (marks of tool calls).
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    structured: Structured | None = None
    bad_words: tuple[str, ...] = ()
    shown_token_ids: tuple[int, ...] = ()

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken."""
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        """True when earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and one sampling rule: `n` choices are `n` requests with the same prompt.

    request_id: unique inside the engine. arrival_time: seconds on the engine's monotonic clock.
    priority: lower runs first under the priority policy. namespace: cache scope (tenant and cache salt);
    prefixes are shared inside one namespace only. eos_token_ids: the model's end ids (empty if ignored).
    seed: 64 bits, always set (the caller draws it when the user gave none). grammar: params.structured, compiled.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_time: float = 0.0
    priority: int = 0
    namespace: str = ""
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    max_tokens: int = 16  # resolved: params.max_tokens clipped to the model's length
    grammar: Grammar | None = None


class SequenceStatus(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """The scheduler's record of one request. Only the scheduler changes it.

    num_computed counts tokens whose K and V are in pages or will be once the dispatched steps are done.
    num_pending counts sampled tokens still on the device (their ids unknown to the host): at most 1 when a step is
    planned, then 2 until the result of the step before is taken in.
    """

    request: Request
    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    num_computed: int = 0
    num_pending: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache when first admitted
    num_preemptions: int = 0
    was_scheduled: bool = False  # a row of this sequence has been dispatched before
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens known or pending: prompt, outputs, and the one still on the device."""
        return len(self.request.prompt_token_ids) + len(self.output_token_ids) + self.num_pending

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far, the pending one included."""
        return len(self.output_token_ids) + self.num_pending

    def token(self, position: int) -> int:
        """Token id at `position`; -1 for the pending one (the device holds it)."""
        prompt = self.request.prompt_token_ids
        if position < len(prompt):
            return prompt[position]
        index = position - len(prompt)
        return self.output_token_ids[index] if index < len(self.output_token_ids) else -1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions [start, stop); -1 stands for the pending one."""
        prompt = self.request.prompt_token_ids
        n = len(prompt)
        if stop <= n:
            return list(prompt[start:stop])
        ids = list(prompt[start:n]) if start < n else []
        ids += self.output_token_ids[max(start - n, 0) : stop - n]
        if len(ids) < stop - start:
            ids.append(-1)
        return ids


class RowKind(enum.Enum):
    """Whether the device must (re)load what it keeps for a slot before this row runs."""

    NEW = "new"
    CONTINUED = "continued"
    RESUMED = "resumed"  # after a preemption: the same slot state must be built again


@dataclass(slots=True)  # never changed; frozen ones take six times as long to make, and every row of a step is one
class ScheduledRow:
    """One sequence's part in one step: positions [start, start + q_len) of it are computed.

    samples: the last of them yields a new token. The position of the sampled token is `start + q_len`.
    page_table: the pages that hold positions [0, start + q_len), copied, so later changes do not show.
    """

    sequence: Sequence
    slot: int
    start: int
    q_len: int
    kind: RowKind
    samples: bool
    token_ids: tuple[int, ...]  # q_len ids; -1: the slot's last sampled token, on the device
    page_table: tuple[int, ...]
    num_output: int  # tokens generated before this row's sample (penalties, min_tokens)
    next_token: int  # id at position start + q_len where known (prompt logprobs), else -1
    mask: np.ndarray | None = None  # i32[ceil(V / 32)] ids that may be sampled, where a grammar says so

    @property
    def kv_len(self) -> int:
        """Tokens in pages once this row has run."""
        return self.start + self.q_len

    def num_known_pages(self, before: tuple[int, ...]) -> int:
        """Leading pages of the table that its sequence's last row had too, whose table was `before`."""
        return len(before) if self.kind is RowKind.CONTINUED else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True when the row computes prompt positions whose successors' log-probabilities were asked for."""
        request = self.sequence.request
        return request.params.prompt_logprobs is not None and self.start + 1 < len(request.prompt_token_ids)


@dataclass(slots=True, frozen=True)
class StepPlan:
    """What one forward pass does. Rows with q_len 1 come first, then the prompt chunks."""

    step_id: int
    rows: tuple[ScheduledRow, ...]
    preempted: tuple[str, ...] = ()  # request ids that gave up their pages for this step

    @property
    def num_tokens(self) -> int:
        return sum([row.q_len for row in self.rows])

    @property
    def num_decode_rows(self) -> int:
        return sum(row.q_len == 1 for row in self.rows)


@dataclass(slots=True, frozen=True)
class Logprobs:
    """Log-probabilities (nats) of one token and of the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True, frozen=True)
class StepResult:
    """What a step produced; arrays are indexed like `StepPlan.rows` and may be longer (padding).

    prompt_logprobs maps a row index to the q_len entries of its chunk, where they were asked for: entry i is
    the log-probability of the token at position start + i + 1.
    """

    step_id: int
    token_ids: np.ndarray  # i32[rows] sampled id, meaningful where the row samples
    logprobs: np.ndarray  # f32[rows] log-probability of the sampled id, nats
    top_ids: np.ndarray  # i32[rows, MAX_LOGPROBS]
    top_logprobs: np.ndarray  # f32[rows, MAX_LOGPROBS]
    finite: np.ndarray  # bool[rows] False: the logits held NaN or infinity, the row must end alone
    prompt_logprobs: Mapping[int, list[Logprobs]] = field(default_factory=dict)


@dataclass(slots=True)  # never changed; not frozen for the same reason as ScheduledRow
class SequenceOutput:
    """What one sequence gained in a step, or its end. At most one output a sequence has a finish_reason."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the end or stop id that ended it, if one did
    error: RequestError | None = None
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None  # on the engine's clock
    may_stop: bool = True  # False: a stop string must not cut it here, its grammar needs more
