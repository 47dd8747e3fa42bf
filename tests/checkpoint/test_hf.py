"""Hugging Face folders: configuration, shards, reading."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.reader import open_checkpoint
from tests.checkpoint.tiny_model import VOCAB, weights, write_tiny_hf


@pytest.fixture
def folder(tmp_path):
    return write_tiny_hf(tmp_path / "hf")


def change(folder, file, **values):
    content = json.loads((folder / file).read_text()) | values
    (folder / file).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def shard(folder):
    """Split the weights over two files with an index; returns the weight map."""
    tensors = weights()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:7], "model-2.safetensors": names[7:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {name: file for file, held in parts.items() for name in held}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_config(folder):
    config = open_checkpoint(folder).config
    assert (config.architecture, config.vocab_size, config.head_dim) == ("llama", VOCAB, 16)
    assert config.tie_word_embeddings


def test_defaults_of_an_old_config(folder):
    change(folder, "config.json", head_dim=None, num_key_value_heads=None, rope_theta=None, tie_word_embeddings=None)
    config = open_checkpoint(folder).config
    assert (config.head_dim, config.num_kv_heads, config.rope_theta) == (16, 4, 10_000.0)
    assert not config.tie_word_embeddings


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500_000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}},
    ],
)
def test_position_scaling_is_kept_in_every_spelling(folder, values):
    change(folder, "config.json", **values)
    config = open_checkpoint(folder).config
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == {"rope_type": "llama3", **LLAMA3}


def test_default_scaling_is_none(folder):
    change(folder, "config.json", rope_parameters={"rope_type": "default", "rope_theta": 7.0}, rope_theta=None)
    config = open_checkpoint(folder).config
    assert (config.rope_scaling, config.rope_theta) == (None, 7.0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "llama3", **LLAMA3, "high_freq_factor": LLAMA3["low_freq_factor"]},
        {"rope_type": "llama3", **LLAMA3, "factor": "8"},
        {"type": 5},
    ],
    ids=str,
)
def test_a_rotation_that_cannot_be_made_is_refused_when_the_config_is_read(folder, scaling):
    change(folder, "config.json", rope_scaling=scaling)
    with pytest.raises(ModelLoadError):
        open_checkpoint(folder)


def test_end_tokens_come_from_the_generation_config_first(folder):
    change(folder, "generation_config.json", eos_token_id=[2, 0, 2])
    assert open_checkpoint(folder).eos_token_ids == (2, 0)
    change(folder, "generation_config.json", eos_token_id=None)
    assert open_checkpoint(folder).eos_token_ids == (2,)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [VOCAB, -1, True, "2", 2.0, [2, VOCAB], [[2]]])
def test_b153_token_ids_outside_the_vocabulary_are_refused(folder, file, value):
    change(folder, file, eos_token_id=value)
    with pytest.raises(ModelLoadError, match="eos_token_id"):
        open_checkpoint(folder)


BAD = {
    "another architecture": {"architectures": ["MambaForCausalLM"]},
    "no architecture": {"architectures": None},
    "two architectures": {"architectures": ["LlamaForCausalLM", "LlamaForCausalLM"]},
    "another activation": {"hidden_act": "gelu"},
    "biases in the feed-forward part": {"mlp_bias": True},
    "quantised weights": {"quantization_config": {"quant_method": "awq"}},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "layers as text": {"num_hidden_layers": "2"},
    "negative width": {"hidden_size": -64},
    "huge number": {"rope_theta": 10**400},
    "scaling as a list": {"rope_scaling": [1]},
    "scaling without a type": {"rope_scaling": {"factor": 2.0}},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_refused(folder, name):
    change(folder, "config.json", **BAD[name])
    with pytest.raises(ModelLoadError):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, '{"a":' * 100_000, "\xff"]
)
def test_config_that_is_no_json_object_is_refused(folder, text):
    (folder / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_checkpoint(folder)


def test_missing_files_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        open_checkpoint(folder)


def test_shards_are_one_model(folder):
    whole = {name: open_checkpoint(folder).read(name) for name in open_checkpoint(folder).names()}
    shard(folder)
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names()) == set(whole)
    for name, value in whole.items():
        np.testing.assert_array_equal(checkpoint.read(name), value)


@pytest.mark.parametrize(
    "name",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "a\\b.safetensors", "x.bin", ".safetensors", 7, None],
)
def test_index_cannot_leave_the_folder(folder, name):
    weight_map = shard(folder)
    weight_map["model.norm.weight"] = name
    write_index(folder, weight_map)
    with pytest.raises(ModelLoadError, match="not the name"):
        open_checkpoint(folder)


def test_index_and_shards_must_agree(folder):
    weight_map = shard(folder)
    write_index(folder, {**weight_map, "extra": "model-1.safetensors"})
    with pytest.raises(ModelLoadError, match="extra"):
        open_checkpoint(folder)
    write_index(folder, {k: v for k, v in weight_map.items() if k != "model.norm.weight"})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight"):
        open_checkpoint(folder)


def test_a_tensor_in_two_shards_is_refused(folder):
    weight_map = shard(folder)
    save_file(weights(), folder / "model-2.safetensors")
    write_index(folder, weight_map)
    with pytest.raises(ModelLoadError, match="elsewhere"):
        open_checkpoint(folder)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_reads_as_stored(folder, dtype):
    save_file({name: value.astype(dtype) for name, value in weights().items()}, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    value = checkpoint.read("model.norm.weight")
    assert value.dtype == dtype
    assert (checkpoint.shape("model.norm.weight"), checkpoint.nbytes("model.norm.weight")) == ((64,), 128)
    assert not value.flags.writeable
    np.testing.assert_array_equal(value, weights()["model.norm.weight"].astype(dtype))


def test_unknown_tensor_is_a_load_error(folder):
    with pytest.raises(ModelLoadError, match="no such tensor"):
        open_checkpoint(folder).shape("missing")
