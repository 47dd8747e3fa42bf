"""Attention of new queries over keys and values that live in pages.

One call serves a ragged mixed batch: rows with one query (decoding) and rows with many (prompt chunks).
"""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import call
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
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    max_q_len: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Causal attention of T query tokens, grouped into B rows, over paged K and V.

    q: [T, N, H], rows back to back. kv_pages: the whole cache, see `KVLayout`. layer: i32[], which layer of it.
    page_table: i32[B, pages]: entry j of a row holds its tokens j * S ... (j + 1) * S - 1; unused entries may be 0.
    kv_lens: i32[B]: tokens of a row in pages, its new ones included (already written). cu_q_lens: i32[B + 1]:
    row b has queries cu_q_lens[b] ... cu_q_lens[b + 1] - 1, its last kv_lens[b]-th tokens; it never falls, beyond
    num_seqs either. num_seqs: i32[]: rows at and beyond it are padding, and so are query tokens beyond
    cu_q_lens[num_seqs].
    scale: of q · k, 1 / sqrt(H) if None. sliding_window: a query sees this many latest keys, itself included.
    soft_cap: scores become cap * tanh(score / cap). sinks: f32[N], one more score a head that takes its share of the
    softmax and gives nothing. kv_scales: f32[2, K], above zero, what stored K and V of each head are multiplied by
    (8-bit caches).
    max_q_len: 1 promises that every row has one query, row b at token b (a smaller program); None promises nothing.
    Returns [T, N, H] in q's dtype; padding tokens hold zeros. What unused pages and page tails hold never matters,
    NaN included. Raises ValueError when shapes do not fit together.
    """
    _check(q, kv_pages, page_table, kv_lens, cu_q_lens, layout, max_q_len)
    _check_heads(q, layout, sinks, kv_scales)
    return call(
        "paged_attention",
        implementation,
        layout.platform,
        q,
        kv_pages,
        layer,
        page_table,
        kv_lens,
        cu_q_lens,
        num_seqs,
        layout=layout,
        scale=layout.head_dim**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
        kv_scales=kv_scales,
        max_q_len=max_q_len,
    )


def _check(q, kv_pages, page_table, kv_lens, cu_q_lens, layout: KVLayout, max_q_len) -> None:
    rows = page_table.shape[0]
    if q.ndim != 3 or q.shape[2] != layout.head_dim:
        raise ValueError(f"q must be [T, N, {layout.head_dim}], got {q.shape=}")
    if kv_pages.ndim != 5 or kv_pages.shape[2:] != layout.page_shape:
        raise ValueError(f"kv_pages must be [L, P, {layout.page_shape}], got {kv_pages.shape=}")
    if kv_lens.shape != (rows,) or cu_q_lens.shape != (rows + 1,):
        raise ValueError(f"{page_table.shape=} wants kv_lens[{rows}] and cu_q_lens[{rows + 1}]")
    if max_q_len not in (None, 1):
        raise ValueError(f"{max_q_len=} must be 1 or None")
    if max_q_len == 1 and q.shape[0] != rows:
        raise ValueError(f"max_q_len=1 wants one token a row, got {q.shape[0]} tokens for {rows} rows")


def _check_heads(q, layout: KVLayout, sinks, kv_scales) -> None:
    if q.shape[1] % layout.kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {layout.kv_heads=}")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be [{q.shape[1]}], one a query head, got {sinks.shape=}")
    if kv_scales is not None and kv_scales.shape != (2, layout.kv_heads):
        raise ValueError(f"kv_scales must be [2, {layout.kv_heads}], got {kv_scales.shape=}")
