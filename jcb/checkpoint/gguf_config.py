"""ModelConfig, end tokens and sampling defaults from GGUF metadata (architectures llama and qwen3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jcb.checkpoint.errors import ModelLoadError, printable
from jcb.checkpoint.fields import Fields
from jcb.config import ModelConfig

if TYPE_CHECKING:
    from jcb.checkpoint.reader import Checkpoint

MAX_SIZE = 1 << 24
"""Largest width, length or vocabulary that is believed."""

MAX_LAYERS = 4_096

ARCHITECTURES = ("llama", "qwen3")
"""Values of `general.architecture`; a model's own keys begin with it."""

_END_TOKEN_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def model_config(fields: Fields, tensors: Checkpoint) -> ModelConfig:
    """The model's shape. `tensors` is asked only for names and for llama3's table of frequency factors."""
    arch = fields.text("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError("general.architecture", f"{printable(arch)} is not supported, only {known}")
    if fields.integer("split.count", 0, 1 << 16, default=0) > 1:
        raise ModelLoadError(
            "split.count", "the model is split over files; merge them first (llama-gguf-split --merge)"
        )
    if fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0):
        raise ModelLoadError(f"{arch}.expert_count", "mixture-of-experts models are not supported")
    names = set(tensors.names())
    hidden = fields.integer(f"{arch}.embedding_length", 1, MAX_SIZE)
    heads = fields.integer(f"{arch}.attention.head_count", 1, MAX_SIZE)
    head_dim = _head_dim(fields, arch, hidden, heads)
    try:
        return ModelConfig(
            architecture=arch,
            vocab_size=_vocab_size(fields, arch),
            hidden_size=hidden,
            intermediate_size=fields.integer(f"{arch}.feed_forward_length", 1, MAX_SIZE),
            num_layers=fields.integer(f"{arch}.block_count", 1, MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=fields.integer(f"{arch}.attention.head_count_kv", 1, heads, default=heads),
            head_dim=head_dim,
            max_position_embeddings=fields.integer(f"{arch}.context_length", 1, MAX_SIZE),
            rms_norm_eps=fields.positive(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_theta=fields.positive(f"{arch}.rope.freq_base", 10_000.0),
            rope_scaling=_rope_scaling(fields, arch, tensors, names, head_dim),
            tie_word_embeddings="output.weight" not in names,
            attention_bias="blk.0.attn_q.bias" in names,
            qk_norm=arch == "qwen3",
        )
    except ValueError as error:
        raise ModelLoadError(arch, str(error)) from error


def end_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    """Ids that end an answer. Every token id that the metadata gives must be inside the vocabulary."""
    for key in fields.values:
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
            fields.integer(key, 0, vocab_size - 1)
    return tuple(dict.fromkeys(fields.values[key] for key in _END_TOKEN_KEYS if fields.has(key)))


def sampling_defaults(fields: Fields) -> dict[str, float]:
    """Sampling settings that the file recommends."""
    defaults: dict[str, float] = {name: fields.number(key) for key, name in _SAMPLING_KEYS.items() if fields.has(key)}
    if fields.has("general.sampling.top_k"):
        defaults["top_k"] = fields.integer("general.sampling.top_k", -1, MAX_SIZE)
    return defaults


def _head_dim(fields: Fields, arch: str, hidden: int, heads: int) -> int:
    head_dim = fields.integer(f"{arch}.attention.key_length", 1, MAX_SIZE, default=max(hidden // heads, 1))
    if not fields.has(f"{arch}.attention.key_length") and hidden % heads:
        raise ModelLoadError(f"{arch}.attention.head_count", f"{heads} heads do not divide the width {hidden}")
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if fields.integer(key, 1, MAX_SIZE, default=head_dim) != head_dim:
            raise ModelLoadError(key, f"{fields.values[key]} differs from the head size {head_dim}: not supported")
    return head_dim


def _vocab_size(fields: Fields, arch: str) -> int:
    """Rows of the vocabulary: the token list, with which `vocab_size` must agree."""
    if not fields.has("tokenizer.ggml.tokens"):
        return fields.integer(f"{arch}.vocab_size", 1, MAX_SIZE)
    listed = len(fields.texts("tokenizer.ggml.tokens"))
    if fields.integer(f"{arch}.vocab_size", 1, MAX_SIZE, default=max(listed, 1)) != listed:
        raise ModelLoadError(
            f"{arch}.vocab_size", f"{fields.values[f'{arch}.vocab_size']} differs from the {listed} tokens listed"
        )
    return listed


def _rope_scaling(fields: Fields, arch: str, tensors: Checkpoint, names: set[str], head_dim: int) -> dict | None:
    """Position scaling in config.json's words; llama3's comes as a table of factors, one for each frequency."""
    if "rope_freqs.weight" in names:
        factors = tensors.read("rope_freqs.weight") if tensors.shape("rope_freqs.weight") == (head_dim // 2,) else None
        if factors is None or not np.all(np.isfinite(factors)) or not np.all(factors > 0):
            raise ModelLoadError("rope_freqs.weight", f"it is not {head_dim // 2} finite numbers above 0")
        return {"rope_type": "frequency_factors", "factors": [float(each) for each in factors]}
    kind = fields.text(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(f"{arch}.rope.scaling.type", f"{printable(kind)} is not supported")
    scaling: dict = {"rope_type": kind, "factor": fields.positive(f"{arch}.rope.scaling.factor")}
    if fields.has(f"{arch}.rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = fields.integer(
            f"{arch}.rope.scaling.original_context_length", 1, MAX_SIZE
        )
    return scaling
