"""How TPU memory is tiled, and which page layouts its kernels can serve."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.layout import KVLayout

LANES = 128


def tile_rows(dtype: str) -> int:
    """Rows of a native tile: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 32 // jnp.dtype(dtype).itemsize


def refuse_layout(layout: KVLayout) -> None:
    """Raises NotImplementedError("why") for pages that the TPU kernels cannot move."""
    rows = tile_rows(layout.dtype)
    if layout.page_size % rows:
        raise NotImplementedError(
            f"page_size={layout.page_size} is not a multiple of {rows}, the rows of a {layout.dtype} tile"
        )
    if layout.head_dim != LANES // 2 and layout.head_dim % LANES:
        raise NotImplementedError(f"head_dim={layout.head_dim} is neither 64 nor a multiple of 128")
