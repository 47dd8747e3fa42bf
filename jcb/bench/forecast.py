"""Does the simulator know this machine? Calibrate on one workload, forecast others, compare with real runs.

    python -m jcb.bench.forecast [--scale 1.0] [--output forecast.json]

One workload, of more and more users in a loop, is run and recorded, and step times are fitted to it. Three others, with
other rates, lengths and knobs, are forecast and then run: step times, TTFT and TPOT are compared. Eight settings of the
knobs are ranked by forecast and by measured throughput. Everything runs in one process on one loaded engine. Exit
status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jcb.bench import real_run
from jcb.config import CacheConfig, SchedulerConfig, ServeConfig
from jcb.recording import Recording
from jcb.simulate.cost import work_of_step
from jcb.simulate.fit import Calibration, calibrate, errors, usable_steps
from jcb.simulate.recorded import recorded_stats
from jcb.simulate.report import columns
from jcb.simulate.simulation import Simulation
from jcb.simulate.stats import RunStats
from jcb.simulate.what_if import spec_of
from jcb.simulate.workloads import Synthetic

if TYPE_CHECKING:
    from jcb.engine.build import Engine

STEP_TARGET, LATENCY_TARGET, TAU_TARGET = 0.15, 0.20, 0.80
CEILING = SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=256, max_model_len=1024)


@dataclass(frozen=True)
class Trial:
    """One workload under one setting of the knobs, at most those of CEILING."""

    name: str
    workload: Synthetic
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 256

    @property
    def scheduler(self) -> SchedulerConfig:
        return dataclasses.replace(
            CEILING, max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens
        )

    @property
    def settings(self) -> dict[str, object]:
        """The knobs by full path."""
        return {
            "scheduler.max_num_seqs": self.max_num_seqs,
            "scheduler.max_num_batched_tokens": self.max_num_batched_tokens,
        }

    def at_rate(self, rate: float) -> Trial:
        """The same with so many requests a second."""
        return dataclasses.replace(self, workload=dataclasses.replace(self.workload, rate=rate))


def calibration_trials(scale: float) -> tuple[Trial, ...]:
    """More and more users in a loop, with prompts of all lengths: every program runs."""
    return tuple(
        Trial(
            f"calibration, {users} users",
            Synthetic(pattern="closed", users=users, requests=_count(requests, scale), prompt="exponential(90)",
                      output="exponential(24)", max_model_len=1024, seed=users),
        )
        for users, requests in ((1, 6), (5, 20), (12, 30), (30, 40))
    )  # fmt: skip


def forecast_trials(scale: float, capacity: Callable[[Trial], float]) -> tuple[Trial, ...]:
    """Other rates, lengths and knobs than those of the calibration.

    capacity: requests a second of a trial that never waits for one; the open ones are sent at a share of it.
    """
    chat = Trial(
        "chat, half load",
        Synthetic(pattern="poisson", requests=_count(30, scale), prompt="lognormal(60,40)",
                  output="exponential(40)", max_model_len=1024, seed=2),
    )  # fmt: skip
    bursts = Trial(
        "bursts of long prompts, small chunks",
        Synthetic(pattern="gamma", cv=2.0, requests=_count(24, scale), prompt="uniform(150,500)",
                  output="exponential(16)", max_model_len=1024, seed=3),
        max_num_batched_tokens=64,
    )  # fmt: skip
    loop = Trial(
        "twelve users in a loop, eight slots",
        Synthetic(pattern="closed", users=12, requests=_count(60, scale), prompt="lognormal(100,90)",
                  output="uniform(10,40)", max_model_len=1024, seed=4),
        max_num_seqs=8,
        max_num_batched_tokens=128,
    )  # fmt: skip
    return chat.at_rate(0.5 * capacity(chat)), bursts.at_rate(0.6 * capacity(bursts)), loop


def knob_trials(scale: float) -> tuple[Trial, ...]:
    """The same burst under eight settings."""
    burst = Synthetic(
        pattern="burst", requests=_count(32, scale), prompt="lognormal(60,50)", output="exponential(16)",
        max_model_len=1024, seed=5,
    )  # fmt: skip
    settings = ((1, 64), (2, 64), (4, 64), (8, 64), (16, 16), (16, 256), (32, 32), (32, 256))
    return tuple(Trial(f"{seqs} seqs, {tokens} tokens", burst, seqs, tokens) for seqs, tokens in settings)


def _count(requests: int, scale: float) -> int:
    return max(round(requests * scale), 6)


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Agreement of two rankings: concordant less discordant pairs over all; 1 is the same order."""
    pairs = list(itertools.combinations(range(len(a)), 2))
    signs = [np.sign(a[i] - a[j]) * np.sign(b[i] - b[j]) for i, j in pairs]
    return float(sum(signs)) / len(pairs)


