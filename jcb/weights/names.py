"""Where each parameter comes from, as data: names of GGUF and of Hugging Face checkpoints.

A source is a tuple of checkpoint names whose rows are joined, in order, into one parameter; `{layer}` is filled in.
"""

from __future__ import annotations

from dataclasses import dataclass

from jcb.config import ModelConfig


@dataclass(frozen=True)
class Source:
    """Checkpoint names joined along the first axis. permuted: how many of them have interleaved RoPE rows."""

    names: tuple[str, ...]
    permuted: int = 0

    def by_layer(self, num_layers: int) -> list[tuple[str, ...]]:
        """The names with each layer filled in; once for a parameter without layers."""
        layers = range(num_layers if "{layer}" in self.names[0] else 1)
        return [tuple(name.format(layer=layer) for name in self.names) for layer in layers]


Table = dict[str, Source]
"""Path of a parameter ("layers/w_qkv") to its source."""

_GGUF_LLAMA: Table = {
    "embedding": Source(("token_embd.weight",)),
    "final_norm": Source(("output_norm.weight",)),
    "head": Source(("output.weight",)),
    "layers/attention_norm": Source(("blk.{layer}.attn_norm.weight",)),
    "layers/w_qkv": Source(
        ("blk.{layer}.attn_q.weight", "blk.{layer}.attn_k.weight", "blk.{layer}.attn_v.weight"), permuted=2
    ),
    "layers/b_qkv": Source(
        ("blk.{layer}.attn_q.bias", "blk.{layer}.attn_k.bias", "blk.{layer}.attn_v.bias"), permuted=2
    ),
    "layers/w_out": Source(("blk.{layer}.attn_output.weight",)),
    "layers/b_out": Source(("blk.{layer}.attn_output.bias",)),
    "layers/mlp_norm": Source(("blk.{layer}.ffn_norm.weight",)),
    "layers/w_gate_up": Source(("blk.{layer}.ffn_gate.weight", "blk.{layer}.ffn_up.weight")),
    "layers/w_down": Source(("blk.{layer}.ffn_down.weight",)),
}

_GGUF_QWEN3: Table = _GGUF_LLAMA | {
    "layers/w_qkv": Source(tuple(f"blk.{{layer}}.attn_{part}.weight" for part in "qkv")),
    "layers/q_norm": Source(("blk.{layer}.attn_q_norm.weight",)),
    "layers/k_norm": Source(("blk.{layer}.attn_k_norm.weight",)),
}
"""Unlike llama's, these files keep rotary halves where Hugging Face has them."""

_ATTENTION = "model.layers.{layer}.self_attn"
_MLP = "model.layers.{layer}.mlp"
_HF_LLAMA: Table = {
    "embedding": Source(("model.embed_tokens.weight",)),
    "final_norm": Source(("model.norm.weight",)),
    "head": Source(("lm_head.weight",)),
    "layers/attention_norm": Source(("model.layers.{layer}.input_layernorm.weight",)),
    "layers/w_qkv": Source(tuple(f"{_ATTENTION}.{part}_proj.weight" for part in "qkv")),
    "layers/b_qkv": Source(tuple(f"{_ATTENTION}.{part}_proj.bias" for part in "qkv")),
    "layers/w_out": Source((f"{_ATTENTION}.o_proj.weight",)),
    "layers/b_out": Source((f"{_ATTENTION}.o_proj.bias",)),
    "layers/mlp_norm": Source(("model.layers.{layer}.post_attention_layernorm.weight",)),
    "layers/w_gate_up": Source((f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight")),
    "layers/w_down": Source((f"{_MLP}.down_proj.weight",)),
}

_HF_QWEN3: Table = _HF_LLAMA | {
    "layers/q_norm": Source((f"{_ATTENTION}.q_norm.weight",)),
    "layers/k_norm": Source((f"{_ATTENTION}.k_norm.weight",)),
}

TABLES: dict[tuple[str, str], Table] = {
    ("gguf", "llama"): _GGUF_LLAMA,
    ("gguf", "qwen3"): _GGUF_QWEN3,
    ("hf", "llama"): _HF_LLAMA,
    ("hf", "qwen3"): _HF_QWEN3,
}
"""By file format and architecture."""

IGNORED: frozenset[str] = frozenset({"rope_freqs.weight"})
"""Derived tables that some files carry; recomputed from the config, never read as parameters."""


def ignorable(name: str, config: ModelConfig) -> bool:
    """True for tensors that hold nothing the model needs: derived tables, and a head equal to the embedding."""
    if name in IGNORED or name.endswith("rotary_emb.inv_freq"):
        return True
    return config.tie_word_embeddings and name == "lm_head.weight"
