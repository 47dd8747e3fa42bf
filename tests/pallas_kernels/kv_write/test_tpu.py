"""The TPU kernel of kv_write in the interpreter, against numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import kv_write
from pallas_kernels.kv_write.cases import CASES, make, make_scales
from tests.pallas_kernels.kv_write.test_kv_write import numpy_write
from tests.pallas_kernels.tpu_interpreter import interpreted_tpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_writes_exactly_the_new_tokens(case):
    arrays, layout = make(case, "tpu"), case.layout("tpu")

    def run(max_q_len=None):
        with interpreted_tpu():
            got = kv_write(
                *arrays, layout=layout, kv_scales=make_scales(case), max_q_len=max_q_len, implementation="tpu"
            )
            return np.asarray(got.astype(jnp.float32))

    if case.page_size < 8:
        with pytest.raises(NotImplementedError, match="tile"):
            run()
        return
    want = numpy_write(case, arrays, "tpu")
    np.testing.assert_array_equal(run()[:, 1:], want[:, 1:])  # page 0 may hold anything
    if case.is_decode:
        np.testing.assert_array_equal(run(max_q_len=1)[:, 1:], want[:, 1:])
