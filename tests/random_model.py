"""A checkpoint of random weights in memory, of any shape, under Hugging Face's names."""

from __future__ import annotations

import zlib

import numpy as np

from jcb.config import ModelConfig


class RandomCheckpoint:
    """Float32 tensors drawn from their names: large enough that greedy answers vary with the prompt."""

    format = "hf"

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._shapes = _shapes(config)

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> np.ndarray:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        values = rng.standard_normal(self._shapes[name])
        if "norm" in name:
            return (1 + 0.1 * values).astype(np.float32)
        return (values * (2.0 if "embed" in name else 2 * values.shape[-1] ** -0.5)).astype(np.float32)


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, width)}
    for layer in range(config.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        shapes |= {attention + f"{part}_proj.weight": (q if part == "q" else kv, width) for part in "qkv"}
        shapes |= {
            f"model.layers.{layer}.input_layernorm.weight": (width,),
            f"model.layers.{layer}.post_attention_layernorm.weight": (width,),
            attention + "o_proj.weight": (width, q),
            mlp + "gate_proj.weight": (ffn, width),
            mlp + "up_proj.weight": (ffn, width),
            mlp + "down_proj.weight": (width, ffn),
        }
        if config.attention_bias:
            shapes |= {attention + f"{part}_proj.bias": (q if part == "q" else kv,) for part in "qkv"}
            shapes |= {attention + "o_proj.bias": (width,)}
        if config.qk_norm:
            shapes |= {attention + "q_norm.weight": (dim,), attention + "k_norm.weight": (dim,)}
    shapes["model.norm.weight"] = (width,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, width)
    return shapes
