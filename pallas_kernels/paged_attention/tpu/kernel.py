"""The TPU kernel of paged attention: items of queries against blocks of pages.

Memory: queries, cache and result stay in HBM; two buffers each of query tiles, KV blocks and result tiles live in
VMEM. While one KV block is computed the next one travels, across the border of items too. A KV block is computed in
pieces of `compute_kv` keys, head by head, with the running softmax of all heads in VMEM.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import KVLayout
from pallas_kernels.tpu_tiles import LANES, tile_rows

_FLOOR = -1e30  # finite, so that a row that has seen nothing yet leaves no NaN
_VMEM_SLACK = 8 << 20  # the compiler's own intermediates
_UNROLLED_HEADS = 8
_UNROLLED_ROWS = 64


@dataclass(frozen=True)
class Blocks:
    """Tile sizes, all powers of two.

    block_q: queries an item. block_kv: tokens one fetch, whole pages. compute_kv: tokens one matmul.
    """

    block_q: int
    block_kv: int
    compute_kv: int


class Rule(NamedTuple):
    """The static part of a call. compute: the type that is multiplied, float32 or bfloat16."""

    layout: KVLayout
    compute: str
    scale: float
    sliding_window: int | None
    soft_cap: float | None


class Items(NamedTuple):
    """Work items, one entry each; those at and beyond count[0] do nothing."""

    count: jax.Array  # i32[1]
    row: jax.Array  # i32[M]
    first_token: jax.Array  # i32[M] of q
    num_queries: jax.Array  # i32[M] 1 ... block_q
    first_position: jax.Array  # i32[M] of the first query in its sequence


def attend_items(
    rule: Rule,
    blocks: Blocks,
    items: Items,
    q: jax.Array,
    kv_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    sinks: jax.Array | None,
    before: jax.Array | None,
) -> jax.Array:
    """f32[T, N, H]: results of the items' tokens; the others as in `before`, or anything if that is None.

    q: f32[T, N, H]. The rest as in `pallas_kernels.paged_attention`.
    """
    layout, (tokens, heads, dim) = rule.layout, q.shape
    kv_heads, group = layout.kv_heads, heads // layout.kv_heads
    shape = _Shape(kv_heads, group, blocks.block_q, max(group * blocks.block_q, 8), dim, max(dim, LANES), heads)
    q = jnp.pad(q, ((0, blocks.block_q - 1), (0, 0), (0, 0)))  # a whole tile can always be fetched
    state = [(kv_heads, shape.rows, LANES), (kv_heads, shape.rows, LANES), (kv_heads, shape.rows, shape.lanes)]
    scratch = [
        pltpu.VMEM((2, blocks.block_q, heads, dim), jnp.float32),
        pltpu.VMEM((2, kv_heads, blocks.block_kv, 2 * dim), layout.dtype),
        pltpu.VMEM((2, blocks.block_q, heads, dim), jnp.float32),
        pltpu.VMEM((kv_heads, shape.rows, shape.lanes), rule.compute),
        *[pltpu.VMEM(each, jnp.float32) for each in state],
        pltpu.SemaphoreType.DMA((3, 2)),
    ]
    operands = [q, kv_pages]
    in_specs = [pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)]
    if sinks is not None:
        operands.append(_sink_rows(sinks, shape))
        in_specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    if before is not None:
        operands.append(before)
        in_specs.append(pl.BlockSpec(memory_space=pl.ANY))
    scalars = (layer[None], *items, page_table.reshape(-1))
    return pl.pallas_call(
        functools.partial(_kernel, rule, blocks, shape, page_table.shape[1], sinks is not None, before is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=in_specs,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct((tokens, heads, dim), jnp.float32),
        input_output_aliases={} if before is None else {len(scalars) + len(operands) - 1: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=_vmem_bytes(rule, blocks, shape) + _VMEM_SLACK,
            disable_bounds_checks=True,
        ),
        cost_estimate=_cost(rule, blocks, q, page_table),
        name=f"paged_attention_q{blocks.block_q}",
    )(*scalars, *operands)


class _Shape(NamedTuple):
    """Sizes of a call: K, G, queries a tile, rows of a head's tile, H, lanes of its result, N."""

    kv_heads: int
    group: int
    block_q: int
    rows: int
    head_dim: int
    lanes: int
    heads: int


