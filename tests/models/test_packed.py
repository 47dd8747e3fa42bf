"""A model whose weights stay packed computes what its dense twin computes, with every backend."""

import numpy as np
import pytest

from jcb.checkpoint.reader import open_checkpoint
from jcb.models.specs import param_specs
from jcb.weights.load import load_params
from jcb.weights.shipped import shipped_config
from pallas_kernels import native
from tests.checkpoint.tiny_model import write_tiny_gguf
from tests.models.test_llama import run

pytest.importorskip("gguf")
IDS = [5, 6, 7, 40, 41, 100, 3, 9, 12, 77, 8]


@pytest.mark.parametrize(
    ("quant", "implementation"), [("Q4_0", "auto"), ("Q4_1", "auto"), ("Q8_0", "auto"), ("Q4_1", "xla")]
)
def test_packed_equals_dense(tmp_path, quant, implementation):
    if implementation == "auto" and not native.available():
        pytest.skip(native.why_not())
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf", quant=quant))
    config = shipped_config(checkpoint)
    packed = load_params(checkpoint, param_specs(config), "float32")
    dense = load_params(checkpoint, param_specs(checkpoint.config), "float32")
    want = run(dense, checkpoint.config, IDS, [11])
    np.testing.assert_allclose(run(packed, config, IDS, [1, 5, 5], implementation), want, atol=2e-4, rtol=2e-4)
    assert np.abs(want).max() > 1
