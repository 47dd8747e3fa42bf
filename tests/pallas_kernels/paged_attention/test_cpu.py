"""The C++ kernel against the reference: every named batch, drawn batches, and what its results may depend on."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import native
from pallas_kernels.dispatch import find
from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention import cpu, paged_attention
from pallas_kernels.paged_attention.cases import CASES, Arrays, Case, make, make_options

needs_library = pytest.mark.skipif(not native.available(), reason=native.why_not() or "it is there")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def run(case: Case, arrays: Arrays, implementation: str = "cpu", **options) -> np.ndarray:
    call = partial(
        find("paged_attention", implementation, "cpu"),
        layout=case.layout("cpu"),
        scale=case.head_dim**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        **make_options(case)._asdict(),
        **options,
    )
    return np.asarray(jax.jit(call)(*arrays).astype(jnp.float32))


def assert_equals_reference(case: Case, arrays: Arrays, **options) -> None:
    tolerance = TOLERANCE[case.dtype]
    want = run(case, arrays, "reference")
    np.testing.assert_allclose(run(case, arrays, **options), want, atol=tolerance, rtol=tolerance)


@needs_library
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case):
    assert_equals_reference(case, make(case, "cpu"))


@needs_library
@pytest.mark.parametrize("instruction_set", ["avx2", "plain"])
@pytest.mark.parametrize(
    "name", ["decode_ragged", "mixed", "mixed_soft_cap", "mixed_int8", "mixed_fp8", "prefill_bf16"]
)
def test_every_instruction_set_equals_reference(name, instruction_set):
    case = next(case for case in CASES if case.name == name)
    assert_equals_reference(case, make(case, "cpu"), instruction_set=instruction_set)


rows = st.lists(
    st.tuples(st.integers(1, 90), st.integers(0, 300)).map(lambda qc: (qc[0], qc[0] + qc[1]))
    | st.tuples(st.just(1), st.integers(1, 1500)),
    max_size=7,
)


@needs_library
@settings(max_examples=6, deadline=None)
@given(
    rows=rows,
    heads=st.sampled_from([(3, 3), (9, 3), (8, 2), (5, 1), (7, 7)]),
    head_dim=st.sampled_from([16, 48, 64, 80]),
    page_size=st.sampled_from([1, 5, 16, 64]),
    window=st.sampled_from([None, 1, 20, 600]),
    sinks=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_ragged_batches_equal_reference(rows, heads, head_dim, page_size, window, sinks, seed):
    case = Case(
        "drawn", tuple(rows), *heads, head_dim=head_dim, page_size=page_size, sliding_window=window, sinks=sinks,
        padding_rows=8 - len(rows), padding_tokens=1 + -sum(q for q, _ in rows) % 256,
    )  # fmt: skip
    assert_equals_reference(case, make(case, "cpu", seed))


def put_row(into: Arrays, row: int, token: int, mine: Arrays, case: Case) -> Arrays:
    """`into` with the pages and the query of the only row of `mine` in the place of one of its own."""
    kv_pages = np.array(into.kv_pages)
    for index in range(-(-case.rows[0][1] // case.page_size)):
        kv_pages[case.layer, into.page_table[row, index]] = mine.kv_pages[case.layer, mine.page_table[0, index]]
    return into._replace(kv_pages=jnp.asarray(kv_pages), q=into.q.at[token].set(mine.q[0]))


@needs_library
@pytest.mark.parametrize("kv_len", [77, 1300])
def test_one_row_never_depends_on_its_mates(kv_len):
    alone = Case("alone", ((1, kv_len),), padding_rows=7, padding_tokens=7)
    mine = make(alone, "cpu")
    crowd = Case("crowd", tuple((1, n) for n in (300, 12, kv_len, 1, 2500, 8, 45, 130)))
    arrays = put_row(make(crowd, "cpu", seed=5), 2, 2, mine, alone)
    np.testing.assert_array_equal(run(crowd, arrays)[2], run(alone, mine)[0])
    mixed = Case("mixed", ((40, 90), (1, kv_len), (100, 700)))
    arrays = put_row(make(mixed, "cpu", seed=6), 1, 40, mine, alone)
    np.testing.assert_array_equal(run(mixed, arrays)[40], run(alone, mine)[0])


@needs_library
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 50},
        {"page_size": 5},
        {"soft_cap": 5.0, "sinks": True},
        {"kv_dtype": "bfloat16"},
        {"kv_dtype": "int8"},
        {"kv_dtype": "float8_e4m3fn"},
    ],
)
def test_chunks_and_single_tokens_give_the_same_bits(options):
    """Tokens 560 ... 639 of a row in one call, in chunks of 7, and one by one."""
    whole = Case("whole", ((80, 640),), **options)
    arrays = make(whole, "cpu")
    want = run(whole, arrays)
    for size in (1, 7):
        for start in range(0, 80, size):
            count = min(size, 80 - start)
            part = arrays._replace(
                q=arrays.q[start : start + count],
                kv_lens=jnp.asarray([560 + start + count], jnp.int32),
                cu_q_lens=jnp.asarray([0, count], jnp.int32),
            )
            np.testing.assert_array_equal(run(whole, part), want[start : start + count])


@needs_library
def test_ids_outside_the_arrays_are_errors_not_reads():
    case = next(case for case in CASES if case.name == "decode_one")
    arrays = make(case, "cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match="page 9999 is outside the cache"):
        run(case, arrays._replace(page_table=arrays.page_table.at[0, 1].set(9999)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no layer 2"):
        run(case, arrays._replace(layer=jnp.int32(2)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="row 0: kv_len 1000000 exceeds its pages"):
        run(case, arrays._replace(kv_lens=arrays.kv_lens.at[0].set(1_000_000)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"row 0: its tokens 0 .* 50 are not among the 2 of q"):
        run(case, arrays._replace(cu_q_lens=arrays.cu_q_lens.at[1].set(50)))


@needs_library
def test_auto_takes_it_and_copies_no_cache():
    """Inside a scan over layers with the cache in the carry: the program's memory does not grow with the cache."""
    case = Case("decode", ((1, 40), (1, 90)), num_layers=3)
    arrays = make(case, "cpu")
    attend = partial(paged_attention, layout=case.layout("cpu"), max_q_len=1)

    def step(q, kv_pages, layers, *where):
        def layer(carry, index):
            q, kv_pages = carry
            kv_pages = kv_pages.at[index, where[0][:, 0], :, 0].set(1.0)
            return (q + attend(q, kv_pages, index, *where), kv_pages), None

        return jax.lax.scan(layer, (q, kv_pages), layers)[0]

    def compiled(num_pages: int):
        pages = jax.ShapeDtypeStruct((3, num_pages, *case.layout("cpu").page_shape), jnp.float32)
        rest = (jnp.arange(3, dtype=jnp.int32), *arrays[3:])
        return jax.jit(step, donate_argnums=1).lower(arrays.q, pages, *rest).compile()

    small, large = compiled(100), compiled(10_000)
    assert cpu.HANDLER in small.as_text()
    page_bytes = case.layout("cpu").page_bytes
    assert large.memory_analysis().temp_size_in_bytes - small.memory_analysis().temp_size_in_bytes < page_bytes
    assert large.memory_analysis().alias_size_in_bytes == 3 * 10_000 * page_bytes


