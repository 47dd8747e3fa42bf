"""What the device at hand can do, measured: bytes a second of a copy, operations a second of a matmul."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

_SIZES = {"cpu": (1 << 26, 1024), "gpu": (1 << 31, 8192), "tpu": (1 << 30, 8192)}
"""Bytes to copy and side of the matrices, by platform."""
_PASSES = 8


@dataclass(frozen=True)
class Roofline:
    """bandwidth: bytes read plus bytes written a second. flops: operations a second in `dtype`."""

    device: str
    dtype: str
    bandwidth: float
    flops: float


class Probe:
    """Copy and matmul on the first device, compiled once, to be measured again and again."""

    def __init__(self, dtype: str) -> None:
        device = jax.devices()[0]
        self._nbytes, self._side = _SIZES[device.platform]
        self._device, self._dtype = f"{device.platform}: {device.device_kind}", dtype
        self._source = jnp.zeros(self._nbytes // 4, jnp.float32)
        self._copy = jax.jit(lambda x: jax.lax.fori_loop(0, _PASSES, lambda _, x: x + 1.0, x))
        self._matrix = jnp.ones((self._side, self._side), dtype)
        self._multiply = jax.jit(partial(jnp.matmul, preferred_element_type=jnp.float32))

    def measure(self, repeat: int = 5) -> Roofline:
        """The best of `repeat` copies and matmuls."""
        copy = best_seconds(self._copy, self._source, repeat=repeat)
        multiply = best_seconds(self._multiply, self._matrix, self._matrix, repeat=repeat)
        return Roofline(
            device=self._device,
            dtype=self._dtype,
            bandwidth=2 * self._nbytes * _PASSES / copy,
            flops=2 * self._side**3 / multiply,
        )


def measure_roofline(dtype: str, repeat: int = 5) -> Roofline:
    """The best of `repeat` copies and matmuls on the first device."""
    return Probe(dtype).measure(repeat)


def best_seconds(call: Callable[..., Any], *args: Any, repeat: int) -> float:
    """The shortest of `repeat` runs after one that is not counted."""
    return min(all_seconds(call, *args, repeat=repeat))


def all_seconds(call: Callable[..., Any], *args: Any, repeat: int) -> list[float]:
    """Wall seconds of `repeat` runs after one that is not counted."""
    jax.block_until_ready(call(*args))
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        seconds.append(time.perf_counter() - start)
    return seconds
