"""The real scheduler on a pretended device: virtual time is exact, so figures can be worked out by hand."""

import time

import pytest

from jcb.config import Limits, SchedulerConfig
from jcb.engine.core import EngineCore
from jcb.scheduler.scheduler import Scheduler
from jcb.simulate.clock import VirtualClock
from jcb.simulate.executor import SimExecutor, affine_cost
from tests.fakes import make_request

LIMITS = Limits(page_size=16, num_pages=200, max_model_len=512, vocab_size=1_000)
COST = affine_cost(step=0.010, token=0.001)


def simulate(requests, *, overlap=True, cost=COST, **config):
    """Run everything to its end: tokens and the time of the end by request id, and the executor."""
    clock = VirtualClock()
    executor = SimExecutor(clock, cost, vocab_size=LIMITS.vocab_size)
    scheduler = Scheduler(SchedulerConfig(**config), LIMITS, enable_prefix_caching=True)
    core = EngineCore(scheduler, executor, overlap=overlap, clock=clock)
    for request in requests:
        core.add(request)
    tokens, ends = {request.request_id: [] for request in requests}, {}
    while core.has_work:
        for output in core.step():
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ends[output.request_id] = clock()
        scheduler.check_integrity()
    return tokens, ends, executor


def some_requests():
    return [make_request(str(n), range(n, n + 20), max_tokens=5 + n % 7) for n in range(20)]


@pytest.mark.parametrize("overlap", [False, True])
def test_time_is_the_sum_of_the_steps(overlap):
    _, ends, executor = simulate([make_request("a", range(20), max_tokens=3)], overlap=overlap)
    assert ends["a"] == pytest.approx(3 * 0.010 + (20 + 2) * 0.001)
    assert executor.busy_seconds == pytest.approx(ends["a"])


def test_tokens_do_not_depend_on_how_they_were_scheduled():
    answers = [
        simulate(some_requests(), **config)[0]
        for config in ({}, {"max_prefill_chunk": 7}, {"preempt_every": 3}, {"max_num_seqs": 1}, {"admission": "static"})
    ]
    assert all(answer == answers[0] for answer in answers)
    assert len({tuple(tokens) for tokens in answers[0].values()}) == 20


def test_continuous_batching_beats_static_when_lengths_differ_and_only_then():
    def seconds(admission, lengths):
        requests = [make_request(str(n), range(n, n + 20), max_tokens=length) for n, length in enumerate(lengths)]
        cost = affine_cost(step=0.010, token=0.0001)
        return max(simulate(requests, cost=cost, admission=admission, max_num_seqs=8)[1].values())

    mixed, equal = [5, 80] * 32, [40] * 64
    assert seconds("static", mixed) > 1.5 * seconds("paged", mixed)
    assert seconds("static", equal) == pytest.approx(seconds("paged", equal), rel=0.15)


def test_an_hour_takes_no_time():
    started = time.perf_counter()
    _, ends, _ = simulate([make_request("a", [1], max_tokens=9)], cost=lambda plan: 400.0, run_timeout=1e6)
    assert ends["a"] == 3_600.0
    assert time.perf_counter() - started < 5.0


def test_the_clock_never_runs_backwards():
    clock = VirtualClock(5.0)
    clock.advance_to(3.0)
    clock.advance(1.0)
    assert clock() == 6.0
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1.0)
