"""Paged attention on TPU (Mosaic): one ragged kernel, run with two tile shapes.

A work item is a tile of queries of one row: one query for a decoding row, up to `block_q` for a prompt chunk. Decoding
rows and prompt chunks of a mixed batch are two lists of items for the same kernel (`kernel.py`); the second run
writes its tokens into the result of the first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention.tpu.kernel import Blocks, Items, Rule, attend_items
from pallas_kernels.quantise import fold_key_scale, fold_value_scale
from pallas_kernels.tpu_tiles import refuse_layout
from pallas_kernels.tuning import Phase, ShapeClass, tuned_blocks

_SMEM_TABLE_BYTES = 768 << 10
"""The page table and the items lie in the scalar memory of 1 MiB."""

_BLOCK_BYTES = 2 << 20
"""Default size of one fetched block: long enough to hide the start of a copy, and two of them fit every chip."""


def default_blocks(layout: KVLayout, num_heads: int, phase: Phase) -> Blocks:
    """Tile sizes where nothing is tuned: blocks of about 2 MiB, tiles of about 256 query rows a KV head."""
    pages = min(max(_BLOCK_BYTES // layout.page_bytes, 1), max(2048 // layout.page_size, 1))
    block_kv = _power_of_two(pages) * layout.page_size
    group = num_heads // layout.kv_heads
    block_q = 1 if phase == "decode" else max(256 // (2 * _power_of_two(group)), 16)
    return Blocks(block_q=block_q, block_kv=block_kv, compute_kv=min(block_kv, 512))


def candidates(layout: KVLayout, num_heads: int, phase: Phase) -> tuple[Blocks, ...]:
    """Tile sizes worth measuring for a shape."""
    group, size = num_heads // layout.kv_heads, layout.page_size
    queries = (1,) if phase == "decode" else (32, 64, 128, 256)
    return tuple(
        Blocks(block_q, block_kv, compute_kv)
        for block_q in queries
        for block_kv in (256, 512, 1024, 2048)
        for compute_kv in (128, 256, 512, 1024)
        if compute_kv <= block_kv
        and block_kv % size == 0
        and group * block_q <= 1024
        and block_kv * layout.page_bytes // size <= 4 * _BLOCK_BYTES
    )


def _blocks(layout: KVLayout, q: jax.Array, phase: Phase) -> Blocks:
    tuned = tuned_blocks("paged_attention", "tpu", "tpu", ShapeClass.of(layout, q.shape[1], q.dtype.name, phase))
    return Blocks(**tuned) if tuned else default_blocks(layout, q.shape[1], phase)


def _power_of_two(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)


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
    decode_blocks: Blocks | None = None,
    chunk_blocks: Blocks | None = None,
) -> jax.Array:
    """See `pallas_kernels.paged_attention`. Refuses pages that are not whole tiles and tables beyond scalar memory.

    decode_blocks, chunk_blocks: tile sizes; None takes the tuned ones, or the defaults.
    """
    refuse_layout(layout)
    if 4 * page_table.size > _SMEM_TABLE_BYTES:
        raise NotImplementedError(f"a page table of {page_table.shape} does not fit the scalar memory")
    rule = Rule(layout, q.dtype.name, scale, sliding_window, soft_cap)
    queries = fold_key_scale(q, kv_scales).astype(jnp.float32)  # single rows of 32-bit arrays can be addressed
    rows, tokens = page_table.shape[0], q.shape[0]
    q_lens = jnp.where(jnp.arange(rows, dtype=jnp.int32) < num_seqs, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    one = decode_blocks or _blocks(layout, q, "decode")
    many = chunk_blocks or _blocks(layout, q, "chunk")
    operands = (queries, kv_pages, layer, page_table, sinks)
    decode = _items(jnp.where(q_lens == 1, 1, 0), kv_lens, cu_q_lens, block_q=1, bound=rows)
    out = attend_items(rule, one, decode, *operands, before=None)
    if max_q_len != 1:
        bound = min(tokens // 2, tokens // many.block_q + rows)
        chunks = _items(jnp.where(q_lens > 1, q_lens, 0), kv_lens, cu_q_lens, block_q=many.block_q, bound=bound)
        out = attend_items(rule, many, chunks, *operands, before=out)
    live = jnp.arange(tokens, dtype=jnp.int32) < cu_q_lens[num_seqs]
    return fold_value_scale(jnp.where(live[:, None, None], out, 0.0).astype(q.dtype), kv_scales)


def _items(q_lens, kv_lens, cu_q_lens, *, block_q: int, bound: int) -> Items:
    """Tiles of at most `block_q` queries of the rows that have some; `bound` is what the arrays hold."""
    counts = (q_lens + block_q - 1) // block_q
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(max(bound, 1), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, index, side="right").astype(jnp.int32), q_lens.shape[0] - 1)
    offset = (index - (ends[row] - counts[row])) * block_q
    return Items(
        count=ends[-1:],
        row=row,
        first_token=cu_q_lens[row] + offset,
        num_queries=jnp.minimum(q_lens[row] - offset, block_q),
        first_position=kv_lens[row] - q_lens[row] + offset,
    )
