"""Faults that users of other serving systems met, tried on this scheduler. Names carry the report's number."""

import gc
import random
import weakref

import pytest

from jcb.types import FinishReason, RequestError, RowKind
from tests.fakes import Bench, make_request


def planned(bench):
    """Request ids of every plan dispatched."""
    return [[row.sequence.request_id for row in plan.rows] for plan in bench.executor.plans]


def fields(row):
    return row.slot, row.start, row.q_len, row.token_ids, row.page_table, row.num_output, row.next_token


def test_b001_what_can_never_fit_does_not_block_the_queue():
    bench = Bench(page_size=16, num_pages=9, max_model_len=4096, max_num_batched_tokens=64)
    with pytest.raises(RequestError, match=r"need 13 pages.*pool has 8") as caught:
        bench.add("huge", range(200))
    assert caught.value.status == 400
    for number in range(10):
        bench.add(str(number), range(number, number + 5))
    bench.run()
    bench.check()
    assert len(bench.ends) == 10


def test_b003_each_running_sequence_is_visited_once_whoever_is_preempted():
    bench = Bench(policy="priority", num_pages=17, max_num_batched_tokens=64, overlap=False, prefix_caching=False)
    for number, name in enumerate("dcba"):
        bench.add(name, range(number, number + 9), max_tokens=40, priority=9 - number)
    bench.executor.keep_plans = True
    while bench.core.has_work:
        preempted = bench.stat("preemptions")
        bench.step()
        ran = planned(bench)[-1]
        ran_or_ended = {record.request_id for record in bench.scheduler._roster.running()} | set(bench.ends)
        if bench.stat("preemptions") > preempted:
            assert set(ran) <= ran_or_ended
            assert {r.request_id for r in bench.scheduler._roster.running()} <= set(ran)
    bench.check()
    assert bench.stat("preemptions") > 0
    assert list(bench.ends) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("overlap", [False, True])
def test_b005_something_always_moves_under_pressure(overlap):
    bench = Bench(num_pages=21, page_size=1, overlap=overlap, prefix_caching=False)
    for number in range(3):
        bench.add(str(number), range(number, number + 6), max_tokens=14)
    quiet = 0
    while bench.core.has_work:
        bench.step()
        quiet = 0 if bench.last else quiet + 1
        assert quiet <= 3
    bench.check()
    assert bench.stat("preemptions") > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_b007_a_stream_never_waits_for_arriving_prompts(overlap):
    """Decode first: a running answer gains a token in every step, whatever is prefilled beside it."""
    bench = Bench(num_pages=2001, max_model_len=2000, max_num_seqs=6, max_num_batched_tokens=32, overlap=overlap)
    bench.add("stream", range(5), max_tokens=300)
    bench.step()
    bench.step()
    for number in range(200):
        if number % 10 == 0 and bench.scheduler.num_waiting < 3:
            bench.add(f"prompt {number}", [number % 90] * 400, max_tokens=2)
        before = len(bench.tokens["stream"])
        bench.step()
        assert len(bench.tokens["stream"]) == before + 1
    bench.run()
    bench.check()


def test_b031_a_pool_that_is_always_full_mixes_nothing_up():
    """1,000 prompts with shared beginnings, the pool pinned full, prefix caching on: each equals its oracle."""
    rng = random.Random(31)
    bench = Bench(
        num_pages=33,
        page_size=2,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_queued=1000,
        max_queued_tokens=10**6,
    )
    shared = [[rng.randrange(100) for _ in range(12)] for _ in range(4)]
    for number in range(1000):
        prompt = [*rng.choice(shared), *[rng.randrange(100) for _ in range(rng.randrange(1, 9))]]
        bench.add(str(number), prompt, max_tokens=rng.randrange(1, 12))
    bench.run(20_000)
    bench.check()
    assert bench.stat("preemptions") > 0
    assert sum(end.num_cached_tokens > 0 for end in bench.ends.values()) > 100


def test_b011_a_chunk_larger_than_the_budget_is_cut_to_it():
    bench = Bench(max_prefill_chunk=4096, max_num_batched_tokens=2048, max_model_len=4000, num_pages=1001)
    bench.add("long", [token % 7 for token in range(3_000)], max_tokens=2)
    bench.run()
    bench.check()


