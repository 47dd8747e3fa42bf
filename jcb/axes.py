"""Which axis of which array is split over devices, as data. Host half: planning needs no device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jcb.config import ModelConfig

TENSOR = "tensor"
"""The one mesh axis."""

RULES: dict[str, str | None] = {
    "layers": None,
    "pages": None,
    "model": None,
    "head_dim": None,
    "heads": TENSOR,
    "ffn": TENSOR,
    "vocab": TENSOR,
}
"""Logical axis to mesh axis. An axis that the devices do not divide stays whole on each (only "vocab" may)."""


def mesh_axes(shape: Sequence[int], axes: Sequence[str], devices: int) -> list[str | None]:
    """The mesh axis of each axis of an array, None where it stays whole."""
    return [RULES[axis] if size % devices == 0 else None for size, axis in zip(shape, axes, strict=True)]


def local_size(shape: Sequence[int], axes: Sequence[str], devices: int) -> int:
    """Elements of the array that one device has."""
    split = any(name is not None for name in mesh_axes(shape, axes, devices))
    return math.prod(shape) // (devices if split else 1)


def check_split(model: ModelConfig, devices: int) -> None:
    """Raises ValueError, with the numbers, where so many devices cannot share the model's layers."""
    for name in ("num_heads", "num_kv_heads", "intermediate_size"):
        if getattr(model, name) % devices:
            raise ValueError(f"tensor_parallel={devices} does not divide {name}={getattr(model, name)} of the model")
