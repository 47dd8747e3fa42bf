"""The search for settings: the best of all pairs, what is said when there is none, the file that is written."""

import dataclasses
import json
import math

import pytest

from jcb import cli, config_file
from jcb.chips import CHIPS
from jcb.config import ServeConfig
from jcb.models.presets import PRESETS
from jcb.plan import goal
from jcb.plan.goal import Goal, Trial, search
from jcb.simulate.setup import make_engine
from jcb.simulate.simulation import Simulation
from jcb.simulate.workloads import parse

MODEL, CHIP = PRESETS["llama-3.1-8b"], CHIPS["h200"]
CONFIG = config_file.override(ServeConfig(), {"max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 2048})
WORKLOAD = parse("poisson rate=20 requests=40 prompt=uniform(50,900) output=exponential(20) max_model_len=2048")


@pytest.fixture(autouse=True)
def few_pairs(monkeypatch):
    monkeypatch.setattr(goal, "SEQS", (2, 16, 32))
    monkeypatch.setattr(goal, "TOKENS", (64, 1024))


def found(text, workload=WORKLOAD, **options):
    return search(CONFIG, MODEL, CHIP, 1, Goal.parse(text, **options), workload)


def test_the_best_is_the_best_of_all_pairs():
    """Trials that were left out would have changed nothing."""
    result = found("ttft=100ms,tpot=10ms")
    assert result.best.is_met
    every = {}
    for tokens in (64, 256, 1024):
        for seqs in (2, 8, 16, 32):
            config = config_file.override(CONFIG, {"max_num_seqs": seqs, "max_num_batched_tokens": tokens})
            stats = Simulation(make_engine(MODEL, CHIP, config).spec, WORKLOAD).run()
            every[seqs, tokens] = max(stats.ttft.quantile(0.9) / 0.1, stats.tpot.quantile(0.9) / 0.01)
    tried = {(trial.max_num_seqs, trial.max_num_batched_tokens): trial.worst for trial in result.trials}
    assert {pair: every[pair] for pair in tried} == pytest.approx(tried)
    assert min(every.values()) == pytest.approx(result.best.worst, rel=0.02)
    assert max(every.values()) > 1.5 * min(every.values())


def test_the_settings_are_those_of_the_best_trial():
    result = found("ttft=100ms")
    scheduler = result.config.scheduler
    assert scheduler.max_num_seqs == result.best.max_num_seqs
    assert scheduler.max_num_batched_tokens == result.best.max_num_batched_tokens
    assert scheduler.max_model_len == 2048
    again = found("ttft=100ms")
    assert again == result


def test_a_stricter_percentile_is_harder():
    assert found("ttft=100ms", percentile=100).best.worst > found("ttft=100ms", percentile=50).best.worst


def test_what_the_chip_alone_cannot_do_is_said():
    result = found("tpot=2ms")  # reading 15.01 GB at 4.8 TB/s takes 3.1 ms
    assert not result.best.is_met
    assert result.binds.startswith("tpot cannot be below 3.1 ms on this chip")


def test_a_load_that_is_too_high_is_said():
    heavy = dataclasses.replace(WORKLOAD, rate=2000.0, requests=200)
    result = found("ttft=60ms", heavy)
    assert not result.best.is_met
    assert result.binds.startswith("the load: what arrives in 0.1 s takes")


def test_knobs_that_pull_apart_are_said():
    values = {"ttft": 0.2, "tpot": 0.03}
    trial = Trial(max_num_seqs=8, max_num_batched_tokens=64, values=values, worst=3.0, lost=0, output_rate=1.0, rows=8,
                  seconds=2.0)  # fmt: skip
    engine = make_engine(MODEL, CHIP, CONFIG)
    said = goal._binds(engine, Goal.parse("ttft=500ms,tpot=10ms"), WORKLOAD, trial)
    assert said.startswith("tpot: prompts and answers share the device")


def test_requests_without_an_answer_miss_the_goal():
    """A queue of one refuses most of those who come while it waits."""
    config = config_file.override(CONFIG, {"max_queued": 1})
    rush = dataclasses.replace(WORKLOAD, rate=5000.0)
    result = search(config, MODEL, CHIP, 1, Goal.parse("ttft=100s"), rush)
    assert result.best.lost > 4
    assert math.isinf(result.best.worst)
    assert "the load" in result.binds


def test_the_command_writes_settings_that_load(tmp_path, capsys):
    output = tmp_path / "found.toml"
    command = ["plan", "--model", "preset:llama-3.1-8b", "--chip", "h200", "--max-model-len", "2048", "--goal"]
    command += ["ttft=1s,tpot=50ms", "--output", str(output), "--max-num-seqs", "8", "--workload"]
    command += ["closed users=4 requests=12 prompt=100 output=10"]
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    config = config_file.load(output)
    line = f"max_num_seqs = {config.scheduler.max_num_seqs}, max_num_batched_tokens = "
    assert line + str(config.scheduler.max_num_batched_tokens) in printed
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["max_num_seqs"] == config.scheduler.max_num_seqs
    command[command.index("ttft=1s,tpot=50ms")] = "ttft=1ms"
    assert cli.main(command) == 1
    assert "what binds: ttft cannot be below" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "ttft", "ttft=500", "ttft=-1ms", "speed=3ms", "ttft=0ms", "ttft=1ms,"])
def test_goals_that_make_no_sense(text):
    with pytest.raises(ValueError, match="as in ttft=500ms"):
        Goal.parse(text)


def test_goals_in_words():
    assert Goal.parse("ttft=1.5s, itl=40ms", 99) == Goal((("ttft", 1.5), ("itl", 0.04)), 99)
    with pytest.raises(ValueError, match="--goal-percentile 0"):
        Goal.parse("ttft=1s", 0)
