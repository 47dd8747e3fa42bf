"""What a call cannot do without: bytes and operations from the true lengths of its rows."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.paged_attention.cases import Case


@dataclass(frozen=True)
class Cost:
    """Bytes to move and floating-point operations to do."""

    nbytes: int
    flops: int

    def seconds(self, bandwidth: float, flops: float) -> float:
        """The shortest time with that many bytes and operations a second: the larger of the two."""
        return max(self.nbytes / bandwidth, self.flops / flops)


def cost_of(case: Case) -> Cost:
    """Live keys and values once a row, queries and results once; two products of H for each query and key it sees."""
    window = case.sliding_window
    kv_tokens = pairs = 0
    for q_len, kv_len in case.rows:
        first = kv_len - q_len
        kv_tokens += kv_len if window is None else min(kv_len, q_len + window - 1)
        seen = range(first + 1, kv_len + 1) if window is None else (min(p + 1, window) for p in range(first, kv_len))
        pairs += sum(seen)
    layout = case.layout("cpu")
    tokens = sum(q_len for q_len, _ in case.rows)
    itemsize = jnp.dtype(case.dtype).itemsize
    return Cost(
        nbytes=kv_tokens * layout.page_bytes // layout.page_size
        + 2 * tokens * case.num_heads * case.head_dim * itemsize,
        flops=4 * pairs * case.num_heads * case.head_dim,
    )
