"""The comparison of forecasts with real runs: its arithmetic, and its trials within what is compiled."""

import copy

import pytest

from jcb.bench import forecast
from jcb.bench.forecast import CEILING, calibration_trials, forecast_trials, kendall_tau, knob_trials, missed

RESULT = {
    "forecasts": [
        {"name": "a", "step_error": 0.1, "ttft": {"error": 0.1}, "tpot": {"error": 0.2}},
        {"name": "b", "step_error": 0.149, "ttft": {"error": 0.0}, "tpot": {"error": 0.0}},
    ],
    "ranking": {"kendall_tau": 0.8},
}


def test_kendall_tau_counts_pairs():
    assert kendall_tau([1, 2, 3], [10, 20, 30]) == 1
    assert kendall_tau([1, 2, 3], [30, 20, 10]) == -1
    assert kendall_tau([1, 2, 3, 4], [1, 2, 4, 3]) == pytest.approx(4 / 6)


def test_trials_fit_the_compiled_programs_and_differ():
    trials = (*calibration_trials(1.0), *forecast_trials(1.0, lambda trial: 2.0), *knob_trials(1.0))
    assert len(trials) == 15
    for trial in trials:
        assert trial.max_num_seqs <= CEILING.max_num_seqs
        assert trial.max_num_batched_tokens <= CEILING.max_num_batched_tokens
        assert trial.scheduler.max_num_seqs == trial.max_num_seqs
        jobs = list(trial.workload.jobs())
        assert all(len(job.prompt) + job.output_tokens <= CEILING.max_model_len for job in jobs)
    assert len({(trial.max_num_seqs, trial.max_num_batched_tokens) for trial in knob_trials(1.0)}) == 8
    assert len({trial.workload for trial in knob_trials(1.0)}) == 1


def test_open_workloads_are_sent_at_a_share_of_what_the_machine_can_take():
    chat, bursts, loop = forecast_trials(1.0, lambda trial: 10.0 if trial.max_num_batched_tokens == 64 else 4.0)
    assert (chat.workload.rate, bursts.workload.rate) == (2.0, 6.0)
    assert loop.workload.pattern == "closed"


def test_what_is_missed_is_told():
    assert missed(RESULT) == []
    bad = copy.deepcopy(RESULT)
    bad["forecasts"][0]["step_error"] = 0.15
    bad["forecasts"][1]["ttft"]["error"] = 0.21
    bad["ranking"]["kendall_tau"] = 0.79
    assert len(missed(bad)) == 3


def test_the_machine_is_measured_beside_it():
    speed = forecast.machine_speed()
    assert speed["read_gbs"] > 0.1
    assert speed["gflops"] > 0.1


def test_the_tables_show_forecast_beside_measured(capsys):
    pair = {"forecast": 0.5, "measured": 0.4, "error": 0.25}
    each = {"name": "chat", "steps": 70, "step_error": 0.12, "ttft": pair, "tpot": pair, "tokens_per_second": pair}
    fit = {"steps": 230, "median_error": 0.1, "r_squared": 0.9, "machine": {"read_gbs": 9.0, "gflops": 65.0}}
    ranking = {"settings": [{"name": "1 seqs", **pair}], "kendall_tau": 0.93}
    forecast.show({"calibration": fit, "forecasts": [each], "ranking": ranking, "seconds": 600.0})
    text = capsys.readouterr().out
    for part in ("230 steps", "12.0%", "0.500 / 0.400 s (25%)", "500 / 400 ms (25%)", "Kendall tau 0.93", "9.0 GB/s"):
        assert part in text, part


def test_bad_flags_are_refused(capsys):
    with pytest.raises(SystemExit):
        forecast.main(["--scale", "0"])
    assert "must be above 0" in capsys.readouterr().err
