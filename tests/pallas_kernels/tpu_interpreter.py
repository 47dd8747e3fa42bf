"""Running TPU kernels on a CPU: JAX's interpreter with simulated memories, DMAs and a race detector."""

from contextlib import contextmanager

import jax
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def interpreted_tpu():
    """Every TPU kernel traced inside runs in the interpreter; uninitialised memory is NaN; a race raises."""
    params = pltpu.InterpretParams(
        detect_races=True, on_race="raise", uninitialized_memory="nan", dma_execution_mode="on_wait"
    )
    with pltpu.force_tpu_interpret_mode(params):
        yield
        jax.effects_barrier()
