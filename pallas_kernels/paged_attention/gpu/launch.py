"""Starting a Mosaic GPU kernel, on every JAX that jcb runs with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_TAKES_COST = "cost_estimate" in inspect.signature(plgpu.kernel).parameters  # JAX 0.11 has no such argument


def launch(
    body: Callable[..., None],
    name: str,
    *,
    grid: Mapping[str, int],
    threads: int,
    scratch: Mapping[str, Any],
    cost: pl.CostEstimate,
    out: tuple[Any, ...] = (),
) -> Any:
    """A function of arrays and Refs that runs `body(*inputs, *outputs, **scratch)` on a grid of thread blocks.

    grid: axis names and sizes. threads: warpgroups of a thread block, on axis "warpgroup". out: shapes of results.
    """
    optional: dict[str, Any] = {"cost_estimate": cost} if _TAKES_COST else {}
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=dict(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=threads,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **optional,
    )


def store(ref: Any, value: Any, *, tiled: bool = True) -> None:
    """Registers to shared memory. tiled: it is swizzled, and the compiler must find a way without bank conflicts."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=tiled)
    else:  # JAX 0.11
        ref[...] = value
