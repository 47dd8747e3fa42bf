"""A `tokenizers` pipeline and a tokenizer_config built from GGUF metadata (byte-level BPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Pipeline

from jcb.checkpoint.errors import ModelLoadError, printable
from jcb.checkpoint.fields import Fields
from jcb.text.pretokenizers import pre_tokenizer

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""Token types in `tokenizer.ggml.token_type` that are matched whole in text; the first two are special."""

_SPECIAL_ROLES = ("bos", "eos", "eot", "eom")
_CONFIG_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_pipeline(metadata: Mapping[str, Any]) -> Pipeline:
    """The tokenizer that the metadata describes. Raises ModelLoadError when it is malformed or of another kind."""
    fields = Fields(metadata)
    kind = fields.text("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelLoadError(
            "tokenizer.ggml.model", f"{printable(kind)} is not supported in GGUF, only gpt2 (byte-level BPE)"
        )
    pre = pre_tokenizer(fields.text("tokenizer.ggml.pre"))
    tokens = fields.texts("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError("tokenizer.ggml.tokens", "a token appears twice")
    model = models.BPE(vocab=vocabulary, merges=_merges(fields, vocabulary), ignore_merges=pre.ignore_merges)
    pipeline = Pipeline(model)
    pipeline.pre_tokenizer = pre.build()
    pipeline.decoder = decoders.ByteLevel()
    if pre.nfc:
        pipeline.normalizer = pre.normalizer()
    pipeline.add_tokens(_added_tokens(fields, tokens))
    _add_sequence_ends(pipeline, fields, tokens, pre.add_bos)
    return pipeline


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What tokenizer_config.json would say."""
    fields = Fields(metadata)
    tokens = fields.texts("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields.integer("llama.context_length", 1, 1 << 24),
    }
    for name, role in _CONFIG_ROLES.items():
        index = _role_id(fields, role, len(tokens))
        if index is not None:
            config[name] = tokens[index]
    if fields.has("tokenizer.chat_template"):
        config["chat_template"] = fields.text("tokenizer.chat_template")
    return config


def _merges(fields: Fields, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merge rules, best first; both halves and their union must be tokens."""
    merges = []
    for text in fields.texts("tokenizer.ggml.merges"):
        left, _, right = text.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelLoadError("tokenizer.ggml.merges", f"{printable(text)!r} does not join two tokens into a third")
        merges.append((left, right))
    return merges


def _added_tokens(fields: Fields, tokens: tuple[str, ...]) -> list[AddedToken]:
    """Tokens that are matched whole, in the order of their ids."""
    types = fields.values.get("tokenizer.ggml.token_type")
    if types is None:
        types = np.ones(len(tokens), np.int32)
    if not isinstance(types, np.ndarray) or types.shape != (len(tokens),):
        raise ModelLoadError("tokenizer.ggml.token_type", f"it is not {len(tokens)} numbers, one for each token")
    special = set(np.flatnonzero((types == _UNKNOWN) | (types == _CONTROL)).tolist())
    special |= {index for role in _SPECIAL_ROLES if (index := _role_id(fields, role, len(tokens))) is not None}
    whole = special | set(np.flatnonzero(types == _USER_DEFINED).tolist())
    return [AddedToken(tokens[i], special=i in special, normalized=False) for i in sorted(whole) if tokens[i]]


def _add_sequence_ends(pipeline: Pipeline, fields: Fields, tokens: tuple[str, ...], add_bos: bool) -> None:
    """Make encoding add the beginning and end tokens where the file wants them."""
    begin = _role_id(fields, "bos", len(tokens)) if fields.flag("tokenizer.ggml.add_bos_token", add_bos) else None
    end = _role_id(fields, "eos", len(tokens)) if fields.flag("tokenizer.ggml.add_eos_token", False) else None
    added = [(tokens[index], index) for index in (begin, end) if index is not None]
    if not added:
        return
    before = [tokens[begin]] if begin is not None else []
    after = [tokens[end]] if end is not None else []
    try:
        pipeline.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after], special_tokens=added
        )
    except ValueError as error:
        raise ModelLoadError("tokenizer.ggml.bos_token_id", printable(str(error), 200)) from error


def _role_id(fields: Fields, role: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    return fields.integer(key, 0, size - 1) if fields.has(key) else None
