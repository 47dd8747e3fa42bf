"""Named writes for tests, benchmarks and tuning, and how to make their arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layout import KVLayout


@dataclass(frozen=True)
class Case:
    """A ragged write by its shapes. rows: (q_len, kv_len) of each row, q_len of them new; padding comes after them."""

    name: str
    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    padding_rows: int = 0
    padding_tokens: int = 0
    num_layers: int = 3
    layer: int = 1
    scales: bool = False

    def layout(self, platform: str) -> KVLayout:
        return KVLayout(platform, self.dtype, self.kv_heads, self.head_dim, self.page_size)

    @property
    def is_decode(self) -> bool:
        """True when every row has one token and tokens are not padded beyond rows."""
        return all(q_len == 1 for q_len, _ in self.rows) and self.padding_tokens == self.padding_rows


class Arrays(NamedTuple):
    """The arguments of `kv_write`, in order."""

    kv_pages: jax.Array
    layer: jax.Array
    k: jax.Array
    v: jax.Array
    page_table: jax.Array
    kv_lens: jax.Array
    cu_q_lens: jax.Array
    num_seqs: jax.Array


def make(case: Case, platform: str, seed: int = 0) -> Arrays:
    """Random arrays for `case`; the pages of a row sit anywhere, and the cache is full of other numbers."""
    rng = np.random.default_rng(seed)
    counts = [-(-kv_len // case.page_size) for _, kv_len in case.rows]
    rows, total = len(case.rows) + case.padding_rows, sum(counts) + 4
    free = rng.permutation(np.arange(1, total))
    table = np.zeros((rows, max(counts, default=1) + 2), np.int32)
    for row, count in enumerate(counts):
        table[row, :count], free = free[:count], free[count:]
    q_lens = [q_len for q_len, _ in case.rows] + [0] * case.padding_rows
    shape = (sum(q_lens) + case.padding_tokens, case.kv_heads, case.head_dim)
    width = 100.0 if jnp.dtype(case.dtype).itemsize == 1 and not case.scales else 1.0
    pages = rng.standard_normal(case.layout(platform).array_shape(case.num_layers, total)) * width
    return Arrays(
        jnp.asarray(np.clip(pages, -120, 120), case.dtype),
        jnp.int32(case.layer),
        jnp.asarray(rng.standard_normal(shape), jnp.float32 if case.scales else case.dtype),
        jnp.asarray(rng.standard_normal(shape), jnp.float32 if case.scales else case.dtype),
        jnp.asarray(table),
        jnp.asarray([kv_len for _, kv_len in case.rows] + [0] * case.padding_rows, jnp.int32),
        jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        jnp.int32(len(case.rows)),
    )


def make_scales(case: Case, seed: int = 0) -> jax.Array | None:
    """f32[2, K] for a case with scales, such that normal values use most of the 8 bits."""
    if not case.scales:
        return None
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.uniform(0.03, 0.05, (2, case.kv_heads)), jnp.float32)


def _decode(*kv_lens: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, kv_len) for kv_len in kv_lens)


CASES: tuple[Case, ...] = (
    Case("decode", _decode(1, 16, 17, 40, 33, 100, 64, 2)),
    Case("decode_padded", _decode(31, 32, 5), padding_rows=5, padding_tokens=5),
    Case("decode_page_128", _decode(1, 128, 129, 300), page_size=128, dtype="bfloat16"),
    Case("chunk", ((100, 130), (1, 7), (3, 3)), padding_rows=2, padding_tokens=24),
    Case("chunk_page_128", ((100, 130), (1, 7), (140, 140)), page_size=128, dtype="bfloat16", padding_tokens=15),
    Case("page_1", ((4, 9), (1, 1)), page_size=1, padding_rows=1, padding_tokens=3),
    Case("bf16", ((30, 45), (10, 10)), dtype="bfloat16"),
    Case("gqa8_128", ((20, 70), (1, 40)), kv_heads=8, head_dim=128, dtype="bfloat16", padding_tokens=3),
    Case("int8", ((20, 70), (1, 40)), page_size=32, dtype="int8", scales=True, padding_tokens=3),
    Case("fp8", ((20, 70), (1, 40)), page_size=32, dtype="float8_e4m3fn", scales=True, padding_tokens=3),
    Case("empty", (), padding_rows=8, padding_tokens=8),
)
