"""kv_write on TPU (Mosaic): aligned windows of pages are read, changed and written back in place.

The smallest thing that TPU memory writes is a tile of several rows, so a new token costs the tile that holds it. One
grid step handles one tile: it comes in, takes the new rows, goes out, while the next one is already on its way. The
grid is as long as there are tiles to change; no two of a call are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import DUMMY_PAGE, KVLayout
from pallas_kernels.tpu_tiles import refuse_layout, tile_rows


class _Windows(NamedTuple):
    """Which tiles change, one entry a window, and what they take in. Windows at and beyond `count` do nothing."""

    count: jax.Array  # i32[]
    page: jax.Array  # i32[M]
    tile: jax.Array  # i32[M] which tile of that page
    low: jax.Array  # i32[M] rows low ... high - 1 of the tile are new
    high: jax.Array  # i32[M]
    first_token: jax.Array  # i32[M] the new token that goes to row `low`


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
    max_q_len: int | None = None,
) -> jax.Array:
    """See `pallas_kernels.kv_write`. Refuses pages that are not whole tiles."""
    refuse_layout(layout)
    rows, tokens = tile_rows(layout.dtype), k.shape[0]
    windows = _windows(page_table, kv_lens, cu_q_lens, num_seqs, layout.page_size, rows, tokens, max_q_len)
    source = windows.first_token[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :] - windows.low[:, None]
    new = layout.pack(k, v).at[source].get(mode="clip")  # [M, rows, K, 2 * H]
    new = new.transpose(0, 2, 1, 3)
    planes, _, width = layout.page_shape
    tile = pl.BlockSpec(
        (None, None, planes, rows, width),
        lambda i, layer, page, tile, low, high: (layer[0], page[i], 0, tile[i], 0),
    )
    moved = new.shape[0] * rows * planes * width * jnp.dtype(layout.dtype).itemsize
    return pl.pallas_call(
        _change_tile,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(windows.count,),
            in_specs=[pl.BlockSpec((None, planes, rows, width), lambda i, *_: (i, 0, 0, 0)), tile],
            out_specs=tile,
        ),
        out_shape=jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        input_output_aliases={6: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=3 * moved),
        name="kv_write",
    )(layer[None], windows.page, windows.tile, windows.low, windows.high, new, kv_pages)


def _change_tile(layer, page, tile, low, high, new_ref, old_ref, out_ref) -> None:
    """out = old with the rows low ... high - 1 taken from new; all [K, rows, 2 * H]."""
    del layer, page, tile
    index = pl.program_id(0)
    row = jax.lax.broadcasted_iota(jnp.int32, new_ref.shape, 1)
    is_new = (row >= low[index]) & (row < high[index])
    wide = jnp.float32  # selects of narrow types need masks that not every chip has; the round trip is exact
    out_ref[...] = jnp.where(is_new, new_ref[...].astype(wide), old_ref[...].astype(wide)).astype(out_ref.dtype)


def _windows(page_table, kv_lens, cu_q_lens, num_seqs, page_size, rows, tokens, max_q_len) -> _Windows:
    """The tiles that T tokens in B rows of the batch touch: at most T, and T / rows + 2 B."""
    batch = page_table.shape[0]
    bound = batch if max_q_len == 1 else min(tokens, tokens // rows + 2 * batch)
    q_lens = jnp.where(jnp.arange(batch, dtype=jnp.int32) < num_seqs, cu_q_lens[1:] - cu_q_lens[:-1], 0)
    start = kv_lens - q_lens
    first_tile = start // rows
    counts = jnp.where(q_lens > 0, (kv_lens - 1) // rows - first_tile + 1, 0)
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    window = jnp.arange(bound, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, window, side="right").astype(jnp.int32), batch - 1)
    live = window < ends[-1]
    tile = first_tile[row] + window - (ends[row] - counts[row])  # counted from the start of the sequence
    low = jnp.maximum(start[row] - tile * rows, 0)
    high = jnp.minimum(kv_lens[row] - tile * rows, rows)
    per_page = page_size // rows
    return _Windows(
        count=jnp.maximum(ends[-1], 1),  # an empty grid is not allowed; its one window changes nothing
        page=jnp.where(live, page_table[row, jnp.where(live, tile // per_page, 0)], DUMMY_PAGE),
        tile=jnp.where(live, tile % per_page, 0),
        low=jnp.where(live, low, 0),
        high=jnp.where(live, high, 0),
        first_token=cu_q_lens[row] + tile * rows + low - start[row],
    )
