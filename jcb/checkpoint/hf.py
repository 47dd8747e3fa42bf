"""Hugging Face model folders as checkpoints: config.json and one or more safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jcb.checkpoint.dequantize import Blocks
from jcb.checkpoint.errors import ModelLoadError, printable
from jcb.checkpoint.fields import Fields
from jcb.checkpoint.hf_config import end_token_ids, model_config, sampling_defaults
from jcb.checkpoint.json_file import load_json_object
from jcb.checkpoint.safetensors_file import SafetensorsFile, StoredTensor
from jcb.config import ModelConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 4_096


class HfCheckpoint:
    """One model folder (see `jcb.checkpoint.reader.Checkpoint`). Everything but tensor data is checked on opening."""

    format: Literal["gguf", "hf"] = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: Mapping[str, Any] = load_json_object(path / "config.json")
        self._files = _open_shards(path)
        fields = Fields(self.metadata)
        self.config: ModelConfig = model_config(fields)
        generation_file = path / "generation_config.json"
        generation = Fields(load_json_object(generation_file) if generation_file.is_file() else {})
        self.eos_token_ids = end_token_ids(fields, generation, self.config.vocab_size)
        self.generation_defaults = sampling_defaults(generation)

    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def nbytes(self, name: str) -> int:
        return self._info(name).nbytes

    def tensor_type(self, name: str) -> str:
        return ""

    def read_blocks(self, name: str) -> Blocks:
        raise ModelLoadError(name, "tensors in Hugging Face files are not kept packed")

    def read(self, name: str) -> np.ndarray:
        self._info(name)
        return self._files[name].read(name)

    def _info(self, name: str) -> StoredTensor:
        if name not in self._files:
            raise ModelLoadError(name, "the folder has no such tensor")
        return self._files[name].tensors[name]


def read_config(folder: Path) -> ModelConfig:
    """The shape that a folder's config.json states, whether or not the weights are there."""
    return model_config(Fields(load_json_object(folder / "config.json")))


def _open_shards(folder: Path) -> dict[str, SafetensorsFile]:
    """Tensor name → the file that holds it. With an index, index and files must agree exactly."""
    if not (folder / INDEX).is_file():
        file = SafetensorsFile(folder / WEIGHTS)
        return dict.fromkeys(file.tensors, file)
    weight_map = _weight_map(folder / INDEX)
    owners: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        file = SafetensorsFile(folder / shard)
        for name in file.tensors:
            if weight_map.get(name) != shard:
                raise ModelLoadError(name, f"it is in {shard}, but the index puts it elsewhere")
            owners[name] = file
    missing = next((name for name in weight_map if name not in owners), None)
    if missing is not None:
        raise ModelLoadError(missing, f"the index puts it in {weight_map[missing]}, which lacks it")
    return owners


def _weight_map(path: Path) -> dict[str, str]:
    """The index's table, every file name checked to be a plain name in the same folder."""
    weight_map = load_json_object(path, limit=64 * 1024 * 1024).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(path.name, "weight_map is missing or empty")
    for shard in weight_map.values():
        if not _is_plain_name(shard):
            raise ModelLoadError(
                path.name, f"{printable(repr(shard))} is not the name of a .safetensors file beside it"
            )
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise ModelLoadError(path.name, f"more than {MAX_SHARDS} files")
    return weight_map


def _is_plain_name(shard: object) -> bool:
    return (
        isinstance(shard, str)
        and shard.endswith(".safetensors")
        and not shard.startswith(".")
        and not any(c in "/\\:\0" for c in shard)
    )
