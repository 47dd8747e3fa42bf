"""The prompts of a request, as text or token ids, one or many, turned into token ids."""

from __future__ import annotations

import asyncio
from typing import Any

from jcb.engine.admission import MAX_N, ModelInfo, check_int
from jcb.server.schema import GenerateBody, Message, TemplateOptions
from jcb.server.service import Served
from jcb.server.tools import check_calls
from jcb.text.chat import check_variables, encode_chat
from jcb.text.tool_formats import tool_format, with_tools
from jcb.types import RequestError

MAX_PROMPTS = 32
MAX_CHOICES = 128
LONG_TEXT = 4096
"""Characters above which text is encoded in a worker thread, so that the event loop stays free."""

_KNOWN_MESSAGE_FIELDS = ("function_call", "audio", "refusal", "reasoning_content")

Prompt = str | list[int]


def parse_prompts(value: object, n: int) -> list[Prompt]:
    """The four forms of OpenAI's `prompt` as a list of prompts; RequestError for anything else."""
    prompts = _as_list(value)
    if len(prompts) > MAX_PROMPTS:
        raise _invalid(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompts)}")
    if 1 <= n <= MAX_N and n * len(prompts) > MAX_CHOICES:
        raise RequestError(
            f"n times the number of prompts may be at most {MAX_CHOICES}, got {n * len(prompts)}",
            param="n",
            code="invalid_value",
        )
    return prompts


async def encode_prompt(served: Served, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
    """Token ids of one prompt; empty text is the model's begin (or else end) token alone."""
    if not isinstance(prompt, str):
        return prompt
    tokenizer = served.tokenizer

    def encode() -> list[int]:
        return tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

    ids = await asyncio.to_thread(encode) if len(prompt) > LONG_TEXT else encode()
    if ids:
        return ids
    first = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else None
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else first
    return [] if begin is None else [begin]


async def encode_messages(
    served: Served, messages: list[Message], options: TemplateOptions, tools: list[dict[str, Any]] | None = None
) -> list[int]:
    """Token ids of a conversation through the model's chat template. tools: what the model is told of."""
    template = served.chat_template
    if template is None:
        raise RequestError("this model has no chat template: use /v1/completions", param="messages", code="no_template")
    if options.continue_final_message and options.add_generation_prompt:
        raise RequestError(
            "continue_final_message needs add_generation_prompt: false",
            param="continue_final_message",
            code="invalid_value",
        )
    check_variables(options.chat_template_kwargs)
    turns = [_turn(message, i) for i, message in enumerate(messages)]
    if not tool_format(template.source, served.tokenizer).in_template:
        turns, tools = with_tools(turns, tools), None

    def encode() -> list[int]:
        return encode_chat(
            served.tokenizer,
            template,
            turns,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=tools,
            **options.chat_template_kwargs,
        )

    size = sum(len(text) if isinstance(text := turn["content"], str) else LONG_TEXT for turn in turns)
    size += LONG_TEXT if tools else 0
    ids = await asyncio.to_thread(encode) if size > LONG_TEXT else encode()
    if options.add_special_tokens:
        ids = served.tokenizer.encode("", add_special_tokens=True) + ids
    return ids


def truncate(ids: list[int], body: GenerateBody, model: ModelInfo, max_tokens: int | None) -> list[int]:
    """The last `truncate_prompt_tokens` of `ids`; with -1 as many as fit beside `max_tokens`."""
    most = body.truncate_prompt_tokens
    if most is None:
        return ids
    check_int("truncate_prompt_tokens", most, -1, model.max_model_len)
    if most == 0:
        raise RequestError(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens", code="invalid_value"
        )
    return ids[-most:] if most > 0 else ids[-max(model.max_model_len - max(max_tokens or 1, 1), 1) :]


def _turn(message: Message, index: int) -> dict[str, Any]:
    """One message for the template, which checks its content."""
    for name, value in (message.model_extra or {}).items():
        if value not in (None, [], {}, ""):
            shown = name if name in _KNOWN_MESSAGE_FIELDS else "field"
            raise RequestError(
                f"messages[{index}].{shown} is not supported by this server",
                param=f"messages[{index}].{shown}",
                code="unsupported_field",
            )
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.content}
    if message.tool_calls:
        if role != "assistant":
            raise RequestError(
                f"messages[{index}].tool_calls: only the assistant calls tools",
                param=f"messages[{index}].tool_calls",
                code="invalid_value",
            )
        turn["tool_calls"] = check_calls(message.tool_calls, f"messages[{index}].tool_calls")
    named = {"name": message.name, "tool_call_id": message.tool_call_id}
    return turn | {key: value for key, value in named.items() if value is not None}


def _as_list(value: object) -> list[Prompt]:
    if value is None:
        raise _invalid("prompt is needed: text, token ids, or a list of either")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise _invalid("prompt must be text, token ids, or a list of either, and not empty")
    if all(isinstance(item, str) for item in value):
        return value
    if all(type(item) is int for item in value):
        return [value]
    if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
        return value
    raise _invalid("prompt must be text, token ids (whole numbers), or a list of either, not a mixture")


def _invalid(message: str) -> RequestError:
    return RequestError(message, param="prompt", code="invalid_value")
