"""The specification of paged attention: every query against its row's pages, nothing clever."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import KVLayout
from pallas_kernels.ragged import token_places, token_rows


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    layout: KVLayout,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    max_q_len: int | None = None,
) -> jax.Array:
    """See `pallas_kernels.paged_attention`. Memory grows as T times the longest allowed context."""
    del max_q_len
    tokens, heads = q.shape[:2]
    rows = token_rows(cu_q_lens, tokens)
    places = token_places(page_table, kv_lens, cu_q_lens, num_seqs, num_tokens=tokens, page_size=layout.page_size)
    k_scale, v_scale = jnp.ones((2, layout.kv_heads)) if kv_scales is None else kv_scales
    sink = jnp.full(heads, -jnp.inf) if sinks is None else sinks

    def attend(query: jax.Array, row: jax.Array, position: jax.Array, is_live: jax.Array) -> jax.Array:
        keys = layout.keys(kv_pages, layer, page_table[row]).astype(jnp.float32) * k_scale[:, None, None]  # [K, C, H]
        values = layout.values(kv_pages, layer, page_table[row]).astype(jnp.float32) * v_scale[:, None, None]
        grouped = query.astype(jnp.float32).reshape(layout.kv_heads, -1, layout.head_dim)
        scores = scale * jnp.einsum("kgh,kch->kgc", grouped, keys, precision="highest")
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        context = jnp.arange(keys.shape[1])
        seen = (context <= position) & is_live
        if sliding_window is not None:
            seen &= context > position - sliding_window
        scores = jnp.where(seen[None, None], scores, -jnp.inf)
        with_sink = jnp.concatenate([scores, sink.reshape(*scores.shape[:2], 1)], axis=-1)
        weights = jax.nn.softmax(with_sink, axis=-1)[..., :-1]
        weights = jnp.where(seen[None, None], weights, 0.0)
        values = jnp.where(seen[None, :, None], values, 0.0)
        return jnp.einsum("kgc,kch->kgh", weights, values, precision="highest").reshape(query.shape)

    out = jax.vmap(attend)(q, rows, places.positions, places.live)
    return jnp.where(places.live[:, None, None], out, 0.0).astype(q.dtype)
