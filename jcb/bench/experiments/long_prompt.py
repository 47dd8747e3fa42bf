"""A long prompt arrives while others are in the middle of their answers: what the budget of tokens a step decides.

All users write with about the same context when the prompt comes; from then on the budget is the one under test.
A tracer request, sent last, ends when everybody writes, and brings the prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcb.bench.experiments.lab import Lab, Run, Settings
from jcb.bench.experiments.picture import legend, style
from jcb.bench.experiments.sim_lab import Pool, SimLab
from jcb.bench.experiments.study import Study
from jcb.engine.core import EngineCore
from jcb.simulate.job import Job
from jcb.simulate.replica import Turn
from jcb.simulate.report import seconds

QUESTION = "A long prompt among people who are reading: how many of its tokens a step?"
WARM_UP = 8
"""Tokens that the tracer writes before the prompt comes."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """users: who write, each with `context` tokens when a prompt of `prompt` tokens arrives; answer: tokens they write.

    budgets: of max_num_batched_tokens, largest first; one more, above all, holds the whole prompt. pool: link and
    budget of the other device that computes the prompt, if any. gap_goal: seconds that no user should wait for a token.
    """

    users: int = 60
    context: int = 1024
    prompt: int = 30_000
    answer: int = 1000
    budgets: tuple[int, ...] = (8192, 4096, 2048, 1024, 512, 256, 128)
    pool: Pool | None = Pool("eth-200", 8192)
    gap_goal: float = 0.050

    @property
    def whole(self) -> int:
        """Budget that holds the prompt in one step beside everybody's token."""
        return self.prompt + self.users + 1

    @property
    def tracer(self) -> int:
        return self.users

    @property
    def long(self) -> int:
        """Number of the long prompt's request."""
        return self.users + 1

    def settings(self, page_size: int = 0, *, fine_buckets: bool = False) -> dict[str, object]:
        """What the engine is compiled for, with pages for everything at once. fine_buckets: also for every budget's
        last step, so that padding does not blur the comparison.
        """
        last = {self.prompt % (b - self.users) + self.users for b in self.budgets} if fine_buckets else set()
        buckets = sorted({*self.budgets, *last, self.whole})
        rows = self.users + 1
        longest = max(self.prompt + 64, self.context + self.answer + WARM_UP)
        tokens = self.users * (self.context + self.answer + WARM_UP) + self.prompt + 64
        return {
            "scheduler.max_num_seqs": rows,
            "scheduler.max_num_batched_tokens": self.whole,
            "scheduler.max_model_len": longest,
            "scheduler.token_buckets": tuple(buckets),
            "scheduler.prefill_row_buckets": (rows,),
            "scheduler.decode_row_buckets": (rows,),
            "cache.page_size": page_size,
            "cache.num_pages": tokens // (page_size or 16) + 2 * rows + 2,
            "cache.enable_prefix_caching": False,
        }


@dataclass
class Interruption:
    """The users and a tracer at once; the long prompt when the tracer has ended."""

    sizes: Sizes

    def jobs(self) -> Iterator[Job]:
        for user in range(self.sizes.users):
            yield self._job(user, 0.0, self.sizes.context - WARM_UP, self.sizes.answer + WARM_UP)
        yield self._job(self.sizes.tracer, 0.0, 8, WARM_UP)

    def after(self, job: Job, now: float) -> Job | None:
        return self._job(self.sizes.long, now, self.sizes.prompt, 32) if job.number == self.sizes.tracer else None

    @staticmethod
    def _job(number: int, at: float, prompt: int, answer: int) -> Job:
        begin = (number + 1) << 20
        tokens = range(begin, begin + prompt + answer)
        return Job(number=number, at=at, prompt=tokens[:prompt], answer=tokens[prompt:])


@dataclass
class _Watch:
    """Sets the budget when the tracer has ended. pages: most that were used until the prompt had its first token."""

    sizes: Sizes
    budget: int
    pages: int = 0
    is_over: bool = False

    def __call__(self, turn: Turn, core: EngineCore) -> None:
        if not self.is_over:
            self.pages = max(self.pages, turn.stats["pages_used"])
            self.is_over = any(output.request_id == str(self.sizes.long) for output in turn.outputs)
        if any(o.finish_reason and o.request_id == str(self.sizes.tracer) for o in turn.outputs):
            core.turn({"max_num_batched_tokens": self.budget})


