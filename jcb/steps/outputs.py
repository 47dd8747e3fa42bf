"""What a step gives back, as one small array, and how the host reads it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jcb.steps.sampling import Sampled
from jcb.types import MAX_LOGPROBS, Logprobs, StepPlan, StepResult

_TOKEN, _LOGPROB, _FINITE, _TOP = 0, 1, 2, 3
WIDTH = _TOP + 2 * MAX_LOGPROBS
"""Numbers a row of the output."""


def pack(sampled: Sampled) -> jax.Array:
    """`sampled` as i32[R, WIDTH], floats as their bits."""
    columns = [
        sampled.token_ids[:, None],
        bits(sampled.logprobs[:, None]),
        sampled.finite.astype(jnp.int32)[:, None],
        sampled.top_ids,
        bits(sampled.top_logprobs),
    ]
    return jnp.concatenate(columns, axis=1)


def unpack(plan: StepPlan, packed: np.ndarray, prompt_logprobs: Mapping[int, list[Logprobs]]) -> StepResult:
    """The host half of `pack`. prompt_logprobs: see `jcb.steps.prompt`."""
    top = packed[:, _TOP:]
    return StepResult(
        step_id=plan.step_id,
        token_ids=packed[:, _TOKEN],
        logprobs=floats(packed[:, _LOGPROB]),
        top_ids=top[:, :MAX_LOGPROBS],
        top_logprobs=floats(top[:, MAX_LOGPROBS:]),
        finite=packed[:, _FINITE] != 0,
        prompt_logprobs=prompt_logprobs,
    )


def bits(values: jax.Array) -> jax.Array:
    """f32 as the i32 of the same bits, on the device."""
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def floats(bits: np.ndarray) -> np.ndarray:
    """The other way, on the host."""
    return np.ascontiguousarray(bits).view(np.float32)
