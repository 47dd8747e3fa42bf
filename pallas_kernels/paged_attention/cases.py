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
    sinks: bool = False
    num_layers: int = 2
    layer: int = 1
    kv_dtype: str = ""

    def layout(self, platform: str) -> KVLayout:
        return KVLayout(platform, self.kv_dtype or self.dtype, self.kv_heads, self.head_dim, self.page_size)

    @property
    def max_q_len(self) -> int | None:
        """What the engine would promise of this batch."""
        return 1 if self.is_decode else None

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


class Options(NamedTuple):
    """Arrays that only some cases have."""

    sinks: jax.Array | None  # f32[N]
    kv_scales: jax.Array | None  # f32[2, K]


def make_options(case: Case, seed: int = 0) -> Options:
    """Random sinks and scales where `case` has them."""
    rng = np.random.default_rng(seed)
    sinks = jnp.asarray(rng.standard_normal(case.num_heads), jnp.float32)
    scales = jnp.asarray(rng.uniform(0.02, 0.04, (2, case.kv_heads)), jnp.float32)
    return Options(sinks if case.sinks else None, scales if case.layout("cpu").is_quantised else None)


def make(case: Case, platform: str, seed: int = 0, *, poison: bool = True) -> Arrays:
    """Random arrays for `case`; pages sit in random order, and what no query may read holds NaN if `poison`.

    Integers have no NaN: there it holds the largest number.
    """
    layout = case.layout(platform)
    bad = 127 if layout.dtype == "int8" else np.nan
    stored = 40.0 if layout.is_quantised else 1.0
    rng = np.random.default_rng(seed)
    size, rows = case.page_size, len(case.rows) + case.padding_rows
    counts = [-(-kv_len // size) for _, kv_len in case.rows]
    width = max(counts, default=1) + 3  # wider than needed, as page tables are
    total = sum(counts) + 4
    pages = np.full(layout.array_shape(case.num_layers, total), bad if poison else 0.0, np.float32)
    free = rng.permutation(np.arange(1, total))
    table = np.zeros((rows, width), np.int32)
    for row, (count, (_, kv_len)) in enumerate(zip(counts, case.rows, strict=True)):
        ids, free = free[:count], free[count:]
        table[row, :count] = ids
        k, v = jnp.asarray(rng.standard_normal((2, kv_len, case.kv_heads, case.head_dim)) * stored, jnp.float32)
        packed = np.moveaxis(np.asarray(layout.pack(k, v)), 0, 1)  # [planes, kv_len, width]
        for index, page in enumerate(ids):
            live = packed[:, index * size : (index + 1) * size]
            pages[case.layer, page, :, : live.shape[1]] = live
    q_lens = [q_len for q_len, _ in case.rows] + [0] * case.padding_rows
    cu_q_lens = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    kv_lens = np.array([kv_len for _, kv_len in case.rows] + [0] * case.padding_rows, np.int32)
    tokens = int(cu_q_lens[-1]) + case.padding_tokens
    q = rng.standard_normal((tokens, case.num_heads, case.head_dim))
    return Arrays(
        jnp.asarray(q, case.dtype),
        jnp.asarray(pages, layout.dtype),
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
    Case("decode_sinks", _decode(12, 140, 20), sinks=True),
    Case("decode_int8", _decode(12, 140, 20), page_size=32, kv_dtype="int8"),
    Case("decode_fp8_bf16", _decode(12, 140, 20), page_size=32, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
    Case("decode_page_128", _decode(1, 128, 129, 300), page_size=128, dtype="bfloat16"),
    Case(
        "decode_gqa4_128",
        _decode(1, 64, 129, 300),
        num_heads=32,
        kv_heads=8,
        head_dim=128,
        page_size=64,
        dtype="bfloat16",
    ),
    Case("decode_empty", (), padding_rows=8, padding_tokens=8),
    Case("prefill_one", ((100, 100),), padding_rows=1, padding_tokens=28),
    Case("prefill_chunk", ((64, 300), (7, 7), (65, 600)), padding_rows=5, padding_tokens=120),
    Case("prefill_window", ((64, 300), (90, 90)), sliding_window=50, padding_rows=2, padding_tokens=6),
    Case("prefill_bf16", ((70, 300), (30, 30)), dtype="bfloat16", padding_rows=2, padding_tokens=28),
    Case("mixed", (*_decode(5, 70, 300), (64, 128), (2, 2), (33, 290)), padding_rows=2, padding_tokens=26),
    Case("mixed_page_1", (*_decode(5, 70), (17, 40)), page_size=1, padding_rows=5, padding_tokens=13),
    Case("mixed_page_64", (*_decode(5, 70), (130, 200)), page_size=64, padding_rows=5, padding_tokens=124),
    Case("mixed_soft_cap", (*_decode(5, 70), (17, 40)), soft_cap=10.0, padding_rows=5, padding_tokens=13),
    Case("mixed_sinks_window", (*_decode(5, 70), (40, 90)), sinks=True, sliding_window=33, padding_tokens=6),
    Case("mixed_int8", (*_decode(5, 70), (40, 90)), page_size=32, kv_dtype="int8", padding_tokens=6),
    Case("mixed_fp8", (*_decode(5, 70), (40, 90)), page_size=32, kv_dtype="float8_e4m3fn", padding_tokens=6),
    Case("mixed_page_128", (*_decode(5, 200), (130, 200), (40, 300)), page_size=128, dtype="bfloat16", padding_rows=2),
    Case("mixed_mqa_256", (*_decode(9), (20, 70)), num_heads=4, kv_heads=1, head_dim=256, padding_tokens=11),
    Case("mixed_gqa8_128", (*_decode(9), (20, 70)), num_heads=16, kv_heads=2, head_dim=128, padding_tokens=11),
)

BENCH: tuple[Case, ...] = (
    Case("smollm2_decode_8x512", _decode(*[512] * 8), num_layers=1, layer=0),
    Case("smollm2_decode_32x256", _decode(*[256] * 32), num_layers=1, layer=0),
    Case("smollm2_decode_64x2048", _decode(*[2048] * 64), num_layers=1, layer=0),
    Case("smollm2_chunk_512", ((512, 512),), num_layers=1, layer=0),
    Case("smollm2_chunk_512_of_2048", ((512, 2048),), num_layers=1, layer=0),
    *(
        Case(f"llama8b_{name}", rows, num_heads=32, kv_heads=8, head_dim=128, num_layers=1, layer=0, kv_dtype=kv_dtype)
        for name, rows, kv_dtype in (
            ("decode_1x8192", _decode(8192), ""),
            ("decode_8x2048", _decode(*[2048] * 8), ""),
            ("decode_64x2048", _decode(*[2048] * 64), ""),
            ("decode_64x2048_fp8", _decode(*[2048] * 64), "float8_e4m3fn"),
            ("decode_256x2048", _decode(*[2048] * 256), ""),
            ("decode_uneven", _decode(*[128 * (1 + i % 32) for i in range(64)]), ""),
            ("chunk_512_of_2048", ((512, 2048),), ""),
            ("chunk_2048", ((2048, 2048),), ""),
            ("mixed", (*_decode(*[2048] * 63), (449, 2048)), ""),
        )
    ),
)
"""Shapes of real models for benchmarks and tuning; whoever runs them chooses data type and page size."""
