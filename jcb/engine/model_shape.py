"""A model's dimensions, from whatever names it. Host half."""

from __future__ import annotations

from pathlib import Path

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.reader import open_checkpoint
from jcb.config import ModelConfig
from jcb.models.presets import PREFIX, preset
from jcb.weights.shipped import shipped_config


def model_shape(model: str) -> ModelConfig:
    """The shape of a preset, of a checkpoint, or of a folder that holds only a config.json.

    Raises ValueError or ModelLoadError when `model` is none of these.
    """
    from jcb.checkpoint.hf import read_config

    if model.startswith(PREFIX):
        return preset(model)
    path = Path(default_model_path() if model == "default" else model).expanduser()
    if (path / "config.json").is_file():
        return read_config(path)
    if not path.exists():
        raise ValueError(f"model {model!r}: no such file or folder; without one, name a shape: --model {PREFIX}NAME")
    return shipped_config(open_checkpoint(path))
