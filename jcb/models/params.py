"""The declaration of a model's parameters: shapes, axes and initialisers as one pytree.

Initialising, loading and sharding are tree-maps over it; nothing else repeats a shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jcb.sharding import Placement


@dataclass(frozen=True)
class ParamSpec:
    """One array: its shape, the logical name of each axis, and how random weights are drawn.

    axes name what an axis means ("layers", "vocab", "model", "heads", "ffn"); a mesh maps them to devices.
    scale: standard deviation of random weights, or None for ones (norms).
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    scale: float | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


Specs = dict[str, Any]
"""A nested dict of ParamSpec; the params pytree has the same keys with arrays."""


def is_spec(node: Any) -> bool:
    """True for a leaf of `Specs`."""
    return isinstance(node, ParamSpec)


def abstract(specs: Specs, dtype: jnp.dtype) -> Any:
    """The params as jax.ShapeDtypeStruct leaves."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, dtype), specs, is_leaf=is_spec)


def init(specs: Specs, dtype: jnp.dtype, seed: int = 0) -> Any:
    """Random params: normal weights with each spec's scale, ones for norms."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        if spec.scale is None:
            return jnp.ones(spec.shape, dtype)
        return (spec.scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)

    return jax.tree.unflatten(structure, [draw(spec, key) for spec, key in zip(leaves, keys, strict=True)])


def nbytes(specs: Specs, dtype: str, placement: Placement = Placement()) -> int:  # noqa: B008 (frozen)
    """Bytes of the params in `dtype` on one device."""
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    return jnp.dtype(dtype).itemsize * sum(placement.local_size(spec.shape, spec.axes) for spec in leaves)


def partition_specs(specs: Specs, placement: Placement) -> Any:
    """How each parameter is split over the devices, by the names of its axes."""
    return jax.tree.map(lambda spec: placement.spec(spec.shape, spec.axes), specs, is_leaf=is_spec)
