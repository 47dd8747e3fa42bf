"""Reading a recording, a line at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcb.config import Limits, SchedulerConfig
from jcb.recording.events import Event, Header, Step, from_json, header_from_json


@dataclass(frozen=True)
class Recording:
    """A recorded run on disk. Iterating reads it anew, in the engine's order and in bounded memory."""

    path: Path
    header: Header

    @staticmethod
    def open(path: str | Path) -> Recording:
        """The recording at `path`; ValueError when it cannot be read or is none."""
        path = Path(path)
        for line in _lines(path):
            try:
                return Recording(path, header_from_json(line))
            except TypeError as error:
                raise ValueError(f"{path}: the header has wrong fields: {error}") from error
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        raise ValueError(f"{path} is empty")

    def __iter__(self) -> Iterator[Event]:
        lines = _lines(self.path)
        next(lines)
        for number, line in enumerate(lines, 2):
            try:
                yield from_json(line)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: no event of a recording ({error})") from error

    def steps(self) -> Iterator[Step]:
        """The turns that ran something."""
        return (event for event in self if isinstance(event, Step) and event.rows)

    def scheduler_config(self) -> SchedulerConfig:
        """The settings under which it was made."""
        recorded = self.header.config["scheduler"]
        values: dict[str, Any] = {name: math.inf if value is None else value for name, value in recorded.items()}
        lists: dict[str, Any] = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return SchedulerConfig(**values | lists)

    def limits(self) -> Limits:
        """The sizes that scheduler and device agreed on."""
        cache, scheduler = self.header.config["cache"], self.header.config["scheduler"]
        return Limits(
            page_size=cache["page_size"],
            num_pages=cache["num_pages"],
            max_model_len=scheduler["max_model_len"],
            vocab_size=self.header.vocab_size,
        )

    @property
    def enable_prefix_caching(self) -> bool:
        return bool(self.header.config["cache"]["enable_prefix_caching"])

    @property
    def overlap(self) -> bool:
        return bool(self.header.config["engine"]["overlap"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a file; a last line that was cut off (the process died) is left out."""
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"recording {str(path)!r} cannot be read: {error.strerror}") from error
    with file:
        number = 1
        try:
            for text in file:
                if not text.endswith("\n"):
                    return
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError("not an object")
                yield line
                number += 1
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON of a recording ({error})") from error
