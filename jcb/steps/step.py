"""The two step functions: `prefill_step` for ragged mixed batches, `decode_step` for one token a row.

Both are pure, donate the device state and nothing else, and sample on the device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jcb.config import ModelConfig, ServeConfig
from jcb.models import llama
from jcb.sharding import Placement, local_model
from jcb.steps import outputs, sampling
from jcb.steps.inputs import SAMPLES, WANTS_PROMPT_LOGPROBS, Rows, unpack
from jcb.steps.shapes import StepShape
from jcb.steps.state import DeviceState
from pallas_kernels.layout import KVLayout

PROMPT_LOGPROBS_TILE = 32
"""Tokens whose whole logits row exists at once while prompt log-probabilities are computed."""


@dataclass(frozen=True)
class StepStatics:
    """What every step program of an engine shares. axis: the mesh axis over which layers are split, if any;
    config and layout then say what one device has.
    """

    config: ModelConfig
    layout: KVLayout
    implementation: str = "auto"
    axis: str | None = None

    @staticmethod
    def of(config: ServeConfig, model: ModelConfig, platform: str) -> StepStatics:
        """Of the whole model, for a resolved configuration."""
        layout = KVLayout(platform, config.dtype, model.num_kv_heads, model.head_dim, config.cache.page_size)
        return StepStatics(model, layout, config.engine.implementation)

    def split(self, placement: Placement) -> StepStatics:
        """What one device of `placement` has, given the statics of the whole model."""
        if placement.axis is None:
            return self
        count = placement.num_devices
        layout = dataclasses.replace(self.layout, kv_heads=self.layout.kv_heads // count)
        return dataclasses.replace(self, config=local_model(self.config, count), layout=layout, axis=placement.axis)


def decode_step(
    statics: StepStatics, shape: StepShape, params: Any, state: DeviceState, packed: jax.Array
) -> tuple[DeviceState, jax.Array]:
    """One token for every row of `packed` (see `inputs.pack`).

    Returns the state and the outputs i32[R, outputs.WIDTH].
    """
    batch, rows = unpack(packed, shape, state.last_token)
    hidden, state = _forward(statics, params, batch, state, max_q_len=1)
    return _finish(statics, params, hidden, rows, state)


def prefill_step(
    statics: StepStatics, shape: StepShape, params: Any, state: DeviceState, packed: jax.Array
) -> tuple[DeviceState, jax.Array, jax.Array]:
    """Prompt chunks and, riding along, one token for each decoding row.

    Returns the state, the outputs i32[R, outputs.WIDTH], and prompt log-probabilities
    i32[T, outputs.PROMPT_WIDTH], zeros where no row asks for them.
    """
    batch, rows = unpack(packed, shape, state.last_token)
    hidden, state = _forward(statics, params, batch, state, max_q_len=None)
    last = jnp.clip(batch.cu_q_lens[1:] - 1, 0, shape.num_tokens - 1)
    state, packed_outputs = _finish(statics, params, hidden[last], rows, state)
    return state, packed_outputs, _prompt_logprobs(statics, params, hidden, batch, rows)


def _forward(
    statics: StepStatics, params: Any, batch: llama.Batch, state: DeviceState, max_q_len: int | None
) -> tuple[jax.Array, DeviceState]:
    hidden, kv_pages = llama.forward(
        params,
        batch,
        state.kv_pages,
        config=statics.config,
        layout=statics.layout,
        max_q_len=max_q_len,
        implementation=statics.implementation,
        axis=statics.axis,
    )
    return hidden, dataclasses.replace(state, kv_pages=kv_pages)


def _logits(statics: StepStatics, params: Any, hidden: jax.Array) -> jax.Array:
    where = {"platform": statics.layout.platform, "implementation": statics.implementation}
    return llama.logits(params, hidden, statics.config, statics.axis, **where)


def _finish(
    statics: StepStatics, params: Any, hidden: jax.Array, rows: Rows, state: DeviceState
) -> tuple[DeviceState, jax.Array]:
    """Sample from hidden states [R, D]; rows that sample update what their slot remembers."""
    logits = _logits(statics, params, hidden)
    sampled = sampling.sample(logits, rows, rows.kv_len, state)
    slots = jnp.where(rows.has(SAMPLES), rows.slot, state.last_token.shape[0])
    state = dataclasses.replace(
        state,
        last_token=state.last_token.at[slots].set(sampled.token_ids, mode="drop"),
        seen=state.seen.at[slots, sampled.token_ids].add(2, mode="drop"),
    )
    return state, outputs.pack(sampled)


def _prompt_logprobs(statics: StepStatics, params: Any, hidden: jax.Array, batch: llama.Batch, rows: Rows) -> jax.Array:
    """For each token the log-probability of the prompt token after it, computed tile by tile."""
    tokens = hidden.shape[0]
    last = jnp.where(rows.q_len > 0, batch.cu_q_lens[1:] - 1, tokens)
    targets = jnp.roll(batch.token_ids, -1).at[last].set(rows.next_token, mode="drop")
    targets = jnp.maximum(targets, 0)
    tile = min(PROMPT_LOGPROBS_TILE, tokens)
    padding = -tokens % tile

    def one_tile(xs: tuple[jax.Array, jax.Array]) -> jax.Array:
        tile_hidden, tile_targets = xs
        logits = _logits(statics, params, tile_hidden)
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        logprobs = jnp.take_along_axis(logits, tile_targets[:, None], axis=-1) - normaliser
        top_ids, top_logprobs = sampling.top_alternatives(logits, normaliser)
        return outputs.pack_prompt(logprobs[:, 0], top_ids, top_logprobs)

    def compute(hidden: jax.Array) -> jax.Array:
        tiled = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, tile, hidden.shape[1])
        lines = jax.lax.map(one_tile, (tiled, jnp.pad(targets, (0, padding)).reshape(-1, tile)))
        return lines.reshape(-1, outputs.PROMPT_WIDTH)[:tokens]

    def skip(hidden: jax.Array) -> jax.Array:
        return jnp.zeros((hidden.shape[0], outputs.PROMPT_WIDTH), jnp.int32)

    return jax.lax.cond(jnp.any(rows.has(WANTS_PROMPT_LOGPROBS)), compute, skip, hidden)
