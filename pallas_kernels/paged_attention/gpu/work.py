"""Who computes what: the work lists of the GPU kernels, made in XLA so that launch grids never change.

An item is one turn of one thread block: some queries of a row, one KV head, a range of keys. Items depend on lengths
only, not on the layer, so a scan over layers makes them once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.gpu.blocks import Blocks

TOKEN, COUNT, HEAD, ROW, POSITION, BEGIN, END, LEAD = range(8)
"""Columns of an item: first query token and how many; KV head; row of the page table; position of the first query;
keys BEGIN (a multiple of the block) ... END - 1; 1 if the attention sink is counted here."""


class Work(NamedTuple):
    """A work list. items: i32[capacity, 8]; count: i32[1], how many of them are real."""

    items: jax.Array
    count: jax.Array


class Splits(NamedTuple):
    """Where the parts of each row are: item first + split * K + head. All i32[B]; splits is 0 for other rows."""

    first: jax.Array
    splits: jax.Array


def _ceil_div(a: jax.Array, b: jax.Array | int) -> jax.Array:
    return (a + b - 1) // b


def _first_block(position: jax.Array, window: int | None, block: int) -> jax.Array:
    """The block-aligned key where the window of a query at `position` begins."""
    if window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - window + 1, 0) // block * block


def _pack(**columns: jax.Array) -> jax.Array:
    order = ("token", "count", "head", "row", "position", "begin", "end", "lead")
    return jnp.stack([columns[name].astype(jnp.int32) for name in order], axis=1)


def decode_work(
    lens: jax.Array, q_starts: jax.Array, kv_heads: int, window: int | None, blocks: Blocks
) -> tuple[Work, Splits]:
    """Rows with one query, `lens` i32[B] keys each (0 for all others), cut into about blocks * turns equal items."""
    size = blocks.block_kv
    begin = _first_block(lens - 1, window, size)
    counts = jnp.where(lens > 0, _ceil_div(lens - begin, size), 0)
    wanted = blocks.blocks * blocks.turns
    longest = jnp.maximum(_ceil_div(jnp.sum(counts) * kv_heads, wanted), blocks.consumers * 2)
    splits = _ceil_div(counts, longest)
    each = _ceil_div(counts, jnp.maximum(splits, 1))
    ends = jnp.cumsum(splits * kv_heads, dtype=jnp.int32)
    first = ends - splits * kv_heads
    index = jnp.arange(lens.shape[0] * kv_heads + wanted, dtype=jnp.int32)
    row = jnp.minimum(
        jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32), lens.shape[0] - 1
    )
    split = (index - first[row]) // kv_heads
    start = begin[row] + split * each[row] * size
    items = _pack(
        token=q_starts[row],
        count=jnp.ones_like(row),
        head=(index - first[row]) % kv_heads,
        row=row,
        position=lens[row] - 1,
        begin=start,
        end=jnp.minimum(start + each[row] * size, lens[row]),
        lead=split == 0,
    )
    return Work(items, ends[-1:]), Splits(first, splits)


def prefill_work(
    kv_lens: jax.Array,
    q_starts: jax.Array,
    q_lens: jax.Array,
    tokens: int,
    tile: int,
    align: int,
    kv_heads: int,
    window: int | None,
    blocks: Blocks,
) -> Work:
    """Tiles of `tile` queries of rows with several (`q_lens` i32[B] is 0 for all others), the last of a row first.

    align: tiles begin at multiples of so many tokens of the batch (`tile` is one); a row may begin inside its first.
    """
    skip = q_starts % align
    tiles = jnp.where(q_lens > 0, _ceil_div(q_lens + skip, tile), 0)
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    rows = q_lens.shape[0]
    count = ends[-1:] * kv_heads
    index = jnp.arange(((tokens + rows * (align - 1)) // tile + rows) * kv_heads, dtype=jnp.int32)
    backwards = jnp.maximum(count - 1 - index, 0)
    number = backwards // kv_heads
    row = jnp.minimum(jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32), rows - 1)
    end = (number - (ends - tiles)[row] + 1) * tile - skip[row]
    offset = jnp.maximum(end - tile, 0)
    queries = jnp.minimum(q_lens[row], end) - offset
    position = kv_lens[row] - q_lens[row] + offset
    items = _pack(
        token=q_starts[row] + offset,
        count=queries,
        head=backwards % kv_heads,
        row=row,
        position=position,
        begin=_first_block(position, window, blocks.block_kv),
        end=position + queries,
        lead=jnp.ones_like(row),
    )
    return Work(items, count)
