"""Memory for K and V: reserved for the worst case, or page by page as tokens come; and what a page's size wastes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jcb.bench.experiments.lab import Lab, Run
from jcb.bench.experiments.picture import fill, legend, style
from jcb.bench.experiments.sim_lab import SimLab
from jcb.bench.experiments.study import Study
from jcb.engine.core import EngineCore
from jcb.simulate.job import Job
from jcb.simulate.replica import Turn
from jcb.simulate.workloads import Synthetic

QUESTION = "Where does the memory for K and V go, and how many requests fit?"
WAYS = {
    "longest": ("reserve", "reserved for the\nmodel's length"),
    "true length": ("reserve", "reserved for the\ntrue length (oracle)"),
    "pages": ("paged", "pages by\nactual use"),
}
GOAL = 0.04
"""Unused space per token kept that the PagedAttention paper reports as "under 4 %" (arXiv 2309.06180)."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """pool: tokens that the pages hold together, at every way; longest: of a sequence.

    pages, means: page sizes and mean lengths of the waste curve, where `crowd` sequences are alive at once.
    """

    pool: int = 16_384
    longest: int = 2048
    requests: int = 256
    slots: int = 128
    prompt: str = "sharegpt"
    output: str = "sharegpt"
    pages: tuple[int, ...] = (16, 64, 128)
    means: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096)
    crowd: int = 48
    seed: int = 3

    def settings(self, page_size: int, way: str = "pages") -> dict[str, object]:
        """Of a run at equal memory."""
        return {
            "scheduler.max_num_seqs": self.slots,
            "scheduler.max_num_batched_tokens": max(self.longest, self.slots),
            "scheduler.prefill_row_buckets": (self.slots,),
            "scheduler.max_model_len": self.longest,
            "scheduler.admission": WAYS[way][0],
            "cache.num_pages": 1 + self.pool // page_size,
            "cache.enable_prefix_caching": False,
        }

    def workload(self, way: str) -> Allowing:
        """The same requests; what clients allow is the model's length, or with the oracle just the answer."""
        burst = Synthetic(
            pattern="burst", requests=self.requests, prompt=self.prompt, output=self.output, seed=self.seed,
            max_model_len=self.longest,
        )  # fmt: skip
        return Allowing(burst, 0 if way == "true length" else self.longest)


@dataclass(frozen=True)
class Allowing:
    """A burst whose clients allow answers up to `longest` tokens in all; 0: just what they get."""

    burst: Synthetic
    longest: int

    def jobs(self) -> Iterator[Job]:
        for job in self.burst.jobs():
            most = max(self.longest - len(job.prompt), job.output_tokens)
            yield dataclasses.replace(job, max_tokens=most) if self.longest else job

    def after(self, job: Job, now: float) -> Job | None:
        del job, now
        return None


@dataclass
class Occupancy:
    """Watches space taken and tokens in it, each over time. only_full: while others wait, so that memory limits."""

    page_size: int
    only_full: bool = True
    taken: float = 0.0
    kept: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0

    def __call__(self, turn: Turn, core: EngineCore) -> None:
        if self.only_full and not core.scheduler.num_waiting:
            return
        ended = {output.request_id for output in turn.outputs if output.finish_reason is not None}
        rows = [row for row in turn.plan.rows if row.sequence.request_id not in ended]
        seconds = turn.ended - turn.began
        self.taken += seconds * turn.stats["pages_used"] * self.page_size
        self.kept += seconds * sum(row.kv_len for row in rows)
        self.rows += seconds * len(rows)
        self.seconds += seconds

    @property
    def unused(self) -> float:
        """Share of the space taken that holds nothing."""
        return 1 - self.kept / self.taken

    @property
    def per_token(self) -> float:
        """Unused space per token kept."""
        return self.taken / self.kept - 1


def run(lab: Lab, sizes: Sizes) -> Study:
    """The three ways at equal memory, and in the simulator the waste of every page size."""
    cells = []
    for way in WAYS:
        watch = Occupancy(lab.page_size)
        found = lab.run(sizes.workload(way), sizes.settings(lab.page_size, way), watch)
        cells.append(_cell(way, found, watch, sizes))
    curve = [_point(lab, sizes, page, mean) for page in sizes.pages for mean in sizes.means if isinstance(lab, SimLab)]
    needed = {str(page): math.ceil((page - 1) / 2 / GOAL) for page in sizes.pages}
    data = {"sizes": dataclasses.asdict(sizes), "page_size": lab.page_size, "cells": cells, "curve": curve,
            "needed": needed}  # fmt: skip
    return Study(
        name="memory",
        question=QUESTION,
        model=lab.model,
        chip=lab.chip,
        place=lab.title,
        workload=f"{sizes.requests} requests at once (prompts {sizes.prompt}, answers {sizes.output}), room for "
        f"{sizes.pool:,} tokens, at most {sizes.longest:,} a sequence",
        finding=_finding(data),
        data=data,
    )


def _cell(way: str, run: Run, watch: Occupancy, sizes: Sizes) -> dict[str, Any]:
    return {
        "way": way,
        "unused": watch.unused,
        "kept": watch.kept / watch.seconds / sizes.pool,
        "admitted": watch.rows / watch.seconds,
        "tokens_per_second": run.tokens_per_second,
        "ttft_p50": run.quantile("ttft", 0.5),
        "preemptions": run.preemptions,
    }


