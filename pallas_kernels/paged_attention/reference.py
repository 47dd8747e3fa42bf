"""The specification of paged attention: every query against its row's pages, nothing clever."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import KVLayout


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
    max_q_len: int | None = None,
) -> jax.Array:
    """See `pallas_kernels.paged_attention`. Memory grows as T times the longest allowed context."""
    del max_q_len
    tokens = jnp.arange(q.shape[0], dtype=jnp.int32)
    rows = jnp.clip(jnp.searchsorted(cu_q_lens, tokens, side="right") - 1, 0, page_table.shape[0] - 1)
    live = tokens < cu_q_lens[num_seqs]
    positions = kv_lens[rows] - cu_q_lens[rows + 1] + tokens

    def attend(query: jax.Array, row: jax.Array, position: jax.Array, is_live: jax.Array) -> jax.Array:
        keys = layout.keys(kv_pages, layer, page_table[row]).astype(jnp.float32)  # [K, C, H]
        values = layout.values(kv_pages, layer, page_table[row]).astype(jnp.float32)
        grouped = query.astype(jnp.float32).reshape(layout.kv_heads, -1, layout.head_dim)
        scores = scale * jnp.einsum("kgh,kch->kgc", grouped, keys, precision="highest")
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        context = jnp.arange(keys.shape[1])
        seen = (context <= position) & is_live
        if sliding_window is not None:
            seen &= context > position - sliding_window
        weights = jax.nn.softmax(jnp.where(seen[None, None], scores, -jnp.inf), axis=-1)
        weights = jnp.where(seen[None, None], weights, 0.0)
        values = jnp.where(seen[None, :, None], values, 0.0)
        return jnp.einsum("kgc,kch->kgh", weights, values, precision="highest").reshape(query.shape)

    out = jax.vmap(attend)(q, rows, positions, live)
    return jnp.where(live[:, None, None], out, 0.0).astype(q.dtype)
