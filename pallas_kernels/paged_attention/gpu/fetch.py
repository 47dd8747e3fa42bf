"""The producer warpgroup: queries, keys and values of one item after another into shared memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.blocks import ROWS
from pallas_kernels.paged_attention.gpu.kernel import Item, Kernel, Refs, item_of


def fetch(kernel: Kernel, refs: Refs, turn: jax.Array, step: jax.Array) -> jax.Array:
    """Fetch one item, as stages come free. step: blocks fetched so far; returns it after this item."""
    item = item_of(kernel, refs, turn)
    _fetch_queries(kernel, refs, turn, item)
    size, heads = kernel.layout.page_size, kernel.layout.kv_heads
    origin = refs.layer[0] * (kernel.pages * heads) + item.head

    def starts(block: jax.Array) -> list[jax.Array]:
        first = item.begin + block * kernel.sizes.block_kv
        return [first + offset for offset in range(0, kernel.sizes.block_kv, kernel.chunk)]

    def page_ids(block: jax.Array) -> list[jax.Array]:
        columns = [jnp.minimum(lax.div(start, jnp.int32(size)), kernel.width - 1) for start in starts(block)]
        return [refs.table[item.row * kernel.width + column] for column in columns]

    def fetch_block(block: jax.Array, carry: tuple) -> tuple:
        step, pages = carry
        following = page_ids(block + 1)  # a block early: their latency hides behind the wait below
        slot = lax.rem(step, jnp.int32(kernel.sizes.stages))

        @pl.when(step >= kernel.sizes.stages)
        def _wait() -> None:
            plgpu.barrier_wait(refs.free.at[slot])

        for index, (start, page) in enumerate(zip(starts(block), pages, strict=True)):
            target = refs.blocks.at[slot, :, pl.ds(index * kernel.chunk, kernel.chunk)]
            _fetch_chunk(kernel, refs, item, 2 * (origin + page * heads), start, target, refs.full.at[slot])
        return step + 1, following

    return lax.fori_loop(0, item.blocks, fetch_block, (step, page_ids(jnp.int32(0))))[0]


def _fetch_queries(kernel: Kernel, refs: Refs, turn: jax.Array, item: Item) -> None:
    """Rows around the item's own hold other tokens' queries: no row looks at another, so they do no harm."""
    slot = lax.rem(turn, jnp.int32(2))

    @pl.when(turn >= 2)
    def _wait() -> None:
        plgpu.barrier_wait(refs.q_free.at[slot])

    rows = kernel.lone_rows if kernel.split else ROWS
    for tile in range(kernel.query_tiles):
        first = (item.token - item.skip + tile * kernel.tokens) * kernel.height
        source = refs.q.at[item.head, pl.ds(first, rows)]
        plgpu.copy_gmem_to_smem(source, refs.q_tile.at[slot, tile, pl.ds(0, rows)], refs.q_full.at[slot])


def _fetch_chunk(
    kernel: Kernel, refs: Refs, item: Item, plane: jax.Array, start: jax.Array, target: Any, barrier: Any
) -> None:
    """K and V of keys start ... start + chunk - 1, unless none of the item's queries sees any of them."""
    wanted = (start < item.end) & (start + kernel.chunk > item.first_key)

    @pl.when(wanted)
    def _copy() -> None:
        for half in range(2):
            source = refs.pages.at[plane + half]
            if kernel.chunk < kernel.layout.page_size:
                inside = lax.rem(start, jnp.int32(kernel.layout.page_size))
                source = refs.pages.at[plane + half, pl.ds(inside, kernel.chunk)]
            plgpu.copy_gmem_to_smem(source, target.at[half], barrier)

    @pl.when(jnp.logical_not(wanted))
    def _skip() -> None:
        for _ in range(2):
            plgpu.barrier_arrive(barrier)
