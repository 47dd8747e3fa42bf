"""Packed weights as a pytree, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.packed import BLOCK, FOUR_BIT_FORMATS, GROUP, PackedShape


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "scales", "mins"),
    meta_fields=("format", "out"),
)
@dataclass(frozen=True)
class PackedWeights:
    """Weights [layers, out, in] as `pallas_kernels.packed` lays them out; abstract ones hold shapes or shardings."""

    codes: Any  # u8[layers, G, B, 4, 16, 4] or i8[layers, G, B, 32, 16]
    scales: Any  # f16[layers, G, B, 16] or f32[layers, G, 1, 16]
    mins: Any  # f16[layers, G, B, 16] or [layers, 0]
    format: str
    out: int

    @property
    def packed_shape(self) -> PackedShape:
        layers, _, blocks = self.codes.shape[:3]
        return PackedShape(self.format, layers, self.out, blocks * BLOCK)


def widen(codes: jax.Array, scales: jax.Array, mins: jax.Array, format: str) -> jax.Array:
    """f32[..., 32, lanes] of codes [..., 4, lanes, 4] or [..., 32, lanes], scales and mins [..., lanes]: exactly what a
    file means.
    """
    scales = scales.astype(jnp.float32)[..., None, :]
    if format in FOUR_BIT_FORMATS:
        codes = codes.swapaxes(-1, -2).reshape(*codes.shape[:-3], -1, codes.shape[-2])
        codes = jnp.concatenate([codes & 15, codes >> 4], axis=-2)
    numbers = codes.astype(jnp.float32)
    if format == "q4_0":
        return (numbers - 8.0) * scales
    return numbers * scales + mins.astype(jnp.float32)[..., None, :] if format == "q4_1" else numbers * scales


def dequantise(packed: PackedWeights, layer: jax.Array | int) -> jax.Array:
    """f32[out, in] of one layer."""
    codes, scales, mins = packed.codes[layer], packed.scales[layer], packed.mins[layer]
    shape = packed.packed_shape
    wide = widen(codes, scales, mins, packed.format)  # [G, B, 32, 16]
    return wide.transpose(0, 3, 1, 2).reshape(shape.groups * GROUP, shape.inner)[: packed.out]


def take_rows(packed: PackedWeights, layer: jax.Array | int, ids: jax.Array) -> jax.Array:
    """f32[T, in]: the outputs `ids` i32[T] of one layer, and no others widened."""
    group, lane = ids // GROUP, ids % GROUP

    def of(array: jax.Array, axis: int = -1) -> jax.Array:
        """[G, ..., 16, ...] to [T, ..., 1, ...], where `axis` has the 16."""
        return jnp.expand_dims(jnp.moveaxis(array, axis, 1)[group, lane], axis)

    codes = of(packed.codes[layer], -2 if packed.format in FOUR_BIT_FORMATS else -1)
    mins = of(packed.mins[layer]) if packed.format == "q4_1" else packed.mins[layer]
    wide = widen(codes, of(packed.scales[layer]), mins, packed.format)
    return wide.reshape(len(ids), packed.packed_shape.inner)
