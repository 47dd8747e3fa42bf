"""The request bodies as pydantic models: names and JSON types. Ranges are checked in `jcb.engine.admission`.

Strict: no string passes for a number and no bool for an integer. Fields outside the models are kept aside
for `jcb.server.fields`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from aiohttp import web
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from jcb.engine.admission import MAX_N, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS
from jcb.server.body import decode_object, read_body
from jcb.server.fields import check_extra
from jcb.server.service import Service
from jcb.server.structured import StructuredFields
from jcb.server.tools import CALL, ToolFields
from jcb.text.messages import MAX_MESSAGES
from jcb.types import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS, RequestError

MAX_STREAM_INTERVAL = 1024


def _documented(extra: Mapping[str, Any]) -> Any:
    """Adds to a field's JSON schema; pydantic does not check it."""
    return Field(json_schema_extra=dict(extra))


def span(low: float, high: float, *, low_open: bool = False) -> Any:
    """The range that admission allows, for the OpenAPI document; a test compares the two."""
    return _documented({"exclusiveMinimum" if low_open else "minimum": low, "maximum": high})


def _sized(most: int, least: int = 0, items: Mapping[str, Any] | None = None) -> Any:
    extra: dict[str, Any] = {"minItems": least, "maxItems": most}
    return _documented(extra if items is None else extra | {"items": dict(items)})


_INT32, _INT64 = 2**31 - 1, 2**63 - 1
_LABEL = _documented({"pattern": "^[A-Za-z0-9._:/+=@-]+$", "minLength": 1, "maxLength": 128})
_TOKEN = {"type": "integer", "minimum": 0}
_STOP_TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_STRING_CHARS}

_Ids = Annotated[list[int], FailFast()]  # the first bad item ends the check: a body may hold a million of them
_Texts = Annotated[list[str], FailFast(), _sized(MAX_STOP_STRINGS, items=_STOP_TEXT)]
_Count = Annotated[int, span(0, MAX_LOGPROBS)]
_MaxTokens = Annotated[int, span(1, _INT32)]

_TEXT_PART = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "input_text", "output_text"]}, "text": {"type": "string"}},
            "required": ["type", "text"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}},
            "required": ["type", "refusal"],
        },
    ]
}
TextContent = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": _TEXT_PART}]})
]
"""Text, text parts or nothing; `jcb.text.messages` checks it."""

_TOKENS = {"type": "array", "items": _TOKEN, "minItems": 1}
_Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _TOKENS,
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 32},
                {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": 32},
            ]
        }
    ),
]
_Bias = Annotated[
    dict[str, float],
    BeforeValidator(lambda value: _bounded(value)),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^[0-9]+$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
            "maxProperties": MAX_LOGIT_BIAS,
        }
    ),
]


def _bounded(value: object) -> object:
    """Refuses a large mapping before its items are looked at: pydantic would list every bad one."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"may hold at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    return value


class Body(BaseModel):
    """Any request body."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True)

    narrow: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Fields of the model that are less than honoured, with what /v1/capabilities says of them."""

    model: str | None = None

    @classmethod
    async def read(cls, request: web.Request, service: Service, *, before: Callable[[], None] | None = None) -> Self:
        """The checked body of `request`, or RequestError.

        before: called once the body has arrived, before anything is made of it; raises what refuses it unread.
        """
        raw = await read_body(request, service.config.body_seconds)
        if before is not None:
            before()
        values = decode_object(raw)
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
            found = error.errors(include_url=False, include_input=False, include_context=False)
            own = [each for each in found if each["loc"][0] == found[0]["loc"][0]]
            first = max(own, key=lambda each: len(each["loc"]))  # the branch of a union that got furthest
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


class GenerateBody(StructuredFields, Body):
    """What completions and chat share."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, span(1, MAX_N)] = 1
    seed: Annotated[int, span(-_INT64 - 1, _INT64)] | None = None
    temperature: Annotated[float, span(0, 10)] = 1.0
    top_p: Annotated[float, span(0, 1, low_open=True)] = 1.0
    top_k: Annotated[int, _documented({"minimum": -1})] = 0
    min_p: Annotated[float, span(0, 1)] = 0.0
    presence_penalty: Annotated[float, span(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, span(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, span(0, 10, low_open=True)] = 1.0
    min_tokens: Annotated[int, span(0, _INT32)] = 0
    stop: Annotated[str, _documented(_STOP_TEXT)] | _Texts = []
    stop_token_ids: Annotated[_Ids, _sized(MAX_STOP_TOKEN_IDS, items=_TOKEN)] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: _Bias = {}
    bad_words: Annotated[list[str], FailFast(), _sized(MAX_BAD_WORDS, items=_STOP_TEXT)] = []
    allowed_token_ids: Annotated[_Ids, _sized(1 << 20, 1, _TOKEN)] | None = None
    prompt_logprobs: _Count | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int, span(-1, _INT32)] | None = None
    stream_interval: Annotated[int, span(1, MAX_STREAM_INTERVAL)] = 1
    priority: Annotated[int, span(-_INT32 - 1, _INT32)] = 0
    cache_salt: Annotated[str, _LABEL] | None = None
    request_id: Annotated[str, _LABEL] | None = None
    max_tokens: _MaxTokens | None = None

    def extra_fields(self) -> dict[str, Any]:
        inner = (self.stream_options.model_extra or {}) if self.stream_options is not None else {}
        return super().extra_fields() | {f"stream_options.{name}": value for name, value in inner.items()}


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    model_config = ConfigDict(json_schema_extra={"required": ["prompt"]})

    prompt: _Prompt = None
    echo: bool = False
    logprobs: _Count | None = None
    max_tokens: Annotated[int, span(0, _INT32)] | None = None
    add_special_tokens: bool = True


class Message(BaseModel):
    """One turn; `content` is text, a list of text parts, or absent."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent = None
    name: str | None = None
    tool_calls: Annotated[list[Any], _documented({"items": CALL})] | None = None
    tool_call_id: str | None = None


class TemplateOptions(BaseModel):
    """How a conversation becomes a prompt. continue_final_message: the answer goes on where the last message ends."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool = False


class ChatBody(ToolFields, TemplateOptions, GenerateBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), _sized(MAX_MESSAGES, 1)]
    logprobs: bool = False
    top_logprobs: _Count | None = None
    max_completion_tokens: _MaxTokens | None = None


class TokenizeBody(TemplateOptions, Body):
    """POST /tokenize: `prompt` or `messages`."""

    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Annotated[_Ids, _documented({"items": _TOKEN})]


_INNER = {"messages": {*Message.model_fields}, "input": {"role", "content", "type"}}
_INNER["stream_options"] = {*StreamOptions.model_fields}


def _param(loc: tuple[int | str, ...]) -> str:
    """The path a caller wrote; pydantic's names of union branches, which may stand in it, are left out."""
    path, inner = str(loc[0])[:64], _INNER.get(str(loc[0]), set())
    for part in loc[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in inner:
            path += f".{part}"
    return path
