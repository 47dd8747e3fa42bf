"""Typed reading of untrusted key-value data (GGUF metadata, JSON objects)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jcb.checkpoint.errors import ModelLoadError, printable

_LARGEST = 1e300
"""Numbers above this are refused (among them infinities, and JSON integers too long for a float)."""


class Fields:
    """A mapping from a model file, read with a type and a range each time. ModelLoadError names the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def has(self, key: str) -> bool:
        """True when the key is there and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]; `default` when the key is absent and a default is given."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(key, f"{_show(value)} is not a whole number")
        if not low <= value <= high:
            raise ModelLoadError(key, f"{value} is outside {low} to {high}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of at least 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(key, f"{_show(value)} is not a number")
        if not 0 <= value <= _LARGEST:
            raise ModelLoadError(key, f"{_show(value)} must be finite and not negative")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value == 0:
            raise ModelLoadError(key, "it must be above 0")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise ModelLoadError(key, f"{_show(value)} is not true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelLoadError(key, f"{_show(value)} is not a string")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(key, None)
        if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
            raise ModelLoadError(key, "it is not a list of strings")
        return tuple(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelLoadError(key, "it is missing")
        return value


def _show(value: object) -> str:
    return printable(repr(value))
