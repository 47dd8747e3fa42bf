"""Where the tokens of a ragged batch are: the row, the position and the page of each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.layout import DUMMY_PAGE


class Places(NamedTuple):
    """One entry a token, all [T]."""

    live: jax.Array  # bool: not padding
    positions: jax.Array  # i32: place in its sequence, 0 for padding
    pages: jax.Array  # i32: page its K and V go to, the dummy page for padding
    offsets: jax.Array  # i32: place inside that page


def token_rows(cu_q_lens: jax.Array, num_tokens: int) -> jax.Array:
    """The row i32[T] of each token; padding tokens get some row."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = jnp.searchsorted(cu_q_lens, tokens, side="right").astype(jnp.int32) - 1
    return jnp.clip(rows, 0, cu_q_lens.shape[0] - 2)


def token_places(
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    num_tokens: int,
    page_size: int,
    max_q_len: int | None = None,
) -> Places:
    """Places of T tokens; the arguments are those of `paged_attention`."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    rows = tokens if max_q_len == 1 else token_rows(cu_q_lens, num_tokens)
    live = tokens < cu_q_lens[num_seqs]
    positions = jnp.where(live, kv_lens[rows] - cu_q_lens[rows + 1] + tokens, 0)
    pages = jnp.where(live, page_table[rows, positions // page_size], DUMMY_PAGE)
    return Places(live, positions, pages, positions % page_size)