def _sink_rows(sinks: jax.Array, shape: _Shape) -> jax.Array:
    """Sinks f32[N] laid out like the running maximum: f32[K, rows, LANES]."""
    rows = jnp.repeat(sinks.astype(jnp.float32).reshape(shape.kv_heads, shape.group), shape.block_q, axis=1)
    rows = jnp.pad(rows, ((0, 0), (0, shape.rows - rows.shape[1])))
    return jnp.broadcast_to(rows[:, :, None], (*rows.shape, LANES))


def _vmem_bytes(rule: Rule, blocks: Blocks, shape: _Shape) -> int:
    kv = 2 * blocks.block_kv * rule.layout.page_bytes // rule.layout.page_size
    tiles = 4 * blocks.block_q * max(shape.heads, 8) * max(shape.head_dim, LANES) * 4
    state = shape.kv_heads * shape.rows * (3 * LANES + 2 * shape.lanes) * 4
    scores = 4 * shape.rows * blocks.compute_kv * 4 + 4 * blocks.compute_kv * 2 * shape.lanes * 4
    return kv + tiles + state + scores


def _cost(rule: Rule, blocks: Blocks, q: jax.Array, page_table: jax.Array) -> pl.CostEstimate:
    """What moves when every row fills its table: shapes are all that a compiler knows."""
    tokens, heads, dim = q.shape
    context = page_table.shape[1] * rule.layout.page_size
    reads = page_table.shape[0] if blocks.block_q == 1 else max(tokens // blocks.block_q, 1)
    return pl.CostEstimate(
        flops=4 * tokens * heads * dim * context,
        transcendentals=tokens * heads * context,
        bytes_accessed=reads * page_table.shape[1] * rule.layout.page_bytes + 2 * q.size * 4,
    )


def _kernel(rule: Rule, blocks: Blocks, shape: _Shape, table_width: int, has_sinks: bool, has_before: bool, *refs):
    """The loop over items; see the module's docstring."""
    layer, count, row_of, token_of, queries_of, position_of, table, q_hbm, kv_hbm, *refs = refs
    sink_ref = refs.pop(0) if has_sinks else None
    if has_before:
        refs.pop(0)  # the same memory as the result
    out_hbm, q_buf, kv_buf, out_buf, q_ref, max_ref, sum_ref, acc_ref, semaphores = refs
    size = rule.layout.page_size
    pages_per_block = blocks.block_kv // size

    def live_keys(item):
        """The keys lo ... hi - 1 that some query of the item sees."""
        first = position_of[item]
        lo = 0 if rule.sliding_window is None else jnp.maximum(first - rule.sliding_window + 1, 0)
        return lo, first + queries_of[item]

    def block_range(item):
        lo, hi = live_keys(item)
        return _div(lo, blocks.block_kv), _div(hi + blocks.block_kv - 1, blocks.block_kv)

    def page_copy(item, block, slot, page):
        """The copy of page `page` of a block."""
        entry = table[row_of[item] * table_width + block * pages_per_block + page]
        rows = pl.ds(pl.multiple_of(page * size, size), size)
        return pltpu.make_async_copy(kv_hbm.at[layer[0], entry], kv_buf.at[slot, :, rows, :], semaphores.at[0, slot])

    def for_pages(item, block, act):
        """`act` on each live page of a block."""
        lo, hi = live_keys(item)
        start = block * pages_per_block
        first = jnp.maximum(_div(lo, size) - start, 0)
        last = jnp.minimum(_div(hi + size - 1, size) - start, pages_per_block)
        jax.lax.fori_loop(first, last, lambda page, _: act(page), None)

    def fetch_block(item, block, slot):
        for_pages(item, block, lambda page: page_copy(item, block, slot, page).start())

    def await_block(item, block, slot):
        for_pages(item, block, lambda page: page_copy(item, block, slot, page).wait())

    def query_copy(item, slot):
        source = q_hbm.at[pl.ds(token_of[item], blocks.block_q)]
        return pltpu.make_async_copy(source, q_buf.at[slot], semaphores.at[1, slot])

    def for_results(item, slot, act):
        """`act` on the copy of each token's result; a full tile is one copy."""
        whole = queries_of[item] == blocks.block_q
        out = lambda first, n: pltpu.make_async_copy(  # noqa: E731
            out_buf.at[slot, pl.ds(first, n)], out_hbm.at[pl.ds(token_of[item] + first, n)], semaphores.at[2, slot]
        )

        @pl.when(whole)
        def _():
            act(out(0, blocks.block_q))

        @pl.when(jnp.logical_not(whole))
        def _():
            jax.lax.fori_loop(0, queries_of[item], lambda token, _: act(out(token, 1)), None)

    def run_item(item, slot):
        """One item whose first block is on its way to buffer `slot`. Returns the slot of the next item's."""
        tile = jax.lax.rem(item, 2)
        begin, end = block_range(item)
        query_copy(item, tile).wait()
        _spread_queries(shape, q_buf, tile, q_ref)
        _reset(max_ref, sum_ref, acc_ref, sink_ref)

        def run_block(block, slot):
            @pl.when(block + 1 < end)
            def _():
                fetch_block(item, block + 1, 1 - slot)

            @pl.when(jnp.logical_and(block + 1 == end, item + 1 < count[0]))
            def _():
                query_copy(item + 1, 1 - tile).start()
                fetch_block(item + 1, block_range(item + 1)[0], 1 - slot)

            await_block(item, block, slot)
            lo, hi = live_keys(item)
            _compute_block(
                rule, blocks, shape, kv_buf.at[slot], block * blocks.block_kv, lo, hi, position_of[item],
                q_ref, max_ref, sum_ref, acc_ref,
            )  # fmt: skip
            return 1 - slot

        slot = jax.lax.fori_loop(begin, end, run_block, slot)

        @pl.when(item >= 2)
        def _():
            for_results(item - 2, tile, lambda copy: copy.wait())

        _gather_results(shape, sum_ref, acc_ref, out_buf, tile)
        for_results(item, tile, lambda copy: copy.start())
        return slot

    @pl.when(count[0] > 0)
    def _():
        query_copy(0, 0).start()
        fetch_block(0, block_range(0)[0], 0)

    jax.lax.fori_loop(0, count[0], run_item, 0)
    for back in (2, 1):

        @pl.when(count[0] >= back)
        def _(back=back):
            item = count[0] - back
            for_results(item, jax.lax.rem(item, 2), lambda copy: copy.wait())


def _spread_queries(shape: _Shape, q_buf, tile, q_ref) -> None:
    """The tile [block_q, N, H] as one matrix a KV head: rows of head g stand at g * block_q."""
    for kv_head, rows, heads in _moves(shape):
        piece = q_buf[tile, 0, heads, :] if shape.block_q == 1 else q_buf[tile, :, heads.start, :]
        q_ref[kv_head, rows, : shape.head_dim] = piece.astype(q_ref.dtype)
    if shape.lanes > shape.head_dim:  # the other half of the row meets V and must not count
        q_ref[:, :, shape.head_dim :] = jnp.zeros((*q_ref.shape[:2], shape.lanes - shape.head_dim), q_ref.dtype)


def _gather_results(shape: _Shape, sum_ref, acc_ref, out_buf, tile) -> None:
    """acc / sum as [block_q, N, H] in the result's tile."""
    for kv_head, rows, heads in _moves(shape):
        result = acc_ref[kv_head, rows, :] / sum_ref[kv_head, rows, :1]
        result = result[:, shape.lanes - shape.head_dim :]
        if shape.block_q == 1:
            out_buf[tile, 0, heads, :] = result
        else:
            out_buf[tile, :, heads.start, :] = result


def _moves(shape: _Shape) -> Iterator[tuple[int, slice, slice]]:
    """KV head, rows of its matrix, query heads: a whole group at once where each head has one row, else one by one."""
    step = shape.group if shape.block_q == 1 else 1
    for head in range(0, shape.heads, step):
        kv_head, place = divmod(head, shape.group)
        rows = slice(place * shape.block_q, (place + step) * shape.block_q)
        yield kv_head, rows, slice(head, head + step)


def _reset(max_ref, sum_ref, acc_ref, sink_ref) -> None:
    """The softmax before any key; a sink counts as a key that has been seen."""
    max_ref[...] = jnp.full(max_ref.shape, _FLOOR, jnp.float32) if sink_ref is None else sink_ref[...]
    sum_ref[...] = jnp.full(sum_ref.shape, 0.0 if sink_ref is None else 1.0, jnp.float32)
    acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)


