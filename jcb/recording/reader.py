"""Reading a recording, a line at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jcb.config import Limits, SchedulerConfig
from jcb.recording.events import Arrival, End, Event, Header, Step, from_json, header_from_json

MAX_SIZE = 1 << 24
"""Most pages, tokens or slots of an engine that is believed; what is made of a recording is bounded by it."""

MAX_TOKENS = 1 << 22
"""Most tokens of one prompt or answer that is believed."""

MAX_LINE_BYTES = 64 << 20
_TIMEOUTS = ("queue_timeout", "run_timeout")


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
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
        raise ValueError(f"{path} is empty")

    def __iter__(self) -> Iterator[Event]:
        """Raises ValueError that names the line of an event that cannot be, or cannot be where it is."""
        lines = _lines(self.path)
        next(lines)
        live, newest = set[int](), -1
        for number, line in enumerate(lines, 2):
            try:
                event = from_json(line)
                if isinstance(event, Arrival):
                    _check_arrival(event, newest)
                    newest = event.id
                    live.add(newest)
                elif isinstance(event, End):
                    _check_end(event, live)
                    live.discard(event.id)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number}: no event of a recording ({error})") from error
            yield event

    def steps(self) -> Iterator[Step]:
        """The turns that ran something."""
        return (event for event in self if isinstance(event, Step) and event.rows)

    def scheduler_config(self) -> SchedulerConfig:
        """The settings under which it was made; ValueError when the header does not tell them."""
        recorded = self._section("scheduler")
        values = {name: math.inf if name in _TIMEOUTS and value is None else value for name, value in recorded.items()}
        if unknown := values.keys() - {field.name for field in dataclasses.fields(SchedulerConfig)}:
            raise ValueError(f"{self.path}: the scheduler has no setting {sorted(unknown)[0][:64]!r}")
        try:
            config = msgspec.convert(values, SchedulerConfig)
        except ValueError as error:
            raise ValueError(f"{self.path}: the header's scheduler cannot be: {error}") from error
        self._check_size("max_num_seqs", config.max_num_seqs)
        self._check_size("max_num_batched_tokens", config.max_num_batched_tokens)
        return config

    def limits(self) -> Limits:
        """The sizes that scheduler and device agreed on; ValueError when the header does not tell them."""
        cache, scheduler = self._section("cache"), self._section("scheduler")
        found = {name: self._check_size(name, cache.get(name)) for name in ("page_size", "num_pages")}
        longest = self._check_size("max_model_len", scheduler.get("max_model_len"))
        if found["num_pages"] < 2:
            raise ValueError(f"{self.path}: the header's num_pages must be at least 2")
        return Limits(**found, max_model_len=longest, vocab_size=self.header.vocab_size)

    @property
    def enable_prefix_caching(self) -> bool:
        return self._flag("cache", "enable_prefix_caching")

    @property
    def overlap(self) -> bool:
        return self._flag("engine", "overlap")

    def _section(self, name: str) -> dict[str, Any]:
        section = self.header.config.get(name)
        if not isinstance(section, dict):
            raise ValueError(f"{self.path}: the header's configuration has no section {name!r}")
        return section

    def _flag(self, section: str, name: str) -> bool:
        value = self._section(section).get(name)
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: the header's {name} must be true or false")
        return value

    def _check_size(self, name: str, value: object) -> int:
        if type(value) is not int or not 1 <= value <= MAX_SIZE:
            raise ValueError(f"{self.path}: the header's {name} must be a whole number from 1 to {MAX_SIZE:,}")
        return value


def is_recording(path: Path) -> bool:
    """Whether the file begins as the recorder begins one."""
    with path.open("rb") as file:
        return file.read(17) == b'{"jcb_recording":'


def _check_arrival(event: Arrival, newest: int) -> None:
    if event.id <= newest:
        raise ValueError(f"request {event.id} comes after {newest}: numbers must ascend")
    if event.prompt_tokens > MAX_TOKENS:
        raise ValueError(f"a prompt of {event.prompt_tokens:,} tokens is over the limit of {MAX_TOKENS:,}")


def _check_end(event: End, live: set[int]) -> None:
    if event.id not in live:
        raise ValueError(f"request {event.id} ends and has not come, or has ended before")
    if event.output_tokens > MAX_TOKENS:
        raise ValueError(f"an answer of {event.output_tokens:,} tokens is over the limit of {MAX_TOKENS:,}")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a file; a last line that was cut off (the process died) is left out."""
    try:
        if path.exists() and not path.is_file():
            raise ValueError(f"recording {str(path)!r} is no file")
        file = path.open("rb")
    except OSError as error:
        raise ValueError(f"recording {str(path)!r} cannot be read: {error.strerror}") from error
    with file:
        number = 1
        try:
            while text := file.readline(MAX_LINE_BYTES + 1):
                if not text.endswith(b"\n"):
                    if len(text) > MAX_LINE_BYTES:
                        raise ValueError(f"it is over {MAX_LINE_BYTES:,} bytes")
                    return
                line = msgspec.json.decode(text)
                if not isinstance(line, dict):
                    raise ValueError("not an object")
                yield line
                number += 1
        except RecursionError:
            raise ValueError(f"{path}, line {number}: not JSON of a recording (nested too deeply)") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not JSON of a recording ({error})") from error
