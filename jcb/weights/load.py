"""Filling a params pytree from a checkpoint: every parameter written once, every tensor used, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jcb.checkpoint.dequantize import Blocks
from jcb.checkpoint.errors import ModelLoadError
from jcb.config import ModelConfig
from jcb.models.params import is_spec
from jcb.models.specs import ParamSpec, Specs
from jcb.sharding import Placement, interleave
from jcb.weights.names import TABLES, Source, Table, ignorable
from pallas_kernels.packed import pack
from pallas_kernels.quantized_dot import PackedWeights


class NamedArrays(Protocol):
    """The part of a checkpoint that loading needs."""

    @property
    def format(self) -> str: ...
    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> tuple[str, ...]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def read(self, name: str) -> np.ndarray: ...
    def read_blocks(self, name: str) -> Blocks: ...


Progress = Callable[[str, int, int], None]


def load_params(
    checkpoint: NamedArrays,
    specs: Specs,
    dtype: str,
    progress: Progress | None = None,
    placement: Placement = Placement(),  # noqa: B008 (frozen)
) -> Any:
    """The params pytree in `dtype`, on the default device or split as `placement` says; packed where `specs` say so.

    Raises ModelLoadError when a tensor is missing, left over, or of the wrong shape; shapes are checked before
    anything is read. `progress("load", done, total)` is called after each parameter.
    """
    leaves, structure = jax.tree.flatten_with_path(specs, is_leaf=is_spec)
    table = TABLES[checkpoint.format, checkpoint.config.architecture]
    paths = ["/".join(key.key for key in path) for path, _ in leaves]
    _check_total(checkpoint, table, {path: spec for path, (_, spec) in zip(paths, leaves, strict=True)})
    arrays = []
    for done, (path, (_, spec)) in enumerate(zip(paths, leaves, strict=True)):
        if spec.format:
            arrays.append(_read_packed(checkpoint, table[path], spec))
        else:
            host = _read_param(checkpoint, table[path], spec, jnp.dtype(dtype), placement.num_devices)
            arrays.append(placement.put(host, placement.spec(spec.shape, spec.axes)))
        if progress is not None:
            progress("load", done + 1, len(leaves))
    return jax.tree.unflatten(structure, arrays)


def _slice_shape(spec: ParamSpec) -> tuple[int, ...]:
    return spec.shape[1:] if spec.axes[0] == "layers" else spec.shape


def _check_total(checkpoint: NamedArrays, table: Table, specs: dict[str, ParamSpec]) -> None:
    """Every parameter has its tensors with fitting shapes, and no tensor is left over."""
    available = set(checkpoint.names())
    used: set[str] = set()
    for path, spec in specs.items():
        want = _slice_shape(spec)
        for names in table[path].by_layer(spec.shape[0]):
            missing = [name for name in names if name not in available]
            if missing:
                raise ModelLoadError(missing[0], f"the checkpoint lacks this tensor, needed for {path}")
            shapes = [checkpoint.shape(name) for name in names]
            rows = sum(shape[0] for shape in shapes)
            if (rows, *shapes[0][1:]) != want or any(shape[1:] != want[1:] for shape in shapes):
                raise ModelLoadError(names[0], f"shapes {shapes} do not make {path}{list(want)}")
            used.update(names)
    left = sorted(name for name in available - used if not ignorable(name, checkpoint.config))
    if left:
        raise ModelLoadError(left[0], f"{len(left)} tensors of the checkpoint fit no parameter, among them {left[:5]}")


def _read_param(checkpoint: NamedArrays, source: Source, spec: ParamSpec, dtype: np.dtype, shards: int) -> np.ndarray:
    """One parameter as a host array in `dtype`; layers are stacked as they are read. Joined parts (q, k, v; gate, up)
    are interleaved so that an even split in `shards` gives each its own of every part.
    """
    out = np.empty(spec.shape, dtype)
    slices = out if spec.axes[0] == "layers" else out[None]
    for target, names in zip(slices, source.by_layer(spec.shape[0]), strict=True):
        if len(names) == 1:
            target[...] = _read_part(checkpoint, source, names[0], 0)
        else:
            interleave([_read_part(checkpoint, source, name, i) for i, name in enumerate(names)], shards, target)
    return out


def _read_packed(checkpoint: NamedArrays, source: Source, spec: ParamSpec) -> PackedWeights:
    """One parameter as the file has it, its blocks only moved: values stay, and no dense copy is ever made."""
    host = spec.packed.empty()
    for layer, names in enumerate(source.by_layer(spec.shape[0])):
        start = 0
        for index, name in enumerate(names):
            blocks = checkpoint.read_blocks(name)
            for part, rows in (("codes", blocks.codes), ("scales", blocks.scales), ("mins", blocks.mins)):
                if rows is not None:
                    rows = unpermute(rows, checkpoint.config.head_dim) if index < source.permuted else rows
                    pack(host[part][layer], rows, start)
            start += len(blocks.codes)
    arrays = {name: jax.device_put(array) for name, array in host.items()}
    return PackedWeights(**arrays, format=spec.format, out=spec.packed.out)


def _read_part(checkpoint: NamedArrays, source: Source, name: str, index: int) -> np.ndarray:
    part = checkpoint.read(name)
    return unpermute(part, checkpoint.config.head_dim) if index < source.permuted else part


def unpermute(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """GGUF's q and k rows [heads * head_dim, ...] back from interleaved RoPE pairs to the two-halves order.

    Source: llama.cpp's converter, which stores row (half, i) of a head at (i, half).
    """
    paired = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return paired.swapaxes(1, 2).reshape(rows.shape)
