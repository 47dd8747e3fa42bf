"""Steps as those who watch see them: bounded, cheap, the truth about slots and pages, and nothing private."""

import json
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from jcb.engine.feed import MAX_WATCHERS, SIZE, StepFeed, bitmap
from jcb.metrics import EngineMetrics, StepTimes
from jcb.types import RequestError
from tests.fakes import Bench


def watched(**options):
    """A bench whose steps go to a feed, and one who watches."""
    bench = Bench(**options)
    feed = bench.core.metrics = StepFeed(EngineMetrics(), bench.scheduler.cached_pages, lambda: bench.now)
    return bench, feed, feed.watch()


def fields(entries):
    """What readers get, through JSON."""
    return [json.loads(msgspec.json.encode(entry.fields)) for entry in entries]


class Reader:
    """Follows the events as the page does."""

    def __init__(self):
        self.pages: dict[int, list[int]] = {}

    def apply(self, step):
        for number in step["left"]:
            self.pages.pop(number, None)
        for number, known, more in step["pages"]:
            self.pages[number] = self.pages.get(number, [])[:known] + more


def test_rows_are_those_of_the_plan():
    bench, _, watcher = watched(page_size=4)
    bench.executor.keep_plans = True
    for index in range(3):
        bench.add(f"r{index}", range(10), 4)
    bench.run()
    steps = [step for step in fields(watcher.take(SIZE)) if step["rows"]]
    assert len(steps) == len(bench.executor.plans) > 4
    for step, plan in zip(steps, bench.executor.plans, strict=True):
        assert [row[1:4] for row in step["rows"]] == [[row.slot, row.start, row.q_len] for row in plan.rows]
        assert [row[4] for row in step["rows"]] == [int(row.start >= 10) for row in plan.rows]
        assert step["size"] == plan.num_tokens
    assert [joined["prompt"] for step in steps for joined in step["joined"]] == [10, 10, 10]
    assert sum(step["tokens"] for step in steps) + sum(s["tokens"] for s in fields(watcher.take(SIZE))) <= 12


def test_a_reader_knows_every_page_after_every_step():
    bench, feed, watcher = watched(page_size=2, num_pages=16, max_num_seqs=4, max_num_batched_tokens=8)
    reader, shared = Reader(), 0
    for index in range(8):
        bench.add(f"r{index}", [1, 2, 3, 4, 5, 6, 7 + index], 8)
    while bench.core.has_work:
        bench.step()
        for step in fields(watcher.take(SIZE)):
            reader.apply(step)
        for record in bench.scheduler._roster.running():
            assert reader.pages[feed._guests[record.request_id].number] == record.pages
        ended = sum(guest.sequence.finish_reason is not None for guest in feed._guests.values())  # told in the next
        assert len(reader.pages) == bench.scheduler.num_running + ended
        counts = np.bincount([page for pages in reader.pages.values() for page in pages], minlength=16)
        shared += int((counts > 1).sum())
    assert bench.stat("preemptions") > 0
    assert shared > 0


def test_a_snapshot_and_the_entries_after_it_agree_with_all_entries():
    bench, feed, early = watched(page_size=2, num_pages=24, max_num_batched_tokens=8)
    for index in range(6):
        bench.add(f"r{index}", range(7), 8)
    for _ in range(6):
        bench.step()
    late = feed.watch()
    reader, other = Reader(), Reader()
    other.pages = {guest["id"]: list(guest["pages"]) for guest in feed.guests() if guest["slot"] >= 0}
    for _ in range(12):
        bench.step()
    for step in fields(early.take(SIZE)):
        reader.apply(step)
    for step in fields(late.take(SIZE)):
        other.apply(step)
    assert reader.pages == other.pages
    assert reader.pages


def test_who_left_between_steps_is_told_when_nothing_runs():
    bench, feed, watcher = watched()
    bench.add("a", range(5), 50)
    for _ in range(3):
        bench.step()
    bench.abort("a")
    feed.record_rest(bench.scheduler.stats())
    feed.record_rest(bench.scheduler.stats())
    steps = fields(watcher.take(SIZE))
    assert [step["left"] for step in steps] == [[], [], [], [1]]
    assert steps[-1]["running"] == 0
    cached = bench.scheduler.cached_pages()
    assert steps[-1]["cached_map"] == bitmap(cached, 64)
    assert feed.guests() == []


def test_a_preempted_sequence_keeps_its_number():
    bench, _, watcher = watched(preempt_every=3)
    bench.add("a", range(5), 12)
    bench.add("b", range(5), 12)
    bench.run()
    steps = fields(watcher.take(SIZE))
    assert {row[0] for step in steps for row in step["rows"]} == {1, 2}
    assert sum(step["preempted"] for step in steps) > 0
    assert any(row[4] == 2 for step in steps for row in step["rows"])
    assert any(step["left"] for step in steps[:-2])


