"""From logits to tokens, on the device, every row by its own rule.

Costly parts run under `lax.cond`, only in steps where some row needs them, so one program serves every mix. What a row
gets never depends on its mates: each branch computes for a row what it would compute alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jcb.steps.inputs import SAMPLES, SUPPRESSES_STOP, USES_BIAS, USES_MASK, USES_PENALTIES, Rows
from jcb.steps.mask import allowed
from jcb.steps.state import DeviceState
from jcb.types import MAX_LOGPROBS

CHANGED_ROWS = 8
"""Rows whose penalties, biases and masks exist at once."""


class Sampled(NamedTuple):
    """What one step sampled; log-probabilities are of the unmodified logits, in nats, 0 where none was asked for."""

    token_ids: jax.Array  # i32[R]
    logprobs: jax.Array  # f32[R]
    top_ids: jax.Array  # i32[R, MAX_LOGPROBS]
    top_logprobs: jax.Array  # f32[R, MAX_LOGPROBS]
    finite: jax.Array  # bool[R]


def likeliest(logits: jax.Array, rows: Rows) -> Sampled:
    """The likeliest token of each row of f32[R, V] logits, without alternatives."""
    return _sampled(logits, rows, _normaliser(logits, rows), _best(logits), _no_alternatives(logits))


def remember(state: DeviceState, rows: Rows, sampled: Sampled) -> DeviceState:
    """`state` in which the slots of rows that sample know their new token."""
    slots = jnp.where(rows.has(SAMPLES), rows.slot, state.last_token.shape[0])
    return dataclasses.replace(
        state,
        last_token=state.last_token.at[slots].set(sampled.token_ids, mode="drop"),
        seen=state.seen.at[slots, sampled.token_ids].add(2, mode="drop"),
    )


def sample(logits: jax.Array, rows: Rows, positions: jax.Array, state: DeviceState) -> Sampled:
    """One token for each row of f32[R, V] logits. positions: i32[R], where the new token will stand."""
    normaliser = _normaliser(logits, rows)
    changes = jnp.any(rows.has(USES_BIAS | USES_PENALTIES | SUPPRESSES_STOP | USES_MASK))
    random = rows.temperature > 0
    draws = jnp.any(random)

    def pick(logits: jax.Array) -> jax.Array:
        adjusted = jax.lax.cond(changes, lambda x: change(x, rows, state), lambda x: x, logits)
        best = _best(adjusted)
        return jax.lax.cond(
            draws, lambda x: jnp.where(random, draw(x, rows, positions), best), lambda x: best, adjusted
        )

    token_ids = jax.lax.cond(changes | draws, pick, _best, logits)  # else no second array of logits is made
    alternatives = jax.lax.cond(
        jnp.any(rows.num_logprobs > 0), lambda x: top_alternatives(x, normaliser), _no_alternatives, logits
    )
    sampled = _sampled(logits, rows, normaliser, token_ids, alternatives)
    return sampled._replace(finite=sampled.finite & jnp.isfinite(jnp.max(logits, axis=-1)))


def _normaliser(logits: jax.Array, rows: Rows) -> jax.Array:
    """f32[R, 1]: logits less it are log-probabilities, where some row wants them; the sum is a pass of its own."""
    wanted = jnp.any(rows.has(SAMPLES) & (rows.num_logprobs >= 0))
    return jax.lax.cond(
        wanted,
        partial(jax.nn.logsumexp, axis=-1, keepdims=True),
        lambda x: jnp.zeros_like(x, shape=(len(x), 1)),
        logits,
    )


def _sampled(
    logits: jax.Array,
    rows: Rows,
    normaliser: jax.Array,
    token_ids: jax.Array,
    alternatives: tuple[jax.Array, jax.Array],
) -> Sampled:
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)
    logprobs = jnp.where(rows.num_logprobs >= 0, (chosen - normaliser)[:, 0], 0.0)
    return Sampled(token_ids, logprobs, *alternatives, jnp.isfinite(chosen[:, 0]))


def _no_alternatives(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    nothing = jnp.zeros((logits.shape[0], MAX_LOGPROBS))
    return nothing.astype(jnp.int32), nothing


def _best(logits: jax.Array) -> jax.Array:
    """i32[R]: the likeliest ids."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def top_alternatives(logits: jax.Array, normaliser: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The MAX_LOGPROBS most likely ids and their log-probabilities, both [R, MAX_LOGPROBS], best first."""
    count = min(MAX_LOGPROBS, logits.shape[-1])
    values, ids = jax.lax.top_k(logits, count)
    width = ((0, 0), (0, MAX_LOGPROBS - count))
    return jnp.pad(ids.astype(jnp.int32), width), jnp.pad(values - normaliser, width, constant_values=-jnp.inf)


def change(logits: jax.Array, rows: Rows, state: DeviceState) -> jax.Array:
    """Logits as each row's request wants them, a few rows at a time: all rows' counts and biases are as large again."""
    tile = next(size for size in range(CHANGED_ROWS, 0, -1) if logits.shape[0] % size == 0)

    def one_tile(part: tuple[jax.Array, Rows]) -> jax.Array:
        logits, rows = part
        adjusts = rows.has(USES_BIAS | USES_PENALTIES | SUPPRESSES_STOP)
        return restrict(jnp.where(adjusts[:, None], adjust(logits, rows, state), logits), rows, state)

    tiles = jax.tree.map(lambda leaf: leaf.reshape(-1, tile, *leaf.shape[1:]), (logits, rows))
    return jax.lax.map(one_tile, tiles).reshape(logits.shape)


