"""Named writes for tests and benchmarks, and how to make their arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import KVLayout


@dataclass(frozen=True)
class Case:
    """`tokens` new tokens at random free places of `pages` pages, then `padding` tokens to the dummy page."""

    name: str
    tokens: int
    padding: int = 0
    pages: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    num_layers: int = 3
    layer: int = 1

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.dtype, self.kv_heads, self.head_dim, self.page_size)


class Arrays(NamedTuple):
    """The arguments of `kv_write`, in order."""

    kv_pages: jax.Array
    layer: jax.Array
    k: jax.Array
    v: jax.Array
    page_ids: jax.Array
    offsets: jax.Array


def make(case: Case, seed: int = 0) -> Arrays:
    """Random arrays for `case`."""
    rng = np.random.default_rng(seed)
    places = rng.permutation((case.pages - 1) * case.page_size)[: case.tokens]
    page_ids = np.concatenate([places // case.page_size + 1, np.zeros(case.padding)]).astype(np.int32)
    offsets = np.concatenate([places % case.page_size, np.zeros(case.padding)]).astype(np.int32)
    shape = (case.tokens + case.padding, case.kv_heads, case.head_dim)
    pages = rng.standard_normal(case.layout.array_shape(case.num_layers, case.pages))
    return Arrays(
        jnp.asarray(pages, case.dtype),
        jnp.int32(case.layer),
        jnp.asarray(rng.standard_normal(shape), case.dtype),
        jnp.asarray(rng.standard_normal(shape), case.dtype),
        jnp.asarray(page_ids),
        jnp.asarray(offsets),
    )


CASES: tuple[Case, ...] = (
    Case("decode", tokens=8),
    Case("decode_padded", tokens=3, padding=5),
    Case("chunk", tokens=100, padding=28),
    Case("page_1", tokens=6, page_size=1, padding=2),
    Case("bf16", tokens=40, dtype="bfloat16"),
    Case("empty", tokens=0, padding=8),
)
