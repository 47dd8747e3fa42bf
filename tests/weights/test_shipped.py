"""Weights kept as shipped: the numbers of the file, in the order of the dense parameters, for the bytes of the file."""

import dataclasses

import jax
import numpy as np
import pytest

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.reader import open_checkpoint
from jcb.models.params import abstract
from jcb.models.specs import nbytes, param_specs
from jcb.weights.load import load_params
from jcb.weights.shipped import shipped_config
from pallas_kernels.quantized_dot import PackedWeights, dequantise
from tests.checkpoint.tiny_model import write_tiny_gguf, write_tiny_hf

pytest.importorskip("gguf")


def is_packed(node) -> bool:
    return isinstance(node, PackedWeights)


def both(checkpoint):
    """(packed, dense) params of a checkpoint."""
    config = shipped_config(checkpoint)
    packed = load_params(checkpoint, param_specs(config), "float32")
    return packed, load_params(checkpoint, param_specs(checkpoint.config), "float32")


def check_equal(packed, dense) -> int:
    """Every parameter is the same, packed or not; how many are packed."""
    count = 0
    for name, want in dense.items():
        got = packed[name]
        if isinstance(want, dict):
            count += check_equal(got, want)
        elif is_packed(got):
            count += 1
            for layer in range(got.packed_shape.layers):
                np.testing.assert_array_equal(dequantise(got, layer), want[layer] if want.ndim == 3 else want)
        else:
            np.testing.assert_array_equal(got, want)
    return count


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_parameters_are_the_dense_ones(tmp_path, quant):
    """The rows of q and k, which the file has in another order, among them."""
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf", quant=quant))
    config = shipped_config(checkpoint)
    assert dict(config.shipped)["layers/w_qkv"] == quant.lower()
    packed, dense = both(checkpoint)
    assert check_equal(packed, dense) == 5
    specs = param_specs(config)
    assert nbytes(specs, "float32") == sum(leaf.nbytes for leaf in jax.tree.leaves(packed))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), packed)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract(specs, np.dtype("float32")))


def test_the_default_model_takes_its_files_bytes():
    checkpoint = open_checkpoint(default_model_path())
    config = shipped_config(checkpoint)
    assert dict(config.shipped) == {
        "embedding": "q8_0", "layers/w_qkv": "q4_1", "layers/w_out": "q4_1", "layers/w_gate_up": "q4_1",
        "layers/w_down": "q4_1",
    }  # fmt: skip
    assert nbytes(param_specs(config), "float32") == sum(checkpoint.nbytes(name) for name in checkpoint.names())
    packed, dense = both(checkpoint)
    assert check_equal({"layers": packed["layers"]}, {"layers": dense["layers"]}) == 4
    np.testing.assert_array_equal(dequantise(packed["embedding"], 0), dense["embedding"])


def test_other_files_have_nothing_to_keep(tmp_path):
    for checkpoint in (
        open_checkpoint(write_tiny_hf(tmp_path / "tiny")),
        open_checkpoint(write_tiny_gguf(tmp_path / "plain.gguf")),
        open_checkpoint(write_tiny_gguf(tmp_path / "q5.gguf", quant="Q5_1")),
    ):
        assert shipped_config(checkpoint) == dataclasses.replace(checkpoint.config, shipped=())
        with pytest.raises(ModelLoadError, match="not kept packed"):
            checkpoint.read_blocks(checkpoint.names()[0])


def test_a_parameter_of_several_types_is_dense(tmp_path):
    class Mixed:
        def __init__(self, inner):
            self.inner, self.format, self.config = inner, inner.format, inner.config

        def names(self):
            return self.inner.names()

        def tensor_type(self, name):
            return "Q8_0" if name == "blk.1.attn_k.weight" else self.inner.tensor_type(name)

    shipped = dict(shipped_config(Mixed(open_checkpoint(write_tiny_gguf(tmp_path / "t.gguf", quant="Q4_1")))).shipped)
    assert "layers/w_qkv" not in shipped
    assert "layers/w_out" in shipped
