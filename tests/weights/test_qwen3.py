"""Qwen3 from a Hugging Face folder and from GGUF: one model, with the norms of q and k, and rows in the same order."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.reader import open_checkpoint
from jcb.config import ModelConfig
from jcb.models import llama
from jcb.weights.load import load_params
from tests.checkpoint.tiny_model import gguf_bytes, gguf_metadata, gguf_name
from tests.random_model import RandomCheckpoint

CONFIG = ModelConfig(
    architecture="qwen3", vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, max_position_embeddings=128, rms_norm_eps=1e-6, rope_theta=1_000_000.0, qk_norm=True,
)  # fmt: skip
HF = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 40, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "hidden_act": "silu", "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "rope_scaling": None, "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36,
    "attention_bias": False, "attention_dropout": 0.0, "tie_word_embeddings": False, "eos_token_id": 3,
}  # fmt: skip


def tensors() -> dict[str, np.ndarray]:
    source = RandomCheckpoint(CONFIG)
    return {name: source.read(name) for name in source.names()}


def write_hf(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF | changes))
    save_file(tensors(), folder / "model.safetensors")
    return folder


def write_gguf(path):
    own = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    stored = {}
    for name, value in tensors().items():
        part = name.split(".")[-2]
        if name == "lm_head.weight":
            new = "output.weight"
        elif part in own:
            new = f"blk.{name.split('.')[2]}.{own[part]}.weight"
        else:
            new = gguf_name(name)
        stored[new] = ("F32", value)
    metadata = {key: value for key, value in gguf_metadata().items() if not key.startswith(("llama.", "tokenizer."))}
    shape = {
        "block_count": 2, "context_length": 128, "embedding_length": 32, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6, "vocab_size": 40,
    }  # fmt: skip
    metadata |= {"general.architecture": "qwen3"} | {f"qwen3.{key}": value for key, value in shape.items()}
    path.write_bytes(gguf_bytes(metadata, stored))
    return path


def test_both_formats_are_one_model(tmp_path):
    folder, file = open_checkpoint(write_hf(tmp_path / "hf")), open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    assert folder.config == CONFIG
    assert file.config.rms_norm_eps == pytest.approx(1e-6)
    specs = llama.param_specs(CONFIG)
    a, b = (load_params(checkpoint, specs, "float32") for checkpoint in (folder, file))
    assert a["layers"]["q_norm"].shape == (2, 16)
    jax.tree.map(np.testing.assert_array_equal, a, b)
    want = tensors()["model.layers.1.self_attn.k_norm.weight"]
    np.testing.assert_array_equal(a["layers"]["k_norm"][1], want)


def test_head_dim_is_the_architectures_own_where_it_is_not_stated(tmp_path):
    folder = write_hf(tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in HF.items() if k != "head_dim"}))
    assert open_checkpoint(folder).config.head_dim == 128


def test_what_is_not_implemented_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="use_sliding_window"):
        open_checkpoint(write_hf(tmp_path / "a", use_sliding_window=True))
    with pytest.raises(ModelLoadError, match=r"Qwen3MoeForCausalLM.*only LlamaForCausalLM, Qwen3ForCausalLM"):
        open_checkpoint(write_hf(tmp_path / "b", architectures=["Qwen3MoeForCausalLM"]))
