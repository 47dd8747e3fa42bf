import json

from tokenizers import Tokenizer as Pipeline

from jcb.checkpoint.reader import open_checkpoint
from jcb.text.export import export_tokenizer
from jcb.text.tokenizer import load_tokenizer
from tests.checkpoint.tiny_model import write_tiny_gguf, write_tiny_hf

TEXT = "Hello world 123 déjà 🤖<|im_end|>"


def test_exported_folder_is_the_same_tokenizer(tmp_path):
    checkpoint = open_checkpoint(write_tiny_gguf(tmp_path / "t.gguf"))
    files = export_tokenizer(checkpoint, tmp_path / "out" / "deep")
    assert {file.name for file in files} == {file.name for file in (tmp_path / "out" / "deep").iterdir()}
    loaded = Pipeline.from_file(str(tmp_path / "out" / "deep" / "tokenizer.json"))
    assert loaded.encode(TEXT).ids == load_tokenizer(checkpoint).encode(TEXT)


def test_exported_folder_loads_as_our_own_with_weights_beside_it(tmp_path):
    source = open_checkpoint(write_tiny_gguf(tmp_path / "t.gguf"))
    folder = write_tiny_hf(tmp_path / "hf")
    export_tokenizer(source, folder)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == source.config
    assert checkpoint.eos_token_ids == source.eos_token_ids
    ours, theirs = load_tokenizer(source), load_tokenizer(checkpoint)
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens == theirs.special_tokens
    assert ours.named_tokens == theirs.named_tokens
    assert ours.encode(TEXT) == theirs.encode(TEXT)


def test_config_files_say_what_clients_look_up(tmp_path):
    export_tokenizer(open_checkpoint(write_tiny_gguf(tmp_path / "t.gguf")), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert config["added_tokens_decoder"]["2"]["content"] == "<|im_end|>"
    assert config["added_tokens_decoder"]["2"]["special"]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": 2}
