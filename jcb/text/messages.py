"""Chat messages as a template wants them: checked, every content a string, tool arguments as objects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jcb.types import RequestError

MAX_MESSAGES = 4_096


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of OpenAI-style messages for a template.

    Content that is null or absent becomes "", text parts are joined by newlines, and the JSON text of tool-call
    arguments becomes the object it spells where it is one. RequestError (400) names what is wrong.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"{len(messages)} messages are over the limit of {MAX_MESSAGES}", param="messages")
    normalized = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    check_plain(normalized, "messages")
    return normalized


def normalize_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """A copy of the tools for a template; an empty list counts as none."""
    if not tools:
        return None
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects", param="tools")
    copied = [dict(tool) for tool in tools]
    check_plain(copied, "tools")
    return copied


def check_plain(value: Any, param: str) -> None:
    """RequestError unless `value` is JSON-like and all its text can be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{param} holds a lone surrogate, which is not valid Unicode", param=param) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{param} is not plain JSON, or is nested too deeply", param=param) from error


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is not an object", param=where)
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f"{where}.role must be a non-empty string", param=f"{where}.role")
    result = {**message, "content": _content(message.get("content"), f"{where}.content")}
    calls = result.get("tool_calls")
    if calls is None:
        result.pop("tool_calls", None)
    elif not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{where}.tool_calls is not a list of objects", param=f"{where}.tool_calls")
    else:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    return result


def _content(content: Any, where: str) -> str:
    """A message's content as one string."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(f"{where}: only text parts are supported", param=where)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where}: a text part needs its text as a string", param=where)
    return text


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a tool call whose arguments are an object, as templates print them with tojson."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else dict(call)
