"""The tiny model is one model in two formats."""

import numpy as np
import pytest

from jcb.checkpoint.reader import open_checkpoint
from jcb.text.chat import encode_chat, load_chat_template
from jcb.text.tokenizer import load_tokenizer
from tests.checkpoint import tiny_model


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    gguf_file = tiny_model.write_tiny_gguf(folder / "tiny.gguf")
    return open_checkpoint(gguf_file), open_checkpoint(tiny_model.write_tiny_hf(folder / "hf"))


def test_both_formats_have_the_same_config(both):
    from_gguf, from_hf = both
    assert from_gguf.config.rms_norm_eps == pytest.approx(from_hf.config.rms_norm_eps)
    assert {**vars(from_gguf.config), "rms_norm_eps": 0} == {**vars(from_hf.config), "rms_norm_eps": 0}
    assert from_gguf.config.vocab_size == tiny_model.VOCAB >= 300
    assert from_gguf.eos_token_ids == from_hf.eos_token_ids == (tiny_model.EOS,)
    assert from_hf.generation_defaults == {"temperature": 0.7, "top_p": 0.9}


def test_both_formats_have_the_same_weights(both):
    from_gguf, from_hf = both
    assert len(from_gguf.names()) == len(from_hf.names()) == 2 + 9 * tiny_model.LAYERS
    for name in from_hf.names():
        ours, theirs = from_gguf.read(tiny_model.gguf_name(name)), from_hf.read(name)
        assert ours.shape == theirs.shape == from_gguf.shape(tiny_model.gguf_name(name))
        heads = {"q_proj": tiny_model.HEADS, "k_proj": tiny_model.KV_HEADS}.get(name.split(".")[-2])
        expected = theirs if heads is None else tiny_model.permute_rows(theirs, heads)
        np.testing.assert_array_equal(ours, expected)


def test_permuted_rows_pair_the_two_halves():
    rows = np.arange(8)[:, None]
    assert tiny_model.permute_rows(rows, 1).ravel().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_both_formats_have_the_same_tokenizer_and_template(both):
    from_gguf, from_hf = map(load_tokenizer, both)
    text = "Hello world, the quick brown fox 1234 déjà vu 🤖<|im_end|>"
    assert from_gguf.encode(text) == from_hf.encode(text)
    assert from_gguf.decode(from_gguf.encode(text), skip_special_tokens=False) == text
    assert from_gguf.special_tokens == from_hf.special_tokens
    messages = [{"role": "user", "content": "Hello"}]
    ids = [encode_chat(each, load_chat_template(each), messages) for each in (from_gguf, from_hf)]
    assert ids[0] == ids[1]
    assert ids[0][0] == tiny_model.BOS
