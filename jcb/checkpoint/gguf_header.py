"""The strict GGUF header parser: bytes to metadata and a checked table of tensors.

A GGUF file (versions 2 and 3, little-endian) is: magic, version, tensor count, metadata count, the metadata,
the tensor table, padding, the tensor data. Every length is checked against the bytes that remain before anything of
that length is made, so a hostile file costs at most a small multiple of its own size.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcb.checkpoint.dequantize import TENSOR_TYPES, UNSUPPORTED_TYPES, TensorType, tensor_nbytes
from jcb.checkpoint.errors import ModelLoadError, printable

MAGIC = b"GGUF"

MAX_METADATA = 65_536
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 1_024
MAX_STRING_BYTES = 16 * 1024 * 1024
MAX_ARRAY = 16 * 1024 * 1024
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. shape: numpy order. start: byte offset from the beginning of the file."""

    kind: TensorType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says before its tensor data. Metadata arrays of numbers are numpy, of strings tuples."""

    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


class _Cursor:
    """A reading position in a buffer that never passes its end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def take(self, count: int, what: str) -> memoryview:
        """The next `count` bytes."""
        if count > self.remaining:
            raise ModelLoadError(what, f"needs {count} bytes, the file has {self.remaining} left")
        start = self.position
        self.position = start + count
        return self.data[start : start + count]

    def number(self, form: struct.Struct, what: str) -> Any:
        return form.unpack(self.take(form.size, what))[0]

    def string(self, what: str, limit: int = MAX_STRING_BYTES) -> str:
        length = self.number(_U64, what)
        if length > limit:
            raise ModelLoadError(what, f"a string of {length} bytes is over the limit of {limit}")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            raise ModelLoadError(what, "a string is not valid UTF-8") from error

    def value(self, kind: int, key: str) -> Any:
        """One metadata value of type `kind`."""
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], key)
        if kind == _BOOL:
            return bool(_checked_bools(np.frombuffer(self.take(1, key), np.uint8), key)[0])
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        raise ModelLoadError(key, f"unknown metadata type {kind}")

    def array(self, key: str) -> np.ndarray | tuple[str, ...]:
        """A metadata array: numbers as a numpy array (a copy), strings as a tuple. Arrays of arrays are refused."""
        kind = self.number(_U32, key)
        count = self.number(_U64, key)
        if count > MAX_ARRAY:
            raise ModelLoadError(key, f"an array of {count} elements is over the limit of {MAX_ARRAY}")
        if kind == _STRING:
            if count * _U64.size > self.remaining:
                raise ModelLoadError(key, f"{count} strings do not fit into the {self.remaining} bytes left")
            return tuple(self.string(key) for _ in range(count))
        if kind == _BOOL:
            return _checked_bools(np.frombuffer(self.take(count, key), np.uint8), key).astype(bool)
        if kind not in _SCALARS:
            raise ModelLoadError(key, f"unknown or nested array type {kind}")
        form = _SCALARS[kind]
        return np.frombuffer(self.take(count * form.size, key), np.dtype(form.format)).copy()


def _checked_bools(raw: np.ndarray, key: str) -> np.ndarray:
    if raw.size and raw.max() > 1:
        raise ModelLoadError(key, "a boolean is neither 0 nor 1")
    return raw


def parse_header(data: memoryview) -> GgufHeader:
    """Read and check the header of a whole GGUF file. Raises ModelLoadError, and nothing else, on bad input."""
    cursor = _Cursor(data)
    if bytes(cursor.take(4, "magic")) != MAGIC:
        raise ModelLoadError("magic", "the file is no GGUF file: it does not begin with GGUF")
    version = cursor.number(_U32, "version")
    if version not in (2, 3):
        hint = " (a big-endian file?)" if version in (2 << 24, 3 << 24) else ""
        raise ModelLoadError("version", f"GGUF version {version}{hint} is not supported, only 2 and 3")
    tensor_count = _count(cursor, "tensor count", MAX_TENSORS)
    metadata_count = _count(cursor, "metadata count", MAX_METADATA)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string("metadata key", MAX_NAME_BYTES)
        if not key or key in metadata:
            raise ModelLoadError(key or "metadata key", "a metadata key is empty or appears twice")
        metadata[key] = cursor.value(cursor.number(_U32, key), key)
    tensors = _read_tensors(cursor, tensor_count, _alignment(metadata))
    return GgufHeader(version, metadata, tensors)


def _count(cursor: _Cursor, what: str, limit: int) -> int:
    count = cursor.number(_U64, what)
    if count > limit:
        raise ModelLoadError(what, f"{count} is over the limit of {limit}")
    return count


def _alignment(metadata: Mapping[str, Any]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelLoadError(
            "general.alignment", f"{printable(str(value))} is not a power of two from 8 to {MAX_ALIGNMENT}"
        )
    return value


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """The tensor table, every entry checked on its own and against the others."""
    relative: dict[str, TensorInfo] = {}
    for _ in range(count):
        name = cursor.string("tensor name", MAX_NAME_BYTES)
        if not name or name in relative:
            raise ModelLoadError(name or "tensor name", "a tensor name is empty or appears twice")
        relative[name] = _read_tensor(cursor, name, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    size = len(cursor.data)
    tensors: dict[str, TensorInfo] = {}
    end, previous = data_start, ""
    for name, info in sorted(relative.items(), key=lambda item: item[1].start):
        start = data_start + info.start
        if start < end:
            raise ModelLoadError(name, f"its bytes overlap those of {printable(previous)}")
        end, previous = start + info.nbytes, name
        if end > size:
            raise ModelLoadError(name, f"its bytes end at {end}, the file at {size}")
        tensors[name] = TensorInfo(info.kind, info.shape, start, info.nbytes)
    return {name: tensors[name] for name in relative}


def _read_tensor(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    """One entry of the tensor table; its start is still relative to the tensor data."""
    rank = cursor.number(_U32, name)
    if not 1 <= rank <= MAX_DIMS:
        raise ModelLoadError(name, f"it has {rank} dimensions, 1 to {MAX_DIMS} are allowed")
    dims = tuple(cursor.number(_U64, name) for _ in range(rank))
    if min(dims) < 1:
        raise ModelLoadError(name, f"a dimension is below 1: {dims}")
    number = cursor.number(_U32, name)
    offset = cursor.number(_U64, name)
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        known = ", ".join(each.name for each in TENSOR_TYPES.values())
        stored = UNSUPPORTED_TYPES.get(number, f"unknown type {number}")
        raise ModelLoadError(name, f"it is stored as {stored}; jcb reads {known}")
    if offset % alignment:
        raise ModelLoadError(name, f"its offset {offset} is not a multiple of the alignment {alignment}")
    try:
        nbytes = tensor_nbytes(kind, dims)
    except ValueError as error:
        raise ModelLoadError(name, str(error)) from error
    return TensorInfo(kind, dims[::-1], offset, nbytes)
