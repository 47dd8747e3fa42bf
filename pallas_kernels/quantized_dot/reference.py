"""The specification of quantized_dot: the weights as numbers, then one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_dot.weights import PackedWeights, dequantise


def quantized_dot(x: jax.Array, packed: PackedWeights, layer: jax.Array) -> jax.Array:
    """See `pallas_kernels.quantized_dot`."""
    return jnp.dot(x.astype(jnp.float32), dequantise(packed, layer).T, precision=jax.lax.Precision.HIGHEST)