def machine_speed() -> dict[str, float]:
    """GB/s that one core reads and GFLOP/s of float32 that numpy multiplies: what else ran beside a figure."""
    array, square = np.ones(16 << 20, np.float32), np.ones((768, 768), np.float32)
    read = min(_timed(lambda: array.sum()) for _ in range(5))
    multiply = min(_timed(lambda: square @ square) for _ in range(5))
    return {"read_gbs": array.nbytes / read / 1e9, "gflops": 2 * 768**3 / multiply / 1e9}


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


class Forecast:
    """Runs trials on one engine and compares them with what the calibration says."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine = engine
        self._folder = folder
        self._count = itertools.count()

    def run(self, trial: Trial) -> tuple[Recording, RunStats]:
        """For real."""
        path = self._folder / f"{next(self._count)}.jsonl"
        begin = time.perf_counter()
        recording = real_run.run(self._engine, trial.workload, path, trial.scheduler)
        print(f"  ran {trial.name} in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        return recording, recorded_stats(recording)

    def compare(self, trial: Trial, calibration: Calibration) -> dict[str, Any]:
        """Forecast and measured medians, and the median error of a step's time."""
        speed = machine_speed()
        recording, real = self.run(trial)
        simulated = forecast_of(recording, calibration, trial)
        steps = usable_steps(recording)
        fit = errors(calibration.cost, [work_of_step(s) for s in steps], np.array([s.device for s in steps]))
        return {
            "name": trial.name,
            "machine": speed,
            "steps": fit.steps,
            "step_error": fit.median_error,
            "ttft": _pair(simulated.ttft.quantile(0.5), real.ttft.quantile(0.5)),
            "tpot": _pair(simulated.tpot.quantile(0.5), real.tpot.quantile(0.5)),
            "tokens_per_second": _pair(
                simulated.per_second(simulated.output_tokens), real.per_second(real.output_tokens)
            ),
        }

    def rank(self, trials: Sequence[Trial], calibration: Calibration) -> dict[str, Any]:
        """Throughput of each, forecast and measured, and how far the two orders agree."""
        pairs: list[dict[str, float]] = []
        for trial in trials:
            recording, real = self.run(trial)
            simulated = forecast_of(recording, calibration, trial)
            pairs.append(_pair(simulated.per_second(simulated.output_tokens), real.per_second(real.output_tokens)))
        tau = kendall_tau([pair["forecast"] for pair in pairs], [pair["measured"] for pair in pairs])
        settings = [{"name": trial.name, **pair} for trial, pair in zip(trials, pairs, strict=True)]
        return {"settings": settings, "kendall_tau": tau}


def forecast_of(recording: Recording, calibration: Calibration, trial: Trial) -> RunStats:
    """`trial` on a simulated clock; of `recording` only the engine's sizes are used.

    Users in a loop ask again when their simulated answer ends, so that a faster forecast does not empty the queue.
    """
    spec = spec_of(recording, trial.settings, cost=calibration.cost, host=calibration.host)
    return Simulation(spec, trial.workload).run()


def capacity_of(recording: Recording, calibration: Calibration, trial: Trial) -> float:
    """Requests a second of `trial` when all are there from the start, by forecast."""
    burst = dataclasses.replace(trial.workload, pattern="burst", requests=200)
    stats = forecast_of(recording, calibration, dataclasses.replace(trial, workload=burst))
    return stats.per_second(stats.finished)


def _pair(forecast: float, measured: float) -> dict[str, float]:
    return {
        "forecast": forecast,
        "measured": measured,
        "error": abs(forecast - measured) / measured if measured else 0.0,
    }


