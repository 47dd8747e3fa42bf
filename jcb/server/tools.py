"""Tools of a chat request: checked, told to the model, demanded by a grammar, and found in its answer."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, WithJsonSchema

from jcb.server.service import Served
from jcb.structured.tools import tool_grammar
from jcb.text.tool_formats import ToolFormat, tool_format
from jcb.text.tool_parser import ToolCallParser, ToolDelta
from jcb.types import RequestError, Structured

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 256 * 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_ID_LETTERS = string.ascii_letters + string.digits

_TOOL = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
"""A call in an earlier message of the assistant."""

_CHOICE = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
    ]
}


class ToolFields(BaseModel):
    """Functions that the model may, or must, call. tool_choice: auto where there are tools."""

    tools: Annotated[list[Any], WithJsonSchema({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS})] = []
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE)] = None
    parallel_tool_calls: bool = True


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools. functions: those that may be called; must_call: plain text is no answer."""

    form: ToolFormat
    tools: list[dict[str, Any]]
    functions: list[Mapping[str, Any]]
    must_call: bool
    parallel: bool

    def structured(self, answer: Structured | None) -> Structured | None:
        """The grammar of the answer. answer: what the request asks of one without calls."""
        if not self.must_call:
            if answer is None:
                return None
            if answer.kind != "json":
                raise _invalid(answer.param, "cannot be used together with tools, but for JSON schemas")
        elif answer is not None:
            raise _invalid("tool_choice", f"cannot demand a call together with {answer.param}")
        return tool_grammar(self.form, self.functions, parallel=self.parallel, answer=answer)

    def parser(self) -> ToolCallParser:
        """For one answer."""
        return ToolCallParser(self.form, {function["name"] for function in self.functions})


def tool_use(body: ToolFields, served: Served) -> ToolUse | None:
    """What `body` asks for, None where no tool may be called. RequestError names the field at fault."""
    functions = _functions(body.tools)
    choice = body.tool_choice if body.tool_choice is not None else ("auto" if functions else "none")
    named = _named(choice)
    if named is not None:
        functions = [function for function in functions if function["name"] == named]
        if not functions:
            raise _invalid("tool_choice.function.name", "is none of the tools")
    if choice == "none" or (choice == "auto" and not functions):
        return None
    if not functions:
        raise _invalid("tool_choice", "demands a call, but there are no tools")
    template = served.chat_template
    form = tool_format("" if template is None else template.source, served.tokenizer)
    return ToolUse(form, body.tools, functions, choice != "auto", body.parallel_tool_calls and named is None)


def check_calls(calls: list[Any], where: str) -> list[dict[str, Any]]:
    """The calls of an earlier message of the assistant, or RequestError."""
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _invalid(f"{where}[{index}].function", "must be an object with a name")
        if not isinstance(function.get("arguments"), str | Mapping | None):
            raise _invalid(f"{where}[{index}].function.arguments", "must be JSON text")
    return calls


def call_id(form: ToolFormat) -> str:
    """A fresh id; Mistral's templates take nine letters and digits and nothing else."""
    if form.name == "mistral":
        return "".join(secrets.choice(_ID_LETTERS) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


class ToolReader:
    """One choice's answer on its way to OpenAI's shapes."""

    def __init__(self, use: ToolUse) -> None:
        self._form = use.form
        self._parser = use.parser()
        self._calls: list[dict[str, Any]] = []
        self._content: list[str] = []

    def deltas(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The deltas of `text`, none where it is not decided yet what it is."""
        parts = [self._parser.push(text)] + ([self._parser.finish()] if is_last else [])
        deltas = []
        for part in parts:
            self._content.append(part.content)
            if part.content:
                deltas.append({"content": part.content})
            if part.calls:
                deltas.append({"tool_calls": [self._delta(call) for call in part.calls]})
        return deltas

    def message(self) -> dict[str, Any]:
        """The whole answer, once it has been read to its end."""
        content = "".join(self._content)
        message = {"role": "assistant", "content": content, "refusal": None}
        return message | {"content": content or None, "tool_calls": self._calls} if self._calls else message

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's word for an answer that ended with calls."""
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _delta(self, call: ToolDelta) -> dict[str, Any]:
        if call.name is None:
            self._calls[call.index]["function"]["arguments"] += call.arguments
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        whole = {"id": call_id(self._form), "type": "function", "function": function}
        self._calls.append(whole)
        return {"index": call.index, **whole, "function": dict(function)}


def _functions(tools: list[Any]) -> list[Mapping[str, Any]]:
    if len(tools) > MAX_TOOLS:
        raise _invalid("tools", f"may hold at most {MAX_TOOLS}, got {len(tools)}")
    size = len(json.dumps(tools, ensure_ascii=False)) if tools else 0
    if size > MAX_TOOLS_CHARS:
        raise _invalid("tools", f"have {size:,} characters, at most {MAX_TOOLS_CHARS:,} are allowed")
    functions: list[Mapping[str, Any]] = []
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise _invalid(f"{where}.type", "must be function")
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise _invalid(f"{where}.function", "must be an object")
        if not isinstance(function.get("name"), str) or not _NAME.fullmatch(function["name"]):
            raise _invalid(f"{where}.function.name", "must be 1 to 64 letters, digits, _, . and -")
        for name, kinds in (("description", str | None), ("parameters", Mapping | None), ("strict", bool | None)):
            if not isinstance(function.get(name), kinds):
                raise _invalid(f"{where}.function.{name}", f"must not be {type(function[name]).__name__}")
        functions.append(function)
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise _invalid("tools", "must have different names")
    return functions


def _named(choice: Any) -> str | None:
    """The name that `choice` demands, None for one of the words."""
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise _invalid("tool_choice", "must be none, auto, required, or a function")
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not isinstance(function, Mapping):
        raise _invalid("tool_choice", "must be none, auto, required, or a function")
    if not isinstance(function.get("name"), str):
        raise _invalid("tool_choice.function.name", "must be text")
    return function["name"]


def _invalid(param: str, problem: str) -> RequestError:
    return RequestError(f"{param} {problem}", param=param, code="invalid_value")
