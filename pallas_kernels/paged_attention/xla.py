"""Paged attention in plain XLA: runs everywhere, and its work follows the live context.

Decoding rows are sorted by length and handled eight at a time, each group over its own number of key blocks. Prompt
chunks are cut into tiles of queries, each tile over its own number of key blocks. All trip counts are values, not
shapes, so one program serves every context length and longer allowed contexts cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import KVLayout
from pallas_kernels.quantise import fold_key_scale, fold_value_scale
from pallas_kernels.tuning import Phase, ShapeClass, tuned_blocks


@dataclass(frozen=True)
class DecodeBlocks:
    """Tile sizes of decoding rows. rows: handled together. block_kv: keys read in one turn."""

    rows: int = 8
    block_kv: int = 128


@dataclass(frozen=True)
class ChunkBlocks:
    """Tile sizes of prompt chunks. block_q: queries a tile. block_kv: keys read in one turn."""

    block_q: int = 64
    block_kv: int = 256


_FLOOR = -1e30  # finite, so that a fully masked block leaves exp(-inf - floor) = 0 and no NaN


class _Softmax(NamedTuple):
    """Running state of a softmax over blocks of keys, all float32."""

    largest: jax.Array  # [..., M]
    total: jax.Array  # [..., M]
    weighted: jax.Array  # [..., M, H]

    @staticmethod
    def init(shape: tuple[int, ...], head_dim: int) -> _Softmax:
        return _Softmax(jnp.full(shape, _FLOOR), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))

    def add(self, scores: jax.Array, values: jax.Array) -> _Softmax:
        """Fold in scores [..., M, C] (-inf where unseen) and values [..., C, H] (0 where nobody sees them)."""
        largest = jnp.maximum(self.largest, scores.max(-1))
        decay = jnp.exp(self.largest - largest)
        weights = jnp.exp(scores - largest[..., None])
        new = _matmul(weights.astype(values.dtype), values)
        return _Softmax(largest, self.total * decay + weights.sum(-1), self.weighted * decay[..., None] + new)

    def result(self) -> jax.Array:
        """[..., M, H]; zeros where nothing was seen."""
        return self.weighted / jnp.where(self.total == 0.0, 1.0, self.total)[..., None]


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
    decode_blocks: DecodeBlocks | None = None,
    chunk_blocks: ChunkBlocks | None = None,
) -> jax.Array:
    """See `pallas_kernels.paged_attention`. decode_blocks, chunk_blocks: tile sizes; None takes the tuned ones, or
    the defaults.
    """
    one = decode_blocks or DecodeBlocks(**_tuned(layout, q, "decode"))
    many = chunk_blocks or ChunkBlocks(**_tuned(layout, q, "chunk"))
    q = fold_key_scale(q, kv_scales)
    rows = page_table.shape[0]
    q_lens = cu_q_lens[1:] - cu_q_lens[:-1]
    live = jnp.arange(rows, dtype=jnp.int32) < num_seqs
    rule = _Rule(layout, scale, sliding_window, soft_cap, sinks)
    decoding = live & (q_lens == 1)
    out = _decode(rule, one, q, kv_pages, layer, page_table, jnp.where(decoding, kv_lens, 0), cu_q_lens[:-1])
    if max_q_len != 1:
        chunk_lens = jnp.where(live & (q_lens > 1), q_lens, 0)
        out = _prefill(rule, many, q, kv_pages, layer, page_table, kv_lens, cu_q_lens[:-1], chunk_lens, out)
    return fold_value_scale(out, kv_scales)


def candidates(layout: KVLayout, num_heads: int, phase: Phase) -> tuple[DecodeBlocks | ChunkBlocks, ...]:
    """Tile sizes worth measuring for a shape."""
    del layout, num_heads
    if phase == "decode":
        return tuple(DecodeBlocks(rows, block) for rows in (2, 4, 8, 16) for block in (64, 128, 256))
    return tuple(ChunkBlocks(block_q, block) for block_q in (32, 64, 128) for block in (128, 256, 512))


def default_blocks(layout: KVLayout, num_heads: int, phase: Phase) -> DecodeBlocks | ChunkBlocks:
    """Tile sizes where nothing is tuned."""
    del layout, num_heads
    return DecodeBlocks() if phase == "decode" else ChunkBlocks()


def _tuned(layout: KVLayout, q: jax.Array, phase: Phase) -> dict[str, int]:
    return (
        tuned_blocks("paged_attention", "xla", layout.platform, ShapeClass.of(layout, q.shape[1], q.dtype.name, phase))
        or {}
    )


class _Rule(NamedTuple):
    """What holds for the whole call."""

    layout: KVLayout
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: jax.Array | None

    def softmax(self, leading: tuple[int, ...], num_heads: int, per_head: int, head_dim: int) -> _Softmax:
        """The state before any key, for scores [*leading, K, G * per_head, C]: sinks count as seen."""
        kv_heads = self.layout.kv_heads
        shape = (*leading, kv_heads, num_heads // kv_heads * per_head)
        empty = _Softmax.init(shape, head_dim)
        if self.sinks is None:
            return empty
        sinks = jnp.repeat(self.sinks.astype(jnp.float32), per_head).reshape(shape[-2:])
        return empty._replace(
            largest=jnp.broadcast_to(sinks.reshape((1,) * len(leading) + shape[-2:]), shape),
            total=jnp.ones(shape),
        )

    def first_key(self, position: jax.Array) -> jax.Array:
        """The earliest key that a query at `position` sees."""
        if self.sliding_window is None:
            return jnp.zeros_like(position)
        return jnp.maximum(position - self.sliding_window + 1, 0)

    def scores(self, q: jax.Array, keys: jax.Array, seen: jax.Array) -> jax.Array:
        """Scores of q [..., M, H] and keys [..., C, H]: f32[..., M, C], -inf where not seen."""
        scores = _matmul(q, jnp.swapaxes(keys, -1, -2)) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        return jnp.where(seen, scores, -jnp.inf)

    def pages_per_block(self, page_table: jax.Array, block: int) -> int:
        return min(max(block // self.layout.page_size, 1), page_table.shape[1])


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    precision = "highest" if a.dtype == jnp.float32 else None
    return jnp.matmul(a, b, precision=precision, preferred_element_type=jnp.float32)


def _pad_pages(page_table: jax.Array, pages: int) -> jax.Array:
    """The table widened with dummy pages so that every block of `pages` entries exists."""
    return jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % pages)))


def _decode(rule, blocks: DecodeBlocks, q, kv_pages, layer, page_table, lens, q_starts) -> jax.Array:
    """Rows with one query each; `lens` is 0 for all others. Returns [T, N, H] with zeros elsewhere."""
    group = min(blocks.rows, lens.shape[0])
    pages = rule.pages_per_block(page_table, blocks.block_kv)
    block = pages * rule.layout.page_size
    padding = -lens.shape[0] % group
    order = jnp.argsort(-lens, stable=True).astype(jnp.int32)
    order = jnp.pad(order, (0, padding), constant_values=lens.shape[0])
    lens = jnp.pad(lens, (0, 1))
    q_starts = jnp.pad(q_starts, (0, 1), constant_values=q.shape[0])
    table = _pad_pages(jnp.pad(page_table, ((0, 1), (0, 0))), pages)
    heads = (rule.layout.kv_heads, q.shape[1] // rule.layout.kv_heads)

    def run_group(index: jax.Array, out: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(order, index * group, group)
        row_lens = lens[rows]
        first = rule.first_key(row_lens - 1)
        row_table = table[rows]
        queries = q.at[q_starts[rows]].get(mode="clip").reshape(group, *heads, q.shape[2])

        def run_block(step: jax.Array, softmax: _Softmax) -> _Softmax:
            ids = jax.lax.dynamic_slice_in_dim(row_table, step * pages, pages, axis=1)
            places = (step * block + jnp.arange(block, dtype=jnp.int32))[None, :]
            seen = (places < row_lens[:, None]) & (places >= first[:, None])  # [group, block]
            values = rule.layout.values(kv_pages, layer, ids).astype(q.dtype)
            values = jnp.where(seen[:, None, :, None], values, 0)
            keys = rule.layout.keys(kv_pages, layer, ids).astype(q.dtype)
            scores = rule.scores(queries, keys, seen[:, None, None])
            return softmax.add(scores, values)

        begin = jnp.min(jnp.where(row_lens > 0, first, jnp.int32(2**30))) // block
        end = (jnp.max(row_lens) + block - 1) // block
        softmax = jax.lax.fori_loop(begin, end, run_block, rule.softmax((group,), q.shape[1], 1, q.shape[2]))
        result = softmax.result().astype(q.dtype).reshape(group, *q.shape[1:])
        targets = jnp.where(row_lens > 0, q_starts[rows], q.shape[0])
        return out.at[targets].set(result, mode="drop")

    groups = (jnp.sum(lens > 0) + group - 1) // group
    return jax.lax.fori_loop(0, groups, run_group, jnp.zeros_like(q))


def _prefill(rule, blocks: ChunkBlocks, q, kv_pages, layer, page_table, kv_lens, q_starts, q_lens, out) -> jax.Array:
    """Rows with several queries; `q_lens` is 0 for all others. Writes their tokens into `out` [T, N, H]."""
    tile = min(blocks.block_q, q.shape[0])
    pages = rule.pages_per_block(page_table, blocks.block_kv)
    block = pages * rule.layout.page_size
    table = _pad_pages(page_table, pages)
    kv_heads, head_dim = rule.layout.kv_heads, q.shape[2]
    group = q.shape[1] // kv_heads
    ends = jnp.cumsum((q_lens + tile - 1) // tile)
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, tile), (0, 0), (0, 0)))

    def run_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
        offset = (index - jnp.where(row > 0, ends[row - 1], 0)) * tile
        start = q_starts[row] + offset
        count = jnp.minimum(q_lens[row] - offset, tile)
        first_position = kv_lens[row] - q_lens[row] + offset
        positions = first_position + jnp.arange(tile, dtype=jnp.int32)
        queries = jax.lax.dynamic_slice_in_dim(q, start, tile)
        queries = queries.reshape(tile, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        queries = queries.reshape(kv_heads, group * tile, head_dim)
        row_table = table[row]

        def run_block(step: jax.Array, softmax: _Softmax) -> _Softmax:
            ids = jax.lax.dynamic_slice_in_dim(row_table, step * pages, pages)
            places = (step * block + jnp.arange(block, dtype=jnp.int32))[None, :]
            seen = (places <= positions[:, None]) & (places >= rule.first_key(positions)[:, None])  # [tile, block]
            live = (places < kv_lens[row]) & (places >= rule.first_key(first_position))
            values = rule.layout.values(kv_pages, layer, ids).astype(q.dtype)
            values = jnp.where(live[:, :, None], values, 0)
            keys = rule.layout.keys(kv_pages, layer, ids).astype(q.dtype)
            seen = jnp.tile(seen & live, (group, 1))[None]
            return softmax.add(rule.scores(queries, keys, seen), values)

        begin = rule.first_key(first_position) // block
        end = (first_position + count + block - 1) // block
        init = rule.softmax((), q.shape[1], tile, head_dim)
        result = jax.lax.fori_loop(begin, end, run_block, init).result().astype(out.dtype)
        result = result.reshape(kv_heads, group, tile, head_dim).transpose(2, 0, 1, 3)
        result = result.reshape(tile, kv_heads * group, head_dim)
        old = jax.lax.dynamic_slice_in_dim(out, start, tile)
        mine = jnp.arange(tile, dtype=jnp.int32)[:, None, None] < count
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(mine, result, old), start, 0)

    return jax.lax.fori_loop(0, ends[-1], run_tile, out)[:-tile]
