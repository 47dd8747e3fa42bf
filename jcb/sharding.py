"""Where arrays live: on one device, or split over a mesh of devices that share every layer.

The rules are data (`jcb.axes`): the logical names of an array's axes to the one mesh axis, "tensor". A step runs
as one `shard_map`: each device works on its own heads, feed-forward rows and part of the vocabulary with the very code
that one device runs, and meets the others only in the sums and gathers that `models` writes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jcb.axes import TENSOR, check_split, mesh_axes
from jcb.config import ModelConfig


@dataclass(frozen=True)
class Placement:
    """One device (mesh None), or a mesh with the one axis "tensor"."""

    mesh: Mesh | None = None

    @property
    def num_devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    @property
    def axis(self) -> str | None:
        """The mesh axis over which layers are split, None when nothing is."""
        return TENSOR if self.num_devices > 1 else None

    def spec(self, shape: tuple[int, ...], axes: Sequence[str]) -> PartitionSpec:
        """How an array of `shape`, its axes named by `axes`, is split."""
        return PartitionSpec(*mesh_axes(shape, axes, self.num_devices))

    def put(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        """`array` on the device, or split over the mesh."""
        return jax.device_put(array, None if self.mesh is None else NamedSharding(self.mesh, spec))

    def abstract(self, tree: Any, specs: Any) -> Any:
        """Shapes that also say where the arrays lie. specs: one PartitionSpec a leaf of `tree`."""
        if self.mesh is None:
            return tree
        mesh = self.mesh

        def place(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, tree, specs)

    def shardings(self, specs: Any) -> Any:
        """NamedSharding a leaf of `specs`, or None for one device."""
        if self.mesh is None:
            return None
        mesh = self.mesh
        is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731 (a leaf test)
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)

    def wrap(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` of each device's own part of its arguments; itself when nothing is split."""
        if self.axis is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def tensor_parallel(count: int, model: ModelConfig, devices: Sequence[Any] | None = None) -> Placement:
    """The placement of `model` on the first `count` of `devices` (default: all of this process).

    Raises ValueError, with the numbers, where the model or the devices cannot be split so.
    """
    if count == 1 and devices is None:
        return Placement()
    devices = jax.devices() if devices is None else devices
    if count > len(devices):
        raise ValueError(f"tensor_parallel={count} needs {count} devices, there are {len(devices)}")
    check_split(model, count)
    mesh = jax.make_mesh((count,), (TENSOR,), axis_types=(AxisType.Auto,), devices=devices[:count])
    return Placement(mesh)


def local_model(model: ModelConfig, count: int) -> ModelConfig:
    """What each of `count` devices computes of every layer."""
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // count,
        num_kv_heads=model.num_kv_heads // count,
        intermediate_size=model.intermediate_size // count,
    )


def interleave(parts: Sequence[np.ndarray], count: int, out: np.ndarray) -> None:
    """Write the rows of `parts` (q, k and v; gate and up) into `out` so that an even split gives each of `count`
    devices its own share of every part, in the order of the parts.
    """
    start = 0
    for device in range(count):
        for part in parts:
            share = len(part) // count
            out[start : start + share] = part[device * share : (device + 1) * share]
            start += share
