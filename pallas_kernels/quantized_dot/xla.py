"""quantized_dot in plain XLA: some hundred outputs at a time are widened and multiplied.

Each call writes out * in float32 weights and reads them again, in pieces that stay in a CPU's cache: never more than
one piece exists, and none is kept. Weights that are used often and fit memory are better kept dense where no kernel is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.packed import GROUP
from pallas_kernels.quantized_dot.rounding import round_int8
from pallas_kernels.quantized_dot.weights import PackedWeights, dequantise

_PIECE_GROUPS = 64


def quantized_dot(
    x: jax.Array, packed: PackedWeights, layer: jax.Array, live: jax.Array, *, rounds: bool = False
) -> jax.Array:
    """See `pallas_kernels.quantized_dot`. rounds: x to 8 bits."""
    x = round_int8(x) if rounds else x.astype(jnp.float32)
    groups = packed.packed_shape.groups
    size = max(size for size in range(1, min(_PIECE_GROUPS, groups) + 1) if groups % size == 0)

    def cut(array: jax.Array) -> jax.Array:
        """One layer of [layers, G, ...] as [G / size, size, ...]."""
        return array[layer].reshape(groups // size, size, *array.shape[2:])

    def one_piece(piece: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        weights = dequantise(PackedWeights(*(a[None] for a in piece), packed.format, size * GROUP), 0)
        return jnp.dot(x, weights.T, precision=jax.lax.Precision.HIGHEST)

    mins = cut(packed.mins) if packed.mins.size else jnp.zeros((groups // size, 0), jnp.float16)
    y = jax.lax.map(one_piece, (cut(packed.codes), cut(packed.scales), mins))
    return y.transpose(1, 0, 2).reshape(x.shape[0], groups * GROUP)[:, : packed.out]
