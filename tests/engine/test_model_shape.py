"""A model by name, folder or file."""

import pytest

from jcb.checkpoint.errors import ModelLoadError
from jcb.engine.model_shape import model_shape
from jcb.models.presets import PRESETS
from tests.checkpoint.tiny_model import write_tiny_gguf, write_tiny_hf


def test_shapes_come_from_presets_folders_and_files(tmp_path):
    assert model_shape("preset:qwen3-8b") == PRESETS["qwen3-8b"]
    folder = write_tiny_hf(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    assert model_shape(str(folder)).num_layers == 2
    assert model_shape(str(write_tiny_gguf(tmp_path / "tiny.gguf"))).num_kv_heads == 2
    with pytest.raises(ValueError, match=r"no preset 'gpt'; known: preset:smollm2-135m, preset:llama-3\.1-8b"):
        model_shape("preset:gpt")
    with pytest.raises(ValueError, match="no such file or folder; without one, name a shape: --model preset:NAME"):
        model_shape(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        model_shape(str(tmp_path / "empty"))