def adjust(logits: jax.Array, rows: Rows, state: DeviceState) -> jax.Array:
    """Logits after repetition, frequency and presence penalties, bias, and stop ids held back by min_tokens."""
    slots = jnp.minimum(rows.slot, state.seen.shape[0] - 1)
    seen = jnp.where(rows.has(USES_PENALTIES)[:, None], state.seen[slots], 0)
    repetition = jnp.where(seen > 0, rows.repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    counts = (seen >> 1).astype(jnp.float32)
    logits = logits - rows.frequency[:, None] * counts - rows.presence[:, None] * (counts > 0)
    logits = logits + jnp.where(rows.has(USES_BIAS)[:, None], state.bias[slots], 0.0)
    held = jnp.where(rows.has(SUPPRESSES_STOP)[:, None], state.stop_ids[slots], logits.shape[1])
    return jax.vmap(lambda row, ids: row.at[ids].set(-jnp.inf, mode="drop"))(logits, held)


def restrict(logits: jax.Array, rows: Rows, state: DeviceState) -> jax.Array:
    """Logits with -inf for the ids that a row's grammar does not allow next."""
    masks = state.mask[jnp.minimum(rows.slot, state.mask.shape[0] - 1)]
    return jnp.where(allowed(masks, logits.shape[1]) | ~rows.has(USES_MASK)[:, None], logits, -jnp.inf)


def draw(logits: jax.Array, rows: Rows, positions: jax.Array) -> jax.Array:
    """A random id i32[R] by temperature, min_p, top_k and top_p.

    Exponential variables race, each at the speed of its weight, and the first wins. Unlike a walk along the sum of
    weights, the winner is not moved by rounding unless two are nearly tied, so other step shapes draw the same ids.
    """
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)[:, None]
    scaled = (logits - logits.max(-1, keepdims=True)) / temperature
    weights = jnp.exp(scaled)
    weights = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)
    narrows = jnp.any((rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1.0)))
    cut = jax.lax.cond(narrows, lambda w: _cut(w, rows), lambda w: jnp.zeros(w.shape[:1]), weights)
    weights = jnp.where(weights >= cut[:, None], weights, 0.0)
    return jnp.argmax(weights / _exponential(rows, positions, weights.shape[1]), axis=-1).astype(jnp.int32)


def _exponential(rows: Rows, positions: jax.Array, vocab: int) -> jax.Array:
    """Independent exponential variables f32[R, V] from (seed, position) alone.

    Each row's key is its seed folded with the position (threefry); a 32-bit hash of the key spreads it over the ids.
    """

    def key_of(low: jax.Array, high: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([high, low]).astype(jnp.uint32))
        return jax.random.key_data(jax.random.fold_in(key, position))

    keys = jax.vmap(key_of)(rows.seed_low, rows.seed_high, positions)  # u32[R, 2]
    ids = jnp.arange(vocab, dtype=jnp.uint32)[None, :] * jnp.uint32(0x9E3779B9)
    bits = _mix(_mix(ids ^ keys[:, :1]) + keys[:, 1:])
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log1p(-uniform)


def _mix(bits: jax.Array) -> jax.Array:
    """A bijection of u32 in which every input bit moves every output bit. Source: MurmurHash3's finaliser."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)


def _cut(weights: jax.Array, rows: Rows) -> jax.Array:
    """f32[R]: weights below it are outside the top_k largest, or outside the smallest set that holds top_p of those.

    No array of weights is made on the way: each would take as much memory as the logits.
    """
    vocab = weights.shape[1]
    top_k = jnp.where(rows.top_k > 0, jnp.minimum(rows.top_k, vocab), vocab)
    floor = _threshold(weights, lambda w, cut: (w >= cut).sum(-1) >= top_k)
    target = rows.top_p * jnp.where(weights >= floor[:, None], weights, 0.0).sum(-1)

    def holds_enough(w: jax.Array, cut: jax.Array) -> jax.Array:
        return jnp.where(w >= jnp.maximum(cut, floor[:, None]), w, 0.0).sum(-1) >= target

    return jnp.where(rows.top_p >= 1.0, floor, jnp.maximum(_threshold(weights, holds_enough), floor))


def _threshold(weights: jax.Array, enough: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """The largest cut f32[R] for which `enough(weights, cut)` holds, found by bisecting its bits (weights >= 0).

    Bits of non-negative floats are ordered as the floats are, so 31 halvings find the exact weight without a sort.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # enough at low, not at high
        middle = low + (high - low) // 2
        cut = jax.lax.bitcast_convert_type(middle, jnp.float32)
        good = enough(weights, cut[:, None])
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    low = jnp.zeros(weights.shape[:1], jnp.int32)
    high = jax.lax.bitcast_convert_type(weights.max(-1), jnp.int32) + 1
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
