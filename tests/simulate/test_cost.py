"""What steps cost, checked against arithmetic done by hand and published."""

import dataclasses

import pytest

from jcb.chips import CHIPS
from jcb.config import Limits, SchedulerConfig
from jcb.models.presets import PRESETS
from jcb.simulate.cost import RooflineCost, StepWork, work_of, work_without_transferred
from jcb.simulate.links import LINKS, Link, link_named
from jcb.simulate.shape import ModelShape
from jcb.steps.shapes import Shapes
from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan

LLAMA, SMOL = PRESETS["llama-3.1-8b"], PRESETS["smollm2-135m"]
LIMITS = Limits(page_size=16, num_pages=10_000, max_model_len=4096, vocab_size=1000)
SHAPES = Shapes.make(SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512), LIMITS)
H200 = dataclasses.replace(CHIPS["h200"], bandwidth=4.3e12, flops=790e12)  # as measured, and as the tables below


def decode(rows, context):
    return StepWork(rows, rows, rows, rows, rows * context, 0, 0.0, True)


def plan(*spans, kind=RowKind.CONTINUED):
    rows = []
    for slot, (start, q_len) in enumerate(spans):
        sequence = Sequence(Request(request_id=str(slot), prompt_token_ids=(1,) * 4000, params=SamplingParams()))
        rows.append(ScheduledRow(sequence, slot, start, q_len, kind, True, (1,) * q_len, (1,), 0, -1))
    return StepPlan(1, tuple(rows))


def test_models_have_the_parameters_that_they_are_named_after():
    assert ModelShape.of(LLAMA).parameters == pytest.approx(8.03e9, rel=0.001)
    assert ModelShape.of(SMOL).parameters == pytest.approx(134.5e6, rel=0.001)
    assert ModelShape.of(SMOL).kv_bytes("bfloat16") == 23_040
    assert ModelShape.of(LLAMA).kv_bytes("bfloat16") == 131_072
    assert ModelShape.of(LLAMA).weight_bytes("bfloat16") == 2 * ModelShape.of(LLAMA).parameters


@pytest.mark.parametrize(("rows", "milliseconds"), [(1, 3.52), (8, 3.74), (32, 4.49), (64, 5.49), (128, 7.49)])
def test_decode_on_an_h200_as_worked_out_elsewhere(rows, milliseconds):
    """Published arithmetic counts the embedding table as read, 7 % of the weights, which a step does not read."""
    cost = RooflineCost.of(LLAMA, H200, bandwidth_share=1.0, flops_share=1.0, launch=0.0)
    assert cost.seconds(decode(rows, 1024)) * 1e3 == pytest.approx(milliseconds, rel=0.07)


@pytest.mark.parametrize(("chunk", "milliseconds"), [(128, (7.9, 12.1)), (512, (19.3, 35.9)), (2048, (66.7, 127))])
def test_a_chunk_beside_sixty_decodes_as_worked_out_elsewhere(chunk, milliseconds):
    cost = RooflineCost.of(LLAMA, H200, launch=0.0)
    for begin, expected in zip((0, 30_000 - chunk), milliseconds, strict=True):
        pairs = chunk * (begin + (chunk + 1) / 2)
        work = StepWork(60 + chunk, 61, 60 + chunk, 61, 60 * 1024, begin + chunk, pairs, False)
        assert cost.seconds(work) * 1e3 == pytest.approx(expected, rel=0.15)


def test_padding_costs_as_much_as_what_it_pads():
    cost = RooflineCost.of(LLAMA, H200)
    work = StepWork(300, 8, 512, 8, 0, 300, 45_000.0, False)
    assert cost.seconds(work) == cost.seconds(work._replace(tokens=512))
    assert cost.seconds(work) > 1.2 * cost.seconds(work._replace(padded_tokens=300))


def test_a_split_model_reads_less_and_pays_for_its_link():
    alone = RooflineCost.of(LLAMA, H200, launch=0.0)
    free = Link("free", "", 1e18, 0.0, "")
    split = RooflineCost.of(LLAMA, H200, launch=0.0, tensor_parallel=4, link=free)
    assert split.seconds(decode(64, 1024)) == pytest.approx(alone.seconds(decode(64, 1024)) / 4)
    real = RooflineCost.of(LLAMA, H200, launch=0.0, tensor_parallel=4, link=LINKS["nvlink4"])
    message = 64 * 4096 * 2
    hop = 3e-6 + message / 4 / (450e9 * 0.85)
    assert real.seconds(decode(64, 1024)) - split.seconds(decode(64, 1024)) == pytest.approx(2 * 32 * 6 * hop)
    with pytest.raises(ValueError, match="needs a link"):
        RooflineCost.of(LLAMA, H200, tensor_parallel=4)


def test_shares_must_be_shares():
    with pytest.raises(ValueError, match=r"bandwidth_share=1\.2 must be above 0 and at most 1"):
        RooflineCost.of(LLAMA, H200, bandwidth_share=1.2)


def test_every_chip_names_a_link_that_is_known_and_every_link_its_source():
    for chip in CHIPS.values():
        assert (chip.link in LINKS) == (chip.platform != "cpu")
    assert all(link.source and link.bandwidth > 1e9 and link.latency > 0 for link in LINKS.values())
    with pytest.raises(ValueError, match="no link 'string' is known, only nvlink3"):
        link_named("string")


# ---- from plans


def test_the_work_of_a_decode_plan_is_in_its_bucket():
    work = work_of(plan((99, 1), (49, 1), (9, 1)), SHAPES)
    assert work == StepWork(3, 3, 8, 8, 160, 0, 0.0, True)


def test_the_work_of_a_mixed_plan_tells_rows_and_chunks_apart():
    work = work_of(plan((99, 1), (100, 20), (0, 4)), SHAPES)
    assert work == StepWork(25, 3, 32, 8, 100, 124, 20 * 110.5 + 4 * 2.5, False)


def test_prompts_from_elsewhere_cost_their_last_token_only():
    spans = (99, 1), (0, 300), (0, 700)
    assert work_without_transferred(plan(*spans, kind=RowKind.NEW), SHAPES) == work_of(
        plan((99, 1), (299, 1), (699, 1)), SHAPES
    )
    assert work_without_transferred(plan((99, 1), (0, 300)), SHAPES) == work_of(plan((99, 1), (0, 300)), SHAPES)
    huge = work_without_transferred(plan((0, 2000), kind=RowKind.RESUMED), SHAPES)
    assert (huge.tokens, huge.padded_tokens, huge.is_decode) == (2000, 2000, False)
