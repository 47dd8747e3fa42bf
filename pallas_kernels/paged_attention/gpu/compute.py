"""The consumer warpgroups: scores, online softmax and weighted sums of one item after another."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.blocks import ROWS
from pallas_kernels.paged_attention.gpu.kernel import Item, Kernel, Refs, item_of
from pallas_kernels.paged_attention.gpu.launch import store

FLOOR = -1e30  # of a running maximum: finite, so that exp2(-inf - floor) is 0 and never NaN
LOG2E = math.log2(math.e)
_TILE = plgpu.Layout.WGMMA


class Softmax(NamedTuple):
    """Running state of 64 query rows, in base 2. weighted: one f32[64, columns] for each slice of V's columns."""

    weighted: tuple[jax.Array, ...]
    largest: jax.Array  # f32[64]
    total: jax.Array  # f32[64]


def compute(kernel: Kernel, refs: Refs, turn: jax.Array, step: jax.Array) -> jax.Array:
    """One item. step: blocks that came before it; returns it after this item."""
    item, me, stride = item_of(kernel, refs, turn), lax.axis_index("warpgroup"), kernel.stride
    q_slot = lax.rem(turn, jnp.int32(2))
    queries = refs.q_tile.at[q_slot, me if kernel.query_tiles > 1 else 0]
    plgpu.barrier_wait(refs.q_full.at[q_slot])
    # Blocks whose running number is `me` modulo stride: then a stage, too, always has the same consumer.
    start = lax.rem(me + stride - lax.rem(step, jnp.int32(stride)), jnp.int32(stride))

    def mine(blocks: jax.Array) -> jax.Array:
        """How many of the first `blocks` blocks are this consumer's."""
        return lax.div(jnp.maximum(blocks - start + (stride - 1), 0), jnp.int32(stride))

    def run(begin: jax.Array, end: jax.Array, softmax: Softmax, masked: bool) -> Softmax:
        def one(index: jax.Array, softmax: Softmax) -> Softmax:
            return _add_block(kernel, refs, item, queries, start + index * stride, step, softmax, masked)

        return lax.fori_loop(mine(begin), mine(end), one, softmax)

    softmax = _empty(kernel, refs, item, me)
    if kernel.window is not None:
        softmax = run(jnp.int32(0), item.ramp, softmax, True)
    softmax = run(item.ramp, item.whole, softmax, False)
    softmax = run(item.whole, item.blocks, softmax, True)
    plgpu.barrier_arrive(refs.q_free.at[q_slot])
    write = _write_part if kernel.split else _write_tokens
    write(kernel, refs, item, me, softmax)
    return step + item.blocks


def _empty(kernel: Kernel, refs: Refs, item: Item, me: jax.Array) -> Softmax:
    """Nothing seen yet but the attention sink, which one part of a row counts."""
    row = _TILE.reduce(1)
    shape = (ROWS, kernel.sizes.columns)
    slices = kernel.columns // kernel.sizes.columns
    weighted = tuple(plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _TILE) for _ in range(slices))
    largest = plgpu.layout_cast(jnp.full((ROWS,), FLOOR, jnp.float32), row)
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row)
    if kernel.has_sinks:
        counts = (item.lead == 1) & (me == 0) if kernel.stride > 1 else item.lead == 1
        sinks = plgpu.load(refs.sinks.at[item.head], layout=row, optimized=False)
        largest = jnp.where(counts, sinks, largest)
        total = jnp.where(counts, jnp.ones_like(total), total)
    return Softmax(weighted, largest, total)


def _add_block(
    kernel: Kernel,
    refs: Refs,
    item: Item,
    queries: Any,
    block: jax.Array,
    step: jax.Array,
    softmax: Softmax,
    masked: bool,
) -> Softmax:
    """Fold in one block of keys. masked: some query may not see some of them."""
    me, size = lax.axis_index("warpgroup"), kernel.sizes.block_kv
    slot = lax.rem(step + block, jnp.int32(kernel.sizes.stages))
    first = item.begin + block * size
    plgpu.barrier_wait(refs.full.at[slot])
    keys, values = _operands(kernel, refs, item, first, slot, masked)

    scores = _product(queries, keys.transpose((1, 0)), (ROWS, size))
    scores = _base_2(kernel, scores)
    if masked:
        scores = jnp.where(_seen(kernel, item, me, first), scores, -jnp.inf)
    largest = jnp.maximum(softmax.largest, scores.max(axis=1))
    decay = jnp.exp2(softmax.largest - largest)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(largest, scores.shape, [0]))
    total = softmax.total * decay + weights.sum(axis=1)
    weights = weights.astype(kernel.dtype)
    if not kernel.sizes.weights_in_registers:
        store(refs.weights.at[me], weights)
        plgpu.commit_smem()
        weights = refs.weights.at[me]

    weighted = []
    for index, old in enumerate(softmax.weighted):
        new = _product(weights, values.at[:, _columns(kernel, me, index)], (ROWS, kernel.sizes.columns))
        weighted.append(old * lax.broadcast_in_dim(decay, old.shape, [0]) + new)
    if not kernel.layout.is_quantised:
        plgpu.barrier_arrive(refs.free.at[slot])
    return Softmax(tuple(weighted), largest, total)


def _columns(kernel: Kernel, me: jax.Array, index: int) -> Any:
    """The index-th slice of this consumer's columns of V."""
    width = kernel.sizes.columns
    return pl.ds(me * kernel.columns + index * width if kernel.by_columns else index * width, width)


