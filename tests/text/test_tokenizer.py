import json
import random
import threading
import time
from pathlib import Path

import pytest
from tokenizers import decoders

from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.reader import open_checkpoint
from jcb.text.tokenizer import load_tokenizer
from jcb.types import RequestError
from tests.checkpoint.tiny_model import SPECIAL, VOCAB, gguf_metadata, vocabulary, write_tiny_hf

CASES = json.loads((Path(__file__).parent.parent / "data" / "smollm2_tokenizer.json").read_text())
EMOJI = "🤖"


def test_every_golden_case_is_equal_and_decodes_back(default_tokenizer):
    assert len(CASES) == 320
    for case in CASES:
        assert default_tokenizer.encode(case["text"]) == case["ids"]
        assert default_tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_facts_of_the_default_model(default_tokenizer):
    assert default_tokenizer.vocab_size == 49152
    assert (default_tokenizer.bos_token_id, default_tokenizer.eos_token_ids) == (1, (2,))
    assert (default_tokenizer.bos_token, default_tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert default_tokenizer.config()["eos_token"] == "<|im_end|>"
    assert default_tokenizer.special_tokens["<|endoftext|>"] == 0
    assert len(default_tokenizer.special_tokens) == 17


def test_b069_every_token_decodes_like_the_reference(default_tokenizer):
    reference = default_tokenizer.pipeline
    for index in range(default_tokenizer.vocab_size):
        for skip in (True, False):
            expected = reference.decode([index], skip_special_tokens=skip)
            assert default_tokenizer.decode([index], skip_special_tokens=skip) == expected


def test_b069_random_sequences_decode_like_the_reference(default_tokenizer):
    rng = random.Random(0)
    for _ in range(3_000):
        ids = rng.choices(range(default_tokenizer.vocab_size), k=rng.randint(0, 8))
        assert default_tokenizer.decode(ids) == default_tokenizer.pipeline.decode(ids)


def test_b069_byte_fallback_decodes_like_the_reference(byte_fallback_tokenizer):
    rng = random.Random(0)
    for _ in range(3_000):
        text = "".join(rng.choices("abhelo ét\n🤖", k=rng.randint(0, 10)))
        ids = byte_fallback_tokenizer.encode(text)
        assert byte_fallback_tokenizer.decode(ids) == byte_fallback_tokenizer.pipeline.decode(ids) == text


def test_b069_empty_and_invalid(any_tokenizer):
    assert any_tokenizer.encode("") in ([], [3])  # SentencePiece puts its space before nothing, too
    assert any_tokenizer.decode([]) == ""
    for bad in (-1, any_tokenizer.vocab_size, 1 << 40):
        with pytest.raises(ValueError, match=str(bad)):
            any_tokenizer.decode([bad])
        with pytest.raises(ValueError, match=str(bad)):
            any_tokenizer.token_bytes(bad)


def test_b069_a_token_added_by_hand_stands_for_itself(tiny_tokenizer):
    from tokenizers import Tokenizer as Pipeline

    from jcb.text.tokenizer import Tokenizer

    pipeline = Pipeline.from_str(tiny_tokenizer.pipeline.to_str())
    pipeline.add_tokens(["my token", "ñandú"])
    tokenizer = Tokenizer(pipeline, config={})
    ids = tokenizer.encode("a my token ñandú")
    assert tokenizer.decode(ids) == "a my token ñandú"
    assert tokenizer.token_bytes(ids[-1]) == "ñandú".encode()


def test_special_tokens_are_parsed_only_when_asked(default_tokenizer):
    text = "a<|im_start|>b<|im_end|>"
    parsed = default_tokenizer.encode(text)
    plain = default_tokenizer.encode(text, parse_special=False)
    assert [i for i in parsed if default_tokenizer.is_special(i)] == [1, 2]
    assert not any(map(default_tokenizer.is_special, plain))
    assert default_tokenizer.decode(plain) == text
    assert default_tokenizer.encode("plain 12", parse_special=False) == default_tokenizer.encode("plain 12")


def test_plain_encoding_equals_that_of_a_tokenizer_without_special_tokens(default_tokenizer):
    from jcb.text.gguf_tokenizer import build_pipeline
    from tests.text.test_gguf_tokenizer import default_metadata

    metadata = {k: v for k, v in default_metadata().items() if not k.endswith(("token_type", "_token_id"))}
    bare = build_pipeline(metadata)
    for text in ("<|im_end|>", " <|im_start|>12 <|endoftext|>\n", "x<filename>y"):
        assert default_tokenizer.encode(text, parse_special=False) == bare.encode(text).ids


def test_b139_special_tokens_are_skipped_wherever_they_stand(default_tokenizer):
    ids = default_tokenizer.encode("<|im_start|>one<|im_end|> two<|endoftext|>")
    assert default_tokenizer.decode(ids) == "one two"
    assert default_tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>one<|im_end|> two<|endoftext|>"


def test_b139_an_end_token_that_the_file_calls_normal_is_special(tmp_path):
    folder = write_tiny_hf(tmp_path / "hf")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [2, 10]}))
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer.is_special(10)
    assert tokenizer.decode([11, 10, 2]) == tokenizer.decode([11])


