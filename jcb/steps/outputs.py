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

PROMPT_WIDTH = 1 + 2 * MAX_LOGPROBS
"""Numbers a token of the prompt log-probabilities."""


def pack(sampled: Sampled) -> jax.Array:
    """`sampled` as i32[R, WIDTH], floats as their bits."""
    columns = [
        sampled.token_ids[:, None],
        _bits(sampled.logprobs[:, None]),
        sampled.finite.astype(jnp.int32)[:, None],
        sampled.top_ids,
        _bits(sampled.top_logprobs),
    ]
    return jnp.concatenate(columns, axis=1)


def pack_prompt(logprobs: jax.Array, top_ids: jax.Array, top_logprobs: jax.Array) -> jax.Array:
    """Prompt log-probabilities of T tokens as i32[T, PROMPT_WIDTH]."""
    return jnp.concatenate([_bits(logprobs[:, None]), top_ids, _bits(top_logprobs)], axis=1)


def unpack(plan: StepPlan, packed: np.ndarray, prompt: np.ndarray | None) -> StepResult:
    """The host half of `pack`. prompt: i32[T, PROMPT_WIDTH] where some row asked for prompt log-probabilities."""
    top = packed[:, _TOP:]
    return StepResult(
        step_id=plan.step_id,
        token_ids=packed[:, _TOKEN],
        logprobs=_floats(packed[:, _LOGPROB]),
        top_ids=top[:, :MAX_LOGPROBS],
        top_logprobs=_floats(top[:, MAX_LOGPROBS:]),
        finite=packed[:, _FINITE] != 0,
        prompt_logprobs={} if prompt is None else _prompt_logprobs(plan, prompt),
    )


def _prompt_logprobs(plan: StepPlan, packed: np.ndarray) -> Mapping[int, list[Logprobs]]:
    found: dict[int, list[Logprobs]] = {}
    position = 0
    for index, row in enumerate(plan.rows):
        wanted = row.sequence.request.params.prompt_logprobs
        if wanted is not None and row.wants_prompt_logprobs:
            targets = [*row.token_ids[1:], row.next_token]
            lines = packed[position : position + row.q_len]
            found[index] = [_entry(line, target, wanted) for line, target in zip(lines, targets, strict=True)]
        position += row.q_len
    return found


def _entry(line: np.ndarray, target: int, wanted: int) -> Logprobs:
    top_logprobs = _floats(line[1 + MAX_LOGPROBS :][:wanted])
    return Logprobs(
        token_id=target,
        logprob=float(_floats(line[:1])[0]),
        top_ids=tuple(line[1 : 1 + wanted].tolist()),
        top_logprobs=tuple(top_logprobs.tolist()),
    )


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.int32)


def _floats(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(np.float32)
