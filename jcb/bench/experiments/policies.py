"""Who waits when there is more to do than can be done: the same traffic under every scheduling policy.

Three users: one sends many long documents, one chats, one asks questions about a long text that all its prompts share.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from jcb.bench.experiments.lab import Lab, Run
from jcb.bench.experiments.picture import fill, legend
from jcb.bench.experiments.study import Study
from jcb.config import SchedulingPolicy
from jcb.scheduler.policy import MOST_PASSES, PROMPT_TOKENS_A_SECOND
from jcb.simulate.job import Job
from jcb.simulate.report import seconds
from jcb.simulate.workloads import Synthetic

QUESTION = "Who waits when the queue is long?"
POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
CLASSES = ("chat", "questions", "documents")
BOUNDS: dict[str, str] = {
    "fcfs": "nobody is overtaken",
    "priority": "none: low priority waits as long as higher comes",
    "shortest-prompt": f"overtaken only by what comes within its prompt tokens / {PROMPT_TOKENS_A_SECOND:,.0f} seconds",
    "longest-prefix": f"as first of the queue passed over at most {MOST_PASSES} times",
    "fair-share": "a user who was idle waits for at most one request of every other user",
}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """requests: of each class; load: how many times as fast requests come as they can be served together.

    chat, document, shared, own: prompt tokens; answer: mean of all answers; slots: max_num_seqs.
    """

    requests: int = 120
    load: float = 1.3
    chat: int = 200
    document: int = 6000
    shared: int = 3000
    own: int = 100
    answer: int = 100
    slots: int = 32
    budget: int = 2048
    seed: int = 11

    def settings(self, page_size: int, policy: str = "fcfs") -> dict[str, object]:
        """Of a run under one policy."""
        longest = self.document * 2 + 20 * self.answer
        return {
            "scheduler.max_num_seqs": self.slots,
            "scheduler.max_num_batched_tokens": max(self.budget, self.slots),
            "scheduler.prefill_row_buckets": (self.slots,),
            "scheduler.max_model_len": longest,
            "scheduler.policy": policy,
            "cache.num_pages": 1 + self.slots * (longest // page_size + 1),
        }

    def workload(self, gap: float) -> Mixed:
        """All three classes, each with a request every `gap` seconds on average (0: all at once)."""
        base = Synthetic(
            pattern="poisson" if gap else "burst", rate=1 / gap if gap else 1.0, requests=self.requests,
            output=f"exponential({self.answer})",
        )  # fmt: skip
        prompts = {
            "chat": {"prompt": f"uniform({self.chat / 2},{self.chat * 1.5})"},
            "questions": {"prompt": f"uniform({self.own / 2},{self.own * 1.5})", "prefix": self.shared},
            "documents": {"prompt": f"uniform({self.document / 2},{self.document * 1.5})"},
        }
        return Mixed(
            tuple(dataclasses.replace(base, seed=self.seed + n, **prompts[name]) for n, name in enumerate(CLASSES))
        )


@dataclass(frozen=True)
class Mixed:
    """Workloads at once, in the order of CLASSES: each a user of its own, the last with less priority."""

    parts: tuple[Synthetic, ...]

    def jobs(self) -> Iterator[Job]:
        marked = [self._marked(number, part) for number, part in enumerate(self.parts)]
        return iter(heapq.merge(*marked, key=lambda job: job.at))

    def after(self, job: Job, now: float) -> Job | None:
        del job, now
        return None

    def _marked(self, number: int, part: Synthetic) -> Iterator[Job]:
        for job in part.jobs():
            yield dataclasses.replace(
                job,
                number=job.number * len(self.parts) + number,
                namespace=CLASSES[number],
                priority=int(number == len(self.parts) - 1),
            )


def run(lab: Lab, sizes: Sizes) -> Study:
    """Every policy under the same overload."""
    at_once = lab.run(sizes.workload(0), sizes.settings(lab.page_size))
    gap = at_once.seconds / sizes.requests / sizes.load
    cells = []
    for policy in POLICIES:
        found = lab.run(sizes.workload(gap), sizes.settings(lab.page_size, policy))
        cells.append({"policy": policy, "bound": BOUNDS[policy]} | _cell(found))
    data = {"sizes": dataclasses.asdict(sizes), "gap": gap, "cells": cells}
    return Study(
        name="policies",
        question=QUESTION,
        model=lab.model,
        chip=lab.chip,
        place=lab.title,
        workload=f"{sizes.load:.1f} times what can be served: chats ({sizes.chat} tokens), questions "
        f"about one text ({sizes.shared + sizes.own:,}), documents ({sizes.document:,})",
        finding=_finding(data),
        data=data,
    )


def _cell(run: Run) -> dict[str, Any]:
    waits: dict[str, Any] = {}
    for number, name in enumerate(CLASSES):
        times = np.array([track.ttft for key, track in run.tracks.items() if key % len(CLASSES) == number])
        waits[name] = {
            "p50": float(np.quantile(times, 0.5)),
            "p99": float(np.quantile(times, 0.99)),
            "max": float(times.max()),
        }
    return {
        "ttft": waits,
        "mean_ttft": float(run.values("ttft").mean()),
        "tokens_per_second": run.tokens_per_second,
        "cached_tokens": run.cached_tokens,
        "preemptions": run.preemptions,
    }


def _finding(data: dict[str, Any]) -> str:
    """What the cells say, in sentences."""
    cells = {cell["policy"]: cell for cell in data["cells"]}
    fcfs = cells["fcfs"]["ttft"]
    parts = [
        f"First come, first served makes everybody wait alike: median first token of a chat after "
        f"{seconds(fcfs['chat']['p50'])}, of a document after {seconds(fcfs['documents']['p50'])}."
    ]
    for policy in POLICIES[1:]:
        waits = cells[policy]["ttft"]
        parts.append(
            f"{policy}: {seconds(waits['chat']['p50'])} and {seconds(waits['documents']['p50'])}, the longest wait "
            f"{seconds(max(wait['max'] for wait in waits.values()))}"
        )
    best = min(data["cells"], key=lambda cell: cell["mean_ttft"])
    return (
        parts[0] + " " + "; ".join(parts[1:]) + f". The mean first token is earliest under {best['policy']} "
        f"({seconds(best['mean_ttft'])} against {seconds(cells['fcfs']['mean_ttft'])})."
    )


def draw(data: dict[str, Any], axes: Any) -> None:
    """Median and longest waits of each class, and what bounds them."""
    medians, longest = axes[0]
    names = [cell["policy"] for cell in data["cells"]]
    for index, name in enumerate(CLASSES):
        for axis, key in ((medians, "p50"), (longest, "max")):
            values = [cell["ttft"][name][key] for cell in data["cells"]]
            places = [place + 0.27 * index for place in range(len(names))]
            bars = axis.bar(places, values, 0.25, label=name, **fill(index))
            axis.bar_label(bars, [f"{value:.2g}" for value in values], fontsize=6.5, padding=1)
    for axis, label in ((medians, "median time to first token (s)"), (longest, "longest time to first token (s)")):
        axis.set_xticks([place + 0.27 for place in range(len(names))], names, fontsize=8)
        axis.set_ylabel(label)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("")
        axis.set_ylim(top=axis.get_ylim()[1] * 2.5)
        legend(axis, loc="upper center", ncols=3)


GRID, SIZE = (1, 2), (11.0, 3.6)
