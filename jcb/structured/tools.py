"""The grammar of an answer that must be tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jcb.structured.grammar import JSON_OPTIONS
from jcb.text.tool_formats import ToolFormat
from jcb.types import Structured


def tool_grammar(
    form: ToolFormat, functions: Sequence[Mapping[str, Any]], *, parallel: bool, answer: Structured | None = None
) -> Structured:
    """One call (or more, if `parallel`) of any of `functions` ({"name", "parameters"}), as `form` writes them.

    Arguments follow the function's schema; without one they are any object. answer: a JSON schema that the answer may
    follow instead of calling.
    """
    more = f"({_text(', ' if form.is_list else form.between)} call)*" if parallel else ""
    begin, end = _parts(form, form.begin), _parts(form, form.end)
    one = " | ".join(f"call{index}" for index in range(len(functions)))
    calls = f'{begin} "[" call {more} "]" {end}' if form.is_list else f"call {more}"
    call = one if form.is_list else f"{begin} ({one}) {end}"
    lines = ["start: answer | calls" if answer is not None else "start: calls", f"calls: {calls}", f"call: {call}"]
    if answer is not None:
        lines.append(f"answer: {_json(json.loads(answer.source))}")
    for index, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "{form.arguments}": '
        schema = {"type": "object"} | dict(function.get("parameters") or {})
        lines.append(f'call{index}: {_text(head)} arguments{index} "}}"')
        lines.append(f"arguments{index}: {_json(schema)}")
    return Structured(kind="grammar", source="\n".join(lines), param="tools")


def _text(text: str) -> str:
    """A literal, or nothing."""
    return json.dumps(text) if text else ""


def _parts(form: ToolFormat, text: str) -> str:
    return " ".join(f"<[{part}]>" if isinstance(part, int) else _text(part) for part in form.parts(text))


def _json(schema: Any) -> str:
    """A schema inside a grammar, with the whitespace that schemas of their own get."""
    options = JSON_OPTIONS
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key != "x-guidance"} | {"x-guidance": options}
    return f"%json {json.dumps(schema)}"
