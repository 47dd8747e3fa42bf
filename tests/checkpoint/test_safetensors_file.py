import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save

from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.safetensors_file import parse_header


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def file(header, data: bytes = bytes(8)) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def parse(raw: bytes):
    return parse_header(memoryview(raw), "f")


def test_reads_what_the_library_writes():
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = save({"b": value, "a": np.ones(4, np.int64)}, metadata={"format": "pt"})
    tensors = parse(raw)
    assert set(tensors) == {"a", "b"}
    info = tensors["b"]
    assert info.shape == (2, 3)
    assert raw[info.start : info.start + info.nbytes] == value.tobytes()


BAD = {
    "empty": b"",
    "seven bytes": bytes(7),
    "header beyond the file": struct.pack("<Q", 1 << 60) + b"{}",
    "no JSON": file(b"nothing"),
    "a list": file(b"[]"),
    "not UTF-8": file(b'{"\xff": 1}'),
    "key twice": file(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":1}'),
    "entry no object": file({"a": 1}),
    "metadata no strings": file({"__metadata__": {"a": 1}, "a": entry()}),
    "unknown dtype": file({"a": entry(dtype="F4")}),
    "dtype a list": file({"a": entry(dtype=["F32"])}),
    "negative dimension": file({"a": entry(shape=(-2,))}),
    "dimension 0": file({"a": entry(shape=(0,), offsets=(0, 0))}, b""),
    "dimension true": file({"a": entry(shape=(True,), offsets=(0, 4))}, bytes(4)),
    "dimension 2.0": file({"a": entry(shape=(2.0,))}),
    "five dimensions": file({"a": entry(shape=(1, 1, 1, 1, 2))}),
    "scalar": file({"a": entry(shape=(), offsets=(0, 4))}, bytes(4)),
    "shape missing": file({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "span too short": file({"a": entry(offsets=(0, 4))}, bytes(4)),
    "span backwards": file({"a": entry(offsets=(8, 0))}),
    "three offsets": file({"a": entry(offsets=(0, 4, 8))}),
    "64-bit product": file({"a": entry(shape=(1 << 32, 1 << 32))}),
    "hole at the start": file({"a": entry(offsets=(4, 12))}, bytes(12)),
    "hole between": file({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "overlap": file({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "data cut": file({"a": entry()}, bytes(7)),
    "data left over": file({"a": entry()}, bytes(9)),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_files_are_refused(name):
    with pytest.raises(ModelLoadError):
        parse(BAD[name])


def test_good_counterpart_of_the_bad_files():
    assert parse(file({"a": entry(), "b": entry(offsets=(8, 16))}, bytes(16)))["b"].nbytes == 8
