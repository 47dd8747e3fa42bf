"""GGUF files as checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jcb.checkpoint.dequantize import Blocks, dequantize, split_blocks
from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.fields import Fields
from jcb.checkpoint.gguf_config import end_token_ids, model_config, sampling_defaults
from jcb.checkpoint.gguf_header import TensorInfo, parse_header
from jcb.checkpoint.mapped_file import map_file
from jcb.config import ModelConfig


class GgufCheckpoint:
    """One GGUF file (see `jcb.checkpoint.reader.Checkpoint`). Everything but tensor data is checked on opening."""

    format: Literal["gguf", "hf"] = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        header = parse_header(self._data)
        self.metadata: Mapping[str, Any] = header.metadata
        self._tensors = header.tensors
        fields = Fields(header.metadata)
        self.config: ModelConfig = model_config(fields, self)
        self.eos_token_ids = end_token_ids(fields, self.config.vocab_size)
        self.generation_defaults = sampling_defaults(fields)

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def nbytes(self, name: str) -> int:
        return self._info(name).nbytes

    def read(self, name: str) -> np.ndarray:
        info = self._info(name)
        return dequantize(info.kind, self._bytes(info), info.shape)

    def tensor_type(self, name: str) -> str:
        return self._info(name).kind.name

    def read_blocks(self, name: str) -> Blocks:
        info = self._info(name)
        return split_blocks(info.kind, self._bytes(info), info.shape)

    def _bytes(self, info: TensorInfo) -> np.ndarray:
        return np.frombuffer(self._data, np.uint8, count=info.nbytes, offset=info.start)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise ModelLoadError(name, "the file has no such tensor")
        return self._tensors[name]
