"""The specification of quantized_dot: the weights as numbers, then one product."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_dot.rounding import round_int8
from pallas_kernels.quantized_dot.weights import PackedWeights, dequantise


def quantized_dot(
    x: jax.Array, packed: PackedWeights, layer: jax.Array, live: jax.Array, *, rounds: bool = False
) -> jax.Array:
    """See `pallas_kernels.quantized_dot`. rounds: x to 8 bits."""
    x = round_int8(x) if rounds else x.astype(jnp.float32)
    return jnp.dot(x, dequantise(packed, layer).T, precision=jax.lax.Precision.HIGHEST)