def test_refusals_say_why(monkeypatch):
    case = CASES[0]
    arrays = make(case, "cpu")
    refused = partial(cpu.paged_attention, *arrays, scale=1.0)
    monkeypatch.setattr(native, "why_not", lambda: "no compiler was here")
    with pytest.raises(NotImplementedError, match="no compiler was here"):
        refused(layout=case.layout("cpu"))
    monkeypatch.setattr(native, "why_not", lambda: "")
    with pytest.raises(NotImplementedError, match="head_dim 24 is not a multiple of 16"):
        refused(layout=KVLayout("cpu", "float32", 3, 24, 16))
    with pytest.raises(NotImplementedError, match="layout of a TPU"):
        refused(layout=case.layout("tpu"))
    with pytest.raises(NotImplementedError, match="queries of float16"):
        cpu.paged_attention(arrays.q.astype(jnp.float16), *arrays[1:], layout=case.layout("cpu"), scale=1.0)
    with pytest.raises(ValueError, match=re.escape("instruction_set='mmx' is not one of")):
        refused(layout=case.layout("cpu"), instruction_set="mmx")


def test_auto_goes_on_to_xla_without_the_library(monkeypatch, caplog):
    monkeypatch.setattr(native, "why_not", lambda: "this library is missing")
    case = CASES[0]
    arrays = make(case, "cpu")
    got = jax.jit(partial(paged_attention, layout=case.layout("cpu")))(*arrays)
    np.testing.assert_array_equal(np.asarray(got), run(case, arrays, "xla"))
    assert "the cpu kernel is not used: this library is missing" in caplog.text
