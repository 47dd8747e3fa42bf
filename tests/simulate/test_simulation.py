"""Fleets on virtual time: figures worked out by hand, and nothing lost between router, pools and engines."""

import dataclasses
import itertools

import pytest

from jcb.config import Limits, SchedulerConfig
from jcb.simulate.cost import NO_HOST, Affine, HostCost
from jcb.simulate.job import VOCAB_SIZE, Job
from jcb.simulate.links import Link
from jcb.simulate.replica import ReplicaSpec
from jcb.simulate.router import LeastLoaded, RoundRobin, router_named
from jcb.simulate.simulation import PrefillPool, Simulation
from jcb.simulate.workloads import parse
from jcb.steps.shapes import Shapes
from jcb.types import FinishReason

LIMITS = Limits(page_size=16, num_pages=1000, max_model_len=2048, vocab_size=VOCAB_SIZE)


class PerStep:
    """Ten milliseconds a step, and one for each computed token."""

    def seconds(self, work):
        return 0.010 + 0.001 * work.padded_tokens


def spec(*, host=NO_HOST, limits=LIMITS, cost=None, overlap=True, **scheduler):
    values = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "queue_timeout": 1e9, "run_timeout": 1e9}
    config = SchedulerConfig(**values | scheduler)
    return ReplicaSpec(
        scheduler=config, limits=limits, shapes=Shapes.make(config, limits), cost=cost or PerStep(), host=host,
        overlap=overlap,
    )  # fmt: skip


class Listed:
    """A workload of given jobs."""

    def __init__(self, *jobs):
        self._jobs = jobs
        self.ended = []

    def jobs(self):
        return iter(self._jobs)

    def after(self, job, now):
        self.ended.append((job.number, now))
        return None


def job(number, at=0.0, prompt=20, output=3, **fields):
    begin = 1000 * number
    prompt, answer = range(begin, begin + prompt), range(begin + prompt, begin + prompt + output)
    return Job(number=number, at=at, prompt=prompt, answer=answer, **fields)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_request_takes_the_sum_of_its_steps(overlap):
    ends = []
    stats = Simulation(spec(overlap=overlap), Listed(job(0, at=5.0)), on_end=ends.append).run()
    prefill, decode = 0.010 + 0.032, 0.010 + 0.002  # a prompt of 20 runs in the bucket of 32, one row in that of 2
    assert stats.ttft.maximum == pytest.approx(prefill)
    assert stats.tpot.maximum == pytest.approx(decode)
    assert stats.latency.maximum == pytest.approx(prefill + 2 * decode)
    assert stats.elapsed == pytest.approx(stats.busy)
    assert (stats.tokens, stats.padded_tokens) == (22, 36)
    assert (stats.finished, stats.prompt_tokens, stats.output_tokens, stats.steps) == (1, 20, 3, 3)
    (end,) = ends
    assert (end.reason, end.output_tokens, end.first_scheduled) == (FinishReason.LENGTH, 3, 5.0)


def test_the_host_hides_behind_the_device_only_under_overlap():
    host = HostCost(before=Affine(0.002), dispatch=Affine(0.001), after=Affine(0.003))
    jobs = [job(n, output=50) for n in range(4)]
    alone = Simulation(spec(host=host, overlap=False), Listed(*jobs)).run()
    hidden = Simulation(spec(host=host, overlap=True), Listed(*jobs)).run()
    free = Simulation(spec(), Listed(*jobs)).run()
    assert free.elapsed == pytest.approx(free.busy)
    assert hidden.elapsed == pytest.approx(free.elapsed + 0.002 + 0.003), "before the first step, after the last"
    assert alone.elapsed == pytest.approx(free.elapsed + alone.steps * (0.002 + 0.003))


