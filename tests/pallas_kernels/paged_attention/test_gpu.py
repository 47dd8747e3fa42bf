"""The GPU kernel of paged attention: its work lists, what it refuses, and its arithmetic in the interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.layout import KVLayout
from pallas_kernels.paged_attention import gpu
from pallas_kernels.paged_attention.cases import CASES, Case, make, make_options
from pallas_kernels.paged_attention.gpu import work
from pallas_kernels.paged_attention.gpu.blocks import SHARED_MEMORY, Blocks, shared_bytes
from tests.pallas_kernels.gpu_interpreter import interpreted_gpu
from tests.pallas_kernels.paged_attention.drawn import with_a_long_one
from tests.pallas_kernels.paged_attention.test_paged_attention import TOLERANCE, dense_oracle

SMALL = Blocks(consumers=2, block_kv=64, stages=2, columns=64, blocks=2)
SERVED = tuple(dataclasses.replace(case, dtype="bfloat16") for case in CASES if case.page_size >= 16)
"""Every named case whose pages the kernel takes, with the queries it takes."""
QUICK = ("decode_ragged", "decode_sinks", "decode_int8", "mixed_mqa_256", "mixed_sinks_window", "mixed_fp8")
"""Together they reach every branch of the kernel; the other cases are the slow test's."""


def check(case: Case, seed: int = 0, **blocks: Blocks) -> None:
    arrays = make(case, "gpu", seed)
    with interpreted_gpu():
        out = gpu.paged_attention(
            *arrays,
            **make_options(case)._asdict(),
            layout=case.layout("gpu"),
            scale=case.head_dim**-0.5,
            sliding_window=case.sliding_window,
            soft_cap=case.soft_cap,
            max_q_len=case.max_q_len,
            **blocks,
        )
        got = np.asarray(out.astype(jnp.float32))
    tolerance = TOLERANCE["bfloat16"]
    np.testing.assert_allclose(got, dense_oracle(case, arrays, "gpu"), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", [case for case in SERVED if case.name in QUICK], ids=lambda case: case.name)
def test_equals_dense_attention_without_races(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in SERVED if case.name not in QUICK], ids=lambda case: case.name)
def test_the_other_cases_equal_dense_attention_without_races(case):
    check(case)


