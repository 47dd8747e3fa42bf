"""Activations in 8 bits, block by block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.packed import BLOCK

_LEVELS = 127
_SMALLEST = 1e-30  # blocks below it are zero


def round_int8(x: jax.Array) -> jax.Array:
    """f32[T, in]: x with each block of 32 rounded to whole multiples, -127 ... 127, of its largest size / 127.

    A block with something infinite or not a number is not a number. Source: the 8-bit blocks of GGUF (Q8_0), with
    steps in float32.
    """
    blocks = x.astype(jnp.float32).reshape(len(x), -1, BLOCK)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    up = jnp.where(largest > _SMALLEST, _LEVELS / largest, 0.0)
    rounded = jnp.round(blocks * up) * (largest * (1.0 / _LEVELS))
    return jnp.where(jnp.isfinite(largest), rounded, jnp.nan).reshape(x.shape)
