"""kv_write against numpy, and its promise to work in place."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.cases import CASES, make, make_scales


def numpy_write(case, arrays, platform):
    """The cache after the write, token by token in numpy, as float32."""
    want = np.array(arrays.kv_pages.astype(jnp.float32))
    scales = make_scales(case)
    table, token = np.asarray(arrays.page_table), 0
    for row, (q_len, kv_len) in enumerate(case.rows):
        for position in range(kv_len - q_len, kv_len):
            place = want[case.layer, table[row, position // case.page_size], :, position % case.page_size]
            for half, name in enumerate(("k", "v")):
                x = getattr(arrays, name)[token]
                if scales is not None:
                    x = x / scales[half][:, None]
                    x = jnp.clip(jnp.round(x), -127, 127) if case.dtype == "int8" else x
                x = np.asarray(x.astype(case.dtype).astype(jnp.float32))
                if platform == "tpu":
                    place[:, half * case.head_dim : (half + 1) * case.head_dim] = x
                else:
                    place[half::2] = x
            token += 1
    return want


@pytest.mark.parametrize(("implementation", "platform"), [("reference", "cpu"), ("xla", "cpu"), ("xla", "tpu")])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writes_exactly_the_new_tokens(case, implementation, platform):
    arrays, layout = make(case, platform), case.layout(platform)
    scales = make_scales(case)
    got = kv_write(*arrays, layout=layout, kv_scales=scales, implementation=implementation)
    got = np.asarray(got.astype(jnp.float32))
    np.testing.assert_array_equal(got[:, 1:], numpy_write(case, arrays, platform)[:, 1:])  # page 0 may hold anything


@pytest.mark.parametrize("case", [c for c in CASES if c.is_decode], ids=lambda case: case.name)
def test_the_decode_form_writes_the_same(case):
    arrays, layout = make(case, "cpu"), case.layout("cpu")
    got = kv_write(*arrays, layout=layout, max_q_len=1)
    np.testing.assert_array_equal(got[:, 1:], kv_write(*arrays, layout=layout)[:, 1:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_cache_is_written_in_place(dtype):
    case = dataclasses.replace(next(c for c in CASES if c.name == "chunk"), dtype=dtype)
    arrays, layout = make(case, "cpu"), case.layout("cpu")
    cache = layout.init(4, 4096)
    call = jax.jit(lambda *a: kv_write(*a, layout=layout), donate_argnums=0)
    compiled = call.lower(cache, *arrays[1:]).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes // 100
    pointer = cache.unsafe_buffer_pointer()
    assert compiled(cache, *arrays[1:]).unsafe_buffer_pointer() == pointer


def test_bad_shapes_are_refused():
    case = CASES[0]
    arrays, layout = make(case, "cpu"), case.layout("cpu")
    with pytest.raises(ValueError, match="kv_lens"):
        kv_write(*arrays._replace(kv_lens=arrays.kv_lens[:-1]), layout=layout)
    with pytest.raises(ValueError, match="k and v"):
        kv_write(*arrays._replace(k=arrays.k[:, :1]), layout=layout)
