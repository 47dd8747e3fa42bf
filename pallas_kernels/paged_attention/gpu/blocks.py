"""Tile sizes of the GPU kernels, and the chip they are for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.layout import KVLayout
from pallas_kernels.tuning import Phase

ROWS = 64
"""Query rows a warpgroup multiplies at once: the M of a wgmma."""
TILE_ROWS = 8
"""Query rows of one swizzle tile. A copy starts at a whole one: from elsewhere TMA fills up with zeros (JAX #34102)."""
SHARED_MEMORY = 232_448 - 2_560
"""Bytes a thread block of an sm90 or sm100 chip may take, less barriers and the compiler's own scratch."""


@dataclass(frozen=True)
class Gpu:
    """The chip a program is for: its name as JAX says it and its number of multiprocessors (SMs)."""

    kind: str
    multiprocessors: int

    @property
    def is_hopper(self) -> bool:
        return any(name in self.kind for name in ("H100", "H200", "H800", "H20", "GH200"))


@dataclass(frozen=True)
class Blocks:
    """How one kernel cuts its work.

    consumers: warpgroups that compute. Prompt tiles give each 64 query rows, decoding deals blocks of keys out to them
    (`stages` must then be a multiple of it), and at head_dim 256 each has half of V's columns.
    block_kv: keys of one step, a multiple of 64. stages: blocks in flight. columns: columns of V multiplied at once.
    blocks: persistent thread blocks. turns: work items a thread block should get when rows are split (decoding only).
    weights_in_registers: feed the softmax weights to the tensor core from registers, which is faster but unknown to
    the interpreter.
    """

    consumers: int
    block_kv: int
    stages: int
    columns: int
    blocks: int
    turns: int = 1
    weights_in_registers: int = False


def current_gpu() -> Gpu | None:
    """The GPU that the current mesh names (real or abstract), else the one at hand, else None."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None and device.platform == "gpu":
        return Gpu(device.device_kind, device.num_cores or 1)
    try:
        found = jax.devices("gpu")[0]
    except RuntimeError:
        return None
    return Gpu(found.device_kind, getattr(found, "core_count", 132))


def default_blocks(layout: KVLayout, num_heads: int, phase: Phase) -> Blocks:
    """Sane sizes where nothing is tuned; small ones for the interpreter, where no GPU is named."""
    del num_heads
    gpu, dim, decoding = current_gpu(), layout.head_dim, phase == "decode"
    if gpu is None:
        return Blocks(consumers=2, block_kv=64, stages=2, columns=min(dim, 128), blocks=2)
    large = dim == 64 or (dim == 128 and not decoding)
    sizes = Blocks(
        consumers=2,
        block_kv=128 if large and not layout.is_quantised else 64,
        stages=2,
        columns=64 if decoding and dim == 256 else min(dim, 128),
        blocks=gpu.multiprocessors,
        turns=4 if decoding else 1,
        weights_in_registers=not decoding or dim == 256,
    )
    deeper = [replace(sizes, stages=stages) for stages in (8, 6, 4)]
    return next((blocks for blocks in deeper if fits(blocks, layout, phase)), sizes)


def candidates(layout: KVLayout, num_heads: int, phase: Phase) -> tuple[Blocks, ...]:
    """Sizes worth measuring for a shape."""
    base, decoding = default_blocks(layout, num_heads, phase), phase == "decode"
    made = (
        replace(base, block_kv=block_kv, stages=stages, turns=turns, weights_in_registers=registers)
        for block_kv in (64, 128)
        for stages in (2, 4, 6, 8)
        for turns in ((1, 2, 4, 8) if decoding else (1,))
        for registers in (True, False)
    )
    return tuple(blocks for blocks in made if fits(blocks, layout, phase))


def fits(blocks: Blocks, layout: KVLayout, phase: Phase) -> bool:
    """True when the attention kernel of these sizes fits the shared memory."""
    return shared_bytes(blocks, layout, phase) <= SHARED_MEMORY


def shared_bytes(blocks: Blocks, layout: KVLayout, phase: Phase) -> int:
    """Bytes of shared memory that the attention kernel takes, as its scratch list says."""
    dim, count, decoding = layout.head_dim, blocks.consumers, phase == "decode"
    own_rows, own_blocks = not decoding and dim <= 128, decoding and dim <= 128
    queries = 2 * (count if own_rows else 1) * ROWS * dim * 2
    block = 2 * blocks.block_kv * dim
    pages = blocks.stages * block * jnp.dtype(layout.dtype).itemsize
    wide = block * 2 * (count if own_blocks else 1) if layout.is_quantised else 0
    weights = 0 if blocks.weights_in_registers else count * ROWS * blocks.block_kv * 2
    return queries + pages + wide + weights + count * ROWS * blocks.columns * (4 if decoding else 2)
