"""kv_write as one XLA scatter."""

from __future__ import annotations

import jax

from pallas_kernels.layout import KVLayout
from pallas_kernels.ragged import token_places


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
    places = token_places(
        page_table,
        kv_lens,
        cu_q_lens,
        num_seqs,
        num_tokens=k.shape[0],
        page_size=layout.page_size,
        max_q_len=max_q_len,
    )
    return kv_pages.at[layer, places.pages, :, places.offsets].set(layout.pack(k, v), mode="drop")
