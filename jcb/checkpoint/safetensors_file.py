"""One safetensors file, its header checked before any tensor is touched.

Layout: a little-endian u64, that many bytes of JSON (name → dtype, shape, data_offsets), then the data without holes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from jcb.checkpoint.errors import ModelLoadError, printable
from jcb.checkpoint.json_file import parse_json_object
from jcb.checkpoint.mapped_file import map_file

MAX_HEADER_BYTES = 64 * 1024 * 1024
MAX_TENSORS = 262_144
MAX_DIMS = 4

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies. start: byte offset from the beginning of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """A mapped safetensors file. Raises ModelLoadError, and nothing else, on bad input."""

    def __init__(self, path: Path) -> None:
        self._data = map_file(path)
        self.tensors: Mapping[str, StoredTensor] = parse_header(self._data, path.name)

    def read(self, name: str) -> np.ndarray:
        """A read-only view of one tensor."""
        info = self.tensors[name]
        data = np.frombuffer(self._data, np.uint8, count=info.nbytes, offset=info.start)
        return data.view(info.dtype).reshape(info.shape)


def parse_header(data: memoryview, file_name: str) -> dict[str, StoredTensor]:
    """The checked table of tensors, in the order of their bytes."""
    if len(data) < 8:
        raise ModelLoadError(file_name, "it is too short for a safetensors file")
    length = struct.unpack("<Q", data[:8])[0]
    if length > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ModelLoadError(file_name, f"a header of {length} bytes does not fit into its {len(data)} bytes")
    header = parse_json_object(bytes(data[8 : 8 + length]), file_name)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelLoadError(file_name, "__metadata__ is not an object of strings")
    if len(header) > MAX_TENSORS:
        raise ModelLoadError(file_name, f"{len(header)} tensors are over the limit of {MAX_TENSORS}")
    start = 8 + length
    entries = sorted((_entry(name, value) for name, value in header.items()), key=lambda entry: entry[1].start)
    tensors, end = {}, 0
    for name, info in entries:
        if info.start != end:
            raise ModelLoadError(name, f"its bytes begin at {info.start}, the ones before end at {end}")
        end += info.nbytes
        tensors[name] = StoredTensor(info.dtype, info.shape, start + info.start, info.nbytes)
    if start + end != len(data):
        raise ModelLoadError(file_name, f"its tensors end at byte {start + end}, the file at {len(data)}")
    return tensors


def _entry(name: str, value: object) -> tuple[str, StoredTensor]:
    """One header entry, checked on its own; its start is still relative to the data."""
    if not isinstance(value, dict):
        raise ModelLoadError(name, "its entry is not an object")
    dtype = DTYPES.get(value["dtype"]) if isinstance(value.get("dtype"), str) else None
    if dtype is None:
        raise ModelLoadError(name, f"its dtype {printable(repr(value.get('dtype')))} is not one of {', '.join(DTYPES)}")
    shape, offsets = _whole_numbers(value.get("shape")), _whole_numbers(value.get("data_offsets"))
    if shape is None or not 1 <= len(shape) <= MAX_DIMS or min(shape) < 1:
        raise ModelLoadError(name, f"its shape is not 1 to {MAX_DIMS} whole numbers above 0")
    nbytes = math.prod(shape) * dtype.itemsize
    if offsets is None or len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ModelLoadError(name, f"its data_offsets do not span the {nbytes} bytes of its shape")
    return name, StoredTensor(dtype, shape, offsets[0], nbytes)


def _whole_numbers(value: object) -> tuple[int, ...] | None:
    """A JSON list of whole numbers of at least 0, else None."""
    if not isinstance(value, list) or len(value) > 64:
        return None
    numbers = tuple(each for each in value if isinstance(each, int) and not isinstance(each, bool) and each >= 0)
    return numbers if len(numbers) == len(value) else None
