"""What one page of the KV cache looks like inside; nothing else in the project knows.

The cache is one array `kv_pages[L, P, *page]`: layers, then pages, then the inside of a page. On CPU and GPU a page is
`[2 * K, S, H]`: K planes, then V planes, each a contiguous `[S, H]` tile that a kernel can fetch in one piece.
Page 0 is the dummy page: padding reads and writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

DUMMY_PAGE = 0


@dataclass(frozen=True)
class KVLayout:
    """Shape of a page: a hashable value, so it can be a static argument.

    dtype: of the stored K and V. kv_heads K, head_dim H, page_size S tokens.
    """

    dtype: str
    kv_heads: int
    head_dim: int
    page_size: int

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of one page: (2 * K, S, H)."""
        return (2 * self.kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        planes, size, dim = self.page_shape
        return planes * size * dim * jnp.dtype(self.dtype).itemsize

    def array_shape(self, num_layers: int, num_pages: int) -> tuple[int, ...]:
        """Shape of the whole cache array."""
        return (num_layers, num_pages, *self.page_shape)

    def init(self, num_layers: int, num_pages: int) -> jax.Array:
        """A zeroed cache: [L, P, 2 * K, S, H]."""
        return jnp.zeros(self.array_shape(num_layers, num_pages), self.dtype)

    def keys(self, kv_pages: jax.Array, layer: jax.Array, pages: jax.Array) -> jax.Array:
        """K of `pages` i32[..., n] of one layer: [..., K, n * S, H] in token order."""
        return self._planes(kv_pages, layer, pages, 0)

    def values(self, kv_pages: jax.Array, layer: jax.Array, pages: jax.Array) -> jax.Array:
        """V of `pages` i32[..., n] of one layer: [..., K, n * S, H] in token order."""
        return self._planes(kv_pages, layer, pages, self.kv_heads)

    def _planes(self, kv_pages: jax.Array, layer: jax.Array, pages: jax.Array, first: int) -> jax.Array:
        planes = first + jnp.arange(self.kv_heads, dtype=jnp.int32)
        planes = planes.reshape((1,) * (pages.ndim - 1) + (self.kv_heads, 1))
        tiles = kv_pages.at[layer, pages[..., None, :], planes].get(mode="promise_in_bounds")
        return tiles.reshape(*tiles.shape[:-3], tiles.shape[-3] * self.page_size, self.head_dim)

    def extract(self, kv_pages: jax.Array, pages: jax.Array) -> jax.Array:
        """Whole pages i32[n] of every layer: [L, n, 2 * K, S, H]."""
        return kv_pages[:, pages]

    def insert(self, kv_pages: jax.Array, pages: jax.Array, content: jax.Array) -> jax.Array:
        """The cache with pages i32[n] of every layer replaced by `content` [L, n, 2 * K, S, H]."""
        return kv_pages.at[:, pages].set(content)
