"""The one way in: a path to a `Checkpoint`, whatever its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from jcb.checkpoint.dequantize import Blocks
from jcb.checkpoint.errors import ModelLoadError
from jcb.config import ModelConfig


class Checkpoint(Protocol):
    """A model on disk, opened and checked but not read: tensors are read one at a time, by name.

    metadata: GGUF's key-value pairs, or the content of config.json. names: every tensor, in file order.
    eos_token_ids: the ids that end an answer, each inside the vocabulary. generation_defaults: sampling
    settings that the model's authors recommend (temperature, top_k, top_p, min_p, repetition_penalty), where given.
    """

    @property
    def path(self) -> Path: ...
    @property
    def format(self) -> Literal["gguf", "hf"]: ...
    @property
    def config(self) -> ModelConfig: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def generation_defaults(self) -> dict[str, float]: ...

    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in numpy order: [out, in] for matrices."""
        ...

    def nbytes(self, name: str) -> int:
        """Bytes the tensor takes on disk."""
        ...

    def tensor_type(self, name: str) -> str:
        """How the tensor is stored: GGUF's name of the type, such as "Q4_1"; "" in other formats."""
        ...

    def read_blocks(self, name: str) -> Blocks:
        """A tensor of type Q4_0, Q4_1 or Q8_0 as it is stored, its rows in GGUF's order."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor: a read-only view of the file where it is stored plainly (float32, float16, bfloat16),
        a new float32 array where it is quantised. GGUF's row order of q and k is left as it is.
        """
        ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder. Raises ModelLoadError when it is neither, or malformed."""
    from jcb.checkpoint.gguf import GgufCheckpoint
    from jcb.checkpoint.hf import HfCheckpoint

    path = Path(path).expanduser()
    if path.is_dir():
        return HfCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise ModelLoadError(str(path), "no such file or folder; give a GGUF file or a Hugging Face model folder")
