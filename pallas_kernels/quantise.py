"""Stored numbers of 8 bits: a stored K or V times its head's scale is the value.

The scales never enter a kernel: K's go into the queries before it, V's into the result after it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def quantise(x: jax.Array, scale: jax.Array | None, dtype: str) -> jax.Array:
    """x [T, K, H] as it is stored: x / scale[K] in `dtype`, rounded and clipped for 8 bits; plain x without a scale."""
    target = jnp.dtype(dtype)
    if scale is not None:
        x = x.astype(jnp.float32) / scale[None, :, None]
    if target == jnp.int8:
        return jnp.clip(jnp.round(x.astype(jnp.float32)), -127, 127).astype(target)
    if target.itemsize == 1:
        largest = jnp.finfo(target).max.astype(jnp.float32)  # beyond it the cast would give NaN
        return jnp.clip(x.astype(jnp.float32), -largest, largest).astype(target)
    return x.astype(target)


def fold_key_scale(q: jax.Array, kv_scales: jax.Array | None) -> jax.Array:
    """Queries [T, N, H] times the K scale of their head (kv_scales f32[2, K])."""
    return q if kv_scales is None else _times(q, kv_scales[0])


def fold_value_scale(out: jax.Array, kv_scales: jax.Array | None) -> jax.Array:
    """Results [T, N, H] times the V scale of their head (kv_scales f32[2, K])."""
    return out if kv_scales is None else _times(out, kv_scales[1])


def _times(x: jax.Array, scale: jax.Array) -> jax.Array:
    factor = jnp.repeat(scale, x.shape[1] // scale.shape[0])[None, :, None]
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
