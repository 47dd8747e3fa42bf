"""The loop: overlap, faults that end only what they must, time-outs, and one end for every request."""

import inspect

import pytest

from jcb.engine.core import EngineCore
from jcb.types import FinishReason
from tests.fakes import Bench


def involves(name, length=0):
    """True for plans in which the named request reaches `length`."""
    return lambda plan: any(row.sequence.request_id == name and row.kv_len >= length for row in plan.rows)


def test_step_reads_in_under_fifteen_lines():
    source, _ = inspect.getsourcelines(EngineCore.step)
    assert len(source) < 15


@pytest.mark.parametrize(("overlap", "expected"), [(True, "ddcdcdcc"), (False, "dcdcdcdc")])
def test_overlap_dispatches_a_step_before_it_collects_the_last(overlap, expected, monkeypatch):
    bench = Bench(overlap=overlap)
    calls = []
    for name in ("dispatch", "collect"):
        call = getattr(bench.executor, name)
        monkeypatch.setattr(bench.executor, name, lambda x, name=name, call=call: (calls.append(name[0]), call(x))[1])
    bench.add("a", range(3), max_tokens=4)
    bench.run()
    bench.check()
    assert "".join(calls) == expected


def test_an_idle_core_does_nothing():
    bench = Bench()
    assert not bench.core.has_work
    assert bench.core.step() == []
    assert bench.executor.num_dispatched == 0


def test_metrics_hear_of_every_step():
    class Heard(list):
        def record_step(self, plan, outputs, stats, times):
            assert times.host >= 0
            assert (times.device is not None) == bool(outputs)
            self.append((len(plan.rows), len(outputs), stats["running"]))

    bench = Bench(overlap=False)
    heard = Heard()
    bench.core.metrics = heard
    bench.add("a", range(3), max_tokens=2)
    bench.run()
    assert heard == [(1, 1, 1), (1, 1, 0)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["fails_dispatch", "fails_collect"])
@pytest.mark.parametrize("length", [1, 7, 12])
def test_a_request_that_fails_its_steps_ends_alone(overlap, where, length):
    bench = Bench(overlap=overlap, num_pages=40)
    for name in "abcd":
        bench.add(name, range(ord(name), ord(name) + 9), max_tokens=8)
    setattr(bench.executor, where, involves("c", length))
    bench.run()
    assert bench.ends["c"].finish_reason is FinishReason.ERROR
    assert bench.ends["c"].error.code == "step_failed"
    assert bench.ends["c"].error.status == 500
    assert bench.tokens["c"] == bench.expected("c")[: len(bench.tokens["c"])]
    bench.check("a", "b", "d")


def test_the_error_of_a_step_says_nothing_of_what_was_sent():
    bench = Bench()

    def explode(plan):
        raise ValueError("secret")

    bench.executor.fails_dispatch = explode
    bench.add("a", [1])
    bench.run()
    assert "secret" not in bench.ends["a"].error.message


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["fails_dispatch", "fails_collect"])
def test_one_bad_moment_ends_nobody(overlap, where):
    for moment in range(1, 14):
        bench = Bench(overlap=overlap, max_prefill_chunk=4)
        for name in "abc":
            bench.add(name, range(ord(name), ord(name) + 9), max_tokens=6)
        setattr(bench.executor, where, lambda plan, moment=moment: plan.step_id == moment)
        bench.run()
        bench.check()
        assert bench.executor.num_resets <= 1


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_fail_with_nobody_to_blame_still_end(overlap):
    bench = Bench(overlap=overlap, max_prefill_chunk=3, num_pages=12)
    for name in "abc":
        bench.add(name, range(ord(name), ord(name) + 10), max_tokens=5)
    bench.executor.fails_collect = lambda plan: len(plan.rows) > 1
    bench.run()
    bench.check()


def test_a_device_that_always_fails_ends_everybody():
    bench = Bench()
    for name in "abcdefgh":
        bench.add(name, [1, 2, 3])
    bench.executor.fails_dispatch = lambda plan: True
    bench.run(100)
    assert {end.error.code for end in bench.ends.values()} == {"step_failed"}
    assert len(bench.ends) == 8


def test_suspects_run_alone_until_they_have_proved_themselves():
    bench = Bench(max_prefill_chunk=4)
    bench.executor.keep_plans = True
    for name in "ab":
        bench.add(name, range(ord(name), ord(name) + 6), max_tokens=6)
    bench.executor.fails_collect = lambda plan: plan.step_id == 3
    bench.run()
    bench.check()
    sizes = [len(plan.rows) for plan in bench.executor.plans]
    assert sizes[:4] == [2, 2, 2, 2]
    assert sizes[4:8] == [1, 1, 1, 1]
    assert sizes[8:10] == [2, 2]


def test_a_sequence_must_prove_more_after_each_failed_step():
    bench = Bench(preempt_every=1, max_num_seqs=2)
    for name in "ab":
        bench.add(name, range(6), max_tokens=3)
    bench.executor.fails_dispatch = lambda plan: len(plan.rows) > 1
    record = bench.scheduler._roster.get("a")
    proofs = []
    while record.finish_reason is None:
        resets = bench.executor.num_resets
        bench.step()
        if bench.executor.num_resets > resets:
            proofs.append(record.must_prove)
    bench.run()
    bench.check()
    assert proofs == sorted(set(proofs))


