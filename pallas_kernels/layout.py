"""What one page of the KV cache looks like inside; nothing else in the project knows.

The cache is one array `kv_pages[L, P, *page]`: layers, then pages, then the inside of a page.

- CPU and GPU: `[2 * K, S, H]`. Plane 2k holds K of head k, plane 2k + 1 its V: two contiguous `[S, H]` tiles side by
  side, so one copy fetches both and a split of the planes is a split of the heads.
- TPU: `[K, S, 2 * H]`. K and V of a head share one row. A row of head_dim 64 is then exactly one 128-lane register
  row, and no number of heads needs padding.

Page 0 is the dummy page: padding reads and writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.page import ITEM_BYTES, PageShape

DUMMY_PAGE = 0

Platform = Literal["cpu", "gpu", "tpu"]
KV_DTYPES = tuple(ITEM_BYTES)


@dataclass(frozen=True)
class KVLayout(PageShape):
    """How keys and values lie in a page: a hashable value, so it can be a static argument.

    "auto" implementations follow its platform.
    """

    @property
    def is_quantised(self) -> bool:
        """True when stored values are numbers of 8 bits, to be multiplied by scales."""
        return ITEM_BYTES[self.dtype] == 1

    def init(self, num_layers: int, num_pages: int) -> jax.Array:
        """A zeroed cache: [L, P, *page]."""
        return jnp.zeros(self.array_shape(num_layers, num_pages), self.dtype)

    def pack(self, k: jax.Array, v: jax.Array) -> jax.Array:
        """K and V [T, K, H] of T tokens as they lie in a page: [T, planes, width], to be put at [:, offset]."""
        tokens, planes, width = k.shape[0], self.page_shape[0], self.page_shape[2]
        return jnp.stack([k, v], axis=2).reshape(tokens, planes, width)

    def keys(self, kv_pages: jax.Array, layer: jax.Array, pages: jax.Array) -> jax.Array:
        """K of `pages` i32[..., n] of one layer: [..., K, n * S, H] in token order."""
        return self._half(kv_pages, layer, pages, 0)

    def values(self, kv_pages: jax.Array, layer: jax.Array, pages: jax.Array) -> jax.Array:
        """V of `pages` i32[..., n] of one layer: [..., K, n * S, H] in token order."""
        return self._half(kv_pages, layer, pages, 1)

    def _half(self, kv_pages: jax.Array, layer: jax.Array, pages: jax.Array, half: int) -> jax.Array:
        heads = jnp.arange(self.kv_heads, dtype=jnp.int32)
        planes = heads if self.platform == "tpu" else 2 * heads + half
        planes = planes.reshape((1,) * (pages.ndim - 1) + (self.kv_heads, 1))
        tiles = kv_pages.at[layer, pages[..., None, :], planes].get(mode="promise_in_bounds")  # [..., K, n, S, width]
        if self.platform == "tpu":
            tiles = jax.lax.slice_in_dim(tiles, half * self.head_dim, (half + 1) * self.head_dim, axis=-1)
        return tiles.reshape(*tiles.shape[:-3], tiles.shape[-3] * self.page_size, self.head_dim)

    def extract(self, kv_pages: jax.Array, pages: jax.Array) -> jax.Array:
        """Whole pages i32[n] of every layer: [L, n, *page]."""
        return kv_pages[:, pages]

    def insert(self, kv_pages: jax.Array, pages: jax.Array, content: jax.Array) -> jax.Array:
        """The cache with pages i32[n] of every layer replaced by `content` [L, n, *page]."""
        return kv_pages.at[:, pages].set(content)
