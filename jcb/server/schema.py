"""The request bodies as pydantic models: names and JSON types. Ranges are checked in `jcb.engine.admission`.

Strict: no string passes for a number and no bool for an integer. Fields outside the models are kept aside
for `jcb.server.fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from aiohttp import web
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, ValidationError, model_validator

from jcb.server.body import read_object
from jcb.server.fields import check_extra
from jcb.server.service import Service
from jcb.types import MAX_LOGIT_BIAS, RequestError

_Ids = Annotated[list[int], FailFast()]  # the first bad item ends the check: a body may hold a million of them
_Texts = Annotated[list[str], FailFast()]


def _bounded(value: object) -> object:
    """Refuses a large mapping before its items are looked at: pydantic would list every bad one."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"may hold at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    return value


class Body(BaseModel):
    """Any request body."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    model: str | None = None

    @classmethod
    async def read(cls, request: web.Request, service: Service) -> Self:
        """The checked body of `request`, or RequestError."""
        values = await read_object(request, service.config.body_seconds)
        body = cls.parse(values)
        check_extra(request, service, body.extra_fields(), cls.model_fields)
        service.check_model(body.model)
        return body

    def extra_fields(self) -> dict[str, Any]:
        """Fields outside the model, by the names to report."""
        return dict(self.model_extra or {})

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """`values` as this model; the RequestError names the first field at fault."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            param = _param(first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise RequestError(f"{param}: {message}", param=param, code="invalid_type") from None


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the counts. continuous_usage_stats: counts so far on every chunk."""

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {k: v for k, v in values.items() if v is not None} if isinstance(values, dict) else values


class GenerateBody(Body):
    """What completions and chat share."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: str | _Texts = []
    stop_token_ids: _Ids = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Annotated[dict[str, float], BeforeValidator(_bounded)] = {}
    allowed_token_ids: _Ids | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: int | None = None
    stream_interval: int = 1
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    max_tokens: int | None = None

    def extra_fields(self) -> dict[str, Any]:
        inner = (self.stream_options.model_extra or {}) if self.stream_options is not None else {}
        return super().extra_fields() | {f"stream_options.{name}": value for name, value in inner.items()}


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: Any = None
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True


class Message(BaseModel):
    """One turn; `content` is text, a list of text parts, or absent."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Any = None
    name: str | None = None


class TemplateOptions(BaseModel):
    """How a conversation becomes a prompt. continue_final_message: the answer goes on where the last message ends."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = False


class ChatBody(TemplateOptions, GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()]
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None


class TokenizeBody(TemplateOptions, Body):
    """POST /tokenize: `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: _Ids


_INNER = {"messages": Message.model_fields, "stream_options": StreamOptions.model_fields}


def _param(loc: tuple[int | str, ...]) -> str:
    """The path a caller wrote; pydantic's names of union branches, which may follow it, are left out."""
    path, inner = str(loc[0])[:64], _INNER.get(str(loc[0]), {})
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in inner:
            path += f".{part}"
        else:
            break
    return path
