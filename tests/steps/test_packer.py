"""What a packer remembers never shows: every plan is packed as a new packer would pack it."""

import random

import numpy as np
import pytest

from jcb.config import Limits, SchedulerConfig
from jcb.engine.core import EngineCore
from jcb.scheduler.scheduler import Scheduler
from jcb.steps.inputs import HEADER, ROW_FIELDS, SAMPLES, packed_size
from jcb.steps.packer import Packer
from jcb.steps.shapes import Shapes, StepShape
from jcb.types import Request, RowKind, SamplingParams, ScheduledRow, Sequence, StepPlan
from tests.fakes import HashExecutor, make_request

LIMITS = Limits(page_size=4, num_pages=40, max_model_len=96, vocab_size=101)


class PackingExecutor(HashExecutor):
    """Packs every plan twice: with the packer of all steps, and with one that has seen nothing."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(LIMITS, max_num_seqs=config.max_num_seqs)
        self.shapes, self.packer, self.packed = Shapes.make(config, LIMITS), Packer(LIMITS, config.max_num_seqs), []

    def dispatch(self, plan: StepPlan):
        shape = self.shapes.choose(plan)
        self.packed.append(self.packer.pack(plan, shape))
        np.testing.assert_array_equal(self.packed[-1], Packer(LIMITS, self.max_num_seqs).pack(plan, shape))
        return super().dispatch(plan)


def test_memory_of_slots_and_pages_never_shows():
    rng = random.Random(5)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, preempt_every=7)
    executor = PackingExecutor(config)
    core = EngineCore(Scheduler(config, LIMITS, enable_prefix_caching=True), executor)
    for number in range(60):
        fields = rng.choice([{}, {"min_tokens": 3}, {"prompt_logprobs": 1}, {"logit_bias": {5: 1.0}}, {"top_k": 4}])
        prompt = [rng.randrange(101) for _ in range(rng.randrange(1, 40))]
        core.add(make_request(f"r{number}", prompt, rng.randrange(1, 20), seed=number, **fields))
        while core.scheduler.num_waiting > 2:
            core.step()
        if rng.random() < 0.2:
            core.abort(f"r{rng.randrange(number + 1)}")
    while core.has_work:
        core.step()
    assert len(executor.packed) > 100
    assert len({array.ctypes.data for array in executor.packed}) == len(executor.packed), "an array was used twice"


def one_row(sequence: Sequence, pages: tuple[int, ...], *, slot=0, start=0, tokens=(5,)) -> StepPlan:
    row = ScheduledRow(sequence, slot, start, len(tokens), RowKind.NEW, True, tokens, pages, 0, -1)
    return StepPlan(1, (row,))


def test_a_shorter_page_table_leaves_nothing_of_the_longer_one():
    shape, packer = StepShape(2, 2, LIMITS.pages_per_seq, True), Packer(LIMITS, 2)
    first, second = (Sequence(Request(request_id=n, prompt_token_ids=(5,), params=SamplingParams())) for n in "ab")
    packer.pack(one_row(first, (3, 4, 5), start=9), shape)
    packed = packer.pack(one_row(second, (7,)), shape)
    begin = HEADER + 2 * len(ROW_FIELDS)
    assert packed.size == packed_size(shape)
    assert packed[begin : begin + LIMITS.pages_per_seq].tolist() == [7] + [0] * (LIMITS.pages_per_seq - 1)
    record = dict(zip(ROW_FIELDS, packed[HEADER:].tolist(), strict=False))
    assert (record["slot"], record["q_len"], record["kv_len"], record["flags"]) == (0, 1, 1, SAMPLES)


def test_a_refused_plan_leaves_no_trace():
    shape, packer = StepShape(2, 2, LIMITS.pages_per_seq, True), Packer(LIMITS, 2)
    sequence = Sequence(Request(request_id="a", prompt_token_ids=(5,), params=SamplingParams()))
    bad = one_row(sequence, (3, 40))
    for _ in range(2):
        with pytest.raises(ValueError, match="outside 1 … 39"):
            packer.pack(bad, shape)
    good = one_row(sequence, (3,))
    np.testing.assert_array_equal(packer.pack(good, shape), Packer(LIMITS, 2).pack(good, shape))
