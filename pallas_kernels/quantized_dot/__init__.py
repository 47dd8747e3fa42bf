"""x times weights that stay packed in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import call
from pallas_kernels.packed import ACTIVATIONS, FORMATS, FOUR_BIT_FORMATS
from pallas_kernels.quantized_dot.weights import PackedWeights as PackedWeights
from pallas_kernels.quantized_dot.weights import dequantise as dequantise
from pallas_kernels.quantized_dot.weights import take_rows as take_rows


def quantized_dot(
    x: jax.Array,
    packed: PackedWeights,
    layer: jax.Array | int = 0,
    *,
    live: jax.Array | int | None = None,
    activations: str = "full",
    platform: str | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """f32[T, out]: x [T, in], float32 or bfloat16, times the weights [out, in] of one layer of `packed`.

    layer: i32[], inside `packed` (out of range is the caller's mistake: XLA clamps it, the C++ kernel refuses it).
    The whole array goes in and nothing of it is copied. Products are those of x and of the exact weights in float32;
    only the order of the sum differs between implementations, and in the C++ kernel it does not depend on T.
    live: i32[], rows of x that count, all if None: later ones are padding, and what comes out for them means nothing
    (the C++ kernel spends no time on them and gives zeros).
    activations: "full", or "int8", which rounds x to 8 bits before it meets 4-bit weights (see `rounding.round_int8`),
    in every implementation; weights of 8 bits meet x as it is.
    platform: "cpu", "gpu" or "tpu", where the program will run; None asks JAX. Raises ValueError when shapes do not
    fit together.
    """
    if packed.format not in FORMATS:
        raise ValueError(f"{packed.format=} is not one of {', '.join(FORMATS)}")
    shape = packed.packed_shape
    for name, (want, dtype) in shape.arrays.items():
        array = getattr(packed, name)
        if array.shape != want or array.dtype != dtype:
            raise ValueError(f"{name} of {shape} must be {dtype}{list(want)}, got {array.dtype}{list(array.shape)}")
    if x.ndim != 2 or x.shape[1] != shape.inner:
        raise ValueError(f"x must be [T, {shape.inner}], got {x.shape=}")
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"x must be float32 or bfloat16, got {x.dtype}")
    if activations not in ACTIVATIONS:
        raise ValueError(f"{activations=} is not one of {', '.join(ACTIVATIONS)}")
    platform = platform or jax.default_backend()
    rounds = activations == "int8" and packed.format in FOUR_BIT_FORMATS
    scalars = (jnp.asarray(layer, jnp.int32), jnp.asarray(len(x) if live is None else live, jnp.int32))
    return call("quantized_dot", implementation, platform, x, packed, *scalars, rounds=rounds)
