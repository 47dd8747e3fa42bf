"""Running Mosaic GPU kernels on a CPU: JAX's interpreter with simulated memories, barriers and a race detector."""

import dataclasses
from contextlib import contextmanager
from unittest import mock

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_copy_to_smem = plgpu.copy_gmem_to_smem


def _copy_whole_tiles(source, *arguments, **options):
    """As a chip does it: a copy into swizzled tiles of 8 rows does not start inside one; here it starts at the tile."""
    *before, indexer = source.transforms
    indices = tuple(
        dataclasses.replace(index, start=index.start - index.start % 8) if isinstance(index, pl.Slice) else index
        for index in indexer.indices
    )
    moved = dataclasses.replace(source, transforms=(*before, dataclasses.replace(indexer, indices=indices)))
    return _copy_to_smem(moved, *arguments, **options)


@contextmanager
def interpreted_gpu(*, detect_races: bool = True):
    """Every GPU kernel traced inside runs in the interpreter; uninitialised memory is NaN; a race raises."""
    params = plgpu.InterpretGPUParams(detect_races=detect_races, on_race="raise", uninitialized_memory="nan")
    with (
        plgpu.force_gpu_interpret_mode(params),
        mock.patch.object(plgpu, "copy_gmem_to_smem", _copy_whole_tiles),
    ):
        yield
        jax.effects_barrier()
