"""Traffic: its rates and lengths are those asked for, it repeats, and what is shared is shared."""

import itertools
import random
import statistics

import pytest

from jcb.simulate import lengths
from jcb.simulate.traces import Trace
from jcb.simulate.workloads import PATTERNS, Synthetic, parse
from tests.fakes import Bench
from tests.simulate.test_replay import record


def gaps(workload):
    times = [job.at for job in workload.jobs()]
    return [b - a for a, b in itertools.pairwise(times)]


def test_poisson_and_gamma_have_their_rate_and_their_burstiness():
    poisson = gaps(Synthetic(pattern="poisson", rate=5, requests=4000))
    gamma = gaps(Synthetic(pattern="gamma", rate=5, cv=3, requests=4000))
    assert statistics.mean(poisson) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(poisson) == pytest.approx(0.2, rel=0.05)
    assert statistics.mean(gamma) == pytest.approx(0.2, rel=0.1)
    assert statistics.stdev(gamma) / statistics.mean(gamma) == pytest.approx(3, rel=0.1)


def test_a_ramp_gets_faster_and_a_burst_is_one_moment():
    ramp = gaps(Synthetic(pattern="ramp", rate=1, rate_to=10, requests=2000))
    assert statistics.mean(ramp[:200]) == pytest.approx(1 / 1.45, rel=0.2)
    assert statistics.mean(ramp[-200:]) == pytest.approx(1 / 9.55, rel=0.2)
    assert set(gaps(Synthetic(pattern="burst", requests=50))) == {0.0}


def test_users_in_a_loop_send_all_requests_and_think_in_between():
    workload = Synthetic(pattern="closed", users=3, requests=10, think=2.0)
    waiting, seen = list(workload.jobs()), []
    assert len(waiting) == 3
    while waiting:
        job = waiting.pop(0)
        seen.append(job.number)
        following = workload.after(job, job.at + 1.0)
        if following is not None:
            assert following.at == job.at + 3.0
            waiting.append(following)
    assert sorted(seen) == list(range(10))


def test_turns_hold_all_that_was_said_before():
    workload = Synthetic(pattern="poisson", requests=7, turns=3, prompt="20", output="5", prefix=16, think=1.0)
    first = list(workload.jobs())
    assert [job.session for job in first] == [0, 1, 2]
    second = workload.after(first[0], 10.0)
    assert second.at == 11.0
    assert second.prompt[: len(first[0].prompt) + 5] == (*first[0].prompt, *first[0].answer)
    assert len(second.prompt) == 16 + 20 + 5 + 20
    assert workload.after(workload.after(second, 20.0), 30.0) is None
    assert workload.after(first[2], 10.0) is None, "only seven requests were asked for"


def test_groups_share_prefixes_and_nobody_shares_by_accident():
    jobs = list(Synthetic(requests=300, prefix=64, groups=5, prompt="40").jobs())
    prefixes = {job.prompt[:64] for job in jobs}
    assert len(prefixes) == 5
    assert len({job.prompt[64:80] for job in jobs}) == 300
    alone = list(Synthetic(requests=300, prompt="40").jobs())
    assert len({tuple(job.prompt[:16]) for job in alone}) == 300
    assert max(max(job.answer) for job in alone) < 2**31


def test_seeds_repeat_and_differ():
    def run(seed):
        jobs = Synthetic(requests=50, seed=seed).jobs()
        return [(job.at, len(job.prompt), job.output_tokens) for job in jobs]

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_long_requests_are_cut_to_the_model():
    jobs = list(Synthetic(requests=200, prompt="exponential(500)", output="exponential(500)", max_model_len=600).jobs())
    assert max(len(job.prompt) + job.output_tokens for job in jobs) == 600


@pytest.mark.parametrize(
    ("text", "mean", "median"),
    [
        ("constant(7)", 7, 7),
        ("30", 30, 30),
        ("uniform(10,50)", 30, 30),
        ("exponential(200)", 200, 139),
        ("lognormal(1155,1020)", 1155, 1020),
        ("azure-conversation", 1155, 1020),
        ("sharegpt", 161, 112),
    ],
)
def test_lengths_have_the_mean_and_median_that_they_say(text, mean, median):
    rng, draw = random.Random(0), lengths.parse(text)
    values = [draw(rng) for _ in range(8000)]
    assert statistics.mean(values) == pytest.approx(mean, rel=0.05)
    assert statistics.median(values) == pytest.approx(median, rel=0.05)
    assert min(values) >= 1


