"""Paged attention against two oracles: the reference, and dense attention over gathered pages in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import CASES, Case, make, make_options

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def stored_token(page: np.ndarray, offset: int, platform: str) -> tuple[np.ndarray, np.ndarray]:
    """K and V [K, H] of one token of one page, by the layout's description."""
    row = page[:, offset]
    if platform == "tpu":
        return row[:, : row.shape[1] // 2], row[:, row.shape[1] // 2 :]
    return row[0::2], row[1::2]


def dense_oracle(case: Case, arrays, platform: str = "cpu") -> np.ndarray:
    """Row by row, head by head, in float64: no paging, no blocks, no JAX."""
    q = np.asarray(arrays.q.astype(jnp.float32), np.float64)
    pages = np.asarray(arrays.kv_pages.astype(jnp.float32), np.float64)[case.layer]
    table, out = np.asarray(arrays.page_table), np.zeros_like(q)
    sinks, scales = make_options(case)
    scales = np.ones((2, case.kv_heads)) if scales is None else np.asarray(scales, np.float64)
    group, start = case.num_heads // case.kv_heads, 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        size = case.page_size
        tokens = [stored_token(pages[table[row, t // size]], t % size, platform) for t in range(kv_len)]
        keys, values = (
            np.stack(half) * scale[:, None] for half, scale in zip(zip(*tokens, strict=True), scales, strict=True)
        )
        for i in range(q_len):
            position = kv_len - q_len + i
            first = 0 if case.sliding_window is None else max(0, position - case.sliding_window + 1)
            for head in range(case.num_heads):
                k, v = keys[first : position + 1, head // group], values[first : position + 1, head // group]
                scores = k @ q[start + i, head] / np.sqrt(case.head_dim)
                if case.soft_cap is not None:
                    scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                weights, sink = np.exp(scores), 0.0 if sinks is None else np.exp(float(sinks[head]))
                out[start + i, head] = weights @ v / (weights.sum() + sink)
        start += q_len
    return out


def run(case: Case, arrays, implementation: str, max_q_len: int | None = None, platform: str = "cpu") -> np.ndarray:
    options = make_options(case)._asdict()
    call = jax.jit(
        lambda *a: paged_attention(
            *a,
            **options,
            layout=case.layout(platform),
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            max_q_len=max_q_len,
            implementation=implementation,
        )
    )
    return np.asarray(call(*arrays).astype(jnp.float32))


@pytest.mark.parametrize(("implementation", "platform"), [("reference", "cpu"), ("xla", "cpu"), ("xla", "tpu")])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_dense_attention(case, implementation, platform):
    arrays = make(case, platform)
    tolerance = TOLERANCE[case.dtype]
    got = run(case, arrays, implementation, platform=platform)
    np.testing.assert_allclose(got, dense_oracle(case, arrays, platform), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ["decode_window", "prefill_window", "mixed_sinks_window"])
def test_pages_before_the_window_may_belong_to_others(name, implementation):
    """Their entries point to the dummy page, which holds NaN."""
    case = next(case for case in CASES if case.name == name)
    arrays = make(case, "cpu")
    table = np.array(arrays.page_table)
    for row, (q_len, kv_len) in enumerate(case.rows):
        table[row, : max(kv_len - q_len + 1 - case.sliding_window, 0) // case.page_size] = 0
    assert (table != arrays.page_table).any()
    got = run(case, arrays._replace(page_table=jnp.asarray(table)), implementation)
    np.testing.assert_allclose(got, dense_oracle(case, arrays), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if c.is_decode], ids=lambda case: case.name)
def test_decode_program_is_bit_equal_to_the_general_one(case):
    arrays = make(case, "cpu")
    np.testing.assert_array_equal(run(case, arrays, "xla", max_q_len=1), run(case, arrays, "xla"))


rows = st.lists(
    st.tuples(st.integers(1, 90), st.integers(0, 300)).map(lambda qc: (qc[0], qc[0] + qc[1]))
    | st.tuples(st.just(1), st.integers(1, 400)),
    max_size=9,
)


@settings(max_examples=10, deadline=None)
@given(
    rows=rows,
    heads=st.sampled_from([(3, 3), (9, 3), (8, 2), (8, 1)]),
    page_size=st.sampled_from([1, 16, 64]),
    window=st.sampled_from([None, 1, 20, 128]),
    seed=st.integers(0, 2**16),
)
def test_random_ragged_batches_equal_dense_attention(rows, heads, page_size, window, seed):
    padding = 10 - len(rows)
    case = Case(
        "drawn", tuple(rows), *heads, head_dim=16, page_size=page_size, sliding_window=window,
        padding_rows=padding, padding_tokens=1 + -sum(q for q, _ in rows) % 256,
    )  # fmt: skip
    arrays = make(case, "cpu", seed)
    np.testing.assert_allclose(run(case, arrays, "xla"), dense_oracle(case, arrays), atol=2e-5, rtol=2e-5)


def test_one_row_never_depends_on_its_mates():
    alone = Case("alone", ((1, 77),), padding_rows=7, padding_tokens=7)
    want = run(alone, make(alone, "cpu"), "xla", max_q_len=1)[0]
    crowd = Case("crowd", tuple((1, n) for n in (300, 12, 77, 1, 500, 8, 45, 130)))
    arrays, mine = make(crowd, "cpu", seed=5), make(alone, "cpu")
    kv_pages = np.array(arrays.kv_pages)
    for index in range(-(-77 // 16)):
        kv_pages[1, arrays.page_table[2, index]] = mine.kv_pages[1, mine.page_table[0, index]]
    arrays = arrays._replace(kv_pages=jnp.asarray(kv_pages), q=arrays.q.at[2].set(mine.q[0]))
    np.testing.assert_array_equal(run(crowd, arrays, "xla", max_q_len=1)[2], want)


def test_work_follows_live_context_not_allowed_context():
    """A program for 50 times longer tables does the same arithmetic: trip counts are values, not shapes."""
    case = Case("short", ((1, 40), (1, 90)))
    arrays = make(case, "cpu")
    arrays = arrays._replace(page_table=jnp.pad(arrays.page_table, ((0, 0), (0, 32))))
    wide = arrays._replace(page_table=jnp.pad(arrays.page_table, ((0, 0), (0, 2048))))
    np.testing.assert_array_equal(run(case, arrays, "xla"), run(case, wide, "xla"))
    attend = jax.jit(lambda *a: paged_attention(*a, layout=case.layout("cpu"), implementation="xla"))
    flops = [attend.lower(*a).compile().cost_analysis()["flops"] for a in (arrays, wide)]
    assert 0 < flops[1] < 1.05 * flops[0]


def test_b161_positions_beyond_int16_are_seen():
    """B161: 16-bit positions overflowed beyond 32,767 tokens."""
    case = Case(
        "long", ((1, 32_769), (3, 32_768)), num_heads=1, kv_heads=1, head_dim=8, page_size=64, num_layers=1, layer=0
    )
    arrays = make(case, "cpu")
    np.testing.assert_allclose(run(case, arrays, "xla"), dense_oracle(case, arrays), atol=2e-5, rtol=2e-5)


def test_bad_shapes_and_names_are_refused():
    case = CASES[0]
    arrays = make(case, "cpu")
    with pytest.raises(ValueError, match="multiple"):
        paged_attention(*arrays._replace(q=arrays.q[:, :8]), layout=case.layout("cpu"))
    with pytest.raises(ValueError, match="not one of"):
        paged_attention(*arrays, layout=case.layout("cpu"), implementation="fast")
    with pytest.raises(NotImplementedError, match="cannot run here"):
        paged_attention(*arrays, layout=case.layout("cpu"), implementation="tpu")