@pytest.mark.slow
@pytest.mark.timeout(0)
@settings(max_examples=25, deadline=None)
@given(
    rows=with_a_long_one(64, 300, 4096),
    group=st.integers(1, 8),
    shape=st.fixed_dictionaries(
        {
            "kv_heads": st.integers(1, 3),
            "head_dim": st.sampled_from([64, 128, 256]),
            "page_size": st.sampled_from([16, 32, 64, 128]),
            "sliding_window": st.sampled_from([None, 1, 33, 500]),
            "soft_cap": st.sampled_from([None, 15.0]),
            "sinks": st.booleans(),
            "kv_dtype": st.sampled_from(["", "", "int8", "float8_e4m3fn"]),
        }
    ),
    spare=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_drawn_large_batches_equal_dense_attention(rows, group, shape, spare, seed):
    heads = group * shape["kv_heads"]
    check(Case("drawn", tuple(rows), heads, dtype="bfloat16", padding_rows=spare, padding_tokens=spare, **shape), seed)


def test_larger_blocks_and_one_consumer_give_the_same():
    case = next(case for case in SERVED if case.name == "mixed_page_128")
    one = Blocks(consumers=1, block_kv=128, stages=3, columns=64, blocks=3, turns=2)
    many = dataclasses.replace(SMALL, block_kv=128, stages=3)
    check(case, decode_blocks=one, chunk_blocks=many)


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.integers(0, 700), min_size=9, max_size=9),
    options=st.sampled_from([(1, None, 4), (3, None, 1), (3, 1, 1), (4, 100, 2)]),
)
def test_decode_items_hold_every_visible_key_once(lens, options):
    kv_heads, window, turns = options
    blocks = dataclasses.replace(SMALL, blocks=5, turns=turns)
    make_work = jax.jit(work.decode_work, static_argnums=(2, 3, 4))
    listed, splits = make_work(jnp.asarray(lens, jnp.int32), jnp.arange(9, dtype=jnp.int32), kv_heads, window, blocks)
    count, items = int(listed.count[0]), np.asarray(listed.items)
    assert count <= len(items)
    seen = np.zeros((len(lens), kv_heads, 700), np.int32)
    for index, item in enumerate(items[:count]):
        row, head, begin, end = item[[work.ROW, work.HEAD, work.BEGIN, work.END]]
        assert begin < end
        assert begin % blocks.block_kv == 0
        assert item[work.LEAD] == (begin // 64 == max(lens[row] - (window or 10**6), 0) // 64)
        split = (index - int(splits.first[row])) // kv_heads
        assert index == int(splits.first[row]) + split * kv_heads + head
        assert split < int(splits.splits[row])
        seen[row, head, begin:end] += 1
    for row, length in enumerate(lens):
        first = 0 if window is None else max(length - window, 0)
        assert (seen[row, :, first:length] == 1).all()
        assert (seen[row, :, length:] == 0).all()
        assert (seen[row, :, : first // 64 * 64] == 0).all()


@settings(max_examples=40, deadline=None)
@given(
    q_lens=st.lists(st.integers(0, 90), min_size=7, max_size=7),
    kv_heads=st.sampled_from([1, 3]),
    cut=st.sampled_from([(21, 1), (16, 2), (32, 4), (64, 8)]),
)
@example(q_lens=[31] * 7, kv_heads=1, cut=(32, 4))  # most items for their tokens: each row begins inside a tile
def test_prefill_items_hold_every_query_once(q_lens, kv_heads, cut):
    tile, align = cut
    q_lens = [length if length != 1 else 0 for length in q_lens]
    starts = np.concatenate([[0], np.cumsum(q_lens)])
    lens, q_starts = jnp.asarray(q_lens, jnp.int32), jnp.asarray(starts[:-1], jnp.int32)
    make_work = jax.jit(work.prefill_work, static_argnums=(3, 4, 5, 6, 7, 8))
    listed = make_work(lens + 10, q_starts, lens, int(starts[-1]), tile, align, kv_heads, None, SMALL)
    count, items = int(listed.count[0]), np.asarray(listed.items)
    assert count <= len(items)
    seen = np.zeros((int(starts[-1]), kv_heads), np.int32)
    for item in items[:count]:
        token, number, head, row, position = item[[work.TOKEN, work.COUNT, work.HEAD, work.ROW, work.POSITION]]
        assert 0 < token % align + number <= tile
        assert token % align == 0 or token == starts[row]
        assert starts[row] <= token < token + number <= starts[row + 1]
        assert position == 10 + token - starts[row]
        assert item[work.END] == position + number
        seen[token : token + number, head] += 1
    assert (seen == 1).all()


def mesh_of(kind: str):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    return jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device)


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_and_candidate_blocks_fit_the_chip(head_dim, dtype, page_size):
    layout = KVLayout("gpu", dtype, 2, head_dim, page_size)
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA H200")):
        for phase in ("decode", "chunk"):
            default = gpu.default_blocks(layout, 8, phase)
            assert default.blocks == 132
            for blocks in (default, *gpu.candidates(layout, 8, phase)):
                assert shared_bytes(blocks, layout, phase) <= SHARED_MEMORY
                assert blocks.stages % blocks.consumers == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "round float32 queries"),
        ({"kv_dtype": "float32"}, "tf32"),
        ({"page_size": 1}, "pages must hold"),
        ({"page_size": 48}, "pages must hold"),
        ({"head_dim": 80}, "head_dim"),
        ({"num_heads": 195}, "query heads"),
    ],
)
def test_what_the_kernel_cannot_do_well_is_refused(change, reason):
    case = dataclasses.replace(SERVED[0], **change)
    with pytest.raises(NotImplementedError, match=reason):
        gpu.paged_attention(*make(case, "gpu"), layout=case.layout("gpu"), scale=1.0)


def test_other_chips_are_refused_by_name():
    case = SERVED[0]
    with jax.sharding.use_abstract_mesh(mesh_of("NVIDIA B200")), pytest.raises(NotImplementedError, match="B200"):
        gpu.paged_attention(*make(case, "gpu"), layout=case.layout("gpu"), scale=1.0)
