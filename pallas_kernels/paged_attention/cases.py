"""Named ragged batches for tests, benchmarks and tuning, and how to make their arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import KVLayout


@dataclass(frozen=True)
class Case:
    """A batch by its shapes. rows: (q_len, kv_len) of each row; padding_rows / padding_tokens come after them."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    padding_rows: int = 0
    padding_tokens: int = 0
    sliding_window: int | None = None
    soft_cap: float | None = None
    num_layers: int = 2
    layer: int = 1

    @property
    def layout(self) -> KVLayout:
        return KVLayout(self.dtype, self.kv_heads, self.head_dim, self.page_size)

    @property
    def is_decode(self) -> bool:
        """True when every row has one query and tokens are not padded beyond rows."""
        return all(q_len == 1 for q_len, _ in self.rows) and self.padding_tokens == self.padding_rows


class Arrays(NamedTuple):
    """The arguments of `paged_attention`, in order."""

    q: jax.Array
    kv_pages: jax.Array
    layer: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array


def make(case: Case, seed: int = 0, *, poison: bool = True) -> Arrays:
    """Random arrays for `case`; pages sit in random order, and what no query may read holds NaN if `poison`."""
    rng = np.random.default_rng(seed)
    size, rows = case.page_size, len(case.rows) + case.padding_rows
    counts = [-(-kv_len // size) for _, kv_len in case.rows]
    width = max(counts, default=1) + 3  # wider than needed, as page tables are
    total = sum(counts) + 4
    pages = np.full((case.num_layers, total, *case.layout.page_shape), np.nan if poison else 0.0, np.float32)
    free = rng.permutation(np.arange(1, total))
    table = np.zeros((rows, width), np.int32)
    for row, (count, (_, kv_len)) in enumerate(zip(counts, case.rows, strict=True)):
        ids, free = free[:count], free[count:]
        table[row, :count] = ids
        for index, page in enumerate(ids):
            live = min(size, kv_len - index * size)
            pages[case.layer, page, :, :live] = rng.standard_normal((2 * case.kv_heads, live, case.head_dim))
    q_lens = [q_len for q_len, _ in case.rows] + [0] * case.padding_rows
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    kv_lens = np.array([kv_len for _, kv_len in case.rows] + [0] * case.padding_rows, np.int32)
    tokens = int(cu_q_lens[-1]) + case.padding_tokens
    q = rng.standard_normal((tokens, case.num_heads, case.head_dim))
    return Arrays(
        jnp.asarray(q, case.dtype),
        jnp.asarray(pages, case.dtype),
        jnp.int32(case.layer),
        jnp.asarray(table),
        jnp.asarray(kv_lens),
        jnp.asarray(cu_q_lens),
        jnp.int32(len(case.rows)),
    )


def _decode(*kv_lens: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, kv_len) for kv_len in kv_lens)


CASES: tuple[Case, ...] = (
    Case("decode_one", _decode(37), padding_rows=1, padding_tokens=1),
    Case("decode_ragged", _decode(1, 5, 16, 17, 300, 64, 129, 2, 450, 33), padding_rows=6, padding_tokens=6),
    Case("decode_page_1", _decode(1, 9, 40), page_size=1, padding_rows=5, padding_tokens=5),
    Case("decode_page_64", _decode(1, 64, 65, 200), page_size=64),
    Case("decode_bf16", _decode(3, 90, 260, 17), dtype="bfloat16"),
    Case("decode_window", _decode(3, 90, 260, 17, 31, 32, 33), sliding_window=32),
    Case("decode_soft_cap", _decode(3, 90, 260), soft_cap=20.0),
    Case("decode_mha_128", _decode(12, 140), num_heads=4, kv_heads=4, head_dim=128),
    Case("decode_mqa_256", _decode(12, 140, 20), num_heads=8, kv_heads=1, head_dim=256),
    Case("decode_empty", (), padding_rows=8, padding_tokens=8),
    Case("prefill_one", ((100, 100),), padding_rows=1, padding_tokens=28),
    Case("prefill_chunk", ((64, 300), (7, 7), (65, 600)), padding_rows=5, padding_tokens=120),
    Case("prefill_window", ((64, 300), (90, 90)), sliding_window=50, padding_rows=2, padding_tokens=6),
    Case("prefill_bf16", ((70, 300), (30, 30)), dtype="bfloat16", padding_rows=2, padding_tokens=28),
    Case("mixed", (*_decode(5, 70, 300), (64, 128), (2, 2), (33, 290)), padding_rows=2, padding_tokens=26),
    Case("mixed_page_1", (*_decode(5, 70), (17, 40)), page_size=1, padding_rows=5, padding_tokens=13),
    Case("mixed_page_64", (*_decode(5, 70), (130, 200)), page_size=64, padding_rows=5, padding_tokens=124),
    Case("mixed_soft_cap", (*_decode(5, 70), (17, 40)), soft_cap=10.0, padding_rows=5, padding_tokens=13),
    Case("mixed_gqa8_128", (*_decode(9), (20, 70)), num_heads=16, kv_heads=2, head_dim=128, padding_tokens=11),
)
