"""The attention kernel of Hopper GPUs, for decoding rows and prompt tiles alike.

Persistent thread blocks walk a work list. In each, one warpgroup fetches (TMA, page by page, as many blocks ahead as
there are stages, and on into the next item) and `consumers` warpgroups compute.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu.blocks import ROWS
from pallas_kernels.paged_attention.gpu.compute import compute
from pallas_kernels.paged_attention.gpu.fetch import fetch
from pallas_kernels.paged_attention.gpu.kernel import Kernel, Refs
from pallas_kernels.paged_attention.gpu.launch import launch
from pallas_kernels.paged_attention.gpu.work import Work

_TRANSFORMS: tuple[Any, Any] = (plgpu.TilingTransform, plgpu.SwizzleTransform)  # type checkers take them for abstract


def attend(
    kernel: Kernel,
    work: Work,
    layer: jax.Array,
    page_table: jax.Array,
    q: jax.Array,
    kv_pages: jax.Array,
    sinks: jax.Array,
    cost: pl.CostEstimate,
    out: Any = None,
) -> Any:
    """Run `kernel` over `work`. q: [K, T * height, H]. sinks: f32[K, 64], of each query row, in base 2.

    Prompt tiles are written into the Ref `out` [T, K, G, H]. Decoding returns the parts that `combine` joins:
    (results, log2 of softmax sums), both f32[items, stride, lone_rows, H].
    """
    planes = kv_pages.reshape(-1, kernel.layout.page_size, kernel.layout.head_dim)
    inputs = (*work, layer.reshape(1), page_table.reshape(-1), q, planes, sinks)
    part = jax.ShapeDtypeStruct(
        (work.items.shape[0], kernel.stride, kernel.lone_rows, kernel.layout.head_dim), jnp.float32
    )

    def body(*arguments: Any, **scratch: Any) -> None:
        _run(kernel, Refs(**dict(zip(Refs._fields, arguments, strict=False)), **scratch))

    call = launch(
        body,
        "paged_attention_decode" if kernel.split else "paged_attention_prefill",
        grid={"block": kernel.sizes.blocks},
        threads=kernel.sizes.consumers + 1,
        scratch=_scratch(kernel),
        cost=cost,
        out=(part, part) if kernel.split else (),
    )
    return call(*inputs) if kernel.split else call(*inputs, out)


def _run(kernel: Kernel, refs: Refs) -> None:
    sizes, warpgroup = kernel.sizes, lax.axis_index("warpgroup")
    turns = lax.div(refs.count[0] - lax.axis_index("block") + (sizes.blocks - 1), jnp.int32(sizes.blocks))

    @pl.when(warpgroup == sizes.consumers)
    def _fetch() -> None:
        if sizes.consumers > 1:
            plgpu.set_max_registers(24, action="decrease")
        steps = lax.fori_loop(0, turns, lambda turn, step: fetch(kernel, refs, turn, step), jnp.int32(0))
        _drain(refs.free, sizes.stages, steps)
        _drain(refs.q_free, 2, turns)

    @pl.when(warpgroup < sizes.consumers)
    def _compute() -> None:
        if sizes.consumers > 1:
            plgpu.set_max_registers(240, action="increase")
        lax.fori_loop(0, turns, lambda turn, step: compute(kernel, refs, turn, step), jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)


def _drain(barriers: Any, count: int, uses: jax.Array) -> None:
    """Wait for what was last handed to the consumers, so that every phase of every barrier has been seen."""
    for index in range(count):

        @pl.when(uses > index)
        def _wait(index: int = index) -> None:
            plgpu.barrier_wait(barriers.at[index])


def _scratch(kernel: Kernel) -> dict[str, Any]:
    """Shared memory and barriers by their names in `Refs`."""
    sizes, head_dim, count = kernel.sizes, kernel.layout.head_dim, kernel.sizes.consumers
    scratch = {
        "q_tile": _tiled((2, kernel.query_tiles, ROWS, head_dim), kernel.dtype),
        "blocks": _tiled((sizes.stages, 2, sizes.block_kv, head_dim), kernel.layout.dtype),
        "result": plgpu.SMEM((count, ROWS, sizes.columns), jnp.float32 if kernel.split else kernel.dtype),
        "q_full": plgpu.Barrier(num_arrivals=kernel.query_tiles, num_barriers=2),
        "q_free": plgpu.Barrier(num_arrivals=count, num_barriers=2),
        "full": plgpu.Barrier(num_arrivals=2 * (sizes.block_kv // kernel.chunk), num_barriers=sizes.stages),
        "free": plgpu.Barrier(num_arrivals=count if kernel.shares else 1, num_barriers=sizes.stages),
    }
    if not sizes.weights_in_registers:
        scratch["weights"] = _tiled((count, ROWS, sizes.block_kv), kernel.dtype)
    if kernel.layout.is_quantised:
        scratch["wide"] = _tiled((1 if kernel.shares else count, 2, sizes.block_kv, head_dim), kernel.dtype)
    if kernel.shares:
        scratch["together"] = plgpu.Barrier(num_arrivals=count)
    return scratch


def _tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in the swizzled tiles that TMA writes and wgmma reads, 128 bytes wide or as wide as a row."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(128, shape[-1] * itemsize)
    tiling, swizzling = _TRANSFORMS
    transforms = (tiling((8, swizzle // itemsize)), swizzling(swizzle))
    return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)