def study(scale: float, folder: Path, model: str = "default") -> dict[str, Any]:
    """The whole comparison as JSON values."""
    begin = time.perf_counter()
    config = ServeConfig(model=model, scheduler=CEILING, cache=CacheConfig(page_size=16, memory_gib=0.5))
    forecast = Forecast(real_run.load(config), folder)
    speed = machine_speed()
    recordings = [forecast.run(trial)[0] for trial in calibration_trials(scale)]
    calibration = calibrate(recordings)
    calibration.save(folder / "calibration.json")
    trials = forecast_trials(scale, partial(capacity_of, recordings[0], calibration))
    forecasts = [forecast.compare(trial, calibration) for trial in trials]
    ranking = forecast.rank(knob_trials(scale), calibration)
    return {
        "model": calibration.model,
        "dtype": calibration.dtype,
        "scale": scale,
        "calibration": {"machine": speed, **dataclasses.asdict(calibration.fit)},
        "forecasts": forecasts,
        "ranking": ranking,
        "median_step_error": statistics.median(each["step_error"] for each in forecasts),
        "seconds": time.perf_counter() - begin,
    }


def missed(result: dict[str, Any]) -> list[str]:
    """Targets that were not met, in words."""
    out = []
    for each in result["forecasts"]:
        if each["step_error"] >= STEP_TARGET:
            out.append(f"{each['name']}: median step error {each['step_error']:.1%} is not below {STEP_TARGET:.0%}")
        out += [
            f"{each['name']}: {word.upper()} is off by {each[word]['error']:.1%}, more than {LATENCY_TARGET:.0%}"
            for word in ("ttft", "tpot")
            if each[word]["error"] > LATENCY_TARGET
        ]
    if result["ranking"]["kendall_tau"] < TAU_TARGET:
        out.append(f"Kendall tau {result['ranking']['kendall_tau']:.2f} is below {TAU_TARGET}")
    return out


def show(result: dict[str, Any]) -> None:
    """Prints the tables."""
    fit = result["calibration"]
    print(
        f"\ncalibration: {fit['steps']} steps, median error {fit['median_error']:.1%}, R² {fit['r_squared']:.3f}; "
        f"machine {fit['machine']['read_gbs']:.1f} GB/s, {fit['machine']['gflops']:.0f} GFLOP/s"
    )
    head = ("workload", "steps", "step error", "TTFT p50 forecast / real", "TPOT p50 forecast / real", "tokens/s")
    rows = [head]
    for each in result["forecasts"]:
        ttft, tpot, rate = each["ttft"], each["tpot"], each["tokens_per_second"]
        rows.append(
            (
                each["name"],
                str(each["steps"]),
                f"{each['step_error']:.1%}",
                f"{ttft['forecast']:.3f} / {ttft['measured']:.3f} s ({ttft['error']:.0%})",
                f"{tpot['forecast'] * 1e3:.0f} / {tpot['measured'] * 1e3:.0f} ms ({tpot['error']:.0%})",
                f"{rate['forecast']:.1f} / {rate['measured']:.1f} ({rate['error']:.0%})",
            )
        )
    print("", *columns(rows), sep="\n")
    ranked = [("setting", "tokens/s forecast", "tokens/s real", "error")]
    ranked += [
        (row["name"], f"{row['forecast']:.1f}", f"{row['measured']:.1f}", f"{row['error']:.0%}")
        for row in result["ranking"]["settings"]
    ]
    print("", *columns(ranked), sep="\n")
    print(f"Kendall tau {result['ranking']['kendall_tau']:.2f}; all of it took {result['seconds']:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes JSON; 1 when a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m jcb.bench.forecast", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of requests (default 1)")
    parser.add_argument("--model", default="default", help="model to run (default: the embedded one)")
    parser.add_argument("--output", type=Path, help="file for the figures as JSON")
    parser.add_argument("--keep", type=Path, help="folder for the recordings and the calibration")
    options = parser.parse_args(arguments)
    if not options.scale > 0:
        parser.error(f"--scale {options.scale} must be above 0")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = study(options.scale, folder, options.model)
    show(result)
    problems = missed(result)
    if options.output is not None:
        options.output.write_text(json.dumps(result | {"missed": problems}, indent=1) + "\n", encoding="utf-8")
    for problem in problems:
        print(f"missed: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
