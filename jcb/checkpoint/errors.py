"""The one error that loading a model raises."""

from __future__ import annotations

_MAX_NAME = 64


def printable(text: str, limit: int = _MAX_NAME) -> str:
    """`text` cut to `limit` characters, anything unprintable escaped: safe to show in a log or a terminal."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


class ModelLoadError(Exception):
    """A model file that is malformed, unsupported or missing.

    name: what is at fault (a file, a tensor, a metadata key). reason: what is wrong, and the fix if there is one.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name = printable(name)
        self.reason = reason
        super().__init__(f"{self.name}: {reason}")
