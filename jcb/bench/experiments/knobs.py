"""The knobs at hand, turned through a grid: which settings no other setting beats at everything."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jcb.bench.experiments.lab import Lab
from jcb.bench.experiments.picture import MARKERS, SHADES, legend
from jcb.bench.experiments.study import Study
from jcb.simulate.report import seconds
from jcb.simulate.workloads import Synthetic

QUESTION = "Which settings are worth choosing from?"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The grid, and a workload at `load` times what the largest settings serve."""

    seqs: tuple[int, ...] = (16, 64, 256)
    budgets: tuple[int, ...] = (256, 512, 2048, 8192)
    policies: tuple[str, ...] = ("fcfs", "shortest-prompt")
    requests: int = 240
    prompt: str = "azure-conversation"
    output: str = "azure-conversation"
    longest: int = 8192
    load: float = 1.1
    seed: int = 7

    def settings(self, page_size: int) -> dict[str, object]:
        """The ceiling of all runs."""
        return {
            "scheduler.max_num_seqs": max(self.seqs),
            "scheduler.max_num_batched_tokens": max(self.budgets),
            "scheduler.max_model_len": self.longest,
            "cache.num_pages": 1 + self.requests * (self.longest // page_size + 1) // 4,
        }

    def workload(self, **fields: Any) -> Synthetic:
        """The requests, in a pattern."""
        values: dict[str, Any] = {
            "requests": self.requests, "prompt": self.prompt, "output": self.output, "seed": self.seed,
            "max_model_len": self.longest,
        }  # fmt: skip
        return Synthetic(**values | fields)


def run(lab: Lab, sizes: Sizes) -> Study:
    """The whole grid."""
    settings = sizes.settings(lab.page_size)
    capacity = sizes.requests / lab.run(sizes.workload(pattern="burst"), settings).seconds
    rate = sizes.load * capacity
    cells = []
    for seqs, budget, policy in itertools.product(sizes.seqs, sizes.budgets, sizes.policies):
        if budget < seqs:
            continue
        values = {"max_num_seqs": seqs, "max_num_batched_tokens": budget, "policy": policy}
        turned = {**settings, **{f"scheduler.{name}": value for name, value in values.items()}}
        found = lab.run(sizes.workload(pattern="poisson", rate=rate), turned)
        cells.append(
            values
            | {
                "ttft": found.quantile("ttft", 0.9),
                "tpot": found.quantile("tpot", 0.9),
                "tokens_per_second": found.tokens_per_second,
            }
        )
    for cell, is_best in zip(cells, front(cells), strict=True):
        cell["on_front"] = is_best
    data = {"sizes": dataclasses.asdict(sizes), "rate": rate, "cells": cells}
    return Study(
        name="knobs",
        question=QUESTION,
        model=lab.model,
        chip=lab.chip,
        place=lab.title,
        workload=f"{sizes.requests} requests, {rate:.2g} a second, prompts {sizes.prompt}, answers {sizes.output}",
        finding=_finding(data),
        data=data,
    )


def front(cells: Sequence[dict[str, Any]]) -> list[bool]:
    """Which cells no other cell equals or beats at TTFT, TPOT and tokens a second together."""
    points = [(cell["ttft"], cell["tpot"], -cell["tokens_per_second"]) for cell in cells]
    return [
        not any(other != point and all(o <= p for o, p in zip(other, point, strict=True)) for other in points)
        for point in points
    ]


def _finding(data: dict[str, Any]) -> str:
    """What the cells say, in sentences."""
    best = [cell for cell in data["cells"] if cell["on_front"]]
    first, smooth = min(best, key=lambda cell: cell["ttft"]), min(best, key=lambda cell: cell["tpot"])
    fast = max(best, key=lambda cell: cell["tokens_per_second"])
    return (
        f"{len(best)} of {len(data['cells'])} settings are not beaten at everything by another. Earliest first tokens "
        f"(p90 {seconds(first['ttft'])}, TPOT {seconds(first['tpot'])}): {_name(first)}. Smoothest answers (p90 TPOT "
        f"{seconds(smooth['tpot'])}, TTFT {seconds(smooth['ttft'])}): {_name(smooth)}. Most tokens "
        f"({fast['tokens_per_second']:,.0f} a second): {_name(fast)}."
    )


def _name(cell: dict[str, Any]) -> str:
    seqs, budget = cell["max_num_seqs"], cell["max_num_batched_tokens"]
    return f"max_num_seqs {seqs}, max_num_batched_tokens {budget:,}, {cell['policy']}"


def draw(data: dict[str, Any], axes: Any) -> None:
    """TPOT over TTFT, throughput over TTFT: all settings, those on the front filled and named."""
    left, right = axes[0]
    budgets = data["sizes"]["budgets"]
    for axis, key, scale in ((left, "tpot", 1e3), (right, "tokens_per_second", 1.0)):
        for cell in data["cells"]:
            index = budgets.index(cell["max_num_batched_tokens"])
            filled = "full" if cell["on_front"] else "none"
            axis.plot(
                [cell["ttft"]], [cell[key] * scale], ls="", marker=MARKERS[index % 6], fillstyle=filled,
                color=SHADES[0] if cell["policy"] == data["sizes"]["policies"][0] else SHADES[2],
                ms=3 + 1.3 * data["sizes"]["seqs"].index(cell["max_num_seqs"]),
            )  # fmt: skip
        axis.set_xscale("log")
        axis.set_xlabel("time to first token, p90 (s)")
        axis.grid(lw=0.3)
    for index, budget in enumerate(budgets):
        left.plot([], [], ls="", marker=MARKERS[index % 6], color="0.3", label=f"{budget:,} tokens a step")
    left.set_ylim(bottom=0)
    left.set_ylabel("time per output token, p90 (ms)")
    right.set_ylabel("output tokens a second")
    left.set_title("size: max_num_seqs; filled: not beaten; black: fcfs, grey: shortest-prompt", fontsize=8)
    legend(left, fontsize=7)


GRID, SIZE = (1, 2), (11.0, 3.8)
