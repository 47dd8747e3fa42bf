"""How families of models write tool calls: the marks around them, and the keys of the JSON between."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jcb.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ToolFormat:
    """One family's way.

    begin, end: marks around a block, "" where there are none. is_list: a block holds a JSON list of calls, else one
    call. between: what stands between two blocks (or calls, without marks). arguments: the key of the arguments.
    in_template: the chat template itself writes tools and earlier calls; else `describe` and `spell` do.
    special: ids of the marks that are special tokens, which text would leave out.
    """

    name: str
    begin: str
    end: str
    is_list: bool
    between: str
    arguments: str = "arguments"
    in_template: bool = True
    special: Mapping[str, int] = field(default_factory=dict)

    def parts(self, text: str) -> list[str | int]:
        """`text` (begin or end) as literals and ids of special tokens."""
        mark = text.strip()
        if mark not in self.special:
            return [text] if text else []
        before, _, after = text.partition(mark)
        return [part for part in (before, self.special[mark], after) if part != ""]


HERMES = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", False, "\n")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", True, "")
LLAMA = ToolFormat("llama", "", "", False, "; ", arguments="parameters")
SMOLLM = ToolFormat("smollm", "<tool_call>", "</tool_call>", True, "", in_template=False)

_SIGNS = (("[TOOL_CALLS]", MISTRAL), ("<tool_call>", HERMES), ("parameters", LLAMA))
"""What a template that knows tools says, and the format it means; the first that is found counts."""


def tool_format(template: str, tokenizer: Tokenizer) -> ToolFormat:
    """The format of a model with this chat template; SmolLM's where the template does not know tools."""
    if "tools" in template:
        for sign, family in _SIGNS:
            if sign in template:
                marks = {mark.strip() for mark in (family.begin, family.end)}
                special = {mark: index for mark, index in tokenizer.special_tokens.items() if mark in marks}
                return dataclasses.replace(family, special=special)
    return SMOLLM


def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tells a model of `tools` in a system message, where its template does not."""
    listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    return (
        f"You can call functions. They are:\n<tools>{listed}</tools>\n\n"
        "If a function helps to answer, reply with nothing but the calls, in this form:\n"
        '<tool_call>[{"name": "function_name", "arguments": {"argument_name": "value"}}]</tool_call>\n'
        "Otherwise reply in plain words."
    )


def spell(calls: Sequence[Mapping[str, Any]]) -> str:
    """Earlier calls of the assistant as SmolLM writes them."""
    written = [{"name": call["function"]["name"], "arguments": _arguments(call)} for call in calls]
    return f"<tool_call>{json.dumps(written, ensure_ascii=False)}</tool_call>"


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> list[dict]:
    """`messages` for a template that knows no tools: they are told of, and calls are written, in plain content."""
    told = [dict(message) for message in messages]
    for message in told:
        if calls := message.pop("tool_calls", None):
            content = message.get("content")
            message["content"] = "\n".join(filter(None, [content if isinstance(content, str) else "", spell(calls)]))
        message.pop("tool_call_id", None)
    if tools:
        if told and told[0].get("role") == "system" and isinstance(told[0].get("content"), str):
            told[0]["content"] = f"{told[0]['content']}\n\n{describe(tools)}"
        else:
            told.insert(0, {"role": "system", "content": describe(tools)})
    return told


def _arguments(call: Mapping[str, Any]) -> Any:
    arguments = call["function"].get("arguments")
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