def test_b075_bytes_are_exact_and_join_to_the_text(default_tokenizer):
    text = f"déjà {EMOJI} vu 日本"
    ids = default_tokenizer.encode(text)
    pieces = [default_tokenizer.token_bytes(i) for i in ids]
    assert b"".join(pieces).decode() == text
    assert any("\ufffd" in default_tokenizer.token_text(i) for i in ids)


def test_b075_keys_never_collide(default_tokenizer, byte_fallback_tokenizer):
    for tokenizer in (default_tokenizer, byte_fallback_tokenizer):
        keys = [tokenizer.token_key(i) for i in range(tokenizer.vocab_size)]
        assert len(set(keys)) == len(keys)
    robot = default_tokenizer.encode(EMOJI)
    assert default_tokenizer.token_key(robot[0]).startswith("bytes:\\x")
    byte_a, letter_a = (
        byte_fallback_tokenizer.pipeline.token_to_id("<0x61>"),
        byte_fallback_tokenizer.pipeline.token_to_id("a"),
    )
    assert byte_fallback_tokenizer.token_bytes(byte_a) == byte_fallback_tokenizer.token_bytes(letter_a) == b"a"
    assert byte_fallback_tokenizer.token_key(letter_a) == f"token_id:{letter_a}"


def test_other_threads_run_while_a_long_text_is_encoded(tiny_tokenizer):
    gaps, done = [0.0], threading.Event()

    def watch():
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            gaps[0], last = max(gaps[0], now - last), now
            time.sleep(0)

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    tiny_tokenizer.encode("The quick brown fox 123. " * 20_000)
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    assert gaps[0] < 0.7 * seconds


def test_lone_surrogates_are_a_request_error(tiny_tokenizer):
    with pytest.raises(RequestError, match="surrogate") as caught:
        tiny_tokenizer.encode("a\ud800b")
    assert caught.value.status == 400


def test_ids_the_tokenizer_lacks_decode_to_nothing(tmp_path):
    folder = write_tiny_hf(tmp_path / "hf")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": VOCAB + 8}))
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer.vocab_size == VOCAB + 8
    assert tokenizer.decode([10, VOCAB + 7]) == tokenizer.decode([10])


def test_continuation_keeps_the_first_space(byte_fallback_tokenizer):
    ids = byte_fallback_tokenizer.encode("he a")
    assert byte_fallback_tokenizer.decode(ids) == "he a"
    assert byte_fallback_tokenizer.decode(ids, continuation=True) == " he a"


@pytest.mark.parametrize("scheme", ["always", "never"])
def test_metaspace_decoders_are_understood(byte_fallback_tokenizer, scheme):
    from tokenizers import Tokenizer as Pipeline

    from jcb.text.tokenizer import Tokenizer

    pipeline = Pipeline.from_str(byte_fallback_tokenizer.pipeline.to_str())
    pipeline.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = Tokenizer(pipeline, config={})
    assert tokenizer.vocabulary.exact
    for tokens in (["▁he", "▁a"], ["▁", "▁a"], ["a", "▁", "b"]):
        ids = [pipeline.token_to_id(token) for token in tokens]
        assert tokenizer.decode(ids) == pipeline.decode(ids)


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path):
    folder = write_tiny_hf(tmp_path / "hf")
    from tokenizers import Tokenizer as Pipeline

    pipeline = Pipeline.from_file(str(folder / "tokenizer.json"))
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=64)
    pipeline.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(open_checkpoint(folder)).encode("abcdefghij")) == 10


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"a": "\\ud800"}'])
def test_a_broken_tokenizer_file_is_a_load_error(tmp_path, text):
    folder = write_tiny_hf(tmp_path / "hf")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(open_checkpoint(folder))


def test_chat_template_is_looked_up_in_order(tmp_path):
    folder = write_tiny_hf(tmp_path / "hf")
    path = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    path.write_text(json.dumps({"eos_token": {"content": SPECIAL[2]}, "chat_template": named}))
    tokenizer = load_tokenizer(open_checkpoint(folder))
    assert tokenizer.chat_template == "plain"
    assert tokenizer.named_tokens == {"eos_token": SPECIAL[2]}
    (folder / "chat_template.jinja").write_text("file")
    assert load_tokenizer(open_checkpoint(folder)).chat_template == "file"
    (folder / "chat_template.jinja").unlink()
    path.write_text("{}")
    assert load_tokenizer(open_checkpoint(folder)).chat_template is None


def test_config_is_a_copy(tiny_tokenizer):
    tiny_tokenizer.config()["eos_token"] = "changed"
    assert tiny_tokenizer.config()["eos_token"] == gguf_metadata()["tokenizer.ggml.tokens"][2] == vocabulary()[0][2]
