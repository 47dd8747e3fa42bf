"""What one page of the KV cache takes, counted without JAX; what is inside is `pallas_kernels.layout`."""

from __future__ import annotations

from dataclasses import dataclass

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
"""Bytes of a number of each data type that weights and pages may have."""


@dataclass(frozen=True)
class PageShape:
    """Shape of a page: a hashable value.

    platform: of the device the cache lives on. dtype: of the stored K and V, a key of ITEM_BYTES. kv_heads K,
    head_dim H, page_size S tokens.
    """

    platform: str
    dtype: str
    kv_heads: int
    head_dim: int
    page_size: int

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of one page: (2 * K, S, H), on TPU (K, S, 2 * H)."""
        if self.platform == "tpu":
            return (self.kv_heads, self.page_size, 2 * self.head_dim)
        return (2 * self.kv_heads, self.page_size, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return 2 * self.kv_heads * self.page_size * self.head_dim * ITEM_BYTES[self.dtype]

    def array_shape(self, num_layers: int, num_pages: int) -> tuple[int, ...]:
        """Shape of the whole cache array."""
        return (num_layers, num_pages, *self.page_shape)
