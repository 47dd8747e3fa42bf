"""Settings that meet a goal: pairs of the two main knobs, each served by the real scheduler on a simulated chip."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jcb.chips import Chip
from jcb.config import ModelConfig, ServeConfig, replace
from jcb.plan.planner import fitting_engine, floor
from jcb.simulate.fit import Calibration
from jcb.simulate.setup import Engine, timed_engine
from jcb.simulate.simulation import Simulation
from jcb.simulate.stats import RunStats, Summary
from jcb.simulate.workloads import Synthetic

SEQS = (4, 8, 16, 32, 64, 128, 256, 512)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
OVERDUE = 0.25
"""The load is too high where serving goes on for longer than this share of the time in which requests arrive."""

_METRICS: dict[str, Callable[[RunStats], Summary]] = {
    "ttft": lambda stats: stats.ttft,
    "tpot": lambda stats: stats.tpot,
    "itl": lambda stats: stats.gaps,
    "e2e": lambda stats: stats.latency,
}
_UNITS = {"ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Goal:
    """Most seconds of each metric, to be held by `percentile` per cent of requests (of gaps for itl)."""

    limits: tuple[tuple[str, float], ...]
    percentile: float = 90.0

    @staticmethod
    def parse(text: str, percentile: float = 90.0) -> Goal:
        """From "ttft=500ms,tpot=40ms". ValueError names the part at fault."""
        if not 0 < percentile <= 100:
            raise ValueError(f"--goal-percentile {percentile} must be above 0 and at most 100")
        limits: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*([a-z0-9]+)\s*=\s*([0-9]*\.?[0-9]+)\s*(ms|s)\s*", part)
            if match is None or match[1] not in _METRICS or not float(match[2]):
                raise ValueError(f"--goal {part!r} must be one of {', '.join(_METRICS)} with a time, as in ttft=500ms")
            limits[match[1]] = float(match[2]) * _UNITS[match[3]]
        return Goal(tuple(limits.items()), percentile)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One pair of settings and what the workload came to under it. values: seconds of each metric at the percentile.

    worst: the largest share of its limit that a metric takes; up to 1 the goal is met. lost: requests without an
    answer. rows: most in one step. seconds: from the first arrival to the last end.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    values: dict[str, float]
    worst: float
    lost: int
    output_rate: float
    rows: int
    seconds: float

    @property
    def is_met(self) -> bool:
        return self.worst <= 1


@dataclass(frozen=True, kw_only=True)
class Search:
    """All trials, and the best: the one with the most room below the goal, or the nearest to it."""

    goal: Goal
    workload: Synthetic
    config: ServeConfig  # with the settings of `best`
    best: Trial
    trials: tuple[Trial, ...]
    binds: str


def search(
    config: ServeConfig, model: ModelConfig, chip: Chip, devices: int, goal: Goal, workload: Synthetic,
    progress: Callable[[str, int, int], None] | None = None, fitted: Calibration | None = None,
) -> Search:  # fmt: skip
    """Try max_num_seqs × max_num_batched_tokens; buckets are left to the usual ladders, which fit any pair.

    More max_num_seqs than a trial made use of are not tried: they would change nothing.
    progress("simulate", done, total). fitted: step times instead of the chip's roofline. ValueError where the model
    does not fit the chip.
    """
    config = replace(config, "scheduler", decode_row_buckets=(), prefill_row_buckets=(), token_buckets=())
    given = config.scheduler
    fitting_engine(config, model, chip, devices, fitted)
    pairs = list(_pairs(given.max_num_seqs, given.max_num_batched_tokens))
    trials: list[Trial] = []
    for index, (tokens, seqs) in enumerate(pairs):
        last = trials[-1] if trials and trials[-1].max_num_batched_tokens == tokens else None
        if last is None or last.rows == last.max_num_seqs:  # else there was room for more: no one waited for a slot
            engine = timed_engine(model, chip, _with(config, devices, seqs, tokens), fitted)
            trials.append(_trial(engine, goal, workload))
        if progress is not None:
            progress("simulate", index + 1, len(pairs))
    best = min(trials, key=lambda trial: (trial.worst, trial.max_num_batched_tokens, trial.max_num_seqs))
    chosen = _with(config, devices, best.max_num_seqs, best.max_num_batched_tokens)
    return Search(
        goal=goal,
        workload=workload,
        config=chosen,
        best=best,
        trials=tuple(trials),
        binds="" if best.is_met else _binds(timed_engine(model, chip, chosen, fitted), goal, workload, best),
    )


def _pairs(seqs: int, tokens: int) -> Iterator[tuple[int, int]]:
    """(max_num_batched_tokens, max_num_seqs) to try: the usual sizes and those of the configuration, ascending."""
    for budget in sorted({*TOKENS, tokens}):
        for rows in sorted({*SEQS, seqs}):
            if rows <= budget:
                yield budget, rows


def _with(config: ServeConfig, devices: int, seqs: int, tokens: int) -> ServeConfig:
    config = replace(config, "mesh", tensor_parallel=devices)
    return replace(config, "scheduler", max_num_seqs=seqs, max_num_batched_tokens=tokens)


def _trial(engine: Engine, goal: Goal, workload: Synthetic) -> Trial:
    stats = Simulation(engine.spec, workload).run()
    lost = stats.refused + stats.failed + stats.aborted
    share = goal.percentile / 100
    values = {name: _METRICS[name](stats).quantile(share) for name, _ in goal.limits}
    too_many = lost > (1 - share) * workload.requests
    worst = math.inf if too_many else max(values[name] / limit for name, limit in goal.limits)
    return Trial(
        max_num_seqs=engine.config.scheduler.max_num_seqs,
        max_num_batched_tokens=engine.config.scheduler.max_num_batched_tokens,
        values=values,
        worst=worst,
        lost=lost,
        output_rate=stats.per_second(stats.output_tokens),
        rows=round(stats.occupancy.maximum),
        seconds=stats.elapsed,
    )


def _binds(engine: Engine, goal: Goal, workload: Synthetic, best: Trial) -> str:
    """Why the nearest trial misses the goal: the chip alone, its load, or that the knobs pull apart."""
    jobs = list(workload.jobs())
    prompt, output = (sorted(lengths)[len(lengths) // 2] for lengths in _lengths(jobs))
    least = floor(engine, 1, prompt, output)
    for name, limit in goal.limits:
        bare = {"ttft": least.ttft, "tpot": least.tpot, "itl": least.tpot}.get(name, least.ttft + output * least.tpot)
        if bare > limit:
            return (
                f"{name} cannot be below {bare * 1e3:,.1f} ms on this chip, even for one client and with no overhead "
                f"({prompt:,} tokens in, {output:,} out): more chips, a smaller data type or a smaller model"
            )
    arriving = jobs[-1].at
    late = best.seconds - arriving > max(OVERDUE * arriving, 3 * (least.ttft + output * least.tpot))
    if (arriving and late) or math.isinf(best.worst):
        return (
            f"the load: what arrives in {arriving:,.1f} s takes {best.seconds:,.1f} s to serve: fewer requests, or "
            "more or faster chips"
        )
    missed = [name for name, limit in goal.limits if best.values[name] > limit]
    return (
        f"{' and '.join(missed)}: prompts and answers share the device; larger steps finish prompts sooner and make "
        "every answer's next token wait longer"
    )


def _lengths(jobs: list) -> tuple[list[int], list[int]]:
    return [len(job.prompt) for job in jobs], [job.output_tokens for job in jobs]


def lines(found: Search, shown: int = 5) -> Iterator[str]:
    """The answer, and the trials next to it."""
    best, goal = found.best, found.goal
    asked = ", ".join(f"{name} ≤ {limit * 1e3:,.0f} ms" for name, limit in goal.limits)
    met = sum(trial.is_met for trial in found.trials)
    yield f"goal: {asked} for {goal.percentile:g} % of {found.workload.requests:,} requests"
    if best.is_met:
        yield (
            f"met by {met} of {len(found.trials)} settings; most room below it: max_num_seqs = {best.max_num_seqs}, "
            f"max_num_batched_tokens = {best.max_num_batched_tokens}"
        )
    else:
        yield (
            f"met by none of {len(found.trials)} settings; nearest: max_num_seqs = {best.max_num_seqs}, "
            f"max_num_batched_tokens = {best.max_num_batched_tokens}"
        )
        yield f"what binds: {found.binds}"
    names = [name for name, _ in goal.limits]
    heads = "".join(f"{f'{name} ms':>12}" for name in names)
    yield f"{'max_num_seqs':>13}{'max_num_batched_tokens':>24}{heads}{'lost':>7}{'tokens/s':>11}{'most rows':>11}"
    for trial in sorted(found.trials, key=lambda trial: trial.worst)[:shown]:
        values = "".join(f"{trial.values[name] * 1e3:>12,.1f}" for name in names)
        yield (
            f"{trial.max_num_seqs:>13}{trial.max_num_batched_tokens:>24}{values}{trial.lost:>7}"
            f"{trial.output_rate:>11,.0f}{trial.rows:>11}"
        )