def test_b015_answers_survive_recomputation():
    rng = random.Random(15)
    prompts = {str(n): [rng.randrange(50) for _ in range(10)] for n in range(8)}
    bench = Bench(num_pages=101, page_size=8, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64)
    for name, prompt in prompts.items():
        bench.add(name, prompt, max_tokens=200)
    bench.run()
    bench.check()
    assert bench.stat("preemptions") > 0


@pytest.mark.parametrize("every", [1, 2, 3])
def test_b017_a_token_in_flight_is_delivered_once_to_a_preempted_sequence(every):
    bench = Bench(preempt_every=every, max_num_seqs=2)
    bench.add("a", range(5), max_tokens=12)
    bench.add("b", range(7), max_tokens=12)
    late = 0
    while bench.core.has_work:
        bench.step()
        waiting = bench.scheduler.num_waiting > 0
        late += waiting and any(output.token_ids for output in bench.last)
    bench.check()
    assert bench.stat("preemptions") > 3
    assert late > 0


def test_b019_a_resumed_sequence_is_priced_with_all_its_tokens():
    bench = Bench(
        page_size=16, num_pages=41, max_model_len=512, max_num_batched_tokens=512, overlap=False, prefix_caching=False
    )
    bench.executor.keep_plans = True
    bench.add("old", range(20), max_tokens=320)
    bench.add("young", range(20, 40), max_tokens=310)
    while bench.stat("preemptions") == 0:
        bench.step()
    assert len(bench.tokens["young"]) == 301
    while "old" not in bench.ends:
        bench.step()
        assert planned(bench)[-1] == ["old"], "21 pages are needed and at most 19 are left"
    bench.run()
    bench.check()
    assert bench.stat("preemptions") == 1
    resumed = next(row for plan in bench.executor.plans for row in plan.rows if row.kind is RowKind.RESUMED)
    assert (resumed.start, resumed.q_len) == (0, 321)


