"""The TPU kernel of paged attention in the interpreter, against dense attention in numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention.cases import CASES, Case, make, make_options
from pallas_kernels.paged_attention.tpu import paged_attention
from pallas_kernels.paged_attention.tpu.kernel import Blocks
from tests.pallas_kernels.paged_attention.drawn import ragged, with_a_long_one
from tests.pallas_kernels.paged_attention.test_paged_attention import TOLERANCE, dense_oracle
from tests.pallas_kernels.tpu_interpreter import interpreted_tpu

NOWHERE = 10**6
"""A page that does not exist: the interpreter raises when something reads it."""


def forbid_dead_pages(case: Case, arrays):
    """The arrays with every entry of the page table that no query needs pointing nowhere."""
    table = np.full(arrays.page_table.shape, NOWHERE, np.int32)
    for row, (q_len, kv_len) in enumerate(case.rows):
        first = 0 if case.sliding_window is None else max(0, kv_len - q_len + 1 - case.sliding_window)
        live = slice(first // case.page_size, -(-kv_len // case.page_size))
        table[row, live] = np.asarray(arrays.page_table)[row, live]
    return arrays._replace(page_table=jnp.asarray(table))


def small_blocks(case: Case) -> dict[str, Blocks]:
    """Tiles so small that a case of a few hundred tokens has many of them."""
    block = max(2 * case.page_size, 64)
    return {"decode_blocks": Blocks(1, block, 32), "chunk_blocks": Blocks(16, block, 64)}


def check(case: Case, seed: int = 0, blocks: dict[str, Blocks] | None = None) -> None:
    arrays = make(case, "tpu", seed)
    with interpreted_tpu():
        out = paged_attention(
            *forbid_dead_pages(case, arrays),
            **make_options(case)._asdict(),
            layout=case.layout("tpu"),
            scale=case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            max_q_len=case.max_q_len,
            **(small_blocks(case) if blocks is None else blocks),
        )
        got = np.asarray(out.astype(jnp.float32))
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(got, dense_oracle(case, arrays, "tpu"), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention_and_reads_live_pages_only(case):
    if case.page_size < 8:
        with pytest.raises(NotImplementedError, match="tile"):
            check(case)
    else:
        check(case)


@pytest.mark.parametrize("name", ["decode_page_128", "mixed_page_128"])
def test_default_blocks_give_the_same(name):
    case = next(case for case in CASES if case.name == name)
    check(case, blocks={})


SHAPES = st.fixed_dictionaries(
    {
        "kv_heads": st.integers(1, 4),
        "head_dim": st.sampled_from([64, 128, 256]),
        "page_size": st.sampled_from([32, 64, 128]),
        "sliding_window": st.sampled_from([None, 1, 33, 500]),
        "soft_cap": st.sampled_from([None, 15.0]),
        "sinks": st.booleans(),
        "kv_dtype": st.sampled_from(["", "", "int8", "float8_e4m3fn"]),
    }
)


def drawn_case(rows, group: int, shape: dict, spare: int) -> Case:
    case = Case("drawn", tuple(rows), num_heads=group * shape["kv_heads"], padding_rows=spare, **shape)
    return dataclasses.replace(case, padding_tokens=spare)


@settings(max_examples=3, deadline=None)
@given(rows=ragged(5, 40, 300), group=st.integers(1, 8), shape=SHAPES, spare=st.integers(0, 3), seed=st.integers(0, 99))
def test_drawn_batches_equal_dense_attention(rows, group, shape, spare, seed):
    check(drawn_case(rows, group, shape, max(spare, not rows)), seed)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(max_examples=25, deadline=None)
@given(
    rows=with_a_long_one(64, 300, 4096),
    group=st.integers(1, 8),
    shape=SHAPES,
    spare=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_drawn_large_batches_equal_dense_attention(rows, group, shape, spare, seed):
    case = drawn_case(rows, group, shape, max(spare, not rows))
    check(case, seed, blocks={})