def test_a_host_slower_than_the_device_sets_the_pace():
    host = HostCost(before=Affine(0.02), dispatch=Affine(0.01), after=Affine(0.03))
    stats = Simulation(spec(host=host), Listed(job(0, output=100))).run()
    assert stats.tpot.mean == pytest.approx(0.06, rel=0.02)
    assert stats.utilisation == pytest.approx(0.012 / 0.06, rel=0.1)


def test_an_answer_that_stops_early_is_a_stop_and_an_impatient_client_an_abort():
    ends = []
    jobs = job(0, output=5, max_tokens=50), job(1, output=9, abort_after=4), job(2, output=5)
    stats = Simulation(spec(), Listed(*jobs), on_end=ends.append).run()
    by_number = {end.job.number: (end.reason, end.output_tokens) for end in ends}
    assert by_number == {0: (FinishReason.STOP, 5), 1: (FinishReason.ABORT, 4), 2: (FinishReason.LENGTH, 5)}
    assert (stats.finished, stats.aborted) == (2, 1)


def test_refused_and_timed_out_requests_are_counted_and_the_loop_goes_on():
    workload = Listed(*[job(n) for n in range(6)], job(6, prompt=3000))
    stats = Simulation(spec(max_num_seqs=1, max_queued=2, max_num_batched_tokens=64), workload).run()
    assert stats.refused == 7 - stats.finished > 1
    assert len(workload.ended) == 7
    slow = Simulation(spec(max_num_seqs=1, max_num_batched_tokens=64, queue_timeout=0.05), Listed(*map(job, range(5))))
    assert slow.run().failed > 0


def test_short_pages_preempt_and_everything_still_ends():
    limits = dataclasses.replace(LIMITS, num_pages=20, max_model_len=256)
    stats = Simulation(spec(limits=limits), Listed(*[job(n, output=100) for n in range(8)])).run()
    assert stats.preemptions > 0
    assert (stats.finished, stats.output_tokens) == (8, 800)
    assert stats.peak_pages <= 19


