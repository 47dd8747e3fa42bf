"""GGUF tensor types: how many bytes a tensor takes, and blocks of bytes to numbers.

A quantised type stores blocks of 32 numbers. `d` is the block's scale, `m` its minimum (both float16), `q` small
integers; number = d * q + m (types _1) or d * (q - offset) (types _0). In 4 and 5 bit types byte j of a block holds
number j in its low nibble and number j + 16 in its high nibble; the fifth bits are a little-endian 32-bit word.
Source: the GGML reference quantisation (ggml-quants.c).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jcb.checkpoint.errors import ModelLoadError

BLOCK = 32
"""Numbers in one block of every quantised type here."""

_CHUNK_BLOCKS = 1 << 16
"""Blocks turned into numbers at a time, so that temporaries stay a few MiB."""


@dataclass(frozen=True)
class TensorType:
    """One GGUF tensor type: plain ones are `stored` as numpy, others `expand` u8[n, block_bytes] to f32[n, 32]."""

    name: str
    block_size: int
    block_bytes: int
    stored: np.dtype | None = None
    expand: Callable[[np.ndarray], np.ndarray] | None = None


def tensor_nbytes(kind: TensorType, dims: tuple[int, ...]) -> int:
    """Bytes of a tensor with GGUF dimensions `dims` (first one fastest), in whole Python integers.

    Raises ValueError when the fastest dimension is not a whole number of blocks.
    """
    if dims[0] % kind.block_size:
        raise ValueError(f"its rows of {dims[0]} are not whole {kind.name} blocks of {kind.block_size}")
    return math.prod(dims) // kind.block_size * kind.block_bytes


def dequantize(kind: TensorType, data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The numbers of one tensor: `data` is u8[nbytes], `shape` in numpy order.

    Plain types come back as stored, a read-only view of `data`; quantised types as a new float32 array.
    """
    if kind.stored is not None:
        return data.view(kind.stored).reshape(shape)
    if kind.expand is None:
        raise ModelLoadError(kind.name, "this tensor type has no dequantiser")
    blocks = data.reshape(-1, kind.block_bytes)
    out = np.empty((len(blocks), kind.block_size), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        out[start : start + _CHUNK_BLOCKS] = kind.expand(blocks[start : start + _CHUNK_BLOCKS])
    return out.reshape(shape)


@dataclass(frozen=True)
class Blocks:
    """A matrix [out, in] in blocks of 32 weights, B = in / 32 of them a row: views of the file, not copies.

    codes: u8[out, B, 16] of nibbles (weight j low, j + 16 high), or i8[out, B, 32]. scales: f16[out, B]. mins: of Q4_1
    f16[out, B], else None.
    """

    codes: np.ndarray
    scales: np.ndarray
    mins: np.ndarray | None


def split_blocks(kind: TensorType, data: np.ndarray, shape: tuple[int, ...]) -> Blocks:
    """The parts of a matrix in Q4_0, Q4_1 or Q8_0; `data` is u8[nbytes]. Raises ModelLoadError for other types."""
    if kind.name not in ("Q4_0", "Q4_1", "Q8_0"):
        raise ModelLoadError(kind.name, "tensors of this type are not kept packed")
    blocks = data.reshape(shape[0], -1, kind.block_bytes)
    halves = blocks[..., : 4 if kind.name == "Q4_1" else 2].view("<f2")
    codes = blocks[..., 2 * halves.shape[-1] :]
    return Blocks(
        codes=codes.view(np.int8) if kind.name == "Q8_0" else codes,
        scales=halves[..., 0],
        mins=halves[..., 1] if kind.name == "Q4_1" else None,
    )


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of every block, as f32[n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """u8[n, 16] to u8[n, 32]: the low nibbles, then the high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1)


def _fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """The 32-bit word at byte `start` of every block as u8[n, 32], each 0 or 16."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (quants.astype(np.float32) - 16)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4, stored=np.dtype("<f4")),
    1: TensorType("F16", 1, 2, stored=np.dtype("<f2")),
    2: TensorType("Q4_0", BLOCK, 18, expand=_q4_0),
    3: TensorType("Q4_1", BLOCK, 20, expand=_q4_1),
    6: TensorType("Q5_0", BLOCK, 22, expand=_q5_0),
    7: TensorType("Q5_1", BLOCK, 24, expand=_q5_1),
    8: TensorType("Q8_0", BLOCK, 34, expand=_q8_0),
    30: TensorType("BF16", 1, 2, stored=np.dtype(ml_dtypes.bfloat16)),
}
"""By the number that a GGUF file gives."""

UNSUPPORTED_TYPES: dict[int, str] = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
"""Types that exist but that jcb does not read, so that the error can name them."""