def test_a_shorter_second_failure_does_not_lower_the_proof():
    bench = Bench()
    bench.add("a", range(6))
    record = bench.scheduler._roster.get("a")
    for length, proof in ((5, 5), (3, 6), (6, 7), (20, 20)):
        bench.scheduler._suspect(record, length)
        assert record.must_prove == proof
    bench.run()
    bench.check()


def test_a_suspect_may_be_aborted():
    bench = Bench()
    for name in "ab":
        bench.add(name, range(6))
    bench.executor.fails_dispatch = lambda plan: plan.step_id == 1
    bench.step()
    bench.abort("a")
    bench.run()
    bench.check("b")


@pytest.mark.parametrize("overlap", [False, True])
def test_values_that_are_not_finite_end_one_sequence(overlap):
    bench = Bench(overlap=overlap)
    for name in "abc":
        bench.add(name, range(ord(name), ord(name) + 5), max_tokens=8)
    bench.executor.not_finite = lambda row: row.sequence.request_id == "b" and row.kv_len == 8
    bench.run()
    bench.check("a", "c")
    assert bench.ends["b"].error.code == "non_finite_logits"
    assert bench.tokens["b"] == bench.expected("b")[:3]


def test_pages_given_up_before_their_values_were_known_to_be_bad_are_not_found():
    """The sequence was preempted while the step with the bad values was on its way."""
    bench = Bench(preempt_every=2)
    bench.executor.not_finite = lambda row: row.sequence.request_id == "a"
    bench.add("a", range(12))
    bench.run()
    assert bench.ends["a"].error.code == "non_finite_logits"
    assert bench.stat("preemptions") == 1
    assert bench.stat("pages_cached") == 0
    bench.add("b", range(12))
    bench.run()
    assert bench.ends["b"].num_cached_tokens == 0
    bench.check("b")


def test_pages_with_values_that_are_not_finite_are_not_found():
    bench = Bench()
    bench.executor.not_finite = lambda row: True
    bench.add("a", range(20), max_tokens=2)
    bench.run()
    assert bench.stat("pages_cached") == 0
    bench.executor.not_finite = lambda row: False
    bench.add("b", range(20), max_tokens=2)
    bench.run()
    bench.check("b")
    assert bench.ends["b"].num_cached_tokens == 0


@pytest.mark.parametrize("token", [-1, 101, 2**31 - 1])
def test_a_token_outside_the_vocabulary_ends_one_sequence(token):
    bench = Bench()
    bench.add("a", [1, 2])
    bench.add("b", [3, 4])
    bench.executor.wrong_token = lambda row: token if row.sequence.request_id == "a" and row.kv_len == 4 else None
    bench.run()
    bench.check("b")
    assert bench.ends["a"].error.code == "invalid_token"
    assert bench.tokens["a"] == bench.expected("a")[:2]


def test_who_waits_too_long_is_told_to_come_back():
    bench = Bench(max_num_seqs=1, queue_timeout=5.0)
    bench.add("runs", [1], max_tokens=30)
    bench.add("waits", [2])
    bench.step()
    bench.now = 4.9
    bench.step()
    assert "waits" not in bench.ends
    bench.now = 5.0
    bench.run()
    bench.check("runs")
    error = bench.ends["waits"].error
    assert (error.status, error.code) == (503, "queue_timeout")
    assert error.retry_after > 0


def test_who_runs_too_long_keeps_what_it_has():
    bench = Bench(run_timeout=5.0)
    bench.now = 100.0
    bench.add("a", [1], max_tokens=50)
    for _ in range(10):
        bench.step()
    bench.now = 105.0
    bench.run()
    error = bench.ends["a"].error
    assert (error.status, error.code) == (504, "run_timeout")
    assert bench.tokens["a"] == bench.expected("a")[:9]


def test_a_preempted_sequence_is_under_the_run_timeout():
    bench = Bench(num_pages=10, queue_timeout=1.0, run_timeout=50.0, max_num_seqs=2)
    for name in "ab":
        bench.add(name, range(10), max_tokens=20)
    while bench.stat("preemptions") == 0:
        bench.step()
    bench.now = 40.0
    bench.run()
    bench.check()


def test_an_executor_that_cannot_reset_stops_the_engine():
    bench = Bench()

    def reset():
        raise OSError("the device is gone")

    bench.executor.reset = reset
    bench.executor.fails_dispatch = lambda plan: True
    bench.add("a", [1])
    with pytest.raises(OSError, match="gone"):
        bench.step()


def test_abort_between_steps_drops_the_row_in_flight():
    bench = Bench()
    bench.add("a", [1], max_tokens=5)
    bench.step()
    bench.abort("a")
    assert bench.core.has_work, "a step is in flight"
    bench.run()
    assert bench.tokens["a"] == []
    assert bench.ends["a"].finish_reason is FinishReason.ABORT