def test_a_conversation_reuses_the_pages_of_its_past_answers():
    workload = parse("closed users=1 requests=4 turns=4 prompt=64 output=32 think=1")
    stats = Simulation(spec(), workload).run()
    pasts = [0, 96, 192, 288]
    assert stats.prompt_tokens == sum(past + 64 for past in pasts)
    # The last token of an answer is never computed, so its page is shared only once the next turn has filled it.
    assert stats.cached_tokens == sum((past - 1) // 16 * 16 if past else 0 for past in pasts)


def test_replicas_share_the_work():
    jobs = [job(n, at=0.001 * n, output=20) for n in range(64)]
    one = Simulation(spec(), Listed(*jobs)).run()
    four = Simulation(spec(), Listed(*jobs), replicas=4, router=RoundRobin()).run()
    assert (four.finished, four.output_tokens) == (64, 64 * 20)
    assert four.elapsed < one.elapsed / 2
    assert four.utilisation < 1


def test_runs_repeat_and_seeds_differ():
    def run(seed):
        workload = parse(f"gamma rate=30 cv=2 requests=60 prompt=exponential(80) output=exponential(20) seed={seed}")
        return Simulation(spec(), workload, replicas=2, router=LeastLoaded()).run().to_json()

    assert run(1) == run(1)
    assert run(1) != run(2)


# ---- pools


def test_prompts_computed_elsewhere_arrive_after_their_transfer():
    link = Link("test", "a test's", bandwidth=1e6, latency=0.5, source="", efficiency=1.0)
    pool = PrefillPool(spec=spec(), replicas=1, link=link, kv_bytes=1000, router=RoundRobin())
    ends = []
    stats = Simulation(spec(), Listed(job(0, prompt=100, output=4)), prefill=pool, on_end=ends.append).run()
    prefill, decode = 0.010 + 0.128, 0.012
    (end,) = ends
    assert end.first_token == pytest.approx(prefill)
    assert end.now == pytest.approx(prefill + 0.5 + 0.1 + 3 * decode), "100 tokens of 1,000 bytes take 0.1 s"
    assert (end.output_tokens, len(end.job.prompt), end.job.number) == (4, 100, 0)
    assert stats.ttft.count == 1
    assert stats.gaps.count == 3
    assert stats.gaps.maximum == pytest.approx(0.6 + decode)
    assert stats.tpot.mean == pytest.approx((0.6 + 3 * decode) / 3)


def test_a_link_carries_one_prompt_after_another():
    link = Link("test", "a test's", bandwidth=1e4, latency=0.0, source="", efficiency=1.0)
    pool = PrefillPool(spec=spec(), replicas=1, link=link, kv_bytes=1000, router=RoundRobin())
    ends = []
    Simulation(spec(), Listed(*[job(n, prompt=50, output=2) for n in range(3)]), prefill=pool, on_end=ends.append).run()
    times = sorted(end.now for end in ends)
    assert all(b - a == pytest.approx(5.0, abs=0.05) for a, b in itertools.pairwise(times))


def test_pools_lose_nothing_whatever_happens():
    limits = dataclasses.replace(LIMITS, num_pages=30, max_model_len=256)
    link = Link("test", "a test's", bandwidth=1e9, latency=0.001, source="")
    pool = PrefillPool(spec=spec(), replicas=2, link=link, kv_bytes=1000, router=LeastLoaded())
    workload = parse("poisson rate=50 requests=80 prompt=uniform(10,60) output=uniform(1,80) max_model_len=256")
    simulation = Simulation(spec(limits=limits), workload, replicas=3, router=LeastLoaded(), prefill=pool)
    stats = simulation.run()
    assert stats.finished == 80
    assert stats.preemptions > 0
    assert not simulation._originals
    assert not simulation._prefilled


# ---- routers


@dataclasses.dataclass
class Busy:
    load: int = 0


def choices(name, jobs, replicas):
    router = router_named(name)
    return [router.choose(each, replicas) for each in jobs]


def test_round_robin_takes_turns_and_the_least_loaded_gets_the_next():
    assert choices("round-robin", [job(n) for n in range(5)], [Busy()] * 3) == [0, 1, 2, 0, 1]
    assert choices("least-loaded", [job(n) for n in range(4)], [Busy(2), Busy(1), Busy(5), Busy(1)]) == [1, 3, 1, 3]


def test_a_session_stays_where_it_is_and_sessions_spread():
    jobs = [job(n, session=n % 40) for n in range(80)]
    chosen = choices("session", jobs, [Busy()] * 8)
    assert chosen[:40] == chosen[40:]
    assert len(set(chosen)) == 8
    assert choices("session", [job(n) for n in range(3)], [Busy()] * 3) == [0, 1, 2]


def test_prefixes_go_where_they_were_unless_that_one_is_swamped():
    shared = [Job(number=n, at=0.0, prompt=(*range(256), 999 + n), answer=(1,)) for n in range(3)]
    other = job(9, prompt=300)
    replicas = [Busy() for _ in range(3)]
    router = router_named("prefix")
    first = router.choose(shared[0], replicas)
    replicas[first].load = 3
    assert router.choose(shared[1], replicas) == first
    assert router.choose(other, replicas) != first
    replicas[first].load = 50
    assert router.choose(shared[2], replicas) != first


def test_prefix_routing_finds_more_in_the_caches_than_round_robin():
    text = "poisson rate=40 requests=200 prompt=32 output=4 prefix=512 groups=40"

    def cached(name):
        return Simulation(spec(), parse(text), replicas=4, router=router_named(name)).run().cached_tokens

    assert cached("prefix") > 1.2 * cached("round-robin")


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match="no router 'magic' is known, only round-robin, least-loaded, prefix, session"):
        router_named("magic")
    with pytest.raises(ValueError, match="must be at least 1"):
        Simulation(spec(), Listed(), replicas=0)
