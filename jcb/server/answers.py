"""What answers hold, as pydantic models for the OpenAPI document. Handlers write plain dicts; tests compare the two."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel


class ErrorObject(BaseModel):
    """OpenAI's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every answer with a status of 400 or above."""

    error: ErrorObject


class Ready(BaseModel):
    """GET /ready."""

    state: str


class Version(BaseModel):
    """GET /version."""

    version: str


class ModelCard(BaseModel):
    """GET /v1/models/{id}."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class Capability(BaseModel):
    """What is done with one field. neutral: the values accepted of a field that is not honoured."""

    status: Literal["honoured", "neutral value accepted", "refused", "label"]
    neutral: list[Any] | None = None


class Capabilities(BaseModel):
    """GET /v1/capabilities: field name → what is done with it, by path."""

    object: Literal["capabilities"]
    model: str
    fields: dict[str, dict[str, Capability]]


class CachedTokens(BaseModel):
    """Prompt tokens whose pages were there already."""

    cached_tokens: int


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class CompletionLogprobs(BaseModel):
    """One entry a token; null for the first of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One of `n` completions of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, Any] | None] = []


class Completion(BaseModel):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class TokenLogprob(BaseModel):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(TokenLogprob):
    """A generated token with the likeliest ones."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[ChatToken]
    refusal: None


class AssistantMessage(BaseModel):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[dict[str, Any]] = []


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None
    token_ids: list[int] = []


class ChatCompletion(BaseModel):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = []
    prompt_logprobs: list[dict[str, Any] | None] = []


class OutputText(BaseModel):
    """A text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputMessage(BaseModel):
    """A message of an answer."""

    type: Literal["message"]
    id: str
    status: Literal["completed", "incomplete", "in_progress"]
    role: Literal["assistant"]
    content: list[OutputText]


class Response(BaseModel):
    """POST /v1/responses; the fields of the request that come back in it are left out here."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    error: Any
    incomplete_details: Any
    model: str
    output: list[OutputMessage]
    usage: Any
    store: Literal[False]


class Knob(BaseModel):
    """A value that can be changed while the server runs: a number within bounds, or one of some words."""

    value: int | str
    minimum: int | None = None
    maximum: int | None = None
    choices: list[str] | None = None


class Knobs(BaseModel):
    """GET and POST /v1/batch/knobs."""

    object: Literal["knobs"]
    can_change: bool
    hint: str
    knobs: dict[str, Knob]


class Tokens(BaseModel):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    """POST /detokenize."""

    prompt: str


class TokenizerInfo(BaseModel):
    """GET /tokenizer_info: the model's tokenizer_config.json."""

    bos_token: Any
    eos_token: Any
    pad_token: Any
    chat_template: str | None
