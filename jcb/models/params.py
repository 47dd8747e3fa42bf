"""What is made of a declaration of parameters (`jcb.models.specs`): abstract, random or split arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jcb.models.specs import ParamSpec, Specs
from jcb.sharding import Placement
from pallas_kernels.quantized_dot import PackedWeights


def is_spec(node: Any) -> bool:
    """True for a leaf of `Specs`."""
    return isinstance(node, ParamSpec)


def abstract(specs: Specs, dtype: jnp.dtype) -> Any:
    """The params as jax.ShapeDtypeStruct leaves."""

    def one(spec: ParamSpec) -> Any:
        if not spec.format:
            return jax.ShapeDtypeStruct(spec.shape, dtype)
        arrays = {name: jax.ShapeDtypeStruct(*array) for name, array in spec.packed.arrays.items()}
        return PackedWeights(**arrays, format=spec.format, out=spec.packed.out)

    return jax.tree.map(one, specs, is_leaf=is_spec)


def init(specs: Specs, dtype: jnp.dtype, seed: int = 0) -> Any:
    """Random params, all dense: normal weights with each spec's scale, ones for norms."""
    leaves, structure = jax.tree.flatten(specs, is_leaf=is_spec)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(spec: ParamSpec, key: jax.Array) -> jax.Array:
        if spec.scale is None:
            return jnp.ones(spec.shape, dtype)
        return (spec.scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)

    return jax.tree.unflatten(structure, [draw(spec, key) for spec, key in zip(leaves, keys, strict=True)])


def partition_specs(specs: Specs, placement: Placement) -> Any:
    """How each parameter is split over the devices, by the names of its axes; packed ones are whole on each."""

    def one(spec: ParamSpec) -> Any:
        if not spec.format:
            return placement.spec(spec.shape, spec.axes)
        whole = PartitionSpec()
        return PackedWeights(whole, whole, whole, format=spec.format, out=spec.packed.out)

    return jax.tree.map(one, specs, is_leaf=is_spec)
