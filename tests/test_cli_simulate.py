"""The lab's commands as they are typed."""

import json

import pytest

from jcb import cli
from tests.fakes import Bench
from tests.simulate.test_replay import drive, record

SMALL = ["--model", "preset:smollm2-135m", "--chip", "h200", "--max-model-len", "2048"]


@pytest.fixture
def recording(tmp_path):
    bench = Bench(num_pages=64)
    collect = bench.executor.collect

    def slow(handle):
        bench.now += 0.01 + 0.001 * len(handle[0].rows)
        return collect(handle)

    bench.executor.collect = slow
    path = tmp_path / "run.jsonl"
    record(bench, path)
    drive(bench, 1)
    return path


def test_simulate_prints_figures_with_units(capsys):
    assert cli.main(["simulate", *SMALL, "--workload", "poisson rate=50 requests=40 prompt=64 output=16"]) == 0
    text = capsys.readouterr().out
    assert "1 engine(s), each on NVIDIA H200" in text
    for word in ("time to first token", "time per output token", "output tokens/s", "device busy", "padding", "ms"):
        assert word in text


def test_simulate_prints_json_and_the_seed_counts(capsys):
    def run(seed):
        command = ["simulate", *SMALL, "--json", "--seed", str(seed), "--replicas", "2", "--router", "round-robin"]
        assert cli.main([*command, "--workload", "poisson rate=50 requests=40"]) == 0
        result = json.loads(capsys.readouterr().out)
        del result["simulated_in"]
        return result

    assert run(1)["requests"]["finished"] == 40
    assert run(1) == run(1) != run(2)


def test_simulate_splits_a_model_over_all_chips_named(capsys):
    command = ["simulate", "--model", "preset:llama-3.1-8b", "--chip", "h200:4", "--max-model-len", "4096"]
    assert cli.main([*command, "--workload", "burst requests=8 prompt=64 output=8"]) == 0
    assert "each on 4 x NVIDIA H200" in capsys.readouterr().out


def test_simulate_with_a_pool_for_prompts(capsys):
    command = ["simulate", *SMALL, "--prefill-replicas", "1", "--link", "nvlink4"]
    assert cli.main([*command, "--workload", "burst requests=8 prompt=64 output=8"]) == 0
    assert "2 engine(s)" in capsys.readouterr().out


def test_a_recording_is_calibrated_and_simulated(recording, tmp_path, capsys):
    output = tmp_path / "c.json"
    assert cli.main(["simulate", "--calibrate", str(recording), "--output", str(output)]) == 0
    assert "median error" in capsys.readouterr().out
    command = ["simulate", *SMALL, "--calibration", str(output), "--workload", str(recording)]
    assert cli.main([*command, "--chip", "cpu"]) == 0
    assert "finished" in capsys.readouterr().out
    assert cli.main(command) == 2
    assert "the calibration is of a cpu, NVIDIA H200 141GB HBM3e is a gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "tsunami"], "must begin with one of poisson"),
        (["--router", "magic"], "no router 'magic' is known"),
        (["--chip", "abacus"], "no chip 'abacus' is known"),
        (["--prefill-replicas", "1", "--link", "string"], "no link 'string' is known"),
        (["--replicas", "0"], "must be at least 1"),
        (["--calibration", "none.json"], "cannot be read"),
    ],
)
def test_bad_flags_are_told_in_one_line(arguments, message, capsys):
    assert cli.main(["simulate", "--model", "preset:smollm2-135m", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_replay_checks_and_compares(recording, capsys):
    assert cli.main(["replay", str(recording), "--check"]) == 0
    assert "came again as they were" in capsys.readouterr().out
    assert cli.main(["replay", str(recording), "--set", "max_num_seqs=1"]) == 0
    text = capsys.readouterr().out
    assert "changed: scheduler.max_num_seqs=1" in text
    assert "changed (vs simulated)" in text
    assert "step times: median error" in text
    assert cli.main(["replay", str(recording), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"settings", "recorded", "simulated"}


def test_replay_says_where_a_recording_went_another_way(recording, capsys):
    lines = recording.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if '"arrival"' in line)
    event = json.loads(lines[first])
    event["prompt_tokens"] += 3
    lines[first] = json.dumps(event)
    recording.write_text("\n".join(lines) + "\n")
    assert cli.main(["replay", str(recording), "--check"]) == 1
    assert "then this did not" in capsys.readouterr().out


def test_replay_refuses_what_it_cannot_read(tmp_path, capsys):
    assert cli.main(["replay", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
