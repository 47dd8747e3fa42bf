"""Named products for tests and benchmarks, and how to make their arrays."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed import BLOCK, PackedShape, pack
from pallas_kernels.quantized_dot.weights import PackedWeights


@dataclass(frozen=True)
class Case:
    """A product by its shapes: rows of x, weights [layers, out, inner] in `format`."""

    name: str
    rows: int
    out: int
    inner: int
    format: str = "q4_1"
    dtype: str = "float32"
    layers: int = 2
    layer: int = 1

    @property
    def shape(self) -> PackedShape:
        return PackedShape(self.format, self.layers, self.out, self.inner)


def make(case: Case, seed: int = 0, scale: float = 0.01) -> tuple[jax.Array, PackedWeights]:
    """x and weights with every code, scales of either sign around `scale`, as float16 where the format has that."""
    rng = np.random.default_rng(seed)
    shape, arrays = case.shape, case.shape.empty()
    blocks = case.inner // BLOCK
    per_row = 1 if case.format == "int8" else blocks
    for layer in range(case.layers):
        width = arrays["codes"].shape[-2]
        codes = rng.integers(0, 256, (case.out, blocks, width), np.uint8).view(arrays["codes"].dtype)
        signs = rng.choice([-1.0, 1.0], (case.out, per_row)) * scale
        pack(arrays["codes"][layer], codes, 0)
        pack(arrays["scales"][layer], signs * rng.uniform(0.5, 1.5, signs.shape), 0)
        if case.format == "q4_1":
            pack(arrays["mins"][layer], -8.0 * scale * rng.uniform(0.5, 1.5, (case.out, blocks)), 0)
    packed = PackedWeights(**{name: jnp.asarray(a) for name, a in arrays.items()}, format=shape.format, out=shape.out)
    return jnp.asarray(rng.standard_normal((case.rows, case.inner)), case.dtype), packed


CASES: tuple[Case, ...] = (
    Case("one_row", 1, 64, 64),
    Case("two_rows", 2, 576, 576),
    Case("three_rows", 3, 48, 96, format="q8_0"),
    Case("eight_rows", 8, 576, 1536),
    Case("nine_rows", 9, 80, 544),
    Case("odd_outputs", 5, 37, 64),
    Case("odd_outputs_tiled", 13, 37, 288, format="q8_0"),
    Case("few_outputs", 4, 1, 32, format="q4_0"),
    Case("q4_0", 7, 96, 160, format="q4_0"),
    Case("q4_0_tiled", 64, 96, 576, format="q4_0"),
    Case("int8", 6, 112, 96, format="int8"),
    Case("int8_tiled", 33, 112, 320, format="int8"),
    Case("bf16", 4, 64, 128, dtype="bfloat16"),
    Case("chunk", 100, 192, 576),
)
