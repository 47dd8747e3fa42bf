"""A recorded run under other knobs, and what a recording says of itself."""

import dataclasses

import pytest

from jcb import config_file
from jcb.config import CacheConfig, ServeConfig
from jcb.engine.record import recorded_config
from jcb.recording import Recording
from jcb.simulate import report
from jcb.simulate.cost import NO_HOST
from jcb.simulate.recorded import RecordedWorkload, recorded_stats
from jcb.simulate.what_if import config_of, simulate_recording
from jcb.steps.shapes import Shapes
from tests.fakes import Bench
from tests.simulate.test_replay import drive, record


class OneSecond:
    def seconds(self, work):
        return 1.0


@pytest.fixture
def recording(tmp_path):
    """A run of a device that takes a second a step, on a clock of the test's own."""
    bench = Bench(num_pages=24, max_model_len=60, run_timeout=1e9, queue_timeout=1e9)
    collect = bench.executor.collect

    def slow(handle):
        bench.now += 1.0
        return collect(handle)

    bench.executor.collect = slow
    record(bench, tmp_path / "run.jsonl")
    for number in range(20):
        bench.add(str(number), range(number, number + 12), max_tokens=4 + number % 5, arrival_time=bench.now)
        bench.step()
    bench.run()
    bench.core.recorder.close()
    return Recording.open(tmp_path / "run.jsonl")


def settings(*texts):
    return config_file.parse_settings(texts)


def test_the_same_knobs_give_the_same_run(recording):
    recorded = recorded_stats(recording)
    simulated = simulate_recording(recording, cost=OneSecond(), host=NO_HOST)
    for name in ("finished", "output_tokens", "prompt_tokens", "cached_tokens", "preemptions", "steps", "tokens"):
        assert getattr(simulated, name) == getattr(recorded, name), name
    assert simulated.busy == pytest.approx(recorded.busy)
    assert simulated.ttft.mean == pytest.approx(recorded.ttft.mean, rel=0.05)
    assert simulated.latency.mean == pytest.approx(recorded.latency.mean, rel=0.05)
    assert simulated.tpot.mean == pytest.approx(recorded.tpot.mean, rel=0.05)
    assert simulated.peak_pages == pytest.approx(recorded.peak_pages, abs=3)


def test_other_knobs_give_another_run(recording):
    base = simulate_recording(recording, cost=OneSecond(), host=NO_HOST)
    single = simulate_recording(recording, settings("max_num_seqs=1"), cost=OneSecond(), host=NO_HOST)
    assert single.elapsed > 1.5 * base.elapsed
    assert single.occupancy.maximum == 1
    tight = simulate_recording(recording, settings("cache.num_pages=17"), cost=OneSecond(), host=NO_HOST)
    assert tight.preemptions > base.preemptions
    uncached = simulate_recording(recording, settings("enable_prefix_caching=false"), cost=OneSecond(), host=NO_HOST)
    assert uncached.cached_tokens == 0


def test_pages_follow_the_memory(recording):
    assert config_of(recording).cache.num_pages == 24
    assert config_of(recording, settings("cache.page_size=8")).cache.num_pages == 12
    assert config_of(recording, settings("cache.num_pages=99")).cache.num_pages == 99


def test_pages_follow_what_keys_and_values_are_kept_in(recording):
    recording.header.config["dtype"] = "float32"
    recording.header.shape.update(num_layers=2, num_kv_heads=3, head_dim=64)
    assert config_of(recording, settings("kv_dtype=bfloat16")).cache.num_pages == 48
    assert config_of(recording, settings("kv_dtype=bfloat16", "page_size=8")).cache.num_pages == 24
    wide, half = (config_of(recording, settings("memory_gib=1", f"kv_dtype={d}")) for d in ("float32", "bfloat16"))
    assert wide.cache.num_pages == (1 << 30) // (2 * 2 * 3 * 64 * 4) // 4
    assert half.cache.num_pages == 2 * wide.cache.num_pages


@pytest.mark.parametrize("setting", ["kv_dtype=bfloat16", "dtype=float32", "weights=dense", "activations=int8"])
def test_what_makes_steps_longer_or_shorter_is_not_simulated(recording, setting):
    path, _ = next(iter(settings(setting).items()))
    with pytest.raises(ValueError, match=f"{path}=.* replay it with --real"):
        simulate_recording(recording, settings(setting), cost=OneSecond(), host=NO_HOST)


def test_a_recording_says_what_it_computed_in():
    config = ServeConfig(dtype="float32", weights="as-shipped", activations="int8", cache=CacheConfig(num_pages=9))
    recorded = recorded_config(config, Shapes((), ()))
    assert (recorded["dtype"], recorded["weights"], recorded["activations"]) == ("float32", "as-shipped", "int8")
    assert recorded["cache"]["kv_dtype"] == "auto"


def test_a_recorded_workload_keeps_times_lengths_and_shared_pages(tmp_path):
    bench = Bench(num_pages=64)
    record(bench, tmp_path / "run.jsonl")
    drive(bench, 2)
    recording = Recording.open(tmp_path / "run.jsonl")
    workload = RecordedWorkload(recording, scale=2.0)
    jobs = list(workload.jobs())
    assert [job.at for job in jobs] == sorted(job.at for job in jobs)
    ends = {each.arrival.id: each.end for each in workload.requests}
    for job in jobs:
        left = job.abort_after is not None
        assert job.output_tokens == ends[job.number].output_tokens + left
    simulated = simulate_recording(recording, cost=OneSecond(), host=NO_HOST)
    assert simulated.finished + simulated.aborted == len(jobs)
    assert simulated.cached_tokens > 0


def test_a_recording_without_ends_is_no_workload(tmp_path):
    bench = Bench()
    record(bench, tmp_path / "run.jsonl")
    bench.core.recorder.close()
    with pytest.raises(ValueError, match="holds no request that came to its end"):
        RecordedWorkload(Recording.open(tmp_path / "run.jsonl"))


def test_the_comparison_shows_each_figure_and_its_change(recording):
    base = simulate_recording(recording, cost=OneSecond(), host=NO_HOST)
    other = simulate_recording(recording, settings("max_num_seqs=1"), cost=OneSecond(), host=NO_HOST)
    lines = report.comparison({"simulated": base, "changed": other}, "simulated")
    assert lines[0].split() == ["simulated", "changed", "(vs", "simulated)"]
    assert any(line.startswith("TTFT p50") and "(+" in line for line in lines)
    assert any(line.startswith("requests finished") and "same" in line for line in lines)
    text = "\n".join(report.lines(dataclasses.replace(base)))
    assert "20 finished" in text
    assert "time to first token" in text
