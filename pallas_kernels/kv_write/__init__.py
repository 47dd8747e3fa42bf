"""Writing new keys and values into their pages, in place when the cache is donated."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import find
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
    implementation: str = "auto",
) -> jax.Array:
    """The cache with T new tokens of one layer written.

    kv_pages: the whole cache, see `KVLayout`. layer: i32[]. k, v: [T, K, H]. page_ids: i32[T], the page of each token
    (0, the dummy page, for padding). offsets: i32[T], its place inside the page, 0 ... S - 1.
    Two real tokens never share a place. Raises ValueError when shapes do not fit together.
    """
    tokens = page_ids.shape
    if k.shape != v.shape or k.shape[1:] != (layout.kv_heads, layout.head_dim):
        raise ValueError(f"k and v must be [T, {layout.kv_heads}, {layout.head_dim}], got {k.shape=} {v.shape=}")
    if tokens != k.shape[:1] or offsets.shape != tokens:
        raise ValueError(f"{page_ids.shape=} and {offsets.shape=} do not fit {k.shape=}")
    if kv_pages.ndim != 5 or kv_pages.shape[2:] != layout.page_shape:
        raise ValueError(f"kv_pages must be [L, P, {layout.page_shape}], got {kv_pages.shape=}")
    return find("kv_write", implementation)(kv_pages, layer, k, v, page_ids, offsets, layout=layout)
