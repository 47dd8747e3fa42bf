import struct

import numpy as np
import pytest

from jcb.checkpoint.errors import ModelLoadError
from jcb.checkpoint.gguf_header import MAX_STRING_BYTES, parse_header
from tests.checkpoint.tiny_model import gguf_bytes

ONE = {"a": ("F32", np.ones((2, 8), np.float32))}


def parse(raw: bytes):
    return parse_header(memoryview(raw))


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def file(metadata: bytes = b"", metadata_count: int = 0, tensors: bytes = b"", tensor_count: int = 0, version: int = 3):
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, metadata_count) + metadata + tensors


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def with_data(raw: bytes, size: int) -> bytes:
    return raw + b"\0" * (-len(raw) % 32) + b"\0" * size


def test_reads_every_kind_of_metadata():
    gguf = pytest.importorskip("gguf")
    kinds = {"u8": 255, "i8": -1, "u16": 65535, "i16": -2, "u32": 1 << 31, "i32": -3, "u64": 1 << 63, "i64": -4}
    formats = {
        "u8": "<IB",
        "i8": "<Ib",
        "u16": "<IH",
        "i16": "<Ih",
        "u32": "<II",
        "i32": "<Ii",
        "u64": "<IQ",
        "i64": "<Iq",
    }
    numbers = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "u64": 10, "i64": 11}
    assert numbers["u64"] == gguf.GGUFValueType.UINT64
    raw = b"".join(string(k) + struct.pack(formats[k], numbers[k], v) for k, v in kinds.items())
    raw += string("f32") + struct.pack("<If", 6, 0.5) + string("f64") + struct.pack("<Id", 12, 0.1)
    raw += string("yes") + struct.pack("<IB", 7, 1) + string("text") + struct.pack("<I", 8) + string("é")
    raw += string("words") + struct.pack("<IIQ", 9, 8, 2) + string("x") + string("")
    raw += string("numbers") + struct.pack("<IIQ3h", 9, 3, 3, 1, -2, 3)
    raw += string("flags") + struct.pack("<IIQ2B", 9, 7, 2, 0, 1)
    metadata = parse(file(raw, len(kinds) + 7)).metadata
    assert {k: metadata[k] for k in kinds} == kinds
    assert (metadata["f32"], metadata["f64"], metadata["yes"], metadata["text"]) == (0.5, 0.1, True, "é")
    assert metadata["words"] == ("x", "")
    assert metadata["numbers"].tolist() == [1, -2, 3]
    assert metadata["flags"].tolist() == [False, True]


@pytest.mark.parametrize("version", [2, 3])
def test_reads_tensors_in_numpy_order(version):
    raw = with_data(file(tensors=tensor("w", (8, 2)), tensor_count=1, version=version), 64)
    info = parse(raw).tensors["w"]
    assert info.shape == (2, 8)
    assert (info.nbytes, info.start) == (64, len(raw) - 64)


