"""quantized_dot by the C++ kernel in cpu.cc: weights are widened on their way into the product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.packed import FORMATS
from pallas_kernels.quantized_dot.weights import PackedWeights

HANDLER = "pallas_kernels_quantized_dot"


def quantized_dot(
    x: jax.Array,
    packed: PackedWeights,
    layer: jax.Array,
    live: jax.Array,
    *,
    rounds: bool = False,
    instruction_set: str = "",
) -> jax.Array:
    """See `pallas_kernels.quantized_dot`. rounds: x to 8 bits. instruction_set: "" is the best that the processor has,
    else at most this.

    Raises NotImplementedError where the C++ kernels are not built.
    """
    native.check_instruction_set(instruction_set)
    native.register()
    run = jax.ffi.ffi_call(HANDLER, jax.ShapeDtypeStruct((x.shape[0], packed.out), jnp.float32))
    format = np.int32(FORMATS.index(packed.format))
    arrays = (x.astype(jnp.float32), packed.codes, packed.scales, packed.mins, layer, live)
    return run(*arrays, format=format, round=rounds, isa=instruction_set)
