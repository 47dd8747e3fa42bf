"""A request body's sampling fields as SamplingParams, with the server's defaults behind the request's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from jcb.engine.admission import check_int
from jcb.server.auth import TENANT
from jcb.server.responses_schema import ResponsesBody
from jcb.server.schema import MAX_STREAM_INTERVAL, ChatBody, CompletionBody, GenerateBody
from jcb.server.structured import structured_of, text_option
from jcb.server.tools import ToolUse
from jcb.types import MAX_LOGPROBS, RequestError, SamplingParams

DEFAULTABLE = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields whose default a model's own generation settings may change."""

DEFAULT_COMPLETION_TOKENS = 16

LABEL = web.RequestKey("label", str)

_LABEL = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TOKEN_KEY = re.compile(r"-?[0-9]{1,18}")


def completion_params(body: CompletionBody, defaults: Mapping[str, Any], room: int) -> SamplingParams:
    """`room`: tokens that fit behind the longest prompt; it bounds the default, not what was asked for."""
    max_tokens = body.max_tokens
    if max_tokens is None:
        max_tokens = max(1, min(DEFAULT_COMPLETION_TOKENS, room))
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        _check_count("logprobs", body.logprobs)
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs)
    # 0 new tokens: the prompt still has to run, so one is made and dropped.
    return _params(body, defaults, max(max_tokens, 1) if max_tokens >= 0 else -1, body.logprobs, prompt_logprobs)


def chat_params(body: ChatBody, defaults: Mapping[str, Any], tools: ToolUse | None = None) -> SamplingParams:
    """None for max_tokens: up to the model's length. tools: may ask for calls, or for marks to be shown."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    given = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(given) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens", code="invalid_value"
        )
    if body.top_logprobs is not None:
        _check_count("top_logprobs", body.top_logprobs)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(body, defaults, given.pop() if given else None, logprobs, body.prompt_logprobs)
    if tools is None:
        return params
    shown = tuple(tools.form.special.values())
    return dataclasses.replace(params, structured=tools.structured(params.structured), shown_token_ids=shown)


def response_params(body: ResponsesBody, defaults: Mapping[str, Any]) -> SamplingParams:
    """None for max_output_tokens: up to the model's length."""
    if body.max_output_tokens is not None:
        check_int("max_output_tokens", body.max_output_tokens, 1, None)
    params = _params(_as_generate(body), defaults, body.max_output_tokens, None, None)
    return dataclasses.replace(params, structured=text_option(body.text or {}))


def check_labels(request: web.Request, body: GenerateBody) -> None:
    """The caller's own id names the response in its headers and nothing else: engine ids are ours."""
    label = check_label("request_id", body.request_id)
    if label is not None:
        request[LABEL] = label


def check_stream(body: GenerateBody) -> None:
    """Refuses combinations that only make sense with, or without, streaming."""
    check_int("stream_interval", body.stream_interval, 1, MAX_STREAM_INTERVAL)
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", param="stream_options", code="invalid_value")
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs", code="invalid_value")


def namespace(request: web.Request, body: GenerateBody) -> str:
    """The prefix-cache scope: the caller's key, and the salt it chose."""
    salt = check_label("cache_salt", body.cache_salt) or ""
    return f"{request[TENANT]}/{salt}"


def check_label(name: str, value: object) -> str | None:
    """`value` if it is 1 … 128 harmless characters or not given, else RequestError."""
    if value is None:
        return None
    if not isinstance(value, str) or not _LABEL.fullmatch(value):
        raise RequestError(
            f"{name} must be 1 to 128 characters of letters, digits and ._:/+=@-", param=name, code="invalid_value"
        )
    return value


def _as_generate(body: ResponsesBody) -> GenerateBody:
    """The sampling fields that both kinds of body have."""
    fields = body.model_fields_set & {"temperature", "top_p"}
    return GenerateBody.model_validate({name: getattr(body, name) for name in fields})


def _params(
    body: GenerateBody,
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    chosen = {name: getattr(body, name) for name in DEFAULTABLE}
    chosen |= {k: v for k, v in defaults.items() if k in DEFAULTABLE and k not in body.model_fields_set}
    return SamplingParams(
        n=body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=body.seed,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias),
        bad_words=tuple(body.bad_words),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        structured=structured_of(body),
        **chosen,
    )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    if not all(_TOKEN_KEY.fullmatch(key) for key in given):
        raise RequestError("logit_bias: the keys must be token ids", param="logit_bias", code="invalid_value")
    biases = {int(key): value for key, value in given.items()}
    if len(biases) < len(given):
        raise RequestError("logit_bias: two keys name one token id", param="logit_bias", code="invalid_value")
    return biases


def _check_count(name: str, value: int) -> None:
    check_int(name, value, 0, MAX_LOGPROBS)