def test_times_to_first_tokens_and_between_tokens():
    bench, _, watcher = watched()
    bench.add("a", range(5), 4)
    while bench.core.has_work:
        bench.now += 0.25
        bench.step()
    steps = fields(watcher.take(SIZE))
    assert [step["ttft_ms"] for step in steps if step["ttft_ms"]] == [[500.0]]
    assert [gap for step in steps for gap in step["itl_ms"]] == [[250.0, 1]] * 3


def test_a_slow_reader_loses_steps_and_memory_is_bounded():
    bench, feed, slow = watched(max_model_len=4 * SIZE, num_pages=4 * SIZE)
    bench.add("a", range(4), 2 * SIZE + 10)
    bench.run()
    assert len(feed._ring) == SIZE
    assert slow.take(8) is None
    assert slow.lost > SIZE
    assert slow.last == feed.head
    assert slow.take(8) == []


def test_readers_share_what_is_encoded_and_get_it_in_order_in_parts():
    bench, feed, first = watched()
    second = feed.watch()
    bench.add("a", range(4), 30)
    bench.run()
    parts = []
    while part := first.take(7):
        assert len(part) <= 7
        parts += part
    assert [entry.number for entry in parts] == list(range(1, feed.head + 1))
    assert all(a is b for a, b in zip(parts, second.take(SIZE), strict=True))


def test_with_nobody_watching_nothing_is_kept():
    bench, feed, watcher = watched()
    bench.add("a", range(4), 9)
    bench.step()
    bench.step()
    assert feed.guests()
    watcher.close()
    watcher.close()
    assert feed.num_watchers == 0
    bench.step()
    assert feed.guests() == []
    assert set(feed._ring) == {None}
    head = feed.head
    bench.run()
    assert feed.head == head


def test_too_many_watchers_are_refused_until_one_leaves():
    _, feed, watcher = watched()
    for _ in range(MAX_WATCHERS - 1):
        feed.watch()
    with pytest.raises(RequestError) as caught:
        feed.watch()
    assert caught.value.status == 429
    watcher.close()
    feed.watch()


def test_nothing_private_is_told():
    bench, feed, watcher = watched(vocab_size=10**6, prefix_caching=True)
    tokens = [900_001, 900_002, 900_003, 900_004, 900_005]
    bench.add("canary-id", tokens, 6, namespace="canary-key")
    bench.step()
    text = json.dumps([fields(watcher.take(SIZE)), feed.guests()])
    bench.run()
    text += json.dumps(fields(watcher.take(SIZE)))
    assert "canary" not in text
    assert not any(str(token) in text for token in [*tokens, *bench.tokens["canary-id"]] if token > 9999)


def test_padding_is_what_the_program_computed_beside_the_plan():
    bench, feed, watcher = watched()
    feed._metrics.record_bucket("prefill", 5, 16)
    bench.add("a", range(5), 1)
    bench.run()
    step = fields(watcher.take(SIZE))[0]
    assert sum(row[3] for row in step["rows"]) == 5
    assert step["size"] == 16


def test_a_bitmap_holds_the_pages():
    import base64

    bits = np.unpackbits(np.frombuffer(base64.b64decode(bitmap([1, 9, 16], 17)), np.uint8), bitorder="little")
    assert np.flatnonzero(bits).tolist() == [1, 9, 16]
    assert not base64.b64decode(bitmap([], 17)).strip(b"\0")


def test_a_step_of_64_rows_costs_little():
    """Bounds far above what is measured (1 µs without, 100 µs with a reader): they catch a change of kind."""
    bench, feed, watcher = watched(max_num_seqs=64, max_num_batched_tokens=512, num_pages=2048)
    for index in range(64):
        bench.add(f"r{index}", [index] * 8, 100)
    for _ in range(4):
        bench.step()
    plan = bench.scheduler.schedule(0.0)
    assert len(plan.rows) == 64
    call = (plan, [], bench.scheduler.stats(), StepTimes(0.0, 0.0))
    quiet = StepFeed(SimpleNamespace(record_step=lambda *args: None, step_size=64), list)
    seconds = {}
    for name, hears in (("watched", feed), ("alone", quiet)):
        began = time.perf_counter()
        for _ in range(200):
            hears.record_step(*call)
        seconds[name] = (time.perf_counter() - began) / 200
    assert seconds["alone"] < 10e-6
    assert seconds["watched"] < 2e-3
    assert len(watcher.take(SIZE)) > 200
