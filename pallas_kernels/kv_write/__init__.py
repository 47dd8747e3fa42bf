"""Writing new keys and values into their pages, in place when the cache is donated."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import call
from pallas_kernels.layout import KVLayout
from pallas_kernels.quantise import quantise


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
    kv_scales: jax.Array | None = None,
    max_q_len: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """The cache with T new tokens of one layer written.

    kv_pages: the whole cache, see `KVLayout`. layer: i32[]. k, v: [T, K, H]. page_table, kv_lens, cu_q_lens, num_seqs
    and max_q_len say where the tokens go, as in `paged_attention`: row b brings the last tokens of its kv_lens[b].
    kv_scales: f32[2, K], above zero, what stored values of 8 bits are multiplied by (see `quantise`).
    No two rows write into one page. Padding writes nothing but the dummy page. Raises ValueError when shapes do not
    fit together.
    """
    rows = page_table.shape[0]
    if k.shape != v.shape or k.shape[1:] != (layout.kv_heads, layout.head_dim):
        raise ValueError(f"k and v must be [T, {layout.kv_heads}, {layout.head_dim}], got {k.shape=} {v.shape=}")
    if kv_lens.shape != (rows,) or cu_q_lens.shape != (rows + 1,):
        raise ValueError(f"{page_table.shape=} wants kv_lens[{rows}] and cu_q_lens[{rows + 1}]")
    if kv_pages.ndim != 5 or kv_pages.shape[2:] != layout.page_shape:
        raise ValueError(f"kv_pages must be [L, P, {layout.page_shape}], got {kv_pages.shape=}")
    if max_q_len == 1 and k.shape[0] != rows:
        raise ValueError(f"max_q_len=1 wants one token a row, got {k.shape[0]} tokens for {rows} rows")
    k_scale, v_scale = (None, None) if kv_scales is None else (kv_scales[0], kv_scales[1])
    return call(
        "kv_write",
        implementation,
        layout.platform,
        kv_pages,
        layer,
        quantise(k, k_scale, layout.dtype),
        quantise(v, v_scale, layout.dtype),
        page_table,
        kv_lens,
        cu_q_lens,
        num_seqs,
        layout=layout,
        max_q_len=max_q_len,
    )
