"""A step plan as one int32 array: packed on the host (`jcb.steps.packer`), taken apart inside the jitted step.

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
from jcb.types import Request, ScheduledRow

HEADER = 8
ROW_FIELDS = (
    "slot", "q_len", "kv_len", "flags", "num_logprobs", "seed_low", "seed_high", "temperature",
    "top_k", "top_p", "min_p", "presence", "frequency", "repetition",
)  # fmt: skip
_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_WIDTH = len(ROW_FIELDS)
_LEAST_REPETITION = 1e-6  # smaller ones rank no token differently, but logits over them overflow

SAMPLES, USES_BIAS, USES_PENALTIES, SUPPRESSES_STOP, USES_MASK = (1 << bit for bit in range(5))


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


def views(packed: Any, shape: StepShape) -> tuple[Any, Any, Any]:
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
        + USES_MASK * (row.mask is not None)
    )


def request_record(request: Request) -> np.ndarray:
    """What a row's record says of its request, i32[len(ROW_FIELDS)]; zeros in the fields that change by step."""
    params = request.params
    seed = request.seed & 0xFFFFFFFFFFFFFFFF
    values = {
        "num_logprobs": -1 if params.logprobs is None else params.logprobs,
        "seed_low": (seed & 0xFFFFFFFF) - ((seed & 0x80000000) << 1),
        "seed_high": (seed >> 32) - ((seed >> 63) << 32),
        "top_k": min(max(params.top_k, 0), 0x7FFFFFFF),
    }
    record = np.array([values.get(name, 0) for name in ROW_FIELDS], np.int32)
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


def read_rows(records: jax.Array) -> Rows:
    """Row records i32[R, len(ROW_FIELDS)] by field."""
    fields = {name: records[:, index] for index, name in enumerate(ROW_FIELDS)}
    for name in _FLOATS:
        fields[name] = jax.lax.bitcast_convert_type(fields[name], jnp.float32)
    return Rows(**fields)


def unpack(packed: jax.Array, shape: StepShape, last_token: jax.Array) -> tuple[Batch, Rows]:
    """The traced half of `packer`: what the model reads, and what sampling reads. Source of -1 ids: `last_token`."""
    records, table, tokens = views(packed, shape)
    num_seqs = packed[0]
    rows = read_rows(records)
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
