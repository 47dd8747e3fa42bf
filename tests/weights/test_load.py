"""Loading is total and exact: both formats give one model, and nothing is missing, left over or misshapen."""

import jax
import numpy as np
import pytest

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.reader import open_checkpoint
from jcb.models import llama
from jcb.weights.load import load_params, unpermute
from tests.checkpoint.tiny_model import write_tiny_gguf, write_tiny_hf


class Edited:
    """A checkpoint with some tensors renamed, dropped or reshaped."""

    def __init__(self, inner, rename=None, drop=(), extra=()):
        self.inner, self.rename = inner, rename or {}
        self.format, self.config = inner.format, inner.config
        self._names = [self.rename.get(n, n) for n in inner.names() if n not in drop] + list(extra)

    def names(self):
        return tuple(self._names)

    def shape(self, name):
        return self.inner.shape(next((k for k, v in self.rename.items() if v == name), name))

    def read(self, name):
        raise AssertionError(f"{name} was read before all names and shapes were checked")


@pytest.fixture
def gguf(tmp_path):
    return open_checkpoint(write_tiny_gguf(tmp_path / "tiny.gguf"))


def specs(checkpoint):
    return llama.param_specs(checkpoint.config)


def test_gguf_and_hugging_face_files_are_one_model(tmp_path, gguf):
    folder = open_checkpoint(write_tiny_hf(tmp_path / "tiny"))
    a, b = (load_params(c, specs(c), "float32") for c in (gguf, folder))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(a))


def test_unpermute_undoes_the_converter():
    rows = np.arange(4 * 16 * 3).reshape(4 * 16, 3)
    stored = rows.reshape(4, 2, 8, 3).swapaxes(1, 2).reshape(64, 3)  # as llama.cpp's converter stores them
    assert not np.array_equal(stored, rows)
    np.testing.assert_array_equal(unpermute(stored, 16), rows)


def test_b147_a_renamed_tensor_is_refused(gguf):
    """B147: an embedding under an unknown name was dropped with a warning and the table stayed uninitialised."""
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight.*lacks"):
        load_params(Edited(gguf, rename={"token_embd.weight": "token_embeddings.weight"}), specs(gguf), "float32")


def test_a_missing_layer_a_leftover_and_a_wrong_shape_are_refused(gguf):
    with pytest.raises(ModelLoadError, match=r"blk\.1\.attn_k"):
        load_params(Edited(gguf, drop=("blk.1.attn_k.weight",)), specs(gguf), "float32")
    with pytest.raises(ModelLoadError, match="fit no parameter"):
        load_params(Edited(gguf, rename={}, extra=("token_embd.weight.bias",)), specs(gguf), "float32")
    swapped = Edited(
        gguf, rename={"blk.0.ffn_down.weight": "blk.0.ffn_up.weight", "blk.0.ffn_up.weight": "blk.0.ffn_down.weight"}
    )
    with pytest.raises(ModelLoadError, match="do not make"):
        load_params(swapped, specs(gguf), "float32")


def test_b145_every_projection_of_the_default_model_is_its_tensor():
    """B145: q and k rows in the wrong order leave everything else right, and the model still says Paris."""
    checkpoint = open_checkpoint(default_model_path())
    params = load_params(checkpoint, specs(checkpoint), "float32")
    config = checkpoint.config
    sizes = np.cumsum([config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim])
    for layer in (0, 17, 29):
        q, k, v = np.split(np.asarray(params["layers"]["w_qkv"][layer]), sizes)
        for got, name in ((q, "attn_q"), (k, "attn_k"), (v, "attn_v")):
            want = checkpoint.read(f"blk.{layer}.{name}.weight")
            if name != "attn_v":
                half = config.head_dim // 2
                want = np.concatenate(
                    [want.reshape(-1, config.head_dim, want.shape[1])[:, part::2] for part in (0, 1)], axis=1
                ).reshape(want.shape)
                assert half == 32
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(
            params["layers"]["w_down"][layer], checkpoint.read(f"blk.{layer}.ffn_down.weight")
        )
        gate, up = np.split(np.asarray(params["layers"]["w_gate_up"][layer]), 2)
        np.testing.assert_array_equal(gate, checkpoint.read(f"blk.{layer}.ffn_gate.weight"))
        np.testing.assert_array_equal(up, checkpoint.read(f"blk.{layer}.ffn_up.weight"))
