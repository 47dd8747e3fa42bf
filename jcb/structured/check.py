"""What a structured request may ask for, checked before anything is compiled."""

from __future__ import annotations

import json

from jcb.structured.regex_size import MOST, expanded_size
from jcb.types import RequestError, Structured

MAX_SOURCE = {"json": 65_536, "regex": 2_048, "choice": 65_536, "grammar": 65_536}
"""Characters, by kind."""

MAX_TOOLS_SOURCE = 524_288
"""Characters of the grammar made of all tools, which may have 262,144 themselves."""

MAX_DEPTH = 64
MAX_NODES = 2_000
MAX_CHOICES = 1_000
MAX_LITERAL = 4_096
"""Characters of a text that an answer must hold word for word."""

MAX_EXPANDED = 10_000
"""Atoms of a regex with its repetitions written out."""


def check(structured: Structured) -> None:
    """RequestError 400 that names the field when `structured` is too large or no text of its kind."""
    size = len(structured.source)
    most = MAX_TOOLS_SOURCE if structured.param == "tools" else MAX_SOURCE[structured.kind]
    if size > most:
        raise refusal(structured, f"has {size:,} characters, at most {most:,} are allowed")
    if not structured.source.strip():
        raise refusal(structured, "is empty")
    if not structured.source.isascii():
        try:
            structured.source.encode()
        except UnicodeEncodeError:
            raise refusal(structured, "holds a lone surrogate, which is not valid Unicode") from None
    if structured.kind == "json":
        _check_schema(structured)
    elif structured.kind == "choice":
        _check_choice(structured)
    elif structured.kind == "regex":
        _check_regex(structured, structured.source)
    else:
        _check_regex(structured, structured.source, most=max(10 * MAX_EXPANDED, most))


def refusal(structured: Structured, problem: str, *, code: str = "invalid_value", status: int = 400) -> RequestError:
    """The RequestError for a structured request that cannot be served."""
    return RequestError(f"{structured.param} {problem}", param=structured.param, code=code, status=status)


def _check_schema(structured: Structured) -> None:
    try:
        schema = json.loads(structured.source)
    except (ValueError, RecursionError):
        raise refusal(structured, "is not valid JSON") from None
    if not isinstance(schema, dict | bool):
        raise refusal(structured, "must be a JSON schema: an object")
    level, nodes = [schema], 0
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        for node in level:
            _check_node(structured, node)
        level = [child for node in level for child in _children(node)]
        if not level:
            break
    else:
        raise refusal(structured, f"is nested deeper than {MAX_DEPTH} levels")
    if nodes > MAX_NODES:
        raise refusal(structured, f"has {nodes:,} objects and lists, at most {MAX_NODES:,} are allowed")


def _check_node(structured: Structured, node: object) -> None:
    """One object or list of a schema: its texts and patterns."""
    if not isinstance(node, dict):
        node = dict(enumerate(node)) if isinstance(node, list) else {}
    for key, value in node.items():
        if isinstance(value, str) and len(value) > MAX_LITERAL and key not in ("description", "title", "$comment"):
            raise refusal(structured, f"holds a text of {len(value):,} characters, at most {MAX_LITERAL:,} are allowed")
        if key == "pattern" and isinstance(value, str):
            _check_regex(structured, value)
        if key == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                _check_regex(structured, pattern)


def _check_regex(structured: Structured, pattern: str, most: int = MAX_EXPANDED) -> None:
    size = expanded_size(pattern)
    if size > most:
        least = "at least " if size == MOST else ""
        raise refusal(
            structured, f"is {least}{size:,} long with its repetitions written out, at most {most:,} is allowed"
        )


def _children(node: object) -> list:
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return [child for child in children if isinstance(child, dict | list)]


def _check_choice(structured: Structured) -> None:
    choices = json.loads(structured.source)
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise refusal(structured, "must be a list of strings that are not empty")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise refusal(structured, f"must hold 1 to {MAX_CHOICES:,} strings, got {len(choices):,}")
    if max(map(len, choices)) > MAX_LITERAL:
        raise refusal(structured, f"may hold strings of at most {MAX_LITERAL:,} characters")
