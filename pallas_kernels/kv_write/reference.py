"""The specification of kv_write: one token after another."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import KVLayout


def kv_write(
    kv_pages: jax.Array,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    layout: KVLayout,
    max_q_len: int | None = None,
) -> jax.Array:
    """See `pallas_kernels.kv_write`; k and v are already of the cache's type."""
    del max_q_len
    packed = layout.pack(k, v)

    def write(token: jax.Array, pages: jax.Array) -> jax.Array:
        row = jnp.searchsorted(cu_q_lens, token, side="right") - 1
        position = kv_lens[row] - cu_q_lens[row + 1] + token
        place = (layer, page_table[row, position // layout.page_size], 0, position % layout.page_size, 0)
        return jax.lax.dynamic_update_slice(pages, packed[token][None, None, :, None, :], place)

    return jax.lax.fori_loop(0, cu_q_lens[num_seqs], write, kv_pages)
