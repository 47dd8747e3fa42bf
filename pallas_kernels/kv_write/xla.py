"""kv_write as one XLA scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import KVLayout


def kv_write(
    kv_pages: jax.Array,
    layer: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    layout: KVLayout,
) -> jax.Array:
    """See `pallas_kernels.kv_write`."""
    del layout
    new = jnp.concatenate([k, v], axis=1).astype(kv_pages.dtype)  # [T, 2 * K, H]
    return kv_pages.at[layer, page_ids, :, offsets].set(new, mode="drop")
