"""What a step holds, in what order, and what becomes of its results."""

import random
import sys

import pytest

from jcb.config import Limits, SchedulerConfig
from jcb.scheduler.scheduler import Scheduler
from jcb.types import FinishReason, RequestError, RowKind
from tests.fakes import Bench, HashExecutor, make_request, reference_prompt_logprobs


def rows(plan):
    return [(row.sequence.request_id, row.start, row.q_len) for row in plan.rows]


def make(page_size=4, num_pages=64, max_model_len=128, prefix_caching=False, **config):
    limits = Limits(page_size=page_size, num_pages=num_pages, max_model_len=max_model_len, vocab_size=101)
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 16} | config
    scheduler = Scheduler(SchedulerConfig(**config), limits, enable_prefix_caching=prefix_caching)
    return scheduler, HashExecutor(limits)


def advance(scheduler, executor):
    """One step without overlap."""
    plan = scheduler.schedule(0.0)
    outputs = scheduler.update(plan, executor.dispatch(plan)[1], 0.0) if plan.rows else []
    scheduler.check_integrity()
    return plan, outputs


def test_decodes_come_first_then_chunks_then_arrivals():
    scheduler, executor = make()
    scheduler.add(make_request("a", range(3)), 0.0)
    scheduler.add(make_request("b", range(30)), 0.0)
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 0, 3), ("b", 0, 13)]
    assert [row.samples for row in plan.rows] == [True, False]
    scheduler.add(make_request("c", range(9)), 0.0)
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 3, 1), ("b", 13, 15)]
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 4, 1), ("b", 28, 2), ("c", 0, 9)]
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 5, 1), ("b", 30, 1), ("c", 9, 1)]


def test_a_chunk_is_bounded():
    scheduler, executor = make(max_prefill_chunk=4)
    scheduler.add(make_request("a", range(9)), 0.0)
    scheduler.add(make_request("b", range(2)), 0.0)
    assert [rows(advance(scheduler, executor)[0]) for _ in range(3)] == [
        [("a", 0, 4), ("b", 0, 2)],
        [("b", 2, 1), ("a", 4, 4)],
        [("a", 8, 1), ("b", 3, 1)],
    ]


def test_rows_of_one_token_lead_even_when_they_end_a_prompt():
    scheduler, executor = make(max_prefill_chunk=4)
    scheduler.add(make_request("long", range(8)), 0.0)
    scheduler.add(make_request("short", [1]), 0.0)
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("short", 0, 1), ("long", 0, 4)]
    assert (plan.num_decode_rows, plan.num_tokens) == (1, 5)


def test_no_more_sequences_than_slots():
    scheduler, executor = make(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, [1], max_tokens=2), 0.0)
    plan, _ = advance(scheduler, executor)
    assert [row.slot for row in plan.rows] == [0, 1]
    advance(scheduler, executor)
    plan, _ = advance(scheduler, executor)
    assert [(row.sequence.request_id, row.slot) for row in plan.rows] == [("c", 0)]


def test_the_row_says_new_continued_resumed():
    scheduler, executor = make(preempt_every=3)
    scheduler.add(make_request("a", [1, 2]), 0.0)
    kinds, outputs = [], []
    for _ in range(4):
        plan, _ = advance(scheduler, executor)
        kinds += [row.kind for row in plan.rows]
        outputs += [row.num_output for row in plan.rows]
    assert kinds == [RowKind.NEW, RowKind.CONTINUED, RowKind.RESUMED]
    assert outputs == [0, 1, 2]


def test_pages_by_actual_use():
    scheduler, executor = make(num_pages=64)
    scheduler.add(make_request("a", range(30), max_tokens=60), 0.0)
    advance(scheduler, executor)
    assert scheduler.stats()["pages_used"] == 4
    advance(scheduler, executor)
    assert scheduler.stats()["pages_used"] == 8


def test_reserve_takes_pages_for_the_longest_answer():
    scheduler, executor = make(admission="reserve", num_pages=40)
    scheduler.add(make_request("a", range(30), max_tokens=60), 0.0)
    scheduler.add(make_request("b", range(30), max_tokens=60), 0.0)
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 0, 16)]
    assert len(plan.rows[0].page_table) == 4
    assert scheduler.stats()["pages_used"] == 23
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_static_fills_a_batch_and_runs_it_to_its_end():
    bench = Bench(admission="static", max_num_seqs=2, overlap=False, num_pages=99)
    for name, length in (("a", 1), ("b", 9), ("c", 1), ("d", 1)):
        bench.add(name, range(12), max_tokens=length)
    together = []
    bench.executor.keep_plans = True
    bench.run()
    bench.check()
    for plan in bench.executor.plans:
        together.append("".join(sorted(row.sequence.request_id for row in plan.rows)))
    assert together[:3] == ["ab", "b", "b"]
    assert together[3:] == ["b"] * 7 + ["cd"]


