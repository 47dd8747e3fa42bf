"""What the producer and the consumers of the GPU attention kernel share: static facts, references, the current item."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention.gpu.blocks import ROWS, TILE_ROWS, Blocks
from pallas_kernels.paged_attention.gpu.work import BEGIN, COUNT, END, HEAD, LEAD, POSITION, ROW, TOKEN


def token_rows(group: int) -> int:
    """Query rows a token takes: its group of heads, rounded up to a power of two so that 8 rows hold whole tokens."""
    return 1 << (group - 1).bit_length()


def tile_tokens(group: int) -> int:
    """Tokens of a swizzle tile: every copy of queries starts at a multiple of them."""
    return max(TILE_ROWS // token_rows(group), 1)


@dataclass(frozen=True)
class Kernel:
    """Everything about one attention kernel that is known when it is traced.

    split: rows of one query whose keys are dealt out to items and consumers (decoding); else tiles of prompts.
    pages: of one layer. width: of the page table. group G: query heads a KV head. scale: of scores. dtype: of q.
    """

    layout: KVLayout
    sizes: Blocks
    split: bool
    pages: int
    width: int
    group: int
    scale: float
    window: int | None
    soft_cap: float | None
    has_sinks: bool
    dtype: Any

    @property
    def by_columns(self) -> bool:
        """Consumers do the same rows and keys, each its own columns of V: one has no registers for 256."""
        return self.layout.head_dim > 128

    @property
    def stride(self) -> int:
        """A consumer takes every stride-th block of an item: decoding deals blocks out."""
        return self.sizes.consumers if self.split and not self.by_columns else 1

    @property
    def query_tiles(self) -> int:
        """Tiles of 64 query rows that an item has: prompt consumers have one each."""
        return 1 if self.split or self.by_columns else self.sizes.consumers

    @property
    def shares(self) -> bool:
        """True when several consumers read the same block."""
        return self.sizes.consumers > self.stride

    @property
    def height(self) -> int:
        """Query rows of a token: its first `group` are real."""
        return token_rows(self.group)

    @property
    def tokens(self) -> int:
        """Query tokens of a tile of 64 rows."""
        return 1 if self.split else ROWS // self.height

    @property
    def lone_rows(self) -> int:
        """Rows fetched for one decoding token, and written of its parts: whole swizzle tiles."""
        return max(self.height, TILE_ROWS)

    @property
    def columns(self) -> int:
        """Columns of V that a consumer sums."""
        return self.layout.head_dim // (self.sizes.consumers if self.by_columns else 1)

    @property
    def chunk(self) -> int:
        """Keys that one copy fetches: a page, or a block of a larger page."""
        return min(self.layout.page_size, self.sizes.block_kv)


class Refs(NamedTuple):
    """What the kernel body sees: inputs and outputs in the order of its arguments, then shared memory and barriers."""

    items: Any  # i32[capacity, 8]
    count: Any  # i32[1]
    layer: Any  # i32[1]
    table: Any  # i32[B * width]
    q: Any  # [K, T * height, H]
    pages: Any  # [L * P * 2 * K, S, H]
    sinks: Any  # f32[K, 64], in base 2
    out: Any  # split: f32[items, stride, lone_rows, H]; else [T, K, G, H]
    sums: Any = None  # split: log2 of each row's softmax sum, in the shape of out
    q_tile: Any = None  # [2, query_tiles, 64, H], of this item and the next
    blocks: Any = None  # [stages, 2, block_kv, H], K and V as stored
    weights: Any = None  # [consumers, 64, block_kv], unless they stay in registers
    wide: Any = None  # [1 or consumers, 2, block_kv, H], 8-bit K and V made wide
    result: Any = None  # [consumers, 64, columns]
    q_full: Any = None  # barriers [2]
    q_free: Any = None  # barriers [2]
    full: Any = None  # barriers [stages]
    free: Any = None  # barriers [stages]
    together: Any = None  # barrier of all consumers, where they share blocks


class Item(NamedTuple):
    """One entry of the work list, as scalars. See `work` for the columns."""

    index: jax.Array
    token: jax.Array
    count: jax.Array
    skip: jax.Array  # tokens of its first tile before its own, as tiles start at whole swizzle tiles
    head: jax.Array
    row: jax.Array
    position: jax.Array
    begin: jax.Array
    end: jax.Array
    lead: jax.Array
    first_key: jax.Array  # the earliest key that any of its queries sees
    blocks: jax.Array  # of keys in begin ... end - 1
    ramp: jax.Array  # blocks before it hold keys that some query's window excludes
    whole: jax.Array  # blocks ramp ... whole - 1 are seen whole by every query


def item_of(kernel: Kernel, refs: Refs, turn: jax.Array) -> Item:
    """The turn-th item of this thread block."""
    index = lax.axis_index("block") + turn * kernel.sizes.blocks
    column = [refs.items[index, number] for number in range(8)]
    position, begin, end, size = column[POSITION], column[BEGIN], column[END], jnp.int32(kernel.sizes.block_kv)
    blocks = lax.div(end - begin + (size - 1), size)
    whole = lax.div(jnp.minimum(end, position + 1) - begin, size)
    first_key, ramp = begin, jnp.int32(0)
    if kernel.window is not None:
        first_key = jnp.maximum(begin, position - (kernel.window - 1))
        excluded = position + column[COUNT] - kernel.window - begin
        ramp = jnp.minimum(lax.div(jnp.maximum(excluded, 0) + (size - 1), size), blocks)
        whole = jnp.maximum(whole, ramp)
    skip = lax.rem(column[TOKEN], jnp.int32(tile_tokens(kernel.group)))
    return Item(
        index, column[TOKEN], column[COUNT], skip, column[HEAD], column[ROW], position, begin, end, column[LEAD],
        first_key, blocks, ramp, whole,
    )  # fmt: skip