def _compute_block(
    rule, blocks, shape, kv_ref, block_start, lo, hi, first_position, q_ref, max_ref, sum_ref, acc_ref
) -> None:
    """Fold the keys of one fetched block [K, block_kv, 2 * H] into the softmax, piece by piece."""
    step = blocks.compute_kv
    first_key, last_key = jnp.maximum(lo - block_start, 0), jnp.minimum(hi - block_start, blocks.block_kv)
    begin, end = _div(first_key, step), _div(last_key + step - 1, step)
    size = rule.layout.page_size
    _clear_rows(rule, kv_ref, begin * step, _div(first_key, size) * size)
    _clear_rows(rule, kv_ref, last_key, end * step)

    def piece(index, _):
        start = pl.multiple_of(index * step, step)
        row = jax.lax.broadcasted_iota(jnp.int32, (shape.rows, step), 0)
        position = first_position + jnp.bitwise_and(row, shape.block_q - 1)
        key = block_start + start + jax.lax.broadcasted_iota(jnp.int32, (shape.rows, step), 1)
        seen = key <= position
        if rule.sliding_window is not None:
            seen = jnp.logical_and(seen, key > position - rule.sliding_window)

        def one_head(head, _=None):
            kv = kv_ref[head, pl.ds(start, step), :].astype(rule.compute)
            _fold(rule, shape, q_ref, kv, seen, head, max_ref, sum_ref, acc_ref)

        if shape.rows <= _UNROLLED_ROWS and shape.kv_heads <= _UNROLLED_HEADS:
            for head in range(shape.kv_heads):  # small matmuls: their latencies overlap
                one_head(head)
        else:
            jax.lax.fori_loop(0, shape.kv_heads, one_head, None)

    jax.lax.fori_loop(begin, end, piece, None)


