"""Long runs: memory follows what is in flight, not what has passed, and progress is told."""

import time
import tracemalloc

import pytest

from jcb.chips import CHIPS
from jcb.config import CacheConfig, SchedulerConfig, ServeConfig
from jcb.models.presets import preset
from jcb.simulate.router import LeastLoaded
from jcb.simulate.setup import make_engine
from jcb.simulate.simulation import PROGRESS_EVERY, Simulation
from jcb.simulate.stats import Summary
from jcb.simulate.workloads import parse


def fleet(requests, replicas=4, progress=None, mean=64, pages=0):
    config = ServeConfig(
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192),
        cache=CacheConfig(num_pages=pages),
    )
    engine = make_engine(preset("llama-3.1-8b"), CHIPS["h200"], config)
    text = f"poisson rate={100 * replicas} requests={requests} prompt=exponential(128) output=exponential({mean})"
    workload = parse(f"{text} max_model_len=8192")
    return Simulation(engine.spec, workload, replicas=replicas, router=LeastLoaded(), progress=progress)


def peak_bytes(requests):
    simulation = fleet(requests, mean=4, pages=600)
    tracemalloc.start()
    try:
        assert simulation.run().finished == requests
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_requests():
    """It holds what is in flight, and keys of at most all pages."""
    assert peak_bytes(2000) < 1.2 * peak_bytes(1000)


def test_progress_is_told():
    heard = []
    fleet(2 * PROGRESS_EVERY + 1, mean=2, progress=lambda ended, now: heard.append((ended, now))).run()
    assert [ended for ended, _ in heard] == [PROGRESS_EVERY, 2 * PROGRESS_EVERY]
    assert 0 < heard[0][1] < heard[1][1]


@pytest.mark.slow
def test_ten_thousand_requests_take_seconds():
    begin = time.process_time()
    assert fleet(10_000, replicas=64).run().finished == 10_000
    assert time.process_time() - begin < 20


def test_quantiles_are_right_within_half_a_percent():
    summary, values = Summary(), [1e-4 * 1.003**n for n in range(4000)]
    for value in values:
        summary.add(value)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert summary.quantile(share) == pytest.approx(values[int(share * 4000)], rel=0.01)
    assert (summary.count, summary.minimum, summary.maximum) == (4000, values[0], values[-1])
    assert summary.mean == pytest.approx(sum(values) / 4000)


def test_a_summary_counts_repeats_zeros_and_nothing():
    assert (Summary().mean, Summary().quantile(0.5)) == (0.0, 0.0)
    summary = Summary()
    summary.add(0.0, times=3)
    summary.add(5.0)
    summary.add(7.0, times=0)
    assert (summary.count, summary.quantile(0.5), summary.quantile(1.0), summary.maximum) == (4, 0.0, 5.0, 5.0)
