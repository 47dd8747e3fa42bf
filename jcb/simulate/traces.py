"""Traffic from a file of requests, read line by line.

CSV with a header line, or JSONL with one object a line; columns in any order, others are ignored:
time      seconds, or a date and time (also `timestamp`, `arrival`, `arrived_at`); in ascending order
prompt    tokens (also `prompt_tokens`, `input_tokens`, `input_length`, `ContextTokens`)
output    tokens (also `output_tokens`, `output_length`, `GeneratedTokens`)
priority  a whole number, lower first (optional)
session   any word; for routers that keep a conversation in one place (optional)
hash_ids  numbers of the prompt's 512-token blocks, equal where prefixes are (optional, JSONL; time is then in ms)
The Azure LLM inference traces and the Mooncake traces can be read as they are.
"""

from __future__ import annotations

import csv
import datetime
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcb.simulate.job import Job

BLOCK_TOKENS = 512
MAX_TOKENS = 1 << 22
MAX_SECONDS = 1e12
_NAMES = {
    "time": ("time", "timestamp", "arrival", "arrived_at"),
    "prompt": ("prompt", "prompt_tokens", "input_tokens", "input_length", "contexttokens"),
    "output": ("output", "output_tokens", "output_length", "generatedtokens"),
}


@dataclass(frozen=True)
class Trace:
    """Requests of a file. limit: most of them; 0 is all. scale: factor on the times between them.

    max_model_len: longer ones are cut, prompt first; 0 leaves them.
    """

    path: Path
    limit: int = 0
    scale: float = 1.0
    max_model_len: int = 0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"scale={self.scale} must be above 0")
        if next(self.jobs(), None) is None:  # an unreadable file is told before anything runs
            raise ValueError(f"{self.path} holds no request")

    def jobs(self) -> Iterator[Job]:
        """In the order of the file; ValueError names the line that is wrong."""
        begin, last = None, 0.0
        for number, (line, row) in enumerate(_rows(self.path)):
            if self.limit and number >= self.limit:
                return
            try:
                when = _seconds(_find(row, "time"), in_ms="hash_ids" in row)
                begin = when if begin is None else begin
                at = (when - begin) * self.scale
                if at < last:
                    raise ValueError("times must ascend")
                last = at
                yield self._job(number, at, row)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise ValueError(f"{self.path}, line {line}: {error}") from error

    def after(self, job: Job, now: float) -> Job | None:
        """Nothing follows from an end."""
        del job, now
        return None

    def _job(self, number: int, at: float, row: Mapping[str, Any]) -> Job:
        prompt, output = int(_find(row, "prompt")), int(_find(row, "output"))
        if max(prompt, output) > MAX_TOKENS:
            raise ValueError(f"prompt and output must be at most {MAX_TOKENS:,} tokens")
        if self.max_model_len:
            output = min(output, self.max_model_len - 1)
            prompt = min(prompt, self.max_model_len - output)
        blocks = (row.get("hash_ids") or ())[: -(-prompt // BLOCK_TOKENS)]
        begin = (1 << 28) + number * 7 % (1 << 29)
        shared = [token for block in blocks for token in range(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)]
        session = row.get("session")
        return Job(
            number=number,
            at=at,
            prompt=tuple(shared[:prompt]) if len(shared) >= prompt else (*shared, *range(begin, begin + prompt)),
            answer=range((1 << 30) + number * 7, (1 << 30) + number * 7 + output),
            session=-1 if session in (None, "") else zlib.crc32(str(session).encode()),
            priority=int(row.get("priority") or 0),
        )


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers and columns by lower-case name."""
    try:
        file = path.open(encoding="utf-8", newline="")
    except OSError as error:
        raise ValueError(f"trace {str(path)!r} cannot be read: {error.strerror}") from error
    with file:
        if path.suffix.lower() in (".jsonl", ".json"):
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, _object(path, number, text)
            return
        rows = csv.DictReader(file)
        try:
            for row in rows:
                yield rows.line_num, {(name or "").strip().lower(): value for name, value in row.items()}
        except csv.Error as error:
            raise ValueError(f"{path}, after line {rows.line_num}: not CSV ({error})") from error


def _object(path: Path, number: int, text: str) -> Mapping[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: not an object")
    return {name.lower(): value for name, value in row.items()}


def _find(row: Mapping[str, Any], column: str) -> Any:
    for name in _NAMES[column]:
        if row.get(name) not in (None, ""):
            return row[name]
    raise ValueError(f"no {column}; the column may be called {', '.join(_NAMES[column])}")


def _seconds(value: Any, *, in_ms: bool) -> float:
    try:
        seconds = float(value) / (1000 if in_ms else 1)
        if not abs(seconds) < MAX_SECONDS:
            raise TypeError("a time must be a number of seconds")
        return seconds
    except ValueError:
        moment = datetime.datetime.fromisoformat(str(value)[:26])
        return (moment - datetime.datetime(1970, 1, 1, tzinfo=moment.tzinfo)).total_seconds()
