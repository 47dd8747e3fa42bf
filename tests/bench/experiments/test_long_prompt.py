"""What must hold of the long prompt's experiment, and the arithmetic by hand that it has to agree with."""

import dataclasses
import itertools

import pytest

from jcb.bench.experiments import long_prompt
from jcb.bench.experiments.long_prompt import Interruption, Sizes, _Watch, choose
from jcb.bench.experiments.sim_lab import Pool, SimLab
from jcb.chips import chip_named
from jcb.models.presets import preset

SMALL = Sizes(users=6, context=256, prompt=3000, answer=80, budgets=(1024, 256, 64), pool=Pool("nvlink4", 1024))


@pytest.fixture(scope="module")
def study(lab):
    return long_prompt.run(lab, SMALL)


def test_a_smaller_budget_shortens_gaps_and_delays_the_prompt(study):
    cells = [cell for cell in study.data["cells"] if cell["budget"]]
    assert [cell["budget"] for cell in cells] == [3007, 1024, 256, 64]
    for large, small in itertools.pairwise(cells):
        assert small["ttft"] > large["ttft"]
        assert small["gap"]["max"] < large["gap"]["max"]
        assert small["tokens_per_second"] < large["tokens_per_second"]
        assert small["steps"] > large["steps"]
    assert all(cell["preemptions"] == 0 == cell["memory_missing"] for cell in cells)
    assert all(cell["gap"]["p50"] <= cell["gap"]["p99"] <= cell["gap"]["max"] for cell in cells)


def test_another_device_leaves_the_users_alone(study):
    whole, *_, other = study.data["cells"]
    assert other["name"] == "other device"
    assert other["gap"]["max"] < 1.1 * study.data["quiet_gap"] < whole["gap"]["max"]
    transfer = 3000 * 131_072 / (450e9 * 0.85)
    steps = (other["second_token"] - other["ttft"] - transfer) / study.data["quiet_gap"]
    assert 1 <= steps <= 3  # it may wait for two steps that were planned before


def test_the_finding_states_figures_of_the_data(study):
    cells = {cell["name"]: cell for cell in study.data["cells"]}
    assert "max_num_batched_tokens" in study.finding
    assert f"{cells['64']['steps']:,} passes" in study.finding
    assert f"{cells['64']['tokens_per_second']:,.0f} instead of" in study.finding
    assert study.data["best"] in study.finding


def test_the_best_budget_is_the_fastest_that_keeps_to_the_goal():
    cells = [
        {"name": "a", "budget": 300, "ttft": 1.0, "gap": {"max": 0.9}},
        {"name": "b", "budget": 200, "ttft": 2.0, "gap": {"max": 0.05}},
        {"name": "c", "budget": 100, "ttft": 3.0, "gap": {"max": 0.01}},
        {"name": "pool", "budget": 0, "ttft": 0.5, "gap": {"max": 0.01}},
    ]
    assert choose(cells, 0.05)["name"] == "b"
    assert choose(cells, 0.001) is None


def test_answers_that_end_too_soon_are_refused(lab):
    with pytest.raises(ValueError, match="answer=8 is too short"):
        long_prompt.run(lab, dataclasses.replace(SMALL, answer=8))


def test_memory_that_a_chip_lacks_is_told():
    v6e = SimLab("Llama-3.1-8B", preset("llama-3.1-8b"), chip_named("v6e"))
    sizes = dataclasses.replace(SMALL, users=20, context=4096, budgets=(1024,), pool=None)
    study = long_prompt.run(v6e, sizes)
    assert study.data["cells"][0]["memory_missing"] == 0
    big = long_prompt.run(v6e, dataclasses.replace(sizes, context=5200))
    assert big.data["cells"][0]["memory_missing"] > 0.1
    assert "GiB more than one such chip has" in big.finding


# Arithmetic by hand: t = max(W / BW, 2 P (n + C) / F) + n c kv / BW + 4 H D L C (p + C / 2) / F for every chunk C of a
# prompt of 30,000 tokens among 60 users with 1,024 tokens each, Llama-3-8B in bfloat16, at 85 % of the bandwidth and
# 60 % of the peak: {chunk: (first token in s, mean gap in ms, last gap in ms)}.
BY_HAND = {
    "h200": (
        {"bandwidth": 4.3e12, "flops": 790e12},
        6.3,
        {
            128: (2.35, 10.0, 12.1),
            256: (1.87, 15.8, 20.1),
            512: (1.62, 27.5, 35.9),
            1024: (1.50, 50.1, 67.3),
            2048: (1.44, 96.2, 127),
            4096: (1.41, 177, 245),
            8192: (1.40, 349, 431),
            30000: (1.39, 1385, 1385),
        },
    ),
    "v6e": (
        {"bandwidth": 1.64e12, "flops": 920e12},
        17.0,
        {128: (4.41, 18.8, 20.6), 512: (1.63, 27.7, 34.8), 2048: (1.30, 86.6, 113), 30000: (1.19, 1194, 1194)},
    ),
}


@pytest.mark.parametrize("chip", BY_HAND)
def test_the_simulator_agrees_with_arithmetic_by_hand(chip):
    """Its chunks are the prompt's tokens alone, the knob counts those of the users too."""
    speeds, quiet, rows = BY_HAND[chip]
    lab = SimLab("Llama-3.1-8B", preset("llama-3.1-8b"), dataclasses.replace(chip_named(chip), **speeds))
    sizes = Sizes(pool=None, budgets=(), answer=300)
    for chunk in rows:
        budget = chunk + sizes.users
        settings = dataclasses.replace(sizes, budgets=(budget,)).settings(lab.page_size, fine_buckets=True)
        run = lab.run(Interruption(sizes), settings, _Watch(sizes, budget))
        first, mean, last = rows[chunk]
        long = run.tracks[sizes.long]
        begin, end = long.job.at, long.token_times[0]
        times = [at for at in run.tracks[0].token_times if begin < at <= end + 1e-9]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        assert long.ttft == pytest.approx(first, rel=0.15)
        assert sum(gaps) / len(gaps) * 1e3 == pytest.approx(mean, rel=0.15)
        assert max(gaps) * 1e3 == pytest.approx(last, rel=0.15)
        assert long_prompt._quiet_gap(run, sizes) * 1e3 == pytest.approx(quiet, rel=0.15)
