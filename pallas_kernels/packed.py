"""What packed weights take and how they are packed, counted without JAX; the op is `pallas_kernels.quantized_dot`.

A weight is code * scale + min: codes are small integers, scales and mins belong to a block of 32 weights along `in`
(int8: scales to a whole output). Codes of 16 outputs lie side by side, so that a vector of the processor holds one
weight of each, or four of 4 bits. With G = ceil(out / 16) groups and B = in / 32 blocks:

    q4_0, q4_1   codes u8[layers, G, B, 4, 16, 4]   byte [p, output, i]: weight 4 p + i of the block in the low nibble,
                                                    4 p + i + 16 in the high one
    q8_0, int8   codes i8[layers, G, B, 32, 16]     byte [k, output]: weight k
    scales       f16[layers, G, B, 16]            int8: f32[layers, G, 1, 16]
    mins         f16[layers, G, B, 16] in q4_1, else f16[layers, 0]; q4_0's min is -8 * scale
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

FORMATS = ("q4_0", "q4_1", "q8_0", "int8")
FOUR_BIT_FORMATS = ("q4_0", "q4_1")
"""Two weights a byte; only these meet x in 8 bits, where that is asked for."""
ACTIVATIONS = ("full", "int8")
BLOCK = 32
GROUP = 16
QUAD = 4
"""Bytes of one output that lie together, in 4-bit codes."""


@dataclass(frozen=True)
class PackedShape:
    """Packed weights [layers, out, in] of one of FORMATS: a hashable value. `inner` is `in`, whole blocks."""

    format: str
    layers: int
    out: int
    inner: int

    @property
    def groups(self) -> int:
        """Groups of 16 outputs; the last is filled with zeros."""
        return -(-self.out // GROUP)

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and data type of "codes", "scales" and "mins"."""
        blocks = self.inner // BLOCK
        by_block = (self.layers, self.groups, blocks, GROUP)
        nibbles = self.format in FOUR_BIT_FORMATS
        side_by_side = (BLOCK // 2 // QUAD, GROUP, QUAD) if nibbles else (BLOCK, GROUP)
        codes = (self.layers, self.groups, blocks, *side_by_side)
        whole = self.format == "int8"
        return {
            "codes": (codes, "uint8" if nibbles else "int8"),
            "scales": ((self.layers, self.groups, 1, GROUP), "float32") if whole else (by_block, "float16"),
            "mins": (by_block if self.format == "q4_1" else (self.layers, 0), "float16"),
        }

    @property
    def nbytes(self) -> int:
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.arrays.values())

    def empty(self) -> dict[str, np.ndarray]:
        """Arrays for `pack` to fill; outputs that fill up the last group are zero."""
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self.arrays.items()}


def pack(target: np.ndarray, rows: np.ndarray, start: int) -> None:
    """Write `rows` [out, ...] into outputs start, start + 1, ... of one layer of an array [G, ..., 16] or, for 4-bit
    codes, [G, B, 4, 16, 4].

    rows: [out, B, 16 or 32] of codes, [out, B] of scales and mins, [out, 1] of int8's scales.
    """
    places = np.moveaxis(target, -1, 1)  # a view [G, 16, ...]
    if target.ndim == 5:
        places, rows = np.moveaxis(target, -2, 1), rows.reshape(*rows.shape[:-1], -1, QUAD)
    end, done = start + len(rows), 0
    if start % GROUP == 0 and len(rows) % GROUP == 0:
        places[start // GROUP : end // GROUP] = rows.reshape(-1, GROUP, *rows.shape[1:])
        return
    while done < len(rows):
        group, lane = divmod(start + done, GROUP)
        count = min(GROUP - lane, len(rows) - done)
        places[group, lane : lane + count] = rows[done : done + count]
        done += count
