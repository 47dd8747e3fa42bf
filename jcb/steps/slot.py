"""The slot program: what the device must know of a sequence with penalties, bias or held-back stop ids.

It runs once when such a sequence is admitted or resumed, never for others.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jcb.steps.state import STOP_WIDTH, DeviceState, mask_words
from jcb.types import MAX_LOGIT_BIAS, Request, Sequence

_HEADER = 4  # slot, prompt length, length, whether only listed ids are allowed
_BIAS_VALUES = _HEADER + MAX_LOGIT_BIAS
_STOP_IDS = _BIAS_VALUES + MAX_LOGIT_BIAS
_ALLOWED = _STOP_IDS + STOP_WIDTH


def needs_slot(request: Request) -> bool:
    """True when the device must prepare a slot for `request`."""
    params = request.params
    restricts = bool(params.logit_bias) or params.allowed_token_ids is not None
    return params.has_penalties or restricts or params.min_tokens > 0


def packed_size(vocab_size: int, max_model_len: int) -> int:
    """Length of the packed array: header, bias ids and values, stop ids, allowed bits, token ids."""
    return _ALLOWED + mask_words(vocab_size) + max_model_len


def pack(sequence: Sequence, vocab_size: int, max_model_len: int) -> np.ndarray:
    """What the slot program needs of `sequence`, as i32[packed_size]."""
    request = sequence.request
    params = request.params
    tokens = sequence.tokens(0, sequence.num_tokens - sequence.num_pending)
    packed = np.zeros(packed_size(vocab_size, max_model_len), np.int32)
    packed[:_HEADER] = (
        sequence.slot,
        len(request.prompt_token_ids),
        len(tokens),
        params.allowed_token_ids is not None,
    )
    packed[_HEADER:_ALLOWED] = vocab_size
    packed[_HEADER : _HEADER + len(params.logit_bias)] = list(params.logit_bias)
    values = np.array(list(params.logit_bias.values()), np.float32)
    packed[_BIAS_VALUES : _BIAS_VALUES + len(values)] = values.view(np.int32)
    stop_ids = sorted({*params.stop_token_ids, *request.eos_token_ids})
    packed[_STOP_IDS : _STOP_IDS + len(stop_ids)] = stop_ids
    allowed = packed[_ALLOWED : _ALLOWED + mask_words(vocab_size)].view(np.uint32)
    ids = np.array(params.allowed_token_ids or (), np.int64)
    np.bitwise_or.at(allowed, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
    packed[_ALLOWED + mask_words(vocab_size) :][: len(tokens)] = tokens
    return packed


def load_slot(state: DeviceState, packed: jax.Array) -> DeviceState:
    """`state` with the rows of one slot rebuilt from `packed`."""
    vocab = state.seen.shape[1]
    slot, prompt_len, length, restricted = packed[0], packed[1], packed[2], packed[3] != 0
    tokens = packed[_ALLOWED + mask_words(vocab) :]
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    prompt_ids = jnp.where(index < prompt_len, tokens, vocab)
    output_ids = jnp.where((index >= prompt_len) & (index < length), tokens, vocab)
    seen = jnp.zeros((vocab,), jnp.int32).at[prompt_ids].max(1, mode="drop").at[output_ids].add(2, mode="drop")
    ids = jnp.arange(vocab, dtype=jnp.int32)
    allowed = (packed[_ALLOWED + ids // 32] >> (ids % 32)) & 1
    bias = jnp.where(restricted & (allowed == 0), -jnp.inf, 0.0)
    values = jax.lax.bitcast_convert_type(packed[_BIAS_VALUES:_STOP_IDS], jnp.float32)
    bias = bias.at[packed[_HEADER:_BIAS_VALUES]].add(values, mode="drop")
    return dataclasses.replace(
        state,
        seen=state.seen.at[slot].set(seen),
        bias=state.bias.at[slot].set(bias),
        stop_ids=state.stop_ids.at[slot].set(packed[_STOP_IDS:_ALLOWED]),
    )