def _point(lab: SimLab, sizes: Sizes, page: int, mean: int) -> dict[str, float]:
    """Waste in pages of one size where sequences are about `mean` tokens long."""
    burst = Synthetic(
        pattern="burst", requests=sizes.crowd, prompt=f"uniform({mean / 2},{mean * 1.5})", output="16", seed=sizes.seed
    )
    settings = {
        "scheduler.max_num_seqs": sizes.crowd,
        "scheduler.max_num_batched_tokens": 1 << 17,
        "scheduler.max_model_len": 2 * max(sizes.means) + 64,
        "cache.page_size": page,
        "cache.num_pages": 2 + sizes.crowd * (2 * mean // page + 3),
        "cache.enable_prefix_caching": False,
    }
    watch = Occupancy(page, only_full=False)
    lab.run(burst, settings, watch)
    return {"page": page, "length": watch.kept / watch.rows, "per_token": watch.per_token}


def _finding(data: dict[str, Any]) -> str:
    """What the cells say, in sentences."""
    longest, oracle, pages = data["cells"]
    text = (
        f"Space reserved for the model's length is {longest['unused']:.0%} empty, reserved for the true length (which "
        f"nobody knows) {oracle['unused']:.0%}, in pages of {data['page_size']} by actual use {pages['unused']:.1%}. "
        f"So {pages['admitted']:.0f} requests run at once instead of {longest['admitted']:.1f} (oracle: "
        f"{oracle['admitted']:.0f}), and the same memory gives {pages['tokens_per_second']:,.0f} tokens/s instead of "
        f"{longest['tokens_per_second']:,.0f}: {pages['tokens_per_second'] / longest['tokens_per_second']:.1f} x "
        f"({pages['tokens_per_second'] / oracle['tokens_per_second']:.2f} x the oracle), with {pages['preemptions']:,} "
        "preemptions."
    )
    if data["curve"]:
        needs = ", ".join(f"{length:,} at page {page}" for page, length in data["needed"].items())
        text += f" Less than {GOAL:.0%} unused per token kept is no gift of paging: it needs a mean length of {needs}."
    return text


def draw(data: dict[str, Any], axes: Any) -> None:
    """Space, requests and tokens a second by way; waste over length by page size."""
    space, rate, curve = axes[0]
    names = [WAYS[cell["way"]][1] for cell in data["cells"]]
    places = range(len(names))
    kept = [100 * cell["kept"] for cell in data["cells"]]
    taken = [100 * cell["kept"] / (1 - cell["unused"]) for cell in data["cells"]]
    space.bar(places, kept, 0.6, label="holds tokens", **fill(0))
    empty = [t - k for t, k in zip(taken, kept, strict=True)]
    space.bar(places, empty, 0.6, bottom=kept, label="taken, empty", **fill(1))
    space.bar(places, [max(100 - t, 0) for t in taken], 0.6, bottom=taken, label="free", color="white", edgecolor="0.5",
              lw=0.6)  # fmt: skip
    for place, cell in zip(places, data["cells"], strict=True):
        space.annotate(f"{cell['admitted']:.0f} running", (place, 102), ha="center", fontsize=8)
    space.set_ylim(0, 125)
    space.set_yticks(range(0, 101, 20))
    space.set_ylabel("space for K and V (%)")
    legend(space, loc="upper center", ncols=3, fontsize=7)
    bars = rate.bar(places, [cell["tokens_per_second"] for cell in data["cells"]], 0.6, **fill(1))
    rate.bar_label(bars, [f"{cell['tokens_per_second']:,.0f}" for cell in data["cells"]], fontsize=8, padding=2)
    rate.set_ylabel("output tokens a second")
    rate.margins(y=0.12)
    for axis in (space, rate):
        axis.set_xticks(list(places), names, fontsize=7)
    _draw_curve(curve, data)


def _draw_curve(axis: Any, data: dict[str, Any]) -> None:
    """Simulated waste by page size, and (page - 1) / 2 tokens a sequence as lines."""
    if not data["curve"]:
        axis.set_visible(False)
        return
    for index, page in enumerate(data["sizes"]["pages"]):
        points = [point for point in data["curve"] if point["page"] == page]
        lengths = [point["length"] for point in points]
        axis.plot(lengths, [100 * point["per_token"] for point in points], **style(index) | {"ls": ""})
        axis.plot(lengths, [50 * (page - 1) / length for length in lengths], label=f"pages of {page}",
                  **style(index) | {"markevery": len(lengths)})  # fmt: skip
    axis.axhline(100 * GOAL, color="0.3", ls=":", lw=1)
    at = ("axes fraction", "data")
    axis.annotate(f"{GOAL:.0%}", (0.01, 104 * GOAL), xycoords=at, fontsize=8, va="bottom")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("mean length of a sequence (tokens)")
    axis.set_ylabel("unused space per token kept (%)")
    axis.set_title("marks: simulated; lines: (page - 1) / 2 a sequence", fontsize=8)
    legend(axis)


GRID, SIZE = (1, 3), (11.0, 3.6)
