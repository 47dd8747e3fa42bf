"""A step plan as one int32 array: packed on the host, taken apart inside the jitted step.

Layout: a header, then a record of ROW_FIELDS numbers a row, then the page table, then the token ids. Floats travel as
their bits. One array means one transfer.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jcb.models.llama import Batch
from jcb.steps.shapes import StepShape
from jcb.types import ScheduledRow, StepPlan

HEADER = 8
ROW_FIELDS = (
    "slot", "q_len", "kv_len", "flags", "next_token", "num_logprobs", "seed_low", "seed_high",
    "temperature", "top_k", "top_p", "min_p", "presence", "frequency", "repetition",
)  # fmt: skip
_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_WIDTH = len(ROW_FIELDS)
_LEAST_REPETITION = 1e-6  # smaller ones rank no token differently, but logits over them overflow

SAMPLES, USES_BIAS, USES_PENALTIES, SUPPRESSES_STOP, WANTS_PROMPT_LOGPROBS, USES_MASK = (1 << bit for bit in range(6))


def packed_size(shape: StepShape) -> int:
    """Length of the packed array of a step of `shape`."""
    return HEADER + shape.num_rows * (_WIDTH + shape.pages_per_seq) + shape.num_tokens


@flax.struct.dataclass
class Rows:
    """The per-row part of a step, each [R]; padding rows are all zeros but for a slot out of range."""

    slot: jax.Array  # i32
    q_len: jax.Array  # i32
    kv_len: jax.Array  # i32
    flags: jax.Array  # i32 bits, see SAMPLES and its neighbours
    next_token: jax.Array  # i32 prompt token after the last of this row, or -1
    num_logprobs: jax.Array  # i32 alternatives wanted; -1 for none
    seed_low: jax.Array  # i32, bits of the request's seed
    seed_high: jax.Array  # i32
    temperature: jax.Array  # f32, 0 is greedy
    top_k: jax.Array  # i32, 0 is off
    top_p: jax.Array  # f32
    min_p: jax.Array  # f32
    presence: jax.Array  # f32
    frequency: jax.Array  # f32
    repetition: jax.Array  # f32

    def has(self, flag: int) -> jax.Array:
        """bool[R]: which rows carry `flag`."""
        return (self.flags & flag) != 0


def pack(plan: StepPlan, shape: StepShape, num_slots: int) -> np.ndarray:
    """`plan` as i32[packed_size(shape)]; a fresh array every time, since the device may read it in place.

    Raises ValueError where the plan does not fit the shape or an id is out of range.
    """
    rows = plan.rows
    if len(rows) > shape.num_rows or plan.num_tokens > shape.num_tokens:
        raise ValueError(f"{len(rows)} rows with {plan.num_tokens} tokens do not fit {shape}")
    packed = np.zeros(packed_size(shape), np.int32)
    packed[0] = len(rows)
    records, table, tokens = _views(packed, shape)
    records[:, 0] = num_slots
    position = 0
    for index, row in enumerate(rows):
        if not (0 <= row.slot < num_slots and row.q_len >= 1 and row.start >= 0):
            raise ValueError(f"{row.slot=} {row.q_len=} {row.start=} of {row.sequence.request_id} is out of range")
        records[index] = _record(row)
        table[index, : len(row.page_table)] = row.page_table
        tokens[position : position + row.q_len] = row.token_ids
        position += row.q_len
    return packed


def _views(packed: Any, shape: StepShape) -> tuple[Any, Any, Any]:
    """Row records, page table and token ids of a packed array, numpy's or JAX's."""
    records_end = HEADER + shape.num_rows * _WIDTH
    table_end = records_end + shape.num_rows * shape.pages_per_seq
    return (
        packed[HEADER:records_end].reshape(shape.num_rows, _WIDTH),
        packed[records_end:table_end].reshape(shape.num_rows, shape.pages_per_seq),
        packed[table_end:],
    )


def row_flags(row: ScheduledRow) -> int:
    """What the row's request asks of the step, as bits. A mask has held back the ids that end an answer already."""
    params = row.sequence.request.params
    return (
        SAMPLES * row.samples
        + USES_BIAS * bool(params.logit_bias or params.allowed_token_ids is not None)
        + USES_PENALTIES * params.has_penalties
        + SUPPRESSES_STOP * (row.num_output < params.min_tokens and row.mask is None)
        + WANTS_PROMPT_LOGPROBS * row.wants_prompt_logprobs
        + USES_MASK * (row.mask is not None)
    )


def _record(row: ScheduledRow) -> np.ndarray:
    request = row.sequence.request
    params = request.params
    seed = request.seed & 0xFFFFFFFFFFFFFFFF
    record = np.array(
        (
            row.slot,
            row.q_len,
            row.kv_len,
            row_flags(row),
            row.next_token,
            -1 if params.logprobs is None else params.logprobs,
            (seed & 0xFFFFFFFF) - ((seed & 0x80000000) << 1),
            (seed >> 32) - ((seed >> 63) << 32),
            0,
            min(max(params.top_k, 0), 0x7FFFFFFF),
            0, 0, 0, 0, 0,
        ),
        np.int32,
    )  # fmt: skip
    record[_FLOAT_INDEX] = np.array(
        (
            0.0 if params.is_greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            max(params.repetition_penalty, _LEAST_REPETITION),
        ),
        np.float32,
    ).view(np.int32)
    return record


_FLOAT_INDEX = [ROW_FIELDS.index(name) for name in _FLOATS]


def unpack(packed: jax.Array, shape: StepShape, last_token: jax.Array) -> tuple[Batch, Rows]:
    """The traced half of `pack`: what the model reads, and what sampling reads. Source of -1 ids: `last_token`."""
    records, table, tokens = _views(packed, shape)
    num_seqs = packed[0]
    fields = {name: records[:, index] for index, name in enumerate(ROW_FIELDS)}
    for name in _FLOATS:
        fields[name] = jax.lax.bitcast_convert_type(fields[name], jnp.float32)
    rows = Rows(**fields)
    starts = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(rows.q_len, dtype=jnp.int32)])
    index = jnp.arange(shape.num_tokens, dtype=jnp.int32)
    if shape.decode:
        row = index
        starts = jnp.minimum(jnp.arange(shape.num_rows + 1, dtype=jnp.int32), num_seqs)
    else:
        row = jnp.clip(jnp.searchsorted(starts, index, side="right").astype(jnp.int32) - 1, 0, shape.num_rows - 1)
    live = index < starts[num_seqs]
    positions = jnp.where(live, rows.kv_len[row] - rows.q_len[row] + index - starts[row], 0)
    device_ids = last_token.at[rows.slot[row]].get(mode="clip")
    batch = Batch(
        token_ids=jnp.where(tokens < 0, device_ids, tokens),
        positions=positions,
        page_table=table,
        kv_lens=rows.kv_len,
        cu_q_lens=starts,
        num_seqs=num_seqs,
    )
    return batch, rows
