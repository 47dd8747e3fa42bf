"""quantized_dot by the C++ kernel in cpu.cc: weights are widened on their way into the product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.packed import FORMATS
from pallas_kernels.quantized_dot.weights import PackedWeights


def quantized_dot(x: jax.Array, packed: PackedWeights, layer: jax.Array) -> jax.Array:
    """See `pallas_kernels.quantized_dot`. Raises NotImplementedError where the C++ kernels are not built."""
    native.register()
    run = jax.ffi.ffi_call("jcb_quantized_dot", jax.ShapeDtypeStruct((x.shape[0], packed.out), jnp.float32))
    format = np.int32(FORMATS.index(packed.format))
    return run(x.astype(jnp.float32), packed.codes, packed.scales, packed.mins, layer, format=format)
