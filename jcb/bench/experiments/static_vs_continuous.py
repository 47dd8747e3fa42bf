"""The same requests batched three ways: static, with pages reserved for the longest answer, and by actual use.

Answers' lengths spread more and more, from all equal (the control, where nobody waits for anybody) to skewed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcb.bench.experiments.lab import Lab, Run
from jcb.bench.experiments.picture import fill, legend, style
from jcb.bench.experiments.study import Study
from jcb.engine.core import EngineCore
from jcb.simulate.job import Job
from jcb.simulate.replica import Turn
from jcb.simulate.workloads import Synthetic

QUESTION = "Why swap requests at every step instead of batch by batch?"
MODES = {"static": "static", "reserve": "continuous, reserving", "paged": "continuous, paged"}
LENGTHS = {
    "constant": "{0}",
    "uniform": "uniform({1},{2})",
    "exponential": "exponential({0})",
    "skewed": "lognormal({0},{3})",
}
"""How answers are distributed about one mean: arguments are the mean, half, one and a half, and a third of it."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """slots: max_num_seqs; requests: sent all at once; prompt: tokens; mean: of the answers.

    slack: what clients allow, as a multiple of the mean (where answers are all equal they allow just that).
    memory: of the pages of continuous batching, as a multiple of what `slots` mean requests hold. Static batching gets
    all that its batches may need, so that only its waiting is compared.
    """

    slots: int = 16
    requests: int = 128
    prompt: int = 128
    mean: int = 200
    slack: float = 4.0
    memory: float = 1.15
    seed: int = 1

    def settings(self, page_size: int, mode: str = "static") -> dict[str, object]:
        """Of a run with this admission; those of "static" are the ceiling of all."""
        longest = self.prompt + round(self.mean * self.slack)
        ample = math.ceil(1.03 * self.slots * math.ceil(longest / page_size)) + 1
        scarce = math.ceil(self.slots * math.ceil((self.prompt + self.mean) / page_size) * self.memory)
        return {
            "scheduler.max_num_seqs": self.slots,
            "scheduler.max_num_batched_tokens": max(512, self.slots),
            "scheduler.prefill_row_buckets": (self.slots,),
            "scheduler.max_model_len": longest,
            "scheduler.admission": mode,
            "cache.num_pages": 1 + (ample if mode == "static" else scarce),
            "cache.enable_prefix_caching": False,
        }

    def workload(self, lengths: str) -> Capped:
        """The requests whose answers are spread as `lengths` says."""
        text = LENGTHS[lengths].format(self.mean, self.mean // 2, self.mean * 3 // 2, max(self.mean // 3, 1))
        most = round(self.mean * (1.0 if lengths == "constant" else self.slack))
        burst = Synthetic(pattern="burst", requests=self.requests, prompt=str(self.prompt), output=text, seed=self.seed)
        return Capped(burst, most)


@dataclass(frozen=True)
class Capped:
    """A burst in which every client allows `limit` tokens, and no answer is longer."""

    burst: Synthetic
    limit: int

    def jobs(self) -> Iterator[Job]:
        for job in self.burst.jobs():
            yield dataclasses.replace(job, answer=job.answer[: self.limit], max_tokens=self.limit)

    def after(self, job: Job, now: float) -> Job | None:
        del job, now
        return None


@dataclass
class Slots:
    """Watches who sits where and when, and how many rows steps had."""

    row_seconds: float = 0.0
    _open: dict[tuple[int, int], tuple[float, float]] = dataclasses.field(default_factory=dict)

    def __call__(self, turn: Turn, core: EngineCore) -> None:
        del core
        self.row_seconds += len(turn.plan.rows) * (turn.ended - turn.began)
        for row in turn.plan.rows:
            key = (row.slot, int(row.sequence.request_id))
            begin, _ = self._open.get(key, (turn.began, 0.0))
            self._open[key] = (begin, turn.ended)

    def spans(self) -> list[list[float]]:
        """[slot, request, from, to] of every request in every slot it had."""
        return [[slot, number, round(begin, 4), round(end, 4)] for (slot, number), (begin, end) in self._open.items()]


def run(lab: Lab, sizes: Sizes) -> Study:
    """Every spread of lengths under every mode."""
    cells, timelines = [], {}
    for lengths in LENGTHS:
        for mode in MODES:
            slots = Slots()
            found = lab.run(sizes.workload(lengths), sizes.settings(lab.page_size, mode), slots)
            cells.append(_cell(lengths, mode, found, slots, sizes))
            if lengths == "exponential":
                timelines[mode] = slots.spans()
    gains = {lengths: _gains(cells, lengths) for lengths in LENGTHS}
    data = {
        "sizes": dataclasses.asdict(sizes),
        "cells": cells,
        "gains": gains,
        "timelines": timelines,
        "expected_slots": sum(1 / n for n in range(1, sizes.slots + 1)),
    }
    return Study(
        name="static-vs-continuous",
        question=QUESTION,
        model=lab.model,
        chip=lab.chip,
        place=lab.title,
        workload=f"{sizes.requests} requests at once, {sizes.slots} slots, prompts of {sizes.prompt} tokens, answers "
        f"of {sizes.mean} on average, {round(sizes.mean * sizes.slack)} allowed",
        finding=_finding(data),
        data=data,
    )


def _cell(lengths: str, mode: str, run: Run, slots: Slots, sizes: Sizes) -> dict[str, Any]:
    latencies = np.sort(run.values("latency"))
    return {
        "lengths": lengths,
        "mode": mode,
        "tokens_per_second": run.tokens_per_second,
        "slot_use": slots.row_seconds / (run.seconds * sizes.slots),
        "seconds": run.seconds,
        "output_tokens": run.output_tokens,
        "latencies": [float(value) for value in latencies],
        "latency_p50": float(np.quantile(latencies, 0.5)),
        "preemptions": run.preemptions,
    }


def _gains(cells: list[dict[str, Any]], lengths: str) -> Mapping[str, float]:
    """Throughput against static batching."""
    rates = {cell["mode"]: cell["tokens_per_second"] for cell in cells if cell["lengths"] == lengths}
    return {mode: rates[mode] / rates["static"] for mode in MODES}


def _finding(data: dict[str, Any]) -> str:
    """What the cells say, in sentences."""
    by = {(cell["lengths"], cell["mode"]): cell for cell in data["cells"]}
    gains, static, paged = data["gains"], by["exponential", "static"], by["exponential", "paged"]
    reserving = by["exponential", "reserve"]
    return (
        f"With exponential lengths continuous batching writes {paged['tokens_per_second']:,.0f} tokens/s against "
        f"{static['tokens_per_second']:,.0f} of static batches: {gains['exponential']['paged']:.2f} x, because "
        f"{paged['slot_use']:.0%} of the slots work instead of {static['slot_use']:.0%} (the longest of "
        f"{data['sizes']['slots']} exponential answers is {data['expected_slots']:.2f} means long); half of the "
        f"answers are complete after {paged['latency_p50']:.2f} s instead of {static['latency_p50']:.2f} s. In "
        f"pages for only {data['sizes']['memory']:.2f} x the mean request in every slot, reserving for the longest "
        f"answer that clients allow fills {reserving['slot_use']:.0%} of the slots and gives "
        f"{gains['exponential']['reserve']:.2f} x (static batches got the memory for that). "
        f"Control: when all answers are equally long, the gain is {gains['constant']['paged']:.2f} x; with skewed "
        f"lengths it is {gains['skewed']['paged']:.2f} x."
    )


def draw(data: dict[str, Any], axes: Any) -> None:
    """Slot timelines above; throughput, slot use and latencies below."""
    end = max(span[3] for spans in data["timelines"].values() for span in spans)
    for axis, (mode, title) in zip(axes[0], MODES.items(), strict=True):
        _timeline(axis, data["timelines"][mode], data["sizes"]["slots"])
        axis.set_xlim(0, end)
        axis.set_title(f"{title} (exponential lengths)", fontsize=9)
        axis.set_xlabel("seconds")
    axes[0][0].set_ylabel("slot")
    rate, use, curve = axes[1]
    for index, (mode, title) in enumerate(MODES.items()):
        cells = [cell for cell in data["cells"] if cell["mode"] == mode]
        places = [place + 0.27 * index for place in range(len(cells))]
        bars = rate.bar(places, [cell["tokens_per_second"] for cell in cells], 0.25, label=title, **fill(index))
        gains = [data["gains"][cell["lengths"]][mode] for cell in cells]
        if mode != "static":
            rate.bar_label(bars, [f"{gain:.1f} x" for gain in gains], fontsize=6.5, padding=2)
        use.bar(places, [100 * cell["slot_use"] for cell in cells], 0.25, label=title, **fill(index))
        latencies = next(cell["latencies"] for cell in cells if cell["lengths"] == "exponential")
        share = [(n + 1) / len(latencies) for n in range(len(latencies))]
        curve.plot(latencies, share, label=title, **style(index) | {"marker": ""})
    for axis in (rate, use):
        axis.set_xticks([place + 0.27 for place in range(len(LENGTHS))], list(LENGTHS))
        axis.set_xlabel("spread of the answers' lengths")
    rate.set_ylabel("output tokens a second")
    rate.margins(y=0.55)
    use.set_ylabel("slots at work (%)")
    use.set_ylim(0, 100)
    curve.set_xlabel("seconds until the whole answer is there")
    curve.set_ylabel("share of requests (exponential)")
    legend(rate, loc="upper center", ncols=1)
    legend(curve, loc="lower right")


def _timeline(axis: Any, spans: list[list[float]], slots: int) -> None:
    """A bar for each request in its slot, shades by turns so that neighbours differ."""
    seen: dict[int, int] = {}
    for slot, _, begin, end in sorted(spans, key=lambda span: span[2]):
        turn = seen[int(slot)] = seen.get(int(slot), -1) + 1
        axis.broken_barh([(begin, end - begin)], (slot + 0.08, 0.84), color=("0.35", "0.65")[turn % 2], lw=0)
    axis.set_ylim(slots, 0)
    axis.set_yticks([])


GRID, SIZE = (2, 3), (11.0, 5.6)