def _fold(rule: Rule, shape: _Shape, q_ref, kv, seen, head, max_ref, sum_ref, acc_ref) -> None:
    """One head's softmax with the keys and values kv [C, 2 * H] added."""
    packed = shape.lanes > shape.head_dim  # K and V in one row of lanes: both halves are multiplied, one counts
    keys, values = (kv, kv) if packed else (kv[:, : shape.head_dim], kv[:, shape.head_dim :])
    precision = jax.lax.Precision.HIGHEST if rule.compute == "float32" else None
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    scores = dot(q_ref[head], keys, (((1,), (1,)), ((), ()))) * rule.scale
    if rule.soft_cap is not None:
        scores = rule.soft_cap * jnp.tanh(scores / rule.soft_cap)
    scores = jnp.where(seen, scores, _FLOOR)
    largest_before = max_ref[head]
    largest = jnp.maximum(largest_before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - largest[:, :1])
    decay = jnp.exp(largest_before - largest)
    max_ref[head] = largest
    sum_ref[head] = decay * sum_ref[head] + jnp.sum(weights, axis=1, keepdims=True)
    new = dot(weights.astype(rule.compute), values, (((1,), (0,)), ((), ())))
    acc_ref[head] = decay[:, :1] * acc_ref[head] + new


def _clear_rows(rule: Rule, kv_ref, begin, end) -> None:
    """Zero the rows begin ... end - 1 of every head: 0 times what memory held before could be NaN.

    end is a multiple of the tile; of the tile that holds `begin` only the rows from there on are cleared.
    """
    rows = tile_rows(rule.layout.dtype)

    def clear(tile, _):
        start = pl.multiple_of(tile * rows, rows)
        old = kv_ref[:, pl.ds(start, rows), :]
        index = start + jax.lax.broadcasted_iota(jnp.int32, old.shape, 1)
        kv_ref[:, pl.ds(start, rows), :] = jnp.where(index < begin, old.astype(jnp.float32), 0.0).astype(old.dtype)

    jax.lax.fori_loop(_div(begin, rows), _div(end + rows - 1, rows), clear, None)


def _div(number, power_of_two: int):
    """number // power_of_two for numbers of 0 and more, as the shift it is."""
    return jax.lax.shift_right_logical(number, jnp.int32(power_of_two.bit_length() - 1))
