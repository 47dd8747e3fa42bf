import math

import ml_dtypes
import numpy as np
import pytest

from jcb.checkpoint import dequantize as module
from jcb.checkpoint.dequantize import TENSOR_TYPES, TensorType, dequantize, tensor_nbytes

KINDS = {kind.name: kind for kind in TENSOR_TYPES.values()}
QUANTISED = [name for name, kind in KINDS.items() if kind.expand is not None]
PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def random_blocks(kind: TensorType, count: int, seed: int = 0) -> np.ndarray:
    """Random quantised bytes whose float16 scales are finite."""
    raw = np.random.default_rng(seed).integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    halves = 2 if kind.name.endswith("_1") else 1
    raw[:, 1 : 2 * halves : 2] &= 0xBF  # clears a bit of the exponent: never infinite, never NaN
    return raw


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_types_equal_the_reference_exactly(name):
    gguf = pytest.importorskip("gguf")
    kind = KINDS[name]
    raw = random_blocks(kind, 6 * 4)
    expected = gguf.quants.dequantize(raw.reshape(6, -1), gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(dequantize(kind, raw.ravel(), (6, 128)), expected)


@pytest.mark.parametrize("name", QUANTISED)
def test_b145_every_type_keeps_the_direction_of_a_quantised_matrix(name):
    gguf = pytest.importorskip("gguf")
    weight = np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32)
    stored = gguf.quants.quantize(weight, gguf.GGMLQuantizationType[name])
    read = dequantize(KINDS[name], stored.ravel().view(np.uint8), weight.shape)
    cosine = (weight * read).sum() / np.linalg.norm(weight) / np.linalg.norm(read)
    assert cosine > (0.99 if name.startswith("Q4") else 0.999)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_types_are_views_of_the_stored_bytes(name):
    value = np.arange(12, dtype=np.float32).astype(PLAIN[name]).reshape(3, 4)
    raw = np.frombuffer(value.tobytes(), np.uint8)
    read = dequantize(KINDS[name], raw, (3, 4))
    assert read.dtype == PLAIN[name]
    assert np.shares_memory(read, raw)
    assert not read.flags.writeable
    np.testing.assert_array_equal(read, value)


@pytest.mark.parametrize("name", QUANTISED)
def test_b149_output_is_fully_written_and_chunks_join(name, monkeypatch):
    kind = KINDS[name]
    raw = random_blocks(kind, 7)
    whole = dequantize(kind, raw.ravel(), (7, 32))
    monkeypatch.setattr(module, "_CHUNK_BLOCKS", 3)  # the last chunk is a short one
    monkeypatch.setattr(module.np, "empty", lambda shape, dtype: np.full(shape, np.nan, dtype))
    poisoned = dequantize(kind, raw.ravel(), (7, 32))
    assert not np.isnan(poisoned).any()
    np.testing.assert_array_equal(poisoned, whole)


def test_b149_sizes_beyond_32_and_64_bits_are_exact():
    dims = (1 << 40, 1 << 30, 3)
    assert tensor_nbytes(KINDS["F32"], dims) == math.prod(dims) * 4
    assert tensor_nbytes(KINDS["Q4_1"], dims) == math.prod(dims) // 32 * 20


def test_rows_must_be_whole_blocks():
    with pytest.raises(ValueError, match="33"):
        tensor_nbytes(KINDS["Q8_0"], (33, 32))
