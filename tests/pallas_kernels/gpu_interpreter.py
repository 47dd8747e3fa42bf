"""Running Mosaic GPU kernels on a CPU: JAX's interpreter with simulated memories, barriers and a race detector."""

from contextlib import contextmanager

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


@contextmanager
def interpreted_gpu(*, detect_races: bool = True):
    """Every GPU kernel traced inside runs in the interpreter; uninitialised memory is NaN; a race raises."""
    params = plgpu.InterpretGPUParams(detect_races=detect_races, on_race="raise", uninitialized_memory="nan")
    with plgpu.force_gpu_interpret_mode(params):
        yield
        jax.effects_barrier()
