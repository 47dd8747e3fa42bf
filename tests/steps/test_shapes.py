"""The ladder of shapes: every legal plan fits, the top is the budget, padding is bounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jcb.config import Limits, SchedulerConfig
from jcb.steps.shapes import Shapes, mixed_row_ladder, row_ladder, token_ladder
from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan

LIMITS = Limits(page_size=16, num_pages=100, max_model_len=1024, vocab_size=300)


def plan(*q_lens: int) -> StepPlan:
    sequence = Sequence(Request(request_id="r", prompt_token_ids=(1,), params=SamplingParams()))
    rows = [ScheduledRow(sequence, i, 0, q, RowKind.NEW, True, (1,) * q, (1,), 0, -1) for i, q in enumerate(q_lens)]
    return StepPlan(1, tuple(rows))


def test_ladders_end_at_the_budget_and_never_have_one_row():
    assert row_ladder(64) == (2, 8, 16, 32, 64)
    assert row_ladder(1) == (2,)
    assert row_ladder(20) == (2, 8, 16, 20)
    assert mixed_row_ladder(64) == (8, 32, 64)
    assert token_ladder(512) == (16, 32, 64, 128, 256, 512)
    assert token_ladder(100) == (16, 32, 64, 100)
    assert token_ladder(8) == (8,)


def test_fine_ladders_step_by_about_a_square_root_of_two_from_64_on():
    assert token_ladder(512, fine=True) == (16, 32, 64, 96, 128, 192, 256, 384, 512)
    assert token_ladder(100, fine=True) == (16, 32, 64, 96, 100)
    assert row_ladder(200, fine=True) == (2, 8, 16, 32, 64, 96, 128, 192, 200)
    assert mixed_row_ladder(64, fine=True) == (16, 64)


@pytest.mark.parametrize(("ladder", "programs"), [("auto", 20), ("coarse", 20), ("fine", 21)])
def test_the_ladder_is_chosen_by_name(ladder, programs):
    shapes = Shapes.make(SchedulerConfig(bucket_ladder=ladder), LIMITS)
    assert len(shapes.decode) + len(shapes.prefill) == programs
    assert (384 in {shape.num_tokens for shape in shapes.prefill}) == (ladder == "fine")


@given(
    max_seqs=st.integers(1, 70),
    extra=st.integers(0, 600),
    data=st.data(),
)
def test_every_legal_plan_has_a_program(max_seqs, extra, data):
    config = SchedulerConfig(max_num_seqs=max_seqs, max_num_batched_tokens=max_seqs + extra)
    shapes = Shapes.make(config, LIMITS)
    budget = config.max_num_batched_tokens
    count = data.draw(st.integers(1, max_seqs))
    q_lens = [1] * count
    left = budget - count
    for i in range(count):
        more = data.draw(st.integers(0, left))
        q_lens[i] += more
        left -= more
    shape = shapes.choose(plan(*q_lens))
    assert shape.num_rows >= count
    assert shape.num_tokens >= sum(q_lens)
    assert shape.num_tokens <= max(budget, 2)
    assert shape.decode == (max(q_lens) == 1)


def test_b011_chunk_larger_than_the_budget_always_finds_a_program():
    """B011: buckets ended below the longest chunk and the first long prompt killed the scheduler."""
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=48, max_prefill_chunk=4096)
    shapes = Shapes.make(config, LIMITS)
    assert shapes.choose(plan(48)).num_tokens == 48
    with pytest.raises(LookupError, match="49 tokens"):
        shapes.choose(plan(49))


def test_buckets_of_the_configuration_replace_the_ladders():
    config = SchedulerConfig(
        max_num_seqs=20, max_num_batched_tokens=100, decode_row_buckets=(5, 20), prefill_row_buckets=(24,),
        token_buckets=(7, 30, 128),
    )  # fmt: skip
    shapes = Shapes.make(config, LIMITS)
    assert [shape.num_rows for shape in shapes.decode] == [5, 20]
    assert [(shape.num_tokens, shape.num_rows) for shape in shapes.prefill] == [(7, 24), (30, 24), (128, 24)]
    assert (shapes.choose(plan(1, 1, 1, 1, 1, 1)).num_rows, shapes.choose(plan(6)).num_tokens) == (20, 7)
    assert shapes.choose(plan(100)).num_tokens == 128


@settings(deadline=None)
@given(data=st.data())
def test_every_legal_plan_fits_the_buckets_of_a_configuration(data):
    seqs = data.draw(st.integers(1, 20))
    budget = data.draw(st.integers(seqs, 80))

    def ladder(top):
        return tuple(sorted(data.draw(st.sets(st.integers(2, max(top, 2)), max_size=4)) | {max(top, 2)}))

    config = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, decode_row_buckets=ladder(seqs),
        prefill_row_buckets=ladder(seqs), token_buckets=ladder(budget),
    )  # fmt: skip
    shapes = Shapes.make(config, LIMITS)
    rows = data.draw(st.integers(1, seqs))
    tokens = data.draw(st.integers(rows, budget))
    shape = shapes.fit(tokens, rows, only_decodes=tokens == rows)
    assert shape.num_rows >= rows
    assert shape.num_tokens >= tokens
    assert shape.decode == (tokens == rows)
