"""What stays on the device between steps, as one donated pytree."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jcb.sharding import Placement
from jcb.types import MAX_STOP_TOKEN_IDS
from pallas_kernels.layout import KVLayout

KV_AXES = ("layers", "pages", "heads")
"""What the first axes of the cache mean; planes of a page are heads."""

STOP_WIDTH = MAX_STOP_TOKEN_IDS + 16
"""Ids a slot can suppress while min_tokens is not reached: the request's own and the model's end ids."""


@flax.struct.dataclass
class DeviceState:
    """The cache and what the device knows of each slot. Donated to every step, returned by it.

    The rows of `seen`, `bias`, `stop_ids` and `mask` mean something only for sequences that asked for them: the slot
    and mask programs write them before such a sequence runs, and each row of a step says which of them it uses.
    """

    kv_pages: jax.Array  # [L, P, *page]
    last_token: jax.Array  # i32[slots] the token sampled last
    seen: jax.Array  # i32[slots, V] twice how often a token was generated, plus 1 if the prompt holds it
    bias: jax.Array  # f32[slots, V] added to the logits; -inf forbids a token
    stop_ids: jax.Array  # i32[slots, STOP_WIDTH] padded with V
    mask: jax.Array  # i32[slots, mask_words(V)] bit i of word w: whether id 32 w + i may be sampled
    hidden: jax.Array  # [T, D] of the last prefill step's tokens, for the prompt program


def mask_words(vocab_size: int) -> int:
    """32-bit words that hold a bit for each id."""
    return -(-vocab_size // 32)


def init_state(
    layout: KVLayout, num_layers: int, num_pages: int, num_slots: int, vocab_size: int, hidden: jax.ShapeDtypeStruct
) -> DeviceState:
    """Zeroed state for `num_slots` sequences. hidden: [T, D] of the largest step."""
    return DeviceState(
        kv_pages=layout.init(num_layers, num_pages),
        last_token=jnp.zeros((num_slots,), jnp.int32),
        seen=jnp.zeros((num_slots, vocab_size), jnp.int32),
        bias=jnp.zeros((num_slots, vocab_size), jnp.float32),
        stop_ids=jnp.full((num_slots, STOP_WIDTH), vocab_size, jnp.int32),
        mask=jnp.full((num_slots, mask_words(vocab_size)), -1, jnp.int32),
        hidden=jnp.zeros(hidden.shape, hidden.dtype),
    )


def state_specs(state: DeviceState, placement: Placement) -> Any:
    """How each array is split: the cache by heads, all else whole on every device."""
    axes = KV_AXES + ("head_dim",) * (state.kv_pages.ndim - len(KV_AXES))
    specs: Any = jax.tree.map(lambda _: PartitionSpec(), state)
    return dataclasses.replace(specs, kv_pages=placement.spec(state.kv_pages.shape, axes))
