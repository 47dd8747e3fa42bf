"""What papers say, what the simulator says, and what was measured here: by ratio, and where they differ, why."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jcb.bench.experiments import long_prompt, memory, static_vs_continuous
from jcb.bench.experiments.lab import Lab
from jcb.bench.experiments.study import Study
from jcb.simulate.workloads import Synthetic

QUESTION = "Published results and this engine, by ratio"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Requests a second under a limit on the 99th percentile of gaps: with whole prompts and in chunks.

    Lengths are about those of Sarathi-Serve's chat traffic. limit: as a multiple of a lone sequence's gap.
    """

    requests: int = 80
    prompt: str = "lognormal(2300,1730)"
    output: str = "lognormal(450,415)"
    longest: int = 8192
    slots: int = 128
    chunk: int = 512
    limit: float = 6.0
    rounds: int = 5
    seed: int = 13


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the experiments that the table is made of. measured: folder in which --real left JSON, "" for none."""

    static: static_vs_continuous.Sizes = field(default_factory=static_vs_continuous.Sizes)
    paging: memory.Sizes = field(default_factory=memory.Sizes)
    long: long_prompt.Sizes = field(default_factory=lambda: long_prompt.Sizes(budgets=(512,), pool=None, answer=400))
    capacity: Capacity = field(default_factory=Capacity)
    measured: str = ""


def run(lab: Lab, sizes: Sizes) -> Study:
    """The table."""
    static = static_vs_continuous.run(lab, sizes.static).data
    kept = memory.run(lab, dataclasses.replace(sizes.paging, means=())).data
    chunked = long_prompt.run(lab, sizes.long).data
    real = {name: _measured(sizes.measured, name) for name in ("static-vs-continuous", "memory", "long-prompt")}
    rows = [
        _batching(static, real["static-vs-continuous"]),
        _waste(kept, real["memory"]),
        _memory_gain(kept, real["memory"]),
        _stall(chunked, real["long-prompt"]),
        _capacity_row(lab, sizes.capacity),
    ]
    data = {"rows": rows, "sizes": dataclasses.asdict(sizes)}
    return Study(
        name="published",
        question=QUESTION,
        model=lab.model,
        chip=lab.chip,
        place=lab.title,
        workload="the experiments static-vs-continuous, memory and long-prompt, and capacity under a limit on gaps",
        finding=_finding(rows),
        data=data,
    )


def _measured(folder: str, name: str) -> Mapping[str, Any] | None:
    """The data that `jcb experiment NAME --real` left in `folder`."""
    path = Path(folder) / f"{name}-real.json"
    return json.loads(path.read_text(encoding="utf-8"))["data"] if folder and path.is_file() else None


def _batching(simulated: Mapping[str, Any], real: Mapping[str, Any] | None) -> dict[str, Any]:
    def gain(data: Mapping[str, Any]) -> str:
        gains = data["gains"]
        return f"{gains['exponential']['paged']:.2f} x (equal lengths: {gains['constant']['paged']:.2f} x)"

    return {
        "what": "static to continuous batching, tokens a second",
        "source": "Orca, OSDI 2022; Anyscale, “How continuous batching enables 23x throughput”, 2023",
        "paper": "Orca up to 36.9 x over FasterTransformer at equal latency; Anyscale 8 x for continuous batching "
        "alone, up to 23 x with vLLM, over naive static batches",
        "simulated": gain(simulated),
        "measured": gain(real) if real else NOT_MEASURED,
        "ratio": simulated["gains"]["exponential"]["paged"],
        "difference": "Theirs also change kernels, memory and queueing, and answers spread up to 1,536 tokens; here "
        f"one setting changes, and with {simulated['sizes']['slots']} slots exponential answers allow at most "
        f"{simulated['expected_slots']:.2f} x.",
    }


def _waste(simulated: Mapping[str, Any], real: Mapping[str, Any] | None) -> dict[str, Any]:
    def shares(data: Mapping[str, Any]) -> str:
        longest, oracle, pages = (cell["kept"] for cell in data["cells"])
        return f"{longest:.1%}, {oracle:.1%}, {pages:.1%}"

    return {
        "what": "share of KV memory that holds tokens: reserved for the model's length, for the true length, in pages",
        "source": "PagedAttention, SOSP 2023 (arXiv 2309.06180), figure 2",
        "paper": "20.4 % (Orca Max), 38.2 % (Orca Oracle), 96.3 % (vLLM)",
        "simulated": shares(simulated),
        "measured": shares(real) if real else NOT_MEASURED,
        "ratio": simulated["cells"][2]["kept"] / simulated["cells"][0]["kept"],
        "difference": "The oracle here reserves just prompt and answer; theirs sits in a buddy allocator, which loses "
        f"more. Lengths here are drawn from ShareGPT's means. Pages hold {simulated['page_size']} tokens.",
    }


def _memory_gain(simulated: Mapping[str, Any], real: Mapping[str, Any] | None) -> dict[str, Any]:
    def gains(data: Mapping[str, Any]) -> str:
        longest, oracle, pages = (cell["tokens_per_second"] for cell in data["cells"])
        return f"{pages / longest:.2f} x over the model's length, {pages / oracle:.2f} x over the oracle"

    longest, _, pages = simulated["cells"]
    return {
        "what": "pages against reservations at equal memory, throughput",
        "source": "PagedAttention, SOSP 2023",
        "paper": "2 to 4 x over FasterTransformer and Orca at the same latency (1.7 to 2.7 x over Orca Oracle, 2.7 to "
        "8 x over Orca Max on ShareGPT)",
        "simulated": gains(simulated),
        "measured": gains(real) if real else NOT_MEASURED,
        "ratio": pages["tokens_per_second"] / longest["tokens_per_second"],
        "difference": "Theirs is the request rate sustained at a latency, here tokens a second with all requests "
        "waiting; this oracle wastes less than theirs.",
    }


def _stall(simulated: Mapping[str, Any], real: Mapping[str, Any] | None) -> dict[str, Any]:
    def ratio(data: Mapping[str, Any]) -> float:
        cells = [cell for cell in data["cells"] if cell["budget"]]
        chosen = min(cells[1:], key=lambda cell: abs(cell["gap"]["max"] / data["quiet_gap"] - 5))
        return cells[0]["gap"]["p99"] / chosen["gap"]["p99"]

    return {
        "what": "p99 gap between the others' tokens while a long prompt runs: whole over chunked",
        "source": "Sarathi-Serve, OSDI 2024 (arXiv 2403.02310)",
        "paper": "no single ratio: chunks with stall-free schedules remove “generation stalls” of seconds",
        "simulated": f"{ratio(simulated):.0f} x shorter with {simulated['sizes']['budgets'][0]} tokens a step",
        "measured": f"{ratio(real):.1f} x shorter" if real else NOT_MEASURED,
        "ratio": ratio(simulated),
        "difference": f"One prompt of {simulated['sizes']['prompt']:,} tokens among {simulated['sizes']['users']} "
        "users, not a mix; the ratio grows with the prompt.",
    }


def _capacity_row(lab: Lab, sizes: Capacity) -> dict[str, Any]:
    whole, chunked = (_capacity(lab, sizes, budget) for budget in (sizes.longest, sizes.chunk))
    return {
        "what": "requests a second under a limit on the p99 gap: chunks against whole prompts",
        "source": "Sarathi-Serve, OSDI 2024 (arXiv 2403.02310)",
        "paper": "2.6 x (Mistral-7B, one A100) to 5.6 x (Falcon-180B, pipelined) over vLLM",
        "simulated": f"{chunked / whole:.2f} x ({chunked:.1f} against {whole:.1f} requests/s)",
        "measured": NOT_MEASURED,
        "ratio": chunked / whole,
        "difference": f"Limit: {sizes.limit:g} times a lone sequence's gap. Even with whole prompts this engine lets "
        "everybody's tokens ride along in the prompt's step; the vLLM of then did not. A looser limit gives less.",
    }


def _capacity(lab: Lab, sizes: Capacity, budget: int) -> float:
    """The highest Poisson rate found whose p99 gap keeps to the limit, by halving the interval of its logarithm."""
    settings = {
        "scheduler.max_num_seqs": sizes.slots,
        "scheduler.max_num_batched_tokens": max(budget, sizes.slots),
        "scheduler.max_model_len": sizes.longest,
        "cache.num_pages": 1 + sizes.slots * (sizes.longest // lab.page_size + 1) // 2,
    }
    lone = Synthetic(pattern="burst", requests=1, prompt="16", output="16")
    quiet = lab.run(lone, settings).quantile("tpot", 0.5)
    crowd = Synthetic(
        pattern="burst", requests=sizes.requests, prompt=sizes.prompt, output=sizes.output, seed=sizes.seed,
        max_model_len=sizes.longest,
    )  # fmt: skip
    high = 2 * sizes.requests / lab.run(crowd, settings).seconds
    low = high / 64
    for _ in range(sizes.rounds):
        rate = (low * high) ** 0.5
        tracks = lab.run(dataclasses.replace(crowd, pattern="poisson", rate=rate), settings).tracks.values()
        gaps = np.concatenate([np.diff(track.token_times) for track in tracks])
        if np.quantile(gaps, 0.99) <= sizes.limit * quiet:
            low = rate
        else:
            high = rate
    return low


def _finding(rows: list[dict[str, Any]]) -> str:
    """The table in sentences."""
    parts = [f"{row['what'].partition(':')[0]}: {row['simulated']}" for row in rows]
    measured = sum(row["measured"] != NOT_MEASURED for row in rows)
    return "Simulated: " + "; ".join(parts) + f". {measured} of {len(rows)} rows are measured on this machine too."


def draw(data: dict[str, Any], axes: Any) -> None:
    """The table as a picture."""
    axis = axes[0][0]
    axis.set_axis_off()
    columns = (("what", 27), ("paper", 34), ("simulated", 21), ("measured", 18), ("difference", 44))
    titles = ("", "paper says", "jcb simulates", "jcb measures", "why they differ")
    cells = [
        [textwrap.fill(str(row[name]), width, break_long_words=False) for name, width in columns]
        for row in data["rows"]
    ]
    total = sum(width for _, width in columns)
    table = axis.table(
        cells, colLabels=titles, cellLoc="left", colLoc="left", loc="center", bbox=(0, 0, 1, 1),
        colWidths=[width / total for _, width in columns],
    )  # fmt: skip
    table.auto_set_font_size(False)
    table.set_fontsize(7.5)
    heights = [1.2] + [max(cell.count("\n") + 1 for cell in row) + 0.6 for row in cells]
    for (row, _), cell in table.get_celld().items():
        cell.set_height(heights[row] / sum(heights))
        cell.set_linewidth(0.4)
        cell.PAD = 0.02
        if row == 0:
            cell.set_text_props(weight="bold")


GRID, SIZE = (1, 1), (11.0, 4.8)
