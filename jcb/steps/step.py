"""The two step functions: `prefill_step` for ragged mixed batches, `decode_step` for one token a row.

Both are pure, donate the device state and nothing else, and take the likeliest tokens on the device.
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
from jcb.steps.inputs import Rows, unpack
from jcb.steps.shapes import StepShape
from jcb.steps.state import DeviceState
from pallas_kernels.layout import KVLayout


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
        layout = KVLayout(platform, config.cache.kv_dtype, model.num_kv_heads, model.head_dim, config.cache.page_size)
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
) -> tuple[DeviceState, jax.Array, jax.Array]:
    """One token for every row of `packed` (see `jcb.steps.packer`).

    Returns the state, the outputs i32[R, outputs.WIDTH] and the logits f32[R, V].
    """
    batch, rows = unpack(packed, shape, state.last_token)
    hidden, state = _forward(statics, params, batch, state, max_q_len=1)
    return _finish(statics, params, hidden, batch.num_seqs, rows, state)


def prefill_step(
    statics: StepStatics, shape: StepShape, params: Any, state: DeviceState, packed: jax.Array
) -> tuple[DeviceState, jax.Array, jax.Array]:
    """Prompt chunks and, riding along, one token for each decoding row.

    Returns the state, with the hidden states of all tokens, the outputs i32[R, outputs.WIDTH] and the logits f32[R, V].
    """
    batch, rows = unpack(packed, shape, state.last_token)
    hidden, state = _forward(statics, params, batch, state, max_q_len=None)
    last = jnp.clip(batch.cu_q_lens[1:] - 1, 0, shape.num_tokens - 1)
    state = dataclasses.replace(state, hidden=jax.lax.dynamic_update_slice_in_dim(state.hidden, hidden, 0, 0))
    return _finish(statics, params, hidden[last], batch.num_seqs, rows, state)


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


def logits_of(statics: StepStatics, params: Any, hidden: jax.Array, live: jax.Array) -> jax.Array:
    """f32[R, V] scores of the token after hidden states [R, D], of which `live` i32[] count."""
    where = {"platform": statics.layout.platform, "implementation": statics.implementation}
    return llama.logits(params, hidden, statics.config, statics.axis, live=live, **where)


def _finish(
    statics: StepStatics, params: Any, hidden: jax.Array, num_seqs: jax.Array, rows: Rows, state: DeviceState
) -> tuple[DeviceState, jax.Array, jax.Array]:
    """The likeliest tokens after hidden states [R, D]; rows that sample update what their slot remembers."""
    logits = logits_of(statics, params, hidden, num_seqs)
    sampled = sampling.likeliest(logits, rows)
    return sampling.remember(state, rows, sampled), outputs.pack(sampled), logits