def test_agrees_with_the_reference_writer(tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_array("list", [1, 2, 3])
    value = np.arange(96, dtype=np.float32).reshape(3, 32)
    writer.add_tensor("w", value)
    quantised = gguf.quants.quantize(value, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    raw = (tmp_path / "m.gguf").read_bytes()
    header = parse(raw)
    w, q = header.tensors["w"], header.tensors["q"]
    assert w.shape == q.shape == (3, 32)
    assert w.start % 64 == q.start % 64 == 0
    np.testing.assert_array_equal(np.frombuffer(raw, np.float32, 96, w.start).reshape(3, 32), value)
    assert raw[q.start : q.start + q.nbytes] == quantised.tobytes()


BAD = {
    "empty": b"",
    "magic": b"GGML" + bytes(40),
    "version 1": file(version=1),
    "big endian": file(version=3 << 24),
    "tensor count": file(tensor_count=1 << 40),
    "metadata count": file(metadata_count=1 << 40),
    "cut in the header": file()[:-1],
    "key longer than the file": file(struct.pack("<Q", 1 << 62), 1),
    "key too long": file(string("k" * 2000) + struct.pack("<II", 4, 1), 1),
    "key not UTF-8": file(struct.pack("<Q", 1) + b"\xff" + struct.pack("<II", 4, 1), 1),
    "key twice": file((string("k") + struct.pack("<II", 4, 1)) * 2, 2),
    "unknown value type": file(string("k") + struct.pack("<II", 13, 1), 1),
    "boolean 2": file(string("k") + struct.pack("<IB", 7, 2), 1),
    "boolean 2 in an array": file(string("k") + struct.pack("<IIQB", 9, 7, 1, 2), 1),
    "nested array": file(string("k") + struct.pack("<IIQIQ", 9, 9, 1, 4, 0), 1),
    "array longer than the file": file(string("k") + struct.pack("<IIQ", 9, 4, 1 << 20), 1),
    "array over the limit": file(string("k") + struct.pack("<IIQ", 9, 0, 1 << 61), 1),
    "strings longer than the file": file(string("k") + struct.pack("<IIQ", 9, 8, 1 << 20), 1),
    "string over the limit": file(string("k") + struct.pack("<IQ", 8, MAX_STRING_BYTES + 1), 1),
    "alignment 0": file(string("general.alignment") + struct.pack("<II", 4, 0), 1),
    "alignment 24": file(string("general.alignment") + struct.pack("<II", 4, 24), 1),
    "alignment of text": file(string("general.alignment") + struct.pack("<I", 8) + string("32"), 1),
    "no dimensions": with_data(file(tensors=tensor("w", ()), tensor_count=1), 64),
    "five dimensions": with_data(file(tensors=tensor("w", (1,) * 5), tensor_count=1), 64),
    "dimension 0": with_data(file(tensors=tensor("w", (8, 0)), tensor_count=1), 64),
    "no name": with_data(file(tensors=tensor("", (8,)), tensor_count=1), 64),
    "name twice": with_data(file(tensors=tensor("w", (8,)) + tensor("w", (8,), offset=32), tensor_count=2), 64),
    "unknown tensor type": with_data(file(tensors=tensor("w", (8,), kind=99), tensor_count=1), 64),
    "unsupported tensor type": with_data(file(tensors=tensor("w", (256,), kind=12), tensor_count=1), 640),
    "unaligned": with_data(file(tensors=tensor("w", (8,), offset=4), tensor_count=1), 64),
    "half a block": with_data(file(tensors=tensor("w", (16, 2), kind=8), tensor_count=1), 64),
    "beyond the file": with_data(file(tensors=tensor("w", (17,)), tensor_count=1), 64),
    "offset beyond the file": with_data(file(tensors=tensor("w", (8,), offset=1 << 63), tensor_count=1), 64),
    "product of 2^64 is not 0": with_data(file(tensors=tensor("w", (1 << 32, 1 << 32)), tensor_count=1), 64),
    "overlap": with_data(file(tensors=tensor("w", (16,)) + tensor("v", (8,), offset=32), tensor_count=2), 96),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_headers_are_refused(name):
    with pytest.raises(ModelLoadError):
        parse(BAD[name])


def test_unsupported_type_is_named():
    with pytest.raises(ModelLoadError, match=r"w: it is stored as Q4_K; jcb reads F32"):
        parse(BAD["unsupported tensor type"])


def test_neighbours_may_touch():
    raw = with_data(file(tensors=tensor("w", (8,)) + tensor("v", (8,), offset=32), tensor_count=2), 64)
    assert list(parse(raw).tensors) == ["w", "v"]


def test_tensors_keep_the_order_of_the_table():
    raw = with_data(file(tensors=tensor("w", (8,), offset=32) + tensor("v", (8,)), tensor_count=2), 64)
    assert list(parse(raw).tensors) == ["w", "v"]


def test_error_text_is_short_and_printable():
    raw = file(string("\x1b[31m" + "k" * 500) + struct.pack("<II", 99, 1), 1)
    with pytest.raises(ModelLoadError) as caught:
        parse(raw)
    assert str(caught.value).isprintable()
    assert len(caught.value.name) < 80


def test_writer_of_the_tests_is_read_back():
    header = parse(gguf_bytes({"k": "v"}, ONE))
    assert header.metadata == {"k": "v"}
    assert header.tensors["a"].shape == (2, 8)
