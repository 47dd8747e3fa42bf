"""kv_write against numpy, and its promise to work in place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.cases import CASES, make


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writes_exactly_the_new_tokens(case, implementation):
    arrays = make(case)
    want = np.array(arrays.kv_pages.astype(jnp.float32))
    k, v = np.asarray(arrays.k.astype(jnp.float32)), np.asarray(arrays.v.astype(jnp.float32))
    for token in range(case.tokens):
        place = want[case.layer, arrays.page_ids[token], :, arrays.offsets[token]]
        place[: case.kv_heads], place[case.kv_heads :] = k[token], v[token]
        want[case.layer, arrays.page_ids[token], :, arrays.offsets[token]] = place
    got = np.asarray(kv_write(*arrays, layout=case.layout, implementation=implementation).astype(jnp.float32))
    np.testing.assert_array_equal(got[:, 1:], want[:, 1:])  # page 0 may hold anything


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_donated_cache_is_written_in_place(dtype):
    case = next(c for c in CASES if c.name == "chunk")
    arrays = make(case)
    cache = jnp.zeros(case.layout.array_shape(4, 4096), dtype)
    call = jax.jit(lambda *a: kv_write(*a, layout=case.layout), donate_argnums=0)
    compiled = call.lower(cache, *arrays[1:]).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
    assert memory.temp_size_in_bytes < cache.nbytes // 100
    pointer = cache.unsafe_buffer_pointer()
    assert compiled(cache, *arrays[1:]).unsafe_buffer_pointer() == pointer


def test_bad_shapes_are_refused():
    case = CASES[0]
    arrays = make(case)
    with pytest.raises(ValueError, match="page_ids"):
        kv_write(*arrays._replace(page_ids=arrays.page_ids[:-1]), layout=case.layout)
