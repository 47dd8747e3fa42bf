"""A file mapped into memory, read-only."""

from __future__ import annotations

import mmap
from pathlib import Path

from jcb.checkpoint.errors import ModelLoadError


def map_file(path: Path) -> memoryview:
    """The bytes of `path`, brought in as they are touched. The mapping lives as long as any view of it."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelLoadError(str(path), f"cannot be read: {error}") from error
