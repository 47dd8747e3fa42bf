"""The pieces of a decoder layer, as pure functions on [T, ...] arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_dot import PackedWeights, quantized_dot


@dataclass(frozen=True)
class PackedLayer:
    """One layer of packed weights, as `linear` takes it: the whole array and an index, so that nothing is copied.

    live, activations, platform, implementation: as `pallas_kernels.quantized_dot` takes them.
    """

    weights: PackedWeights
    layer: jax.Array | int
    live: jax.Array | None
    activations: str
    platform: str | None
    implementation: str


Weight = jax.Array | PackedLayer


def linear(x: jax.Array, weight: Weight) -> jax.Array:
    """x [T, in] times weight [out, in]: [T, out] in x's dtype, summed in float32."""
    return linear_f32(x, weight).astype(x.dtype)


def linear_f32(x: jax.Array, weight: Weight) -> jax.Array:
    """x [T, in] times weight [out, in]: f32[T, out]."""
    if isinstance(weight, PackedLayer):
        where = {"platform": weight.platform, "implementation": weight.implementation}
        packed, live = weight.weights, weight.live
        return quantized_dot(x, packed, weight.layer, live=live, activations=weight.activations, **where)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] over its root mean square, times weight [D]; computed in float32."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any] | None) -> np.ndarray:
    """Radians a position for each of head_dim / 2 rotations, f32.

    scaling: None, or Hugging Face's rope_scaling of type "default", "linear" or "llama3", or what a GGUF file states
    outright: type "frequency_factors" with one divisor a rotation.
    Raises ValueError for other types.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies.astype(np.float32)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies.astype(np.float32)
    if kind == "linear":
        return (frequencies / scaling["factor"]).astype(np.float32)
    if kind == "llama3":
        return _llama3_frequencies(frequencies, scaling).astype(np.float32)
    if kind == "frequency_factors":
        return (frequencies / np.asarray(scaling["factors"], np.float64)).astype(np.float32)
    raise ValueError(f"rope_scaling type {kind!r} is not supported; supported: default, linear, llama3")


def _llama3_frequencies(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Long wavelengths slowed by `factor`, short ones kept, those between blended. Source: Llama 3.1's config."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / factor)


def rope_table(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines f32[T, 1, head_dim / 2] of positions i32[T]."""
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [T, heads, head_dim]: the first half of each head against the second (Hugging Face order)."""
    cos, sin = table
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def swiglu(x: jax.Array, w_gate_up: Weight, w_down: Weight) -> jax.Array:
    """x [T, D] through silu(gate) * up; w_gate_up [2 * F, D] holds gate's rows, then up's; w_down [D, F]."""
    gate, up = jnp.split(linear_f32(x, w_gate_up), 2, axis=-1)
    return linear((jax.nn.silu(gate) * up).astype(x.dtype), w_down)