def test_lengths_of_a_recording_come_as_often_as_they_did(tmp_path):
    bench = Bench(num_pages=64)
    record(bench, tmp_path / "run.jsonl")
    for number in range(8):
        bench.add(str(number), range(10 if number % 4 else 20), max_tokens=3)
    bench.run()
    bench.core.recorder.close()
    rng = random.Random(0)
    prompt = lengths.parse(str(tmp_path / "run.jsonl"), side="prompt")
    values = [prompt(rng) for _ in range(2000)]
    assert set(values) == {10, 20}
    assert values.count(20) == pytest.approx(500, rel=0.15)
    assert lengths.parse(str(tmp_path / "run.jsonl"), side="output")(rng) == 3
    with pytest.raises(ValueError, match="cannot be read"):
        lengths.parse("none.jsonl")


@pytest.mark.parametrize(
    "text", ["", "gaussian(3)", "uniform(3)", "constant(-1)", "exponential(x)", "lognormal(10,20)", "exponential(0)"]
)
def test_bad_lengths_are_told(text):
    with pytest.raises(ValueError, match=r"lengths|log-normal"):
        lengths.parse(text)


def test_a_workload_in_words():
    workload = parse("closed users=4 requests=9 prompt=uniform(5,9) output=3 think=0.5 slack=2")
    assert workload == Synthetic(
        pattern="closed", users=4, requests=9, prompt="uniform(5,9)", output="3", think=0.5, slack=2.0
    )
    assert all(PATTERNS.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with one of poisson, gamma"),
        ("tsunami", "must begin with one of"),
        ("poisson rate", "must be KEY=VALUE"),
        ("poisson speed=3", "must be KEY=VALUE with a key of cv, groups"),
        ("poisson requests=many", "'requests=many' must be a int"),
        ("poisson rate=0", r"rate=0\.0 must be above 0"),
        ("poisson requests=0", "requests=0 must be at least 1"),
        ("poisson prompt=nothing", "lengths 'nothing' must be a number"),
        ("poisson slack=0.5", r"slack=0\.5 must be at least 1"),
        ("poisson think=-1", "must not be negative"),
    ],
)
def test_bad_words_are_told(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


# ---- traces


def test_azure_and_mooncake_traces_are_read_as_they_are(tmp_path):
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8\n"
    )
    jobs = list(Trace(azure).jobs())
    assert [(len(job.prompt), job.output_tokens) for job in jobs] == [(4808, 10), (3180, 8)]
    assert [job.at for job in jobs] == [0.0, pytest.approx(0.052)]
    mooncake = tmp_path / "mooncake.jsonl"
    mooncake.write_text(
        '{"timestamp": 1000, "input_length": 1100, "output_length": 4, "hash_ids": [7, 8, 9]}\n'
        '{"timestamp": 3000, "input_length": 1030, "output_length": 4, "hash_ids": [7, 8, 11]}\n'
    )
    one, two = Trace(mooncake).jobs()
    assert (len(one.prompt), len(two.prompt), two.at) == (1100, 1030, 2.0)
    assert one.prompt[:1024] == two.prompt[:1024]
    assert one.prompt[1024:1030] != two.prompt[1024:]


def test_a_trace_can_be_cut_short_and_sped_up(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("time,prompt,output,session,priority\n" + "".join(f"{i},100,50,s{i % 2},1\n" for i in range(9)))
    jobs = list(Trace(path, limit=4, scale=0.5, max_model_len=120).jobs())
    assert [job.at for job in jobs] == [0.0, 0.5, 1.0, 1.5]
    assert {(len(job.prompt), job.output_tokens, job.priority) for job in jobs} == {(70, 50, 1)}
    assert jobs[0].session == jobs[2].session != jobs[1].session


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,prompt\n1,2\n", "line 2: no output"),
        ("time,prompt,output\n1,2,3\n0,2,3\n", "line 3: times must ascend"),
        ("time,prompt,output\n1,two,3\n", "line 2"),
        ("time,prompt,output\nnoon,2,3\n", "line 2"),
        ("time,prompt,output\n1,0,3\n", "line 2: job 0: 0 prompt"),
    ],
)
def test_a_bad_trace_is_told_with_its_line(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        list(Trace(tmp_path / "t.csv").jobs())
    with pytest.raises(ValueError, match="cannot be read"):
        Trace(tmp_path / "none.csv")
