"""GGUF checkpoints: configuration, end tokens, reading."""

import numpy as np
import pytest

from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.reader import open_checkpoint
from tests.checkpoint.tiny_model import EOS, VOCAB, gguf_bytes, gguf_metadata, weights, write_tiny_gguf

EMBEDDING = {"token_embd.weight": ("F32", np.zeros((VOCAB, 64), np.float32))}


def opened(tmp_path, changes=None, tensors=None):
    metadata = gguf_metadata() | (changes or {})
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes({k: v for k, v in metadata.items() if v is not None}, tensors or EMBEDDING))
    return open_checkpoint(path)


def test_config(tmp_path):
    config = opened(tmp_path).config
    assert (config.architecture, config.num_layers, config.hidden_size, config.intermediate_size) == (
        "llama",
        2,
        64,
        128,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (4, 2, 16, VOCAB)
    assert (config.max_position_embeddings, config.rope_theta, config.rope_scaling) == (512, 10_000.0, None)
    assert config.tie_word_embeddings
    assert not config.attention_bias


def test_own_head_and_biases_are_seen_in_the_tensors(tmp_path):
    extra = {"output.weight": ("F32", np.zeros((VOCAB, 64))), "blk.0.attn_q.bias": ("F32", np.zeros(64))}
    config = opened(tmp_path, tensors=EMBEDDING | extra).config
    assert not config.tie_word_embeddings
    assert config.attention_bias


def test_defaults(tmp_path):
    without = dict.fromkeys(["llama.attention.head_count_kv", "llama.rope.freq_base", "llama.rope.dimension_count"])
    config = opened(tmp_path, without | {"llama.vocab_size": None}).config
    assert (config.num_kv_heads, config.rope_theta, config.head_dim, config.vocab_size) == (4, 10_000.0, 16, VOCAB)


def test_position_scaling(tmp_path):
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 128,
    }
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert opened(tmp_path, yarn).config.rope_scaling == expected
    factors = {"rope_freqs.weight": ("F32", np.array([1, 1, 2, 2, 4, 4, 8, 8], np.float32))}
    scaling = opened(tmp_path, tensors=EMBEDDING | factors).config.rope_scaling
    assert scaling == {"rope_type": "frequency_factors", "factors": [1, 1, 2, 2, 4, 4, 8, 8]}


BAD = {
    "another architecture": {"general.architecture": "mamba"},
    "no architecture": {"general.architecture": None},
    "no layers": {"llama.block_count": 0},
    "a text for a number": {"llama.block_count": "2"},
    "a flag for a number": {"llama.block_count": True},
    "a list for a number": {"llama.attention.head_count_kv": np.array([2, 2])},
    "too many layers": {"llama.block_count": 1 << 30},
    "no width": {"llama.embedding_length": None},
    "heads that do not divide": {"llama.attention.head_count": 3},
    "more kv heads than heads": {"llama.attention.head_count_kv": 8},
    "kv heads that do not divide": {"llama.attention.head_count_kv": 3},
    "eps 0": {"llama.attention.layer_norm_rms_epsilon": 0.0},
    "eps NaN": {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    "theta infinite": {"llama.rope.freq_base": float("inf")},
    "partial rotary": {"llama.rope.dimension_count": 8},
    "other value size": {"llama.attention.value_length": 8},
    "vocabularies differ": {"llama.vocab_size": VOCAB + 1},
    "no tokens": {"tokenizer.ggml.tokens": []},
    "tokens that are numbers": {"tokenizer.ggml.tokens": np.arange(8)},
    "experts": {"llama.expert_count": 8},
    "split": {"split.count": 2},
    "unknown scaling": {"llama.rope.scaling.type": "longrope"},
    "scaling without factor": {"llama.rope.scaling.type": "linear"},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_metadata_is_refused(tmp_path, name):
    with pytest.raises(ModelLoadError) as caught:
        opened(tmp_path, BAD[name])
    assert caught.value.reason


@pytest.mark.parametrize("role", ["bos", "eos", "eot", "eom", "unknown", "padding", "cls", "fim_pre"])
def test_b153_token_ids_outside_the_vocabulary_are_refused(tmp_path, role):
    key = f"tokenizer.ggml.{role}_token_id"
    assert opened(tmp_path, {key: VOCAB - 1})
    for bad in (VOCAB, 0xFFFFFFFF):
        with pytest.raises(ModelLoadError, match=key):
            opened(tmp_path, {key: bad})


def test_every_end_token_counts_once(tmp_path):
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": EOS}
    assert opened(tmp_path, ends).eos_token_ids == (EOS, 7)
    assert opened(tmp_path, {"tokenizer.ggml.eos_token_id": None}).eos_token_ids == ()


def test_sampling_defaults(tmp_path):
    recommended = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.top_p": 0.25}
    assert opened(tmp_path).generation_defaults == {}
    assert opened(tmp_path, recommended).generation_defaults == {"temperature": 0.5, "top_k": 20, "top_p": 0.25}


@pytest.mark.parametrize(("quant", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")])
def test_reads_plain_tensors_as_stored(tmp_path, quant, dtype):
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "t.gguf", quant=quant))
    value = checkpoint.read("token_embd.weight")
    expected = weights()["model.embed_tokens.weight"]
    assert value.dtype.name == dtype
    np.testing.assert_array_equal(value, expected.astype(value.dtype))
    assert checkpoint.nbytes("token_embd.weight") == value.nbytes
    assert checkpoint.read("output_norm.weight").dtype == np.float32


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_reads_quantised_tensors_as_float32(tmp_path, quant):
    pytest.importorskip("gguf")
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "t.gguf", quant=quant))
    value = checkpoint.read("token_embd.weight")
    expected = weights()["model.embed_tokens.weight"]
    assert value.dtype == np.float32
    assert np.abs(value - expected).max() < 0.1 * np.abs(expected).max()
    assert checkpoint.nbytes("token_embd.weight") < value.nbytes / 2


def test_unknown_tensor_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match="no such tensor"):
        opened(tmp_path).read("missing")


@pytest.mark.parametrize("path", ["absent.gguf", "empty.gguf", "text.gguf"])
def test_paths_that_are_no_model(tmp_path, path):
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "text.gguf").write_bytes(b"hello, I am not a model")
    with pytest.raises(ModelLoadError):
        open_checkpoint(tmp_path / path)