def test_a_blocked_head_is_not_overtaken():
    scheduler, executor = make(num_pages=11)
    scheduler.add(make_request("a", range(16), max_tokens=9), 0.0)
    advance(scheduler, executor)
    scheduler.add(make_request("big", range(30), max_tokens=2), 0.0)
    scheduler.add(make_request("small", range(2), max_tokens=2), 0.0)
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 16, 1)]


def test_admission_counts_what_running_prompts_still_need():
    scheduler, executor = make(num_pages=11, max_prefill_chunk=4)
    scheduler.add(make_request("a", range(30), max_tokens=2), 0.0)
    scheduler.add(make_request("b", range(40, 60), max_tokens=2), 0.0)
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 0, 4)], "b needs 5 of 9 pages, but a needs 7 of them later"
    assert scheduler.num_waiting == 1


def test_a_chunk_takes_pages_from_a_younger_chunk_of_the_same_step():
    bench = Bench(num_pages=37, page_size=1, max_prefill_chunk=2, overlap=False, prefix_caching=False)
    bench.executor.keep_plans = True
    bench.add("old", [1], max_tokens=20)
    bench.add("middle", range(16), max_tokens=2)
    bench.add("young", range(20, 36), max_tokens=2)
    while bench.stat("preemptions") == 0:
        bench.step()
    assert rows(bench.executor.plans[-1]) == [("old", 7, 1), ("middle", 14, 2)]
    bench.run()
    bench.check()


def test_a_preempted_sequence_waits_for_its_token_in_flight():
    scheduler, executor = make(preempt_every=2)
    scheduler.add(make_request("a", [1, 2]), 0.0)
    first = scheduler.schedule(0.0)
    _, result = executor.dispatch(first)
    preempting = scheduler.schedule(0.0)
    assert (preempting.preempted, preempting.rows) == (("a",), ())
    assert scheduler.schedule(0.0).rows == ()
    assert len(scheduler.update(first, result, 0.0)) == 1
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 0, 3)]


def test_pages_of_a_prompt_are_found_while_the_rest_of_it_is_computed():
    bench = Bench(max_prefill_chunk=5, overlap=False)
    bench.add("long", range(60), max_tokens=1)
    for _ in range(4):
        bench.step()
    bench.add("same", range(60), max_tokens=1)
    bench.run()
    bench.check()
    assert bench.ends["same"].num_cached_tokens >= 20


def test_cached_tokens_are_counted_at_the_first_admission_only():
    bench = Bench(preempt_every=3)
    bench.add("a", range(12), max_tokens=12)
    bench.run()
    bench.check()
    assert bench.stat("prefix_hit_tokens") > 0
    assert bench.ends["a"].num_cached_tokens == 0


def test_a_burst_with_one_prefix_computes_it_once():
    bench = Bench(max_num_seqs=8, max_num_batched_tokens=128, overlap=False)
    bench.executor.keep_plans = True
    for number in range(8):
        bench.add(str(number), [*range(20), number], max_tokens=1)
    bench.add("other", [99, 98], max_tokens=1)
    bench.run()
    bench.check()
    assert [plan.num_tokens for plan in bench.executor.plans] == [21, 7 + 2]


def test_nobody_waits_longer_than_a_step_for_the_pages_of_another():
    bench = Bench(max_num_batched_tokens=32, max_prefill_chunk=4, overlap=False)
    bench.executor.keep_plans = True
    bench.add("a", range(60), max_tokens=1)
    bench.add("same", range(60), max_tokens=1)
    bench.add("other", [99, 98], max_tokens=1)
    for _ in range(3):
        bench.step()
    names = [[row.sequence.request_id for row in plan.rows] for plan in bench.executor.plans]
    assert names[:2] == [["a"], ["a", "same", "other"]]


def test_priority_decides_the_order_and_the_victim():
    bench = Bench(policy="priority", num_pages=9, max_num_batched_tokens=16, overlap=False)
    bench.add("low", range(8), max_tokens=20, priority=2)
    bench.step()
    bench.add("high", range(10, 18), max_tokens=20, priority=1)
    bench.run()
    bench.check()
    assert list(bench.ends) == ["high", "low"]
    assert bench.stat("preemptions") == 1