def test_b021_one_request_larger_than_the_pool_ends_gracefully():
    bench = Bench(page_size=16, num_pages=5, max_model_len=4096, vocab_size=9)
    with pytest.raises(RequestError, match=r"need 14 pages, the pool has 4"):
        bench.add("asks", range(10), max_tokens=200)
    bench.add("fits", range(10), max_tokens=54)
    bench.run()
    bench.check()
    assert bench.ends["fits"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("where", ["fails_dispatch", "fails_collect"])
def test_b027_pages_of_a_failed_step_are_not_found(where):
    bench = Bench()
    setattr(bench.executor, where, lambda plan: bench.executor.num_dispatched == 1)
    bench.add("a", range(13), max_tokens=1)
    bench.step()
    bench.step()
    assert bench.stat("pages_cached") == 0
    assert bench.stat("prefix_hit_tokens") == 0
    bench.run()
    bench.check()
    assert bench.stat("prefix_hit_tokens") == 0


@pytest.mark.parametrize("length", [2, 3])
def test_b027_pages_of_a_row_taken_out_of_a_plan_are_not_found(length):
    bench = Bench(num_pages=13, page_size=2, max_prefill_chunk=2, overlap=False)
    bench.add("old", range(20), max_tokens=4)
    bench.add("young", range(50, 50 + length), max_tokens=12)
    while bench.stat("preemptions") == 0:
        computed = next((r.num_computed for r in bench.scheduler._roster.running() if r.request_id == "young"), 0)
        bench.step()
    assert computed > length, "it was generating, so its row had been planned before the chunk asked for pages"
    assert bench.stat("pages_cached") + bench.stat("pages_free") == 12 - bench.stat("pages_used")
    pages = bench.scheduler._pages
    hits = pages.match(pages.keys(bench.scheduler._roster.get("young")))
    assert len(hits) <= computed // 2
    bench.run()
    bench.check()


def test_b033_the_next_turn_finds_prompt_and_answer():
    bench = Bench(max_num_batched_tokens=64)
    for page_size_multiple in (0, 1, 2, 3):
        prompt = [page_size_multiple, *range(20, 29 + page_size_multiple)]
        name = f"turn {page_size_multiple}"
        bench.add(name, prompt, max_tokens=40)
        bench.run()
        bench.add(f"{name} again", [*prompt, *bench.tokens[name], 1, 2, 3], max_tokens=3)
        bench.run()
        assert bench.ends[f"{name} again"].num_cached_tokens >= (len(prompt) + 39) // 4 * 4
    bench.check()


@pytest.mark.parametrize("overlap", [False, True])
def test_b035_an_interrupted_answer_leaves_a_true_cache(overlap):
    for index in range(1, 21):
        bench = Bench(overlap=overlap, page_size=2)
        bench.add("cut", range(5), max_tokens=30)
        while len(bench.tokens["cut"]) < index:
            bench.step()
        bench.abort("cut")
        bench.add("next", [*range(5), *bench.expected("cut")[: index + 3]], max_tokens=5)
        bench.run()
        bench.check("next")
        assert bench.ends["next"].num_cached_tokens >= (5 + index - 1) // 2 * 2


def test_b037_no_row_is_empty_whatever_the_budget_leaves():
    for budget in range(4, 12):
        bench = Bench(max_num_batched_tokens=budget, max_prefill_chunk=3)
        bench.executor.keep_plans = True
        for number, length in enumerate((1, 9, 10, 11, 3, 7)):
            bench.add(str(number), range(number, number + length), max_tokens=9)
        bench.run()
        bench.check()
        plans = bench.executor.plans
        assert all(row.q_len >= 1 for plan in plans for row in plan.rows)
        assert max(plan.num_tokens for plan in plans) <= budget


def test_b039_a_slot_is_kept_and_a_plan_never_changes_after_dispatch():
    bench = Bench(num_pages=16, max_prefill_chunk=3, page_size=2)
    bench.executor.keep_plans = True
    copies = {}
    for number in range(6):
        bench.add(str(number), range(number, number + 12), max_tokens=10)
    while bench.core.has_work:
        bench.step()
        plan = bench.executor.plans[-1]
        copies.setdefault(plan.step_id, [fields(row) for row in plan.rows])
    bench.check()
    slots = {}
    for row in (row for plan in bench.executor.plans for row in plan.rows):
        if row.kind is not RowKind.CONTINUED:
            slots[row.sequence.request_id] = row.slot
        assert slots[row.sequence.request_id] == row.slot
    assert {plan.step_id: [fields(row) for row in plan.rows] for plan in bench.executor.plans} == copies
    assert bench.stat("preemptions") > 0


def test_b041_overlap_chunks_and_preemption_change_no_token():
    rng = random.Random(41)
    trace = [([rng.randrange(3) for _ in range(rng.randint(1, 20))], rng.randint(1, 12)) for _ in range(25)]
    answers = []
    for overlap in (False, True):
        bench = Bench(overlap=overlap, num_pages=12, max_prefill_chunk=5, preempt_every=4)
        for number, (prompt, length) in enumerate(trace):
            bench.add(str(number), prompt, max_tokens=length, eos_token_ids=(1, 2, 3))
        bench.run()
        bench.check()
        assert bench.stat("preemptions") > 5
        answers.append(bench.tokens)
    assert answers[0] == answers[1]


def test_b043_prompts_around_the_chunk_size():
    for bos in ([], [0]):
        for length in (7, 8, 9, 15, 16, 17):
            bench = Bench(max_prefill_chunk=8)
            bench.executor.keep_plans = True
            prompt = [*bos, *range(length)]
            bench.add("a", prompt, max_tokens=1)
            bench.run()
            bench.check()
            fed = [token for plan in bench.executor.plans for row in plan.rows for token in row.token_ids]
            assert fed == prompt
            assert all(row.q_len == 8 for plan in bench.executor.plans[:-1] for row in plan.rows)


def test_b047_abort_is_legal_in_every_state():
    for overlap in (False, True):
        for step in range(24):
            bench = Bench(num_pages=12, max_prefill_chunk=4, max_num_seqs=2, overlap=overlap, preempt_every=5)
            for name in "abc":
                bench.add(name, range(10), max_tokens=8)
            for _ in range(step):
                bench.step()
            alive = [name for name in "abc" if name not in bench.ends]
            for name in alive:
                bench.abort(name)
                bench.scheduler.check_integrity()
                assert bench.ends[name].finish_reason is FinishReason.ABORT
                assert bench.tokens[name] == bench.expected(name)[: len(bench.tokens[name])]
            assert bench.stat("pages_used") == 0
            bench.run()
            assert len(bench.ends) == 3


def test_b049_late_double_and_unknown_events_are_harmless():
    bench = Bench()
    scheduler, executor = bench.scheduler, bench.executor
    bench.add("a", range(5), max_tokens=4)
    bench.add("b", range(5, 9), max_tokens=4)
    first = scheduler.schedule(0.0)
    _, result = executor.dispatch(first)
    assert len(scheduler.update(first, result, 0.0)) == 2
    assert scheduler.update(first, result, 0.0) == []
    second = scheduler.schedule(0.0)
    _, late = executor.dispatch(second)
    assert scheduler.abort("a") is not None
    assert scheduler.abort("a") is None
    assert scheduler.abort("unknown") is None
    bench.core.add(bench.requests["a"])  # the same id again: a new sequence, not the late row's
    assert [output.request_id for output in scheduler.update(second, late, 0.0)] == ["b"]
    assert scheduler.fail(second, RuntimeError(), 0.0) == []
    assert scheduler.fail(first, RuntimeError(), 0.0) == []
    scheduler.check_integrity()


def test_b051_ended_requests_are_freed_without_the_cycle_collector():
    bench = Bench(max_num_seqs=16, max_num_batched_tokens=256, num_pages=200, max_queued=10_000)
    alive: weakref.WeakSet = weakref.WeakSet()
    gc.collect()
    gc.disable()
    try:
        for batch in range(100):
            for number in range(100):
                bench.core.add(make_request(f"{batch} {number}", [number, batch], max_tokens=2))
            record = bench.scheduler._roster.get(f"{batch} {batch}")
            assert record is not None
            alive.add(record)
            del record
            bench.core.abort(f"{batch} {batch + 1}")
            while bench.core.has_work:
                bench.core.step()
        bench.executor._owner.clear()
        assert len(alive) == 0
        roster = bench.scheduler._roster
        assert len(roster._waiting._heap) + len(roster._deadlines._heap) < 1_000
        assert not bench.scheduler._in_flight
    finally:
        gc.enable()


def test_b053_a_small_full_cache_keeps_everybody_moving():
    bench = Bench(num_pages=9, page_size=4, max_num_seqs=16, max_num_batched_tokens=32)
    for number in range(16):
        bench.add(str(number), range(number, number + 8), max_tokens=16)
    quiet = 0
    while bench.core.has_work:
        bench.step()
        quiet = 0 if bench.last else quiet + 1
        assert quiet <= 4
    bench.check()
    assert bench.stat("pages_free") + bench.stat("pages_cached") == 8


@pytest.mark.parametrize("length", [32_766, 32_767, 32_768, 32_769])
def test_b161_lengths_beyond_16_bits(length):
    bench = Bench(max_model_len=40_000, max_num_batched_tokens=40_000, num_pages=400, page_size=128)
    bench.executor.keep_plans = True
    bench.add("a", [token % 50 for token in range(length)], max_tokens=3)
    bench.run()
    assert bench.ends["a"].finish_reason is FinishReason.LENGTH
    rows = [row for plan in bench.executor.plans for row in plan.rows]
    assert [row.kv_len for row in rows] == [length, length + 1, length + 2]
    assert all(len(row.page_table) == -(-row.kv_len // 128) for row in rows)


def test_b163_the_scheduler_uses_exactly_the_pages_there_are():
    bench = Bench(num_pages=9, page_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    bench.executor.keep_plans = True
    assert len(bench.executor._cells) == bench.limits.num_pages
    for number in range(8):
        bench.add(str(number), range(number, number + 4), max_tokens=8)
    bench.run()
    bench.check()
    used = {page for plan in bench.executor.plans for row in plan.rows for page in row.page_table}
    assert used == set(range(1, 9))
    assert bench.executor._cells[0] == [None] * 4


def test_b165_bursts_padded_to_a_bucket_keep_their_own_tokens():
    bench = Bench(max_num_seqs=32, max_num_batched_tokens=64, num_pages=400)
    bench.executor.padding = 224
    for burst in range(4):
        for number in range(32):
            bench.add(f"{burst} {number}", [number, burst, number], max_tokens=1 + number % 5)
        for _ in range(3):
            bench.step()
    bench.run()
    bench.check()


def test_b183_a_clock_that_jumps_never_waits_for_ever():
    bench = Bench(max_num_seqs=1, queue_timeout=10.0, run_timeout=20.0)
    bench.now = 1_000.0
    bench.add("runs", [1], max_tokens=50)
    bench.add("waits", [2], max_tokens=50)
    bench.step()
    bench.now = 500.0
    bench.step()
    assert not bench.ends
    bench.now = 1e9
    bench.step()
    assert {name: end.error.code for name, end in bench.ends.items() if end.error} == {
        "runs": "run_timeout",
        "waits": "queue_timeout",
    }
    assert {end.error.status for end in bench.ends.values() if end.error} == {503, 504}
    bench.run()
