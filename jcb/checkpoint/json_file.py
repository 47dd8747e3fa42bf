"""Strict JSON from model folders: bounded size, no repeated keys, no NaN."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jcb.checkpoint.errors import ModelLoadError, printable

MAX_JSON_BYTES = 16 * 1024 * 1024


def load_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file of at most `limit` bytes. Raises ModelLoadError when it is anything else."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise ModelLoadError(path.name, f"cannot be read in {str(path.parent)!r}: {error.strerror}") from error
    if len(raw) > limit:
        raise ModelLoadError(path.name, f"it is over the limit of {limit} bytes")
    return parse_json_object(raw, path.name)


def parse_json_object(raw: bytes, name: str) -> dict[str, Any]:
    """The object that `raw` spells; `name` is for the error."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ModelLoadError(name, f"it is not valid JSON: {printable(str(error), 200)}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(name, "it is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is not a JSON number")
