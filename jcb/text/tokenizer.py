"""Text to token ids and back, for any checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Pipeline

from jcb.checkpoint.errors import ModelLoadError, printable
from jcb.checkpoint.json_file import load_json_object
from jcb.checkpoint.reader import Checkpoint
from jcb.text import gguf_tokenizer
from jcb.text.guard import MARK, SpecialTokenGuard, marked_pipeline
from jcb.text.vocabulary import read_vocabulary
from jcb.types import RequestError

MAX_TOKENIZER_BYTES = 128 * 1024 * 1024

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """One model's tokenizer. Immutable, and safe to use from several threads.

    special_tokens: the strings and ids of tokens that never stand for text (turn marks, end of sequence …).
    vocab_size: ids are below it; ids that the model has but the tokenizer has not decode to nothing.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        config: dict[str, Any],
        bos_token_id: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int = 0,
    ) -> None:
        pipeline.no_truncation()
        pipeline.no_padding()
        self.pipeline = pipeline
        self._config = config
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.vocabulary = read_vocabulary(pipeline, vocab_size)
        self.vocab_size = len(self.vocabulary.pieces)
        self._special_ids = _special_ids(pipeline, (bos_token_id, *eos_token_ids))
        names = {index: pipeline.id_to_token(index) for index in sorted(self._special_ids)}
        self.special_tokens: dict[str, int] = {name: index for index, name in names.items() if name}
        self.guard = SpecialTokenGuard(self.special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of `text`. With parse_special false, strings of special tokens are encoded as the text they are.

        RequestError when the text cannot be written as UTF-8 (a lone surrogate).
        """
        if not parse_special:
            text = self.guard.mark(text)
        pipeline = self._marked_pipeline if MARK in text else self.pipeline
        try:  # a batch of one, since only encoding in batches lets other threads run meanwhile
            return pipeline.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except TypeError as error:
            raise RequestError("the text holds a lone surrogate, which is not valid Unicode") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, continuation: bool = False) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD.

        continuation: the text follows other text, so a SentencePiece tokenizer keeps the space before its first word.
        Raises ValueError for an id outside the vocabulary.
        """
        for index in ids:
            self._check(index)
        if not self.vocabulary.exact:
            return self.pipeline.decode(ids, skip_special_tokens=skip_special_tokens)
        pieces = self.visible_pieces(skip_special_tokens)
        text = b"".join([pieces[index] for index in ids]).decode("utf-8", "replace")
        strips = self.vocabulary.strips_space and not continuation
        return text.removeprefix(" ") if strips else text

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of one token, which need not be whole UTF-8 characters."""
        self._check(token_id)
        return self.vocabulary.pieces[token_id]

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are not UTF-8 become U+FFFD, so different tokens can read the same."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_key(self, token_id: int) -> str:
        r"""One token as a string that no other token has.

        Its text where that is exact and unique, else "bytes:\xe2\x80" (OpenAI's form), else "token_id:123".
        """
        piece = self.token_bytes(token_id)
        if self._first_with_bytes[piece] != token_id:
            return f"token_id:{token_id}"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def visible_pieces(self, skip_special_tokens: bool) -> tuple[bytes, ...]:
        """Bytes by token id, empty for special tokens when they are to be skipped."""
        return self._text_pieces if skip_special_tokens else self.vocabulary.pieces

    @property
    def bos_token(self) -> str | None:
        return None if self.bos_token_id is None else self.pipeline.id_to_token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return self.pipeline.id_to_token(self.eos_token_ids[0]) if self.eos_token_ids else None

    @property
    def chat_template(self) -> str | None:
        """Source of the model's own chat template, where it has one."""
        return self._config.get("chat_template")

    @property
    def named_tokens(self) -> dict[str, str]:
        """What chat templates print by name (bos_token, eos_token, …), as far as the model has it."""
        return {name: self._config[name] for name in _NAMED_TOKENS if self._config.get(name)}

    def config(self) -> dict[str, Any]:
        """Content of tokenizer_config.json (a copy)."""
        return dict(self._config)

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"{token_id=} is outside the vocabulary of {self.vocab_size}")

    @cached_property
    def _text_pieces(self) -> tuple[bytes, ...]:
        return tuple(b"" if i in self._special_ids else piece for i, piece in enumerate(self.vocabulary.pieces))

    @cached_property
    def _first_with_bytes(self) -> dict[bytes, int]:
        return {piece: i for i, piece in reversed(list(enumerate(self.vocabulary.pieces)))}

    @cached_property
    def _marked_pipeline(self) -> Pipeline:
        return marked_pipeline(self.pipeline, self.special_tokens)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer: tokenizer.json in a Hugging Face folder, else built from GGUF metadata."""
    if checkpoint.format == "gguf":
        pipeline = gguf_tokenizer.build_pipeline(checkpoint.metadata)
        config = gguf_tokenizer.tokenizer_config(checkpoint.metadata)
        bos = config.get("bos_token")
    else:
        pipeline = _read_pipeline(checkpoint.path / "tokenizer.json")
        config = _read_config(checkpoint.path)
        bos = config.get("bos_token")
    eos = checkpoint.eos_token_ids or _named_ids(pipeline, config.get("eos_token"))
    return Tokenizer(
        pipeline,
        config=config,
        bos_token_id=next(iter(_named_ids(pipeline, bos)), None),
        eos_token_ids=eos,
        vocab_size=checkpoint.config.vocab_size,
    )


def _read_pipeline(path: Path) -> Pipeline:
    """tokenizer.json, its size checked and the JSON known to be whole before the native parser sees it."""
    content = load_json_object(path, MAX_TOKENIZER_BYTES)
    try:
        return Pipeline.from_str(json.dumps(content))
    except BaseException as error:  # the native parser can panic, which is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise ModelLoadError(path.name, f"it is not a tokenizer: {printable(str(error), 200)}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json with token names as plain strings and the chat template from wherever it lies."""
    path = folder / "tokenizer_config.json"
    config = load_json_object(path) if path.is_file() else {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):  # an AddedToken written out
            config[name] = value.get("content")
        if not isinstance(config.get(name), str | None):
            raise ModelLoadError(path.name, f"{name} is not a string")
    template = _read_chat_template(folder, config.get("chat_template"))
    config.pop("chat_template", None)
    return config | ({"chat_template": template} if template is not None else {})


def _read_chat_template(folder: Path, configured: object) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json (a string, or a list of named ones)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelLoadError(path.name, f"cannot be read: {printable(str(error), 200)}") from error
    if isinstance(configured, list):
        named = {each["name"]: each.get("template") for each in configured if isinstance(each, dict) and "name" in each}
        configured = named.get("default")
    if not isinstance(configured, str | None):
        raise ModelLoadError("chat_template", "it is not a string")
    return configured


def _named_ids(pipeline: Pipeline, token: str | None) -> tuple[int, ...]:
    """The id of a token given by its string: one, or none when there is no such token."""
    index = None if token is None else pipeline.token_to_id(token)
    return () if index is None else (index,)


def _special_ids(pipeline: Pipeline, ends: Iterable[int | None]) -> frozenset[int]:
    added = pipeline.get_added_tokens_decoder()
    return frozenset(i for i, token in added.items() if token.special) | {i for i in ends if i is not None}
