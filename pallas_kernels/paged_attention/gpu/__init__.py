"""Paged attention on NVIDIA Hopper GPUs in Pallas Mosaic GPU.

Rows with one query and prompt tiles go through the same kernel (`attend`) with two work lists (`work`): the
keys of a decoding row are split so that few long rows fill the chip, and a second pass (`combine`) joins its parts.
Both write into one output in place.

Blackwell (sm100) has no wgmma: there the products must be tcgen05_mma into TMEM, the softmax state and the weights
read and written by async_load_tmem / async_store_tmem, and the barriers order the tensor core. Fetching, work lists,
masks and the second pass would stay as they are. Until somebody writes that, these chips take the XLA path.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention.gpu.attend import attend
from pallas_kernels.paged_attention.gpu.blocks import ROWS, Blocks, candidates, current_gpu, default_blocks
from pallas_kernels.paged_attention.gpu.combine import combine
from pallas_kernels.paged_attention.gpu.compute import LOG2E
from pallas_kernels.paged_attention.gpu.kernel import Kernel, tile_tokens, token_rows
from pallas_kernels.paged_attention.gpu.work import decode_work, prefill_work
from pallas_kernels.quantise import fold_key_scale, fold_value_scale
from pallas_kernels.tuning import Phase, ShapeClass, tuned_blocks

__all__ = ("Blocks", "candidates", "default_blocks", "paged_attention")


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
    """See `pallas_kernels.paged_attention`. Refuses what tensor cores would round and what is not a Hopper GPU.

    decode_blocks, chunk_blocks: tile sizes; None takes the tuned ones, or the defaults.
    """
    _refuse(q, layout)
    heads, group = layout.kv_heads, q.shape[1] // layout.kv_heads
    decode_blocks = decode_blocks or _blocks(layout, q, "decode")
    chunk_blocks = chunk_blocks or _blocks(layout, q, "chunk")
    queries = fold_key_scale(q, kv_scales).reshape(-1, heads, group, layout.head_dim)
    by_head = _whole_tiles(queries)

    def kernel(blocks: Blocks, *, split: bool) -> Kernel:
        pages, width = kv_pages.shape[1], page_table.shape[1]
        return Kernel(
            layout, blocks, split, pages, width, group, scale, sliding_window, soft_cap, sinks is not None, q.dtype
        )

    q_lens, q_starts = cu_q_lens[1:] - cu_q_lens[:-1], cu_q_lens[:-1]
    live = jnp.arange(kv_lens.shape[0], dtype=jnp.int32) < num_seqs
    fixed = (layer, page_table, by_head, kv_pages, _tile_sinks(sinks, heads, group))
    cost, mixed = _cost(q, page_table, layout), max_q_len != 1
    light = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * q.size * q.dtype.itemsize)
    out = jax.new_ref(jnp.zeros_like(queries))
    lens = jnp.where(live & (q_lens == 1), kv_lens, 0)
    work, splits = decode_work(lens, q_starts, heads, sliding_window, decode_blocks)
    # Of a mixed call's two kernels one reads a row, so its keys are counted once, in the second.
    parts = attend(kernel(decode_blocks, split=True), work, *fixed, light if mixed else cost)
    combine(parts, splits, q_starts, out)
    if mixed:
        prefill = kernel(chunk_blocks, split=False)
        chunks = jnp.where(live & (q_lens > 1), q_lens, 0)
        cut = (q.shape[0], prefill.query_tiles * prefill.tokens, tile_tokens(group))
        tiles = prefill_work(kv_lens, q_starts, chunks, *cut, heads, sliding_window, chunk_blocks)
        attend(prefill, tiles, *fixed, cost, out)
    return fold_value_scale(jax.freeze(out).reshape(q.shape), kv_scales)


def _blocks(layout: KVLayout, q: jax.Array, phase: Phase) -> Blocks:
    tuned = tuned_blocks("paged_attention", "gpu", "gpu", ShapeClass.of(layout, q.shape[1], q.dtype.name, phase))
    return Blocks(**tuned) if tuned else default_blocks(layout, q.shape[1], phase)


def _refuse(q: jax.Array, layout: KVLayout) -> None:
    gpu = current_gpu()
    if gpu is not None and not gpu.is_hopper:
        raise NotImplementedError(f"the kernel is for Hopper GPUs (wgmma), this is a {gpu.kind}")
    if q.dtype != jnp.bfloat16:
        raise NotImplementedError(f"tensor cores would round {q.dtype} queries; the kernel takes bfloat16")
    if layout.dtype == "float32":
        raise NotImplementedError("tensor cores would round a float32 cache to 10 bits (tf32)")
    if layout.head_dim not in (64, 128, 256):
        raise NotImplementedError(f"head_dim must be 64, 128 or 256, not {layout.head_dim}")
    if layout.page_size < 16 or layout.page_size & (layout.page_size - 1):
        raise NotImplementedError(f"pages must hold 16, 32, 64, ... tokens, not {layout.page_size}")
    if q.shape[1] // layout.kv_heads > ROWS:
        raise NotImplementedError(f"at most {ROWS} query heads a KV head, not {q.shape[1] // layout.kv_heads}")


def _whole_tiles(queries: jax.Array) -> jax.Array:
    """Queries [T, K, G, H] as copies take them: [K, T * height, H], zeros up to whole swizzle tiles."""
    tokens, heads, group, dim = queries.shape
    padding = ((0, -tokens % tile_tokens(group)), (0, 0), (0, token_rows(group) - group), (0, 0))
    return jnp.pad(queries, padding).swapaxes(0, 1).reshape(heads, -1, dim)


def _tile_sinks(sinks: jax.Array | None, heads: int, group: int) -> jax.Array:
    """Sinks in base 2 by query row of a tile: f32[K, 64]."""
    if sinks is None:
        return jnp.zeros((heads, ROWS), jnp.float32)
    by_head = sinks.astype(jnp.float32).reshape(heads, group) * LOG2E
    by_token = jnp.pad(by_head, ((0, 0), (0, token_rows(group) - group)))
    return jnp.tile(by_token, (1, ROWS // token_rows(group)))


def _cost(q: jax.Array, page_table: jax.Array, layout: KVLayout) -> pl.CostEstimate:
    """What a call does when every row of the page table is full."""
    rows, width = page_table.shape
    pairs = max(q.shape[0], rows) * q.shape[1] * width * layout.page_size
    return pl.CostEstimate(
        flops=4 * pairs * layout.head_dim,
        transcendentals=pairs,
        bytes_accessed=rows * width * layout.page_bytes + 2 * q.size * q.dtype.itemsize,
    )