def run(lab: Lab, sizes: Sizes) -> Study:
    """Every budget, and with a pool the prompt elsewhere, on the same requests."""
    settings = sizes.settings(lab.page_size, fine_buckets=not lab.is_real)
    runs = []
    for budget in (sizes.whole, *sizes.budgets):
        watch = _Watch(sizes, budget)
        runs.append((lab.run(Interruption(sizes), settings, watch), watch))
    if sizes.pool is not None and isinstance(lab, SimLab):
        watch = _Watch(sizes, sizes.whole)
        runs.append((lab.run(Interruption(sizes), settings, watch, pool=sizes.pool), watch))
    horizon = max(found.tracks[sizes.long].ttft for found, _ in runs)
    room = _room(lab, settings)
    cells = []
    for (found, watch), budget in zip(runs, (sizes.whole, *sizes.budgets, 0), strict=False):
        name = "whole prompt" if budget == sizes.whole else f"{budget:,}" if budget else "other device"
        missing = room(watch.pages)
        cells.append({"name": name, "budget": budget, "memory_missing": missing} | _cell(found, sizes, horizon))
    quiet = _quiet_gap(runs[0][0], sizes)
    goal = max(sizes.gap_goal, 3 * quiet)
    best = choose(cells, goal)
    data: dict[str, Any] = {
        "sizes": dataclasses.asdict(sizes),
        "quiet_gap": quiet,
        "horizon": horizon,
        "goal": goal,
        "best": best["name"] if best else None,
        "cells": cells,
    }
    return Study(
        name="long-prompt",
        question=QUESTION,
        model=lab.model,
        chip=lab.chip,
        place=lab.title,
        workload=f"{sizes.users} users are answered (context {sizes.context:,}) when a prompt of "
        f"{sizes.prompt:,} tokens arrives",
        finding=_finding(data),
        data=data,
    )


def _cell(run: Run, sizes: Sizes, horizon: float) -> dict[str, Any]:
    """One run's figures. gap: of all users' tokens from the prompt's arrival to its first token; tokens_per_second:
    prompt and users together until then; users_tokens_per_second: from the arrival on, as long as the slowest takes.
    """
    long = run.tracks[sizes.long]
    begin, end = long.job.at, long.token_times[0]
    gaps, written = [], 0
    for user in range(sizes.users):
        times = np.array(run.tracks[user].token_times)
        if times[-1] < begin + horizon:
            raise ValueError(
                f"answer={sizes.answer} is too short: a user ended {begin + horizon - times[-1]:.2f} s before the "
                "slowest prompt had its first token"
            )
        within = (times[1:] > begin) & (times[1:] <= end + 1e-9)
        gaps.append(np.diff(times)[within])
        written += int(np.sum((times > begin) & (times <= begin + horizon)))
    every = np.concatenate(gaps)
    return {
        "ttft": long.ttft,
        "second_token": long.token_times[1] - begin,
        "gap": {
            "mean": float(every.mean()),
            "p50": float(np.quantile(every, 0.5)),
            "p99": float(np.quantile(every, 0.99)),
            "max": float(every.max()),
        },
        "steps": int(np.median([len(each) for each in gaps])),
        "tokens_per_second": (sizes.prompt + len(every)) / long.ttft,
        "users_tokens_per_second": written / horizon,
        "preemptions": run.preemptions,
    }


def _quiet_gap(run: Run, sizes: Sizes) -> float:
    """The users' median gap while nobody disturbs them: just before the prompt comes."""
    begin = run.tracks[sizes.long].job.at
    gaps = []
    for user in range(sizes.users):
        times = np.array(run.tracks[user].token_times)
        gaps.append(np.diff(times[times <= begin + 1e-9])[-WARM_UP + 2 :])
    return float(np.median(np.concatenate(gaps)))


def choose(cells: Sequence[dict[str, Any]], goal: float) -> dict[str, Any] | None:
    """Of the budgets under which no gap is above `goal`, that with the earliest first token, or None."""
    fit = [cell for cell in cells if cell["budget"] and cell["gap"]["max"] <= goal]
    return min(fit, key=lambda cell: cell["ttft"], default=None)


def _room(lab: Lab, settings: Settings) -> Callable[[int], float]:
    """How many GiB so many pages are beyond what a simulated chip has for them."""
    if not isinstance(lab, SimLab):
        return lambda pages: 0.0
    limits = lab.engine({**settings, "cache.num_pages": 0}).spec.limits
    return lambda pages: max(pages - limits.usable_pages, 0) * limits.page_size * lab.kv_bytes / (1 << 30)


