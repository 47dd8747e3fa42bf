"""The Llama architecture: grouped-query attention, rotary positions, RMSNorm, SwiGLU; Qwen3 adds a norm of q and k.

Layers are scanned with the KV cache in the carry, so it is written in place; weights are stacked [L, ...] in
[out, in] order, q, k and v in one matrix, gate and up in another. Split over devices (`axis`), each runs this code on
its own heads, feed-forward rows and part of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jcb.config import ModelConfig
from jcb.models import layers
from jcb.models.layers import PackedLayer
from jcb.models.specs import param_specs as param_specs
from pallas_kernels.kv_write import kv_write
from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.quantized_dot import PackedWeights, take_rows


@flax.struct.dataclass
class Batch:
    """A ragged batch of T tokens in B rows, as `forward` reads it."""

    token_ids: jax.Array  # i32[T]
    positions: jax.Array  # i32[T] place in its sequence
    page_table: jax.Array  # i32[B, pages_per_seq]
    kv_lens: jax.Array  # i32[B] tokens in pages, the new ones included
    cu_q_lens: jax.Array  # i32[B + 1] where each row's tokens start
    num_seqs: jax.Array  # i32[] rows at and beyond it are padding


def forward(
    params: Any,
    batch: Batch,
    kv_pages: jax.Array,
    *,
    config: ModelConfig,
    layout: KVLayout,
    max_q_len: int | None = None,
    implementation: str = "auto",
    axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Hidden states [T, D] after the last norm, and the cache with the T new tokens written.

    params: the pytree declared by `param_specs`. max_q_len: 1 promises one token a row (see `paged_attention`).
    axis: the mesh axis over which params and cache are split; config and layout then say what one device has.
    """
    frequencies = layers.rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    table = layers.rope_table(batch.positions, frequencies)
    eps = config.rms_norm_eps
    where = (batch.page_table, batch.kv_lens, batch.cu_q_lens, batch.num_seqs)
    write = partial(kv_write, layout=layout, max_q_len=max_q_len, implementation=implementation)
    attend = partial(paged_attention, layout=layout, max_q_len=max_q_len, implementation=implementation)

    packed = {name: w for name, w in params["layers"].items() if isinstance(w, PackedWeights)}
    how = (batch.cu_q_lens[batch.num_seqs], config.activations, layout.platform, implementation)

    def layer(carry: tuple[jax.Array, jax.Array], xs: tuple[Any, jax.Array]) -> tuple[Any, None]:
        hidden, kv_pages = carry
        dense, index = xs
        weights = dense | {name: PackedLayer(w, index, *how) for name, w in packed.items()}
        q, k, v = _project(weights, layers.rms_norm(hidden, weights["attention_norm"], eps), config)
        if config.qk_norm:
            q, k = layers.rms_norm(q, weights["q_norm"], eps), layers.rms_norm(k, weights["k_norm"], eps)
        q, k = layers.rope(q, table), layers.rope(k, table)
        kv_pages = write(kv_pages, index, k, v, *where)
        attended = attend(q, kv_pages, index, *where)
        hidden = hidden + _merge(weights, attended, config, axis)
        normed = layers.rms_norm(hidden, weights["mlp_norm"], eps)
        return (hidden + _sum(layers.swiglu(normed, weights["w_gate_up"], weights["w_down"]), axis), kv_pages), None

    hidden = _embed(params, batch.token_ids, config, axis)
    indices = jnp.arange(config.num_layers, dtype=jnp.int32)
    dense = {name: stacked for name, stacked in params["layers"].items() if name not in packed}
    (hidden, kv_pages), _ = jax.lax.scan(layer, (hidden, kv_pages), (dense, indices))
    return layers.rms_norm(hidden, params["final_norm"], eps), kv_pages


def logits(
    params: Any,
    hidden: jax.Array,
    config: ModelConfig,
    axis: str | None = None,
    *,
    live: jax.Array | None = None,
    platform: str | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """f32[R, V] scores of the next token for hidden states [R, D], the same on every device.

    live: i32[], rows that count. live, platform, implementation: of packed weights, see `pallas_kernels.quantized_dot`.
    """
    head = params.get("head", params["embedding"])
    if isinstance(head, PackedWeights):
        head = PackedLayer(head, 0, live, config.activations, platform, implementation)
    scores = layers.linear_f32(hidden, head)
    if axis is None or scores.shape[1] == config.vocab_size:
        return scores
    return jax.lax.all_gather(scores, axis, axis=1, tiled=True)


def _embed(params: Any, token_ids: jax.Array, config: ModelConfig, axis: str | None) -> jax.Array:
    """[T, D]: rows of the table; of a split table each device adds the rows that it has."""
    embedding = params["embedding"]
    if isinstance(embedding, PackedWeights):
        return take_rows(embedding, 0, token_ids).astype(params["final_norm"].dtype)
    rows = embedding.shape[0]
    if axis is None or rows == config.vocab_size:
        return embedding[token_ids]
    local = token_ids - rows * jax.lax.axis_index(axis)
    mine = (local >= 0) & (local < rows)
    return jax.lax.psum(jnp.where(mine[:, None], embedding[jnp.clip(local, 0, rows - 1)], 0), axis)


def _sum(x: jax.Array, axis: str | None) -> jax.Array:
    return x if axis is None else jax.lax.psum(x, axis)


def _project(weights: Any, x: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, N, H], k and v [T, K, H] of x [T, D]."""
    qkv = layers.linear(x, weights["w_qkv"])
    if config.attention_bias:
        qkv = qkv + weights["b_qkv"][None, :]
    qkv = qkv.reshape(x.shape[0], -1, config.head_dim)
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]


def _merge(weights: Any, attended: jax.Array, config: ModelConfig, axis: str | None) -> jax.Array:
    """[T, D] of attended heads [T, N, H]."""
    out = _sum(layers.linear(attended.reshape(attended.shape[0], -1), weights["w_out"]), axis)
    return out + weights["b_out"][None, :] if config.attention_bias else out
