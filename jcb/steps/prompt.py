"""The prompt program: how likely each token of a prompt is after those before it.

It runs after a prefill step in which some row asks for that, on the hidden states which the step left in the device
state, and never for others. Only the tokens of those rows are computed, tile by tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jcb.steps import sampling
from jcb.steps.outputs import bits, floats
from jcb.steps.state import DeviceState
from jcb.steps.step import StepStatics, logits_of
from jcb.types import MAX_LOGPROBS, Logprobs, ScheduledRow, StepPlan

TILE = 32
"""Tokens whose whole logits row exists at once."""

WIDTH = 1 + 2 * MAX_LOGPROBS
"""Numbers a token of the output."""


def packed_size(num_tokens: int) -> int:
    """Length of the packed array of an engine whose steps have at most `num_tokens` tokens."""
    return 1 + 2 * _lines(num_tokens)


def pack(plan: StepPlan, num_tokens: int) -> np.ndarray | None:
    """How many tokens of `plan` are asked about, where they stand in the step and what follows each: a fresh
    i32[packed_size]. None where no row asks.
    """
    if not any(row.wants_prompt_logprobs for row in plan.rows):
        return None
    places: list[int] = []
    targets: list[int] = []
    start = 0
    for row in plan.rows:
        if row.wants_prompt_logprobs:
            places += range(start, start + row.q_len)
            targets += _following(row)
        start += row.q_len
    packed = np.zeros(packed_size(num_tokens), np.int32)
    packed[0] = len(places)
    lines = packed[1:].reshape(2, -1)
    lines[:, : len(places)] = places, np.maximum(targets, 0)
    return packed


def prompt_step(
    statics: StepStatics, params: Any, state: DeviceState, packed: jax.Array
) -> tuple[DeviceState, jax.Array]:
    """Log-probabilities of the tokens that `packed` names (see `pack`), given the hidden states before them.

    Returns the state as it was and i32[lines, WIDTH], floats as their bits; lines that nothing asks for mean nothing.
    """
    count = packed[0]
    places, targets = packed[1:].reshape(2, -1)

    def one_tile(number: jax.Array, lines: jax.Array) -> jax.Array:
        start = number * TILE
        hidden = state.hidden[jax.lax.dynamic_slice_in_dim(places, start, TILE)]
        logits = logits_of(statics, params, hidden, count - start)
        normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        following = jax.lax.dynamic_slice_in_dim(targets, start, TILE)[:, None]
        logprobs = jnp.take_along_axis(logits, following, axis=-1) - normaliser
        top_ids, top_logprobs = sampling.top_alternatives(logits, normaliser)
        tile = jnp.concatenate([bits(logprobs), top_ids, bits(top_logprobs)], axis=1)
        return jax.lax.dynamic_update_slice_in_dim(lines, tile, start, 0)

    lines = jnp.zeros((places.shape[0], WIDTH), jnp.int32)
    return state, jax.lax.fori_loop(0, (count + TILE - 1) // TILE, one_tile, lines)


def unpack(plan: StepPlan, packed: np.ndarray) -> Mapping[int, list[Logprobs]]:
    """The output of the program by row index: one entry a token of each row that asks."""
    found: dict[int, list[Logprobs]] = {}
    start = 0
    for index, row in enumerate(plan.rows):
        wanted = row.sequence.request.params.prompt_logprobs
        if wanted is not None and row.wants_prompt_logprobs:
            lines = packed[start : start + row.q_len]
            found[index] = [_entry(line, token, wanted) for line, token in zip(lines, _following(row), strict=True)]
            start += row.q_len
    return found


def _lines(num_tokens: int) -> int:
    """Lines of the output: whole tiles."""
    return -(-num_tokens // TILE) * TILE


def _following(row: ScheduledRow) -> list[int]:
    """The token after each of the row's own; -1 after the last of a prompt."""
    return [*row.token_ids[1:], row.next_token]


def _entry(line: np.ndarray, token: int, wanted: int) -> Logprobs:
    return Logprobs(
        token_id=token,
        logprob=float(floats(line[:1])[0]),
        top_ids=tuple(line[1 : 1 + wanted].tolist()),
        top_logprobs=tuple(floats(line[1 + MAX_LOGPROBS :][:wanted]).tolist()),
    )
