"""Paged attention on the CPU in C++ (`cpu.cc`): pages are read where they lie, so nothing but live context costs.

A query's result depends on its own keys alone, bit for bit: not on batch mates, chunks or threads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.layout import KVLayout
from pallas_kernels.quantise import fold_key_scale, fold_value_scale

HANDLER = "pallas_kernels_paged_attention"


def paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    layer: jax.Array,
    page_table: jax.Array,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    layout: KVLayout,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    max_q_len: int | None = None,
    instruction_set: str = "",
) -> jax.Array:
    """See `pallas_kernels.paged_attention`. instruction_set: the best that the processor has if "", else at most this.

    Raises NotImplementedError where the library is missing and for shapes that it does not serve. At run time a page, a
    row or a layer outside its array is an error.
    """
    del max_q_len
    if reason := native.why_not() or _refuses(q, layout):
        raise NotImplementedError(reason)
    native.check_instruction_set(instruction_set)
    call = jax.ffi.ffi_call(HANDLER, jax.ShapeDtypeStruct(q.shape, q.dtype))
    indices = (jnp.asarray(x, jnp.int32) for x in (layer, page_table, kv_lens, cu_q_lens, num_seqs))
    out = call(
        fold_key_scale(q, kv_scales),
        kv_pages,
        *indices,
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int64(sliding_window or 0),
        isa=instruction_set,
    )
    return fold_value_scale(out, kv_scales)


def _refuses(q: jax.Array, layout: KVLayout) -> str:
    """Why these shapes are not served, "" when they are."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"queries of {q.dtype.name} are not served, only float32 and bfloat16"
    if layout.platform == "tpu":
        return "the pages have the layout of a TPU"
    if layout.head_dim % 16:
        return f"head_dim {layout.head_dim} is not a multiple of 16"
    return ""
