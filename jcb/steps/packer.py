"""Plans to packed arrays, working out only what is new since a row's last step.

What a request asks of sampling never changes and a page table seldom does, so both are kept by slot and recognised by
identity. See `jcb.steps.inputs` for the layout.
"""

from __future__ import annotations

import numpy as np

from jcb.config import Limits
from jcb.steps.inputs import ROW_FIELDS, SAMPLES, packed_size, request_record, row_flags, views
from jcb.steps.shapes import StepShape
from jcb.types import SamplingParams, ScheduledRow, Sequence, StepPlan

_CHANGING = [ROW_FIELDS.index(name) for name in ("slot", "q_len", "kv_len", "flags")]


class Packer:
    """Packs the plans of one engine. Every array is fresh: the device may take it as its own buffer.

    Raises ValueError for a plan that does not fit its shape or names a slot, page or token out of range: JAX would
    clamp or drop those without a word.
    """

    def __init__(self, limits: Limits, num_slots: int) -> None:
        self._limits = limits
        self._num_slots = num_slots
        self._sequences: list[Sequence | None] = [None] * num_slots
        self._records = np.zeros((num_slots, len(ROW_FIELDS)), np.int32)
        self._is_plain = [False] * num_slots  # whether the flags of its rows say no more than whether they sample
        self._tables: list[tuple[int, ...]] = [()] * num_slots
        self._pages = np.zeros((num_slots, limits.pages_per_seq), np.int32)

    def pack(self, plan: StepPlan, shape: StepShape) -> np.ndarray:
        """`plan` as i32[packed_size(shape)]."""
        rows, count, num_tokens = plan.rows, len(plan.rows), plan.num_tokens
        if count > shape.num_rows or num_tokens > shape.num_tokens:
            raise ValueError(f"{count} rows with {num_tokens} tokens do not fit {shape}")
        packed = np.zeros(packed_size(shape), np.int32)
        records, table, tokens = views(packed, shape)
        packed[0] = count
        records[:, 0] = self._num_slots
        if not count:
            return packed
        changing = [self._changing(row) for row in rows]
        slots = [row.slot for row in rows]
        records[:count] = self._records[slots]
        records[:count, _CHANGING] = changing
        table[:count] = self._pages[slots, : shape.pages_per_seq]
        tokens[:num_tokens] = [token for row in rows for token in row.token_ids]
        if tokens.min() < -1 or tokens.max() >= self._limits.vocab_size:
            raise ValueError(f"step {plan.step_id}: a token id is outside 0 … {self._limits.vocab_size - 1}")
        return packed

    def _changing(self, row: ScheduledRow) -> tuple[int, int, int, int]:
        """What of a row is new in every step; the rest is brought up to date in its slot."""
        slot, start, q_len = row.slot, row.start, row.q_len
        if not (0 <= slot < self._num_slots and q_len >= 1 and start >= 0):
            raise ValueError(f"{row.slot=} {row.q_len=} {row.start=} of {row.sequence.request_id} is out of range")
        if self._sequences[slot] is not row.sequence:
            self._enter(row)
        if self._tables[slot] is not row.page_table:
            self._take_table(row)
        kv_len = start + q_len
        if len(row.page_table) * self._limits.page_size < kv_len:
            raise ValueError(f"{row.sequence.request_id}: {len(row.page_table)} pages cannot hold {row.kv_len=}")
        flags = SAMPLES * row.samples if self._is_plain[slot] and row.mask is None else row_flags(row)
        return slot, q_len, kv_len, flags

    def _enter(self, row: ScheduledRow) -> None:
        """The slot has another sequence."""
        request = row.sequence.request
        self._records[row.slot] = request_record(request)
        self._is_plain[row.slot] = _is_plain(request.params)
        self._sequences[row.slot] = row.sequence

    def _take_table(self, row: ScheduledRow) -> None:
        """The slot's pages changed."""
        table, pages = row.page_table, self._limits.num_pages
        if min(table) < 1 or max(table) >= pages:
            raise ValueError(f"{row.sequence.request_id}: a page of {table} is outside 1 … {pages - 1}")
        line = self._pages[row.slot]
        line[: len(table)] = table
        line[len(table) :] = 0
        self._tables[row.slot] = table


def _is_plain(params: SamplingParams) -> bool:
    """Whether a row without a mask has no flag beside SAMPLES, wherever it stands."""
    changes = params.logit_bias or params.allowed_token_ids is not None or params.has_penalties
    return not (changes or params.min_tokens)