def _finding(data: dict[str, Any]) -> str:
    """What the cells say, in sentences."""
    cells = {cell["name"]: cell for cell in data["cells"]}
    whole, small = data["cells"][0], [cell for cell in data["cells"] if cell["budget"]][-1]
    text = (
        f"The knob is max_num_batched_tokens. With the whole prompt in one step everybody waits "
        f"{_s(whole['gap']['max'])} for a token (undisturbed: {_s(data['quiet_gap'])}); the prompt's first token comes "
        f"after {_s(whole['ttft'])}. At {small['name']} the longest gap is {_s(small['gap']['max'])}. The price: "
        f"{small['steps']:,} passes over weights and KV, a first token after {_s(small['ttft'])} "
        f"({small['ttft'] / whole['ttft']:.1f} x), and {small['tokens_per_second']:,.0f} instead of "
        f"{whole['tokens_per_second']:,.0f} tokens/s, prompt and users together, while the prompt is computed (the "
        f"users alone, over the same {_s(data['horizon'])}, get {small['users_tokens_per_second']:,.0f} instead of "
        f"{whole['users_tokens_per_second']:,.0f}: their tokens ride along). "
    )
    if data["best"] is None:
        text += f"No budget here keeps every gap below {_s(data['goal'])}."
    else:
        best = cells[data["best"]]
        text += (
            f"If no gap may exceed {_s(data['goal'])}, {best['name']} is best: first token after "
            f"{_s(best['ttft'])}, {best['ttft'] / whole['ttft'] - 1:+.0%} against the whole prompt, with the longest "
            f"gap {whole['gap']['max'] / best['gap']['max']:.0f} x shorter."
        )
    if other := cells.get("other device"):
        text += (
            f" A second device for prompts keeps the longest gap at {_s(other['gap']['max'])}; first token after "
            f"{_s(other['ttft'])}, the next at {_s(other['second_token'])}, once the pages have travelled."
        )
    lacking = [cell for cell in data["cells"] if cell["memory_missing"] > 0.05]
    if lacking:
        worst = max(lacking, key=lambda cell: cell["memory_missing"])
        text += (
            f" (So many tokens are written meanwhile at {worst['name']} that the pages take "
            f"{worst['memory_missing']:.1f} GiB more than one such chip has; the simulation gave them.)"
        )
    return text


_s = seconds


def draw(data: dict[str, Any], axes: Any) -> None:
    """First token, gaps and throughput, each over the budget."""
    cells, names = data["cells"], [cell["name"] for cell in data["cells"]]
    first, gap, rate = axes[0]
    _plot(first, cells, 0, lambda cell: cell["ttft"])
    first.set_ylabel("long prompt's first token (s)")
    first.set_ylim(bottom=0)
    for index, (key, label) in enumerate((("max", "longest"), ("p99", "99th percentile"), ("p50", "median"))):
        _plot(gap, cells, index, lambda cell, key=key: cell["gap"][key] * 1e3, label)
    for height, label, line in ((data["quiet_gap"], "undisturbed", ":"), (data["goal"], "goal", "--")):
        gap.axhline(height * 1e3, color="0.3", ls=line, lw=1)
        gap.annotate(label, (-0.3, height * 1e3), fontsize=8, va="bottom", color="0.2")
    gap.set_yscale("log")
    gap.set_ylabel("time between a user's tokens (ms)")
    budgets = [cell for cell in cells if cell["budget"]]
    _plot(rate, budgets, 0, lambda cell: cell["tokens_per_second"], "prompt and users, to its first token")
    _plot(rate, cells, 1, lambda cell: cell["users_tokens_per_second"], f"users alone, over {_s(data['horizon'])}")
    rate.set_ylabel("tokens a second")
    rate.set_ylim(0, 1.35 * max(cell["tokens_per_second"] for cell in budgets))
    legend(gap)
    legend(rate, loc="upper right")
    for axis in axes[0]:
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
        axis.set_xlabel("max_num_batched_tokens")
        axis.grid(axis="y", lw=0.3)
        if data["best"] is not None:
            axis.axvline(names.index(data["best"]), color="0.85", lw=6, zorder=0)


def _plot(
    axis: Any, cells: Sequence[dict[str, Any]], index: int, value: Callable[[dict[str, Any]], float], label: str = ""
) -> None:
    """A curve over the budgets, and a mark of its own for the other device."""
    values = [value(cell) for cell in cells if cell["budget"]]
    axis.plot(range(len(values)), values, label=label or None, **style(index))
    for place, cell in enumerate(cells):
        if not cell["budget"]:
            axis.plot([place], [value(cell)], **style(index) | {"ls": ""})


GRID, SIZE = (1, 3), (11.0, 3.6)
