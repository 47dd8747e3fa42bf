"""The exact bytes of every token, and how they join to text.

Two families cover nearly all models, and in both the text of a sequence is the joined bytes of its tokens decoded as
UTF-8, so text can be built token by token without decoding anything twice:
- byte-level (GPT-2, Llama 3, Qwen, SmolLM): every character of a token stands for one byte;
- byte-fallback (SentencePiece: Llama 2, Mistral, Gemma): "▁" stands for a space, "<0xAB>" for one byte, and the
  space that encoding put before the first word is taken off again.
Any other decoder is used through `tokenizers` itself (`exact` is False).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer as Pipeline

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """Bytes of each token by id (empty for ids that no token has).

    exact: joining the bytes is decoding. strips_space: decoding a whole text takes one leading space off.
    """

    pieces: tuple[bytes, ...]
    exact: bool
    strips_space: bool


def read_vocabulary(pipeline: Pipeline, size: int) -> Vocabulary:
    """The bytes of the tokens of `pipeline`, at least `size` entries."""
    tokens = pipeline.get_vocab(with_added_tokens=True)
    size = max(size, max(tokens.values(), default=-1) + 1)
    added = {index: token.content for index, token in pipeline.get_added_tokens_decoder().items()}
    steps = _decoder_steps(pipeline)
    kinds = [step["type"] for step in steps]
    exact, strips_space = True, False
    if kinds == ["ByteLevel"]:
        spell: Callable[[str], bytes] = _byte_level_bytes
    elif _is_byte_fallback(steps):
        strips_space = any(step["type"] == "Strip" or step.get("prepend_scheme", "never") != "never" for step in steps)
        fallback = "ByteFallback" in kinds
        spell = _byte_fallback_bytes if fallback else lambda token: token.replace("▁", " ").encode()
    else:
        exact = False
        spell = str.encode
    pieces = [b""] * size
    for token, index in tokens.items():
        pieces[index] = added[index].encode() if index in added else spell(token)
    return Vocabulary(tuple(pieces), exact, strips_space)


def _decoder_steps(pipeline: Pipeline) -> list[dict]:
    """The decoder's steps as plain data, sequences flattened; empty when there is no decoder."""
    if pipeline.decoder is None:
        return []
    state = json.loads(pipeline.decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _is_byte_fallback(steps: list[dict]) -> bool:
    """True when the steps only turn "▁" into spaces, join byte tokens, and take a leading space off."""
    return any(step["type"] in ("Metaspace", "Replace") for step in steps) and all(
        (step["type"] == "Metaspace" and step["replacement"] == "▁")
        or (step["type"] == "Replace" and step["pattern"] == {"String": "▁"} and step["content"] == " ")
        or step["type"] in ("ByteFallback", "Fuse")
        or (step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0))
        for step in steps
    )


def _byte_table() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes: printable Latin-1 stands for itself, the rest is at U+0100 on."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_table()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[c] for c in token])
    except KeyError:  # a token added by hand holds characters outside the table: it stands for itself
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