def _product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """a @ b in float32 on the tensor core. a: a reference or registers; b: a reference to shared memory."""

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _base_2(kernel: Kernel, scores: jax.Array) -> jax.Array:
    """Raw products as scores in base 2, soft cap applied."""
    cap = kernel.soft_cap
    if cap is None:
        return scores * (kernel.scale * LOG2E)
    # tanh(x) = 1 - 2 / (exp(2 x) + 1): the chip's own tanh has 11 bits, its exp2 has 22.
    power = jnp.exp2(scores * (2 * LOG2E * kernel.scale / cap))
    return (1 - 2 / (power + 1)) * (cap * LOG2E)


def _seen(kernel: Kernel, item: Item, me: jax.Array, first: jax.Array) -> jax.Array:
    """Which keys each of the 64 query rows sees: bool[64, block_kv]."""
    shape = (ROWS, kernel.sizes.block_kv)
    position = item.position
    if not kernel.split:
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_TILE)
        token = _first_token(kernel, me) - item.skip + lax.div(row, jnp.full_like(row, kernel.height))
        position = position + token
    key = first + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_TILE)
    seen = (key <= position) & (key < item.end)
    if kernel.window is not None:
        seen &= key > position - kernel.window
    return seen


def _first_token(kernel: Kernel, me: jax.Array) -> jax.Array:
    """Of this consumer's tile, counted from the item's first tile."""
    return me * kernel.tokens if kernel.query_tiles > 1 else jnp.zeros_like(me)


def _operands(kernel: Kernel, refs: Refs, item: Item, first: jax.Array, slot: jax.Array, masked: bool) -> tuple:
    """K and V of a stage as wgmma takes them, V zeroed where no query may look: 0 x NaN would be NaN."""
    me, is_wide = lax.axis_index("warpgroup"), kernel.layout.is_quantised
    stored = refs.blocks.at[slot]
    ready = refs.wide.at[0 if kernel.shares else me] if is_wide else stored
    if not is_wide and not masked:
        return ready.at[0], ready.at[1]
    if is_wide and kernel.shares:
        _meet(refs)  # nobody still multiplies by what is about to be overwritten
    for piece in range(kernel.sizes.block_kv // ROWS):
        rows = pl.ds(piece * ROWS, ROWS)

        def prepare(half: int, rows: Any = rows, piece: int = piece) -> None:
            content = plgpu.load(stored.at[half, rows], layout=_TILE, optimized=not is_wide)
            if is_wide and jnp.issubdtype(content.dtype, jnp.floating):
                content = content.astype(jnp.float32)  # sm90 cannot make bfloat16 of 8-bit floats in one go
            content = content.astype(kernel.dtype)
            if half == 1 and masked:
                key = first + piece * ROWS + plgpu.broadcasted_iota(jnp.int32, content.shape, 0, layout=_TILE)
                content = jnp.where((key < item.end) & (key >= item.first_key), content, jnp.zeros_like(content))
            store(ready.at[half, rows], content)

        @pl.when(me == piece % kernel.sizes.consumers if kernel.shares else True)
        def _prepare(prepare: Any = prepare) -> None:
            for half in range(0 if is_wide else 1, 2):
                prepare(half)
            plgpu.commit_smem()

    if is_wide:
        plgpu.barrier_arrive(refs.free.at[slot])
    if kernel.shares:
        _meet(refs)
    return ready.at[0], ready.at[1]


def _meet(refs: Refs) -> None:
    """Wait until every consumer is here."""
    plgpu.barrier_arrive(refs.together)
    plgpu.barrier_wait(refs.together)


def _write_part(kernel: Kernel, refs: Refs, item: Item, me: jax.Array, softmax: Softmax) -> None:
    """A part of a row: its own normalised result, and log2 of its softmax sum spread over H, for `combine`."""
    scale = 1 / jnp.where(softmax.total == 0, jnp.ones_like(softmax.total), softmax.total)
    level = softmax.largest + jnp.log2(softmax.total)
    part = me if kernel.stride > 1 else 0
    for index, weighted in enumerate(softmax.weighted):
        where = (item.index, part, slice(None), _columns(kernel, me, index))
        for target, value in (
            (refs.out, weighted * lax.broadcast_in_dim(scale, weighted.shape, [0])),
            (refs.sums, lax.broadcast_in_dim(level, weighted.shape, [0])),
        ):
            plgpu.wait_smem_to_gmem(0)
            store(refs.result.at[me], value, tiled=False)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(refs.result.at[me, pl.ds(0, refs.out.shape[2])], target.at[where])


def _write_tokens(kernel: Kernel, refs: Refs, item: Item, me: jax.Array, softmax: Softmax) -> None:
    """The finished queries of a tile, token by token, as an item may begin and end inside the 64 rows."""
    scale = 1 / jnp.where(softmax.total == 0, jnp.ones_like(softmax.total), softmax.total)
    first = item.skip - _first_token(kernel, me)  # the item's first token in this tile; negative: in one before
    begin, end = jnp.clip(first, 0, kernel.tokens), jnp.clip(first + item.count, 0, kernel.tokens)
    for index, weighted in enumerate(softmax.weighted):
        plgpu.wait_smem_to_gmem(0)
        value = (weighted * lax.broadcast_in_dim(scale, weighted.shape, [0])).astype(kernel.dtype)
        store(refs.result.at[me], value, tiled=False)
        plgpu.commit_smem()

        @pl.loop(begin, end)
        def _write(number: jax.Array, index: int = index) -> None:
            target = refs.out.at[item.token + number - first, item.head, :, _columns(kernel, me, index)]
            plgpu.copy_smem_to_gmem(refs.result.at[me, pl.ds(number * kernel.height, kernel.group)], target)
