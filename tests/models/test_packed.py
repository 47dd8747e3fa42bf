"""A model whose weights stay packed computes what its dense twin computes, with every backend."""

import dataclasses

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


@pytest.mark.parametrize("implementation", ["auto", "xla"])
def test_activations_in_8_bits_change_answers_a_little(tmp_path, implementation):
    """Only where weights have 4 bits, the same in every backend."""
    if implementation == "auto" and not native.available():
        pytest.skip(native.why_not())
    for quant in ("Q4_1", "Q8_0"):
        checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / f"{quant}.gguf", quant=quant))
        config = shipped_config(checkpoint)
        params = load_params(checkpoint, param_specs(config), "float32")
        rounded = dataclasses.replace(config, activations="int8")
        full, got = (run(params, one, IDS, [11], implementation) for one in (config, rounded))
        if quant == "Q8_0":
            np.testing.assert_array_equal(got, full)
            continue
        difference = np.abs(got - full).max()
        assert 1e-4 < difference < 0.1 * np.abs(full).max()
        np.testing.assert_allclose(got, run(params, rounded, IDS, [11], "reference"), atol=0.05 * difference)
