"""The second pass of split decoding on GPUs: the parts of each row become its result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.kernel import tile_tokens, token_rows
from pallas_kernels.paged_attention.gpu.launch import launch, store
from pallas_kernels.paged_attention.gpu.work import Splits

_FLOOR = -1e30


def combine(parts: tuple[jax.Array, jax.Array], splits: Splits, q_starts: jax.Array, out: Any) -> None:
    """Write rows that have parts into the Ref `out` [T, K, G, H] at their tokens.

    parts: results and log2 of softmax sums, f32[items, parts, lone_rows, H], see `attend`.
    """
    rows, (_, per_item, height, head_dim), heads = q_starts.shape[0], parts[0].shape, out.shape[1]
    group = out.shape[2]

    def body(results: Any, sums: Any, first: Any, count: Any, tokens: Any, out: Any, result: Any) -> None:
        row, head = lax.axis_index("row"), lax.axis_index("head")

        @pl.when(count[row] > 0)
        def _join() -> None:
            def add(part: jax.Array, carry: tuple) -> tuple:
                weighted, largest, total = carry
                item = first[row] + lax.div(part, jnp.int32(per_item)) * heads + head
                where = (item, lax.rem(part, jnp.int32(per_item)))
                value, level = (
                    plgpu.load(results.at[where], optimized=False),
                    plgpu.load(sums.at[where], optimized=False),
                )
                top = jnp.maximum(largest, level)
                decay, weight = jnp.exp2(largest - top), jnp.exp2(level - top)
                return weighted * decay + value * weight, top, total * decay + weight

            shape = (height, head_dim)
            strided = plgpu.Layout.WG_STRIDED(shape, vec_size=2)
            zeros, floor = (plgpu.layout_cast(jnp.full(shape, value, jnp.float32), strided) for value in (0.0, _FLOOR))
            initial = (zeros, floor, zeros)
            weighted, _, total = lax.fori_loop(0, count[row] * per_item, add, initial)
            store(result, (weighted / total).astype(out.dtype), tiled=False)
            plgpu.commit_smem()
            start = lax.rem(tokens[row], jnp.int32(tile_tokens(group))) * token_rows(group)
            plgpu.copy_smem_to_gmem(result.at[pl.ds(start, group)], out.at[tokens[row], head])
            plgpu.wait_smem_to_gmem(0)

    cost = pl.CostEstimate(
        flops=4 * rows * heads * height * head_dim,
        transcendentals=2 * rows * heads * height * head_dim,
        bytes_accessed=2 * parts[0].size * 4 + out.size * jnp.dtype(out.dtype).itemsize,
    )
    scratch = {"result": plgpu.SMEM((height, head_dim), out.dtype)}
    call = launch(
        body, "paged_attention_combine", grid={"row": rows, "head": heads}, threads=1, scratch=scratch, cost=cost
    )
    call(*parts, *splits, q_starts, out)
