"""The floor by hand, for a model small enough, and for a large one as others have published it."""

import dataclasses

import pytest

from jcb.aot.floor import live_share, step_floor
from jcb.chips import CHIPS
from jcb.config import Limits
from jcb.models.presets import PRESETS
from jcb.steps.shapes import StepShape
from pallas_kernels.layout import KVLayout

LLAMA = PRESETS["llama-3.1-8b"]
LAYOUT = KVLayout("gpu", "bfloat16", 8, 128, 64)
LIMITS = Limits(page_size=64, num_pages=10_000, max_model_len=1024, vocab_size=LLAMA.vocab_size)


def decode(rows: int) -> StepShape:
    return StepShape(rows, rows, 16, True)


def test_a_decode_step_reads_weights_and_live_keys_and_values_once():
    floor = step_floor(LLAMA, LAYOUT, "bfloat16", decode(8), LIMITS, 1)
    weights = 8_030_261_248 - 128_256 * 4096 + 8 * 4096  # the embedding is only looked up in
    assert floor.nbytes == 2 * weights + 8 * 1024 * 131_072  # 128 KiB a token
    assert floor.flops == pytest.approx(
        2 * (8_030_261_248 - 128_256 * 4096) * 8 + 4 * 32 * 128 * 32 * 8 * 1024, rel=1e-3
    )


@pytest.mark.parametrize(("rows", "milliseconds"), [(1, 3.52), (8, 3.74), (32, 4.49), (64, 5.49), (128, 7.49)])
def test_published_arithmetic_for_an_h200(rows, milliseconds):
    """Decode at a context of 1,024 and 4.3 TB/s: within 7 %, since that arithmetic reads the embedding table too."""
    chip = dataclasses.replace(CHIPS["h200"], bandwidth=4.3e12)
    floor = step_floor(LLAMA, LAYOUT, "bfloat16", decode(rows), LIMITS, 1)
    assert floor.seconds(chip) * 1e3 == pytest.approx(milliseconds, rel=0.07)


def test_pages_that_are_not_there_are_not_read():
    few = dataclasses.replace(LIMITS, num_pages=65)
    assert live_share(decode(8), few) == 0.5
    assert live_share(decode(4), few) == 1.0
    full, half = (step_floor(LLAMA, LAYOUT, "bfloat16", decode(8), limits, 1) for limits in (LIMITS, few))
    assert full.nbytes - half.nbytes == 8 * 512 * 131_072


def test_a_chunk_is_bound_by_arithmetic():
    floor = step_floor(LLAMA, LAYOUT, "bfloat16", StepShape(8192, 8, 128, False), LIMITS, 1)
    chip = CHIPS["h200"]
    assert floor.seconds(chip) == floor.flops / chip.flops
    assert floor.flops > 2 * 7e9 * 8192
