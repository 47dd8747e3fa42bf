"""Knobs are turned between steps, within what was compiled, and change no answer."""

import pytest

from jcb.config import SchedulerConfig
from jcb.scheduler.knobs import POLICIES, describe, turn
from jcb.types import RequestError
from tests.fakes import Bench

CEILING = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)


@pytest.mark.parametrize(
    ("changes", "param", "rule"),
    [
        ({"max_num_seqs": 9}, "max_num_seqs", "max_num_seqs=9 must be a whole number from 1 to 8"),
        ({"max_num_seqs": 0}, "max_num_seqs", "from 1 to 8"),
        ({"max_num_seqs": True}, "max_num_seqs", "max_num_seqs=True must"),
        ({"max_num_seqs": 2.0}, "max_num_seqs", "max_num_seqs=2.0 must"),
        ({"max_num_seqs": 2**63}, "max_num_seqs", "from 1 to 8"),
        ({"max_num_batched_tokens": 33}, "max_num_batched_tokens", "=33 must be a whole number from 8 to 32"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens", "from 8 to 32"),
        ({"max_num_batched_tokens": 3, "max_num_seqs": 4}, "max_num_batched_tokens", "from 4 to 32"),
        ({"max_num_batched_tokens": "9"}, "max_num_batched_tokens", "='9' must"),
        ({"policy": "lifo"}, "policy", "policy='lifo' must be one of fcfs, priority, shortest-prompt"),
        ({"policy": []}, "policy", "must be one of"),
        ({"page_size": 4}, "page_size", "page_size is no knob"),
    ],
)
def test_a_value_outside_its_bounds_is_refused_by_name(changes, param, rule):
    with pytest.raises(RequestError) as caught:
        turn(CEILING, CEILING, changes)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert rule in caught.value.message


def test_bounds_say_what_turn_allows():
    config = turn(CEILING, CEILING, {"max_num_seqs": 4, "max_num_batched_tokens": 6})
    knobs = describe(config, CEILING)
    assert knobs.pop("policy") == {"value": "fcfs", "choices": list(POLICIES)}
    assert knobs == {
        "max_num_batched_tokens": {"value": 6, "minimum": 4, "maximum": 32},
        "max_num_seqs": {"value": 4, "minimum": 1, "maximum": 6},
    }
    for name, knob in knobs.items():
        least, most = knob["minimum"], knob["maximum"]
        for value in (least, most):
            assert getattr(turn(config, CEILING, {name: value}), name) == value
        for value in (least - 1, most + 1):
            with pytest.raises(RequestError):
                turn(config, CEILING, {name: value})


def test_a_knob_leaves_the_queue_as_long_as_it_was():
    assert turn(CEILING, CEILING, {"max_num_seqs": 1}).max_queued == 64
    large = SchedulerConfig(max_num_seqs=32)
    assert turn(large, large, {"max_num_seqs": 1}).max_queued == 128


def test_fewer_slots_send_the_youngest_back_and_nothing_is_lost():
    bench = Bench(max_num_seqs=4, max_num_batched_tokens=16)
    for index in range(4):
        bench.add(f"r{index}", range(index, index + 9), 20)
    for _ in range(8):
        bench.step()
    assert bench.scheduler.num_running == 4
    bench.scheduler.turn({"max_num_seqs": 2})
    bench.step()
    assert [record.request_id for record in bench.scheduler._roster.running()] == ["r0", "r1"]
    bench.scheduler.turn({"max_num_seqs": 3, "max_num_batched_tokens": 3})
    bench.run()
    assert all(bench.tokens[name] == bench.expected(name) for name in bench.requests)
    assert bench.stat("preemptions") == 2


def test_no_step_is_larger_than_the_knobs_allow():
    bench = Bench(max_num_seqs=4, max_num_batched_tokens=16, num_pages=256)
    bench.executor.keep_plans = True
    for index in range(12):
        bench.add(f"r{index}", range(40), 12)
    allowed, seen = [(4, 16), (1, 1), (2, 9), (4, 5)], []
    while bench.core.has_work:
        seqs, tokens = allowed[len(seen) // 7 % len(allowed)]
        bench.scheduler.turn({"max_num_seqs": seqs, "max_num_batched_tokens": tokens})
        bench.step()
        for plan in bench.executor.plans:
            assert len(plan.rows) <= seqs
            assert plan.num_tokens <= tokens
        seen.append(sum(plan.num_tokens for plan in bench.executor.plans))
        bench.executor.plans.clear()
    assert max(seen) == 16
    assert all(bench.tokens[name] == bench.expected(name) for name in bench.requests)


def test_a_new_policy_sorts_those_who_wait():
    bench = Bench(max_num_seqs=1, max_num_batched_tokens=16, policy="priority")
    bench.add("running", [1], 4)
    bench.step()
    for name, priority in (("late", 5), ("early", -5)):
        bench.add(name, [2], 2, priority=priority, arrival_time=1.0)
    assert bench.scheduler._roster.first_waiting().request_id == "early"
    bench.scheduler.turn({"policy": "fcfs"})
    assert bench.scheduler._roster.first_waiting().request_id == "late"
    bench.scheduler.turn({"policy": "priority"})
    bench.scheduler.check_integrity()
    assert bench.scheduler._roster.first_waiting().request_id == "early"
    bench.run()
    assert list(bench.ends) == ["running", "early", "late"]
