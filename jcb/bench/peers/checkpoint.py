"""The default model's weights in the forms that the peers read, made once from its GGUF file.

`hf-float32`, `hf-bfloat16`: Hugging Face folders; `f16.gguf`: the same matrices as 16-bit floats. Dequantised values
are what every engine computes with, so all of them answer alike up to rounding.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from jcb.checkpoint.reader import Checkpoint, open_checkpoint
from jcb.text.export import export_tokenizer
from jcb.weights.load import unpermute
from jcb.weights.names import TABLES

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def hf_folder(source: Path, folder: Path, dtype: str) -> Path:
    """`folder`/hf-`dtype`: model.safetensors, config.json, the tokenizer. Kept when it is whole already."""
    from safetensors.numpy import save_file

    target = folder / f"hf-{dtype}"
    if (target / "config.json").is_file():
        return target
    checkpoint = open_checkpoint(source)
    working = folder / f"hf-{dtype}.part"
    shutil.rmtree(working, ignore_errors=True)
    export_tokenizer(checkpoint, working)
    save_file(dict(_hf_arrays(checkpoint, _DTYPES[dtype])), working / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((working / "config.json").read_text(encoding="utf-8"))
    (working / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}, indent=2), encoding="utf-8")
    working.rename(target)
    return target


def _hf_arrays(checkpoint: Checkpoint, dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its Hugging Face name, in that library's row order."""
    config = checkpoint.config
    theirs = TABLES["hf", config.architecture]
    have = set(checkpoint.names())
    for path, source in TABLES["gguf", config.architecture].items():
        layers = zip(source.by_layer(config.num_layers), theirs[path].by_layer(config.num_layers), strict=True)
        for ours, named in layers:
            for index, (name, target) in enumerate(zip(ours, named, strict=True)):
                if name not in have:
                    continue
                array = checkpoint.read(name)
                if index < source.permuted:
                    array = unpermute(array, config.head_dim)
                yield target, np.ascontiguousarray(array.astype(dtype))


def f16_gguf(source: Path, folder: Path) -> Path:
    """`folder`/f16.gguf: matrices as float16, everything else as it is. Needs the package gguf."""
    import gguf

    target = folder / "f16.gguf"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    working = folder / "f16.gguf.part"
    writer = gguf.GGUFWriter(working, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    checkpoint = open_checkpoint(source)
    for name in checkpoint.names():
        array = checkpoint.read(name)
        writer.add_tensor(name, array.astype(np.float16 if array.ndim > 1 else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    working.rename(target)
    return target