def test_logprobs_are_cut_to_what_was_asked():
    bench = Bench()
    bench.add("none", [1], max_tokens=1)
    bench.add("chosen", [1], max_tokens=1, logprobs=0)
    bench.add("three", [1], max_tokens=1, logprobs=3)
    bench.step()
    bench.step()
    given = {output.request_id: output.logprobs for output in bench.last}
    assert given["none"] == ()
    assert given["chosen"][0].top_ids == ()
    assert given["three"][0].top_ids == (0, 1, 2)
    assert given["three"][0].token_id == bench.tokens["three"][0]


def test_the_end_token_is_part_of_the_output():
    bench = Bench(vocab_size=5)
    bench.add("a", [1, 2], max_tokens=50, eos_token_ids=(3,))
    bench.run()
    bench.check()
    assert bench.tokens["a"][-1] == 3
    assert bench.ends["a"].stop_token_id == 3
    assert bench.ends["a"].finish_reason is FinishReason.STOP


def test_the_model_length_ends_a_sequence():
    bench = Bench(max_model_len=10)
    bench.add("a", range(7), max_tokens=50)
    bench.run()
    bench.check()
    assert len(bench.tokens["a"]) == 3
    assert bench.ends["a"].finish_reason is FinishReason.LENGTH


def test_an_id_in_use_is_refused():
    bench = Bench()
    bench.add("a", [1], max_tokens=2)
    with pytest.raises(RequestError, match="being served"):
        bench.add("a", [2], max_tokens=2)
    bench.run()
    bench.check()


def test_prompt_logprobs_are_delivered_once_and_in_order():
    bench = Bench(preempt_every=2, max_num_batched_tokens=5, max_num_seqs=2, vocab_size=50)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    bench.add("first", prompt, max_tokens=6)
    bench.run()
    bench.add("a", prompt, max_tokens=6, prompt_logprobs=1)
    bench.run()
    bench.check()
    entries = [(entry.token_id, entry.logprob) for entry in bench.prompt_logprobs["a"]]
    assert entries == reference_prompt_logprobs(prompt)
    assert bench.ends["a"].num_cached_tokens == 0
    assert bench.stat("preemptions") > 0


def test_stats_name_every_page():
    bench = Bench(num_pages=20)
    bench.add("a", range(9), max_tokens=2)
    bench.step()
    assert (bench.stat("running"), bench.stat("pages_used")) == (1, 3)
    bench.run()
    assert bench.stat("pages_used") == 0
    assert bench.stat("pages_free") + bench.stat("pages_cached") == bench.stat("pages_total") == 19


def test_nothing_grows_with_the_number_of_waiting_requests():
    scheduler, executor = make(max_num_seqs=1, max_num_batched_tokens=16, max_queued=5_000, max_queued_tokens=10_000)
    for number in range(2_000):
        scheduler.add(make_request(f"r{number}", [1, 2], max_tokens=50), 0.0)
    advance(scheduler, executor)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        scheduler.expire(0.0)
        scheduler.schedule(0.0)
    finally:
        sys.setprofile(None)
    assert calls < 200


def test_admission_leaves_some_pages_while_others_run():
    scheduler, executor = make(num_pages=201, page_size=1, max_model_len=300, max_num_batched_tokens=300)
    scheduler.add(make_request("a", range(100), max_tokens=5), 0.0)
    scheduler.add(make_request("b", range(99), max_tokens=5), 0.0)
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("a", 0, 100)], "one page would be left, two (1 %) must be"
    scheduler.abort("a")
    plan, _ = advance(scheduler, executor)
    assert rows(plan) == [("b", 0, 99)]


@pytest.mark.parametrize("overlap", [False, True])
def test_random_traffic_on_a_pool_that_is_always_full(overlap):
    rng = random.Random(1)
    bench = Bench(overlap=overlap, num_pages=21, page_size=2, max_num_seqs=6, max_queued=999, max_queued_tokens=9_999)
    for number in range(150):
        prompt = [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        bench.add(str(number), prompt, max_tokens=rng.randint(1, 28), eos_token_ids=(1,))
    bench.run()
    bench.check()
    assert bench.stat("preemptions") > 20
    assert bench.stat("prefix_hit_tokens") > 100
