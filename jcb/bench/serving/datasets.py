"""What is asked: random words of given lengths, ShareGPT's conversations, or a file of one's own."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jcb.bench.serving.codec import Codec

DatasetName = Literal["random", "sharegpt", "custom"]

_TRIES = 20
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048  # the conversations that vLLM's benchmark keeps
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Sample:
    """One request: its text, the tokens of that as counted here, and the tokens to ask for."""

    prompt: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Where samples come from. path: the file of sharegpt and custom. range_ratio: lengths are drawn evenly from
    length × (1 ± range_ratio). prefix_len: tokens that all random prompts begin with, beside input_len.
    output_override: tokens to ask for in place of the file's own. oversample: begin again when the file is too short.
    """

    name: DatasetName = "random"
    path: str = ""
    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    prefix_len: int = 0
    output_override: int | None = None
    shuffle: bool = True
    oversample: bool = True

    def __post_init__(self) -> None:
        if self.name != "random" and not self.path:
            raise ValueError(f"--dataset-name {self.name} needs --dataset-path")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"--random-range-ratio {self.range_ratio} must be 0 or more and below 1")
        for flag, value, least in (
            ("--random-input-len", self.input_len, 1),
            ("--random-output-len", self.output_len, 1),
            ("--random-prefix-len", self.prefix_len, 0),
        ):
            if value < least:
                raise ValueError(f"{flag} {value} must be at least {least}")
        if self.output_override is not None and self.output_override < 1:
            raise ValueError(
                f"--sharegpt-output-len and --custom-output-len must be at least 1: {self.output_override}"
            )

    async def samples(self, count: int, seed: int, codec: Codec) -> list[Sample]:
        """`count` samples, the same for the same seed. Raises ValueError where the file has none to give."""
        rng = random.Random(seed)
        if self.name == "random":
            return await self._random(count, rng, codec)
        items = list(_sharegpt(self.path) if self.name == "sharegpt" else _custom(self.path, self.output_override))
        if self.shuffle:
            rng.shuffle(items)
        found = await self._measured(items, count, codec)
        if not found:
            raise ValueError(f"--dataset-path {self.path!r} holds no request that can be used")
        if len(found) < count and not self.oversample:
            return found
        return [found[index % len(found)] for index in range(count)]

    def lengths(self, length: int, count: int, rng: random.Random) -> list[int]:
        """`count` whole numbers drawn evenly from length × (1 ± range_ratio), at least 1."""
        low, high = math.floor(length * (1 - self.range_ratio)), math.ceil(length * (1 + self.range_ratio))
        return [max(rng.randint(low, high), 1) for _ in range(count)]

    async def _random(self, count: int, rng: random.Random, codec: Codec) -> list[Sample]:
        inputs, outputs = (self.lengths(length, count, rng) for length in (self.input_len, self.output_len))
        prefix = await text_of_length(codec, rng, self.prefix_len) if self.prefix_len else ""
        samples = []
        for tokens, output in zip(inputs, outputs, strict=True):
            text = await text_of_length(codec, rng, self.prefix_len + tokens, prefix)
            samples.append(Sample(text, self.prefix_len + tokens, output))
        return samples

    async def _measured(self, items: Sequence[tuple[str, str | int]], count: int, codec: Codec) -> list[Sample]:
        """The first `count` usable items with their lengths; an answer's length is that of its text."""
        samples = []
        for prompt, answer in items:
            tokens = len(await codec.encode(prompt))
            output = self.output_override
            if output is None:
                output = answer if isinstance(answer, int) else len(await codec.encode(answer))
            if self.name == "custom" or _is_usual(tokens, output, self.output_override is None):
                samples.append(Sample(prompt, tokens, output))
            if len(samples) == count:
                break
        return samples


def _is_usual(prompt: int, output: int, is_measured: bool) -> bool:
    """Whether a conversation is neither too short nor too long."""
    enough = prompt >= _SHORTEST and (output >= _SHORTEST or not is_measured)
    return enough and prompt <= _LONGEST_PROMPT and prompt + output <= _LONGEST


async def text_of_length(codec: Codec, rng: random.Random, tokens: int, prefix: str = "") -> str:
    """`prefix` and random words behind it, `tokens` tokens in all; ValueError when no such text is found."""
    text = prefix
    for _ in range(_TRIES):
        ids = await codec.encode(text)
        if len(ids) == tokens:
            return text
        if len(ids) < tokens:
            text += "".join(f" {_word(rng)}" for _ in range(tokens - len(ids)))
            ids = await codec.encode(text)
        if len(ids) != tokens:
            text = await codec.decode(ids[:tokens])
    raise ValueError(f"no random text of exactly {tokens} tokens was found in {_TRIES} tries; try another --seed")


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(2, 8)))


def _sharegpt(path: str) -> Iterator[tuple[str, str]]:
    """The first turn and its answer of each conversation in a ShareGPT file."""
    entries = _json(path, _text(path))
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
        turns = entry.get("conversations", []) if isinstance(entry, dict) else None
        first = turns[:2] if isinstance(turns, list) else [None]
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in first]
        known = [text for text in texts if isinstance(text, str)]
        if len(known) < len(texts):
            raise ValueError(
                f'{path}, entry {number}: must be like {{"conversations": [{{"value": text}}, {{"value": text}}]}}, '
                f"got {str(entry)[:60]!r}"
            )
        if len(known) == 2:
            yield known[0], known[1]


def _custom(path: str, override: int | None) -> Iterator[tuple[str, int]]:
    """The prompts of a file with one JSON object a line: {"prompt": text, "output_tokens": number}."""
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        entry = _json(f"{path} line {number}", line)
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise ValueError(f'{path} line {number} must be an object with a "prompt", got {line[:60]!r}')
        output = override if override is not None else entry.get("output_tokens")
        if type(output) is not int or not 1 <= output < 1 << 31:
            raise ValueError(f'{path} line {number}: "output_tokens" is {str(output)[:60]}: give --custom-output-len')
        yield entry["prompt"], output


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--dataset-path {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--dataset-path {name} is not JSON: {error}") from error
