"""Prompts that begin alike: a few system prompts, conversations, and a control; with the prefix cache and without."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from jcb.bench.experiments.lab import Lab, Run
from jcb.bench.experiments.picture import fill, legend
from jcb.bench.experiments.study import Study
from jcb.simulate.report import seconds
from jcb.simulate.workloads import Synthetic

QUESTION = "What does it save to keep pages of prompts that begin alike?"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """users: clients in a loop; requests: in all; system: tokens of a shared prompt, one of `groups`; own: tokens of
    each request's own; answer: mean tokens; turns: of a conversation.
    """

    users: int = 32
    requests: int = 192
    system: int = 2048
    groups: int = 4
    own: int = 128
    answer: int = 96
    turns: int = 6
    budget: int = 2048
    seed: int = 5

    def settings(self, page_size: int) -> dict[str, object]:
        """Of all runs."""
        longest = self.system + (self.own + 8 * self.answer) * self.turns
        return {
            "scheduler.max_num_seqs": self.users,
            "scheduler.max_num_batched_tokens": max(self.budget, self.users),
            "scheduler.prefill_row_buckets": (self.users,),
            "scheduler.max_model_len": longest,
            "cache.num_pages": 1 + (self.users + self.groups) * (longest // page_size + 1),
        }

    def workloads(self) -> dict[str, Synthetic]:
        """By what their prompts share."""
        base = Synthetic(
            pattern="closed", users=self.users, requests=self.requests,
            prompt=f"uniform({self.own / 2},{self.own * 1.5})",
            output=f"uniform({self.answer / 2},{self.answer * 1.5})", seed=self.seed,
        )  # fmt: skip
        long = f"uniform({self.system + self.own / 2},{self.system + self.own * 1.5})"
        return {
            "system prompts": dataclasses.replace(base, prefix=self.system, groups=self.groups),
            "conversations": dataclasses.replace(base, turns=self.turns),
            "nothing shared": dataclasses.replace(base, prompt=long),
        }


def run(lab: Lab, sizes: Sizes) -> Study:
    """Every workload, with the cache and without."""
    cells = []
    for name, workload in sizes.workloads().items():
        for cached in (False, True):
            settings = sizes.settings(lab.page_size) | {"cache.enable_prefix_caching": cached}
            cells.append(_cell(name, cached, lab.run(workload, settings)))
    data = {"sizes": dataclasses.asdict(sizes), "cells": cells}
    return Study(
        name="prefix",
        question=QUESTION,
        model=lab.model,
        chip=lab.chip,
        place=lab.title,
        workload=f"{sizes.users} users in a loop; {sizes.groups} system prompts of {sizes.system:,} tokens, or "
        f"conversations of {sizes.turns} turns, or nothing shared",
        finding=_finding(data),
        data=data,
    )


def _cell(name: str, cached: bool, run: Run) -> dict[str, Any]:
    return {
        "workload": name,
        "cached": cached,
        "hit_share": run.cached_tokens / sum(len(track.job.prompt) for track in run.tracks.values()),
        "ttft_p50": run.quantile("ttft", 0.5),
        "ttft_p99": run.quantile("ttft", 0.99),
        "tpot_p50": run.quantile("tpot", 0.5),
        "tokens_per_second": run.tokens_per_second,
    }


def _finding(data: dict[str, Any]) -> str:
    """What the cells say, in sentences."""
    parts = []
    for off, on in _pairs(data):
        gain = on["tokens_per_second"] / off["tokens_per_second"]
        parts.append(
            f"{off['workload']}: {on['hit_share']:.0%} of the prompt tokens are found, median first token after "
            f"{seconds(on['ttft_p50'])} instead of {seconds(off['ttft_p50'])} "
            f"({off['ttft_p50'] / on['ttft_p50']:.1f} x), {gain:.2f} x the tokens a second"
        )
    return "With the prefix cache, " + "; ".join(parts) + " (the control)."


def _pairs(data: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    cells = data["cells"]
    return list(zip(cells[::2], cells[1::2], strict=True))


def draw(data: dict[str, Any], axes: Any) -> None:
    """First token, throughput and hits, without the cache and with it."""
    first, rate, hits = axes[0]
    pairs = _pairs(data)
    names = [off["workload"].replace(" ", "\n") for off, _ in pairs]
    for index, label in enumerate(("without", "with the prefix cache")):
        places = [place + 0.38 * index for place in range(len(pairs))]
        cells = [pair[index] for pair in pairs]
        bars = first.bar(places, [cell["ttft_p50"] * 1e3 for cell in cells], 0.36, label=label, **fill(2 * index))
        first.bar_label(bars, [f"{cell['ttft_p50'] * 1e3:.3g}" for cell in cells], fontsize=8, padding=2)
        bars = rate.bar(places, [cell["tokens_per_second"] for cell in cells], 0.36, label=label, **fill(2 * index))
        rate.bar_label(bars, [f"{cell['tokens_per_second']:,.0f}" for cell in cells], fontsize=8, padding=2)
    bars = hits.bar(range(len(pairs)), [100 * on["hit_share"] for _, on in pairs], 0.5, **fill(1))
    hits.bar_label(bars, [f"{on['hit_share']:.0%}" for _, on in pairs], fontsize=8, padding=2)
    hits.set_xticks(range(len(pairs)), names)
    hits.set_ylabel("prompt tokens found in the cache (%)")
    hits.set_ylim(0, 105)
    for axis, label in ((first, "median time to first token (ms)"), (rate, "output tokens a second")):
        axis.set_xticks([place + 0.19 for place in range(len(pairs))], names)
        axis.set_ylabel(label)
        axis.margins(y=0.25)
        legend(axis, loc="upper left")


GRID, SIZE = (1, 3), (11.0, 3.4)
