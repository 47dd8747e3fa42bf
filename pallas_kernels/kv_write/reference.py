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
    page_ids: jax.Array,
    offsets: jax.Array,
    *,
    layout: KVLayout,
) -> jax.Array:
    """See `pallas_kernels.kv_write`."""
    del layout
    new = jnp.concatenate([k, v], axis=1).astype(kv_pages.dtype)  # [T, 2 * K, H]

    def write(token: jax.Array, pages: jax.Array) -> jax.Array:
        place = (layer, page_ids[token], 0, offsets[token], 0)
        return jax.lax.dynamic_update_slice(pages, new[token][None, None, :, None, :], place)

    return jax.lax.fori_loop(0, k.shape[0], write, kv_pages)
