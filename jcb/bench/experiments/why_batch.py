"""Tokens a second over the number of sequences that decode together, between what memory and arithmetic allow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcb.bench.experiments.lab import Lab, Track
from jcb.bench.experiments.picture import legend, style
from jcb.bench.experiments.sim_lab import SimLab
from jcb.bench.experiments.study import Study
from jcb.simulate.cost import RooflineCost
from jcb.simulate.report import seconds
from jcb.simulate.workloads import Synthetic
from pallas_kernels.page import ITEM_BYTES

QUESTION = "Why batch? What one more sequence in a step costs, and where it begins to cost"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """batches: sequences at once; contexts: tokens that each holds; answer: tokens that each writes."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
    contexts: tuple[int, ...] = (128, 1024)
    answer: int = 48
    budget: int = 16_384

    def settings(self, page_size: int) -> dict[str, object]:
        """The ceiling of all runs."""
        most, longest = max(self.batches), max(self.contexts) + self.answer
        return {
            "scheduler.max_num_seqs": most,
            "scheduler.max_num_batched_tokens": max(self.budget, most),
            "scheduler.max_model_len": longest,
            "scheduler.prefill_row_buckets": (most,),
            "scheduler.decode_row_buckets": tuple(sorted({max(batch, 2) for batch in self.batches})),
            "cache.num_pages": 2 + most * (longest // page_size + 2),
            "cache.enable_prefix_caching": False,
        }


def run(lab: Lab, sizes: Sizes) -> Study:
    """Every batch at every context, decoding alone."""
    settings = sizes.settings(lab.page_size)
    cells = []
    for context in sizes.contexts:
        for batch in sizes.batches:
            if not _fits(lab, settings, batch, context + sizes.answer):
                continue
            burst = Synthetic(pattern="burst", requests=batch, prompt=str(context), output=str(sizes.answer))
            found = lab.run(burst, {**settings, "scheduler.max_num_seqs": batch})
            step = _step_seconds(list(found.tracks.values()))
            cells.append({"context": context, "batch": batch, "step": step, "tokens_per_second": batch / step})
    data: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "cells": cells}
    if isinstance(lab, SimLab):
        data["limits"] = _limits(lab)
    return Study(
        name="why-batch",
        question=QUESTION,
        model=lab.model,
        chip=lab.chip,
        place=lab.title,
        workload="sequences that decode together, nothing else in a step",
        finding=_finding(data),
        data=data,
    )


def _fits(lab: Lab, settings: dict[str, object], batch: int, tokens: int) -> bool:
    """Whether the chip's pages hold that many sequences."""
    if not isinstance(lab, SimLab):
        return True
    limits = lab.engine({**settings, "cache.num_pages": 0}).spec.limits
    return batch * limits.pages_for(tokens) <= limits.usable_pages


def _step_seconds(tracks: list[Track]) -> float:
    """Median time between tokens while everybody decodes."""
    begin = max(track.token_times[0] for track in tracks)
    end = min(track.token_times[-1] for track in tracks)
    times = np.array(tracks[0].token_times)
    gaps = np.diff(times[(times >= begin) & (times <= end)])
    if not len(gaps):
        raise ValueError("the first sequences end before the last begin: a larger budget or longer answers are needed")
    return float(np.median(gaps))


def _limits(lab: SimLab) -> dict[str, float]:
    """What the cost model's parts say alone, in tokens a second: one step's weights, and the arithmetic of a token.

    ridge: sequences whose arithmetic takes as long as reading the weights.
    """
    cost = lab.engine({}).spec.cost
    assert isinstance(cost, RooflineCost)
    bandwidth = cost.chip.bandwidth * cost.bandwidth_share * cost.tensor_parallel
    flops = cost.chip.flops * cost.flops_share * cost.tensor_parallel
    weights = cost.shape.step_parameters * ITEM_BYTES[cost.dtype] / bandwidth
    token = 2 * cost.shape.step_parameters / flops
    return {
        "weights_seconds": weights,
        "token_seconds": token,
        "ridge": weights / token,
        "kv_bytes": cost.shape.kv_bytes(cost.kv_dtype),
        "bandwidth": bandwidth,
    }


def _finding(data: dict[str, Any]) -> str:
    """What the cells say, in sentences."""
    parts = []
    for context in data["sizes"]["contexts"]:
        cells = [cell for cell in data["cells"] if cell["context"] == context]
        if not cells:
            continue
        one, top = cells[0], cells[-1]
        parts.append(
            f"With {context:,} tokens of context, {one['batch']} sequence writes {one['tokens_per_second']:,.0f} "
            f"tokens/s ({seconds(one['step'])} a step), {top['batch']} together {top['tokens_per_second']:,.0f} "
            f"({seconds(top['step'])}): {top['tokens_per_second'] / one['tokens_per_second']:.0f} x the tokens for "
            f"{top['step'] / one['step']:.1f} x the time a step."
        )
    if limits := data.get("limits"):
        parts.append(
            f"Reading the weights takes {seconds(limits['weights_seconds'])} whoever shares them; arithmetic takes "
            f"over only at {limits['ridge']:.0f} sequences. Before that every sequence's own KV "
            f"({limits['kv_bytes'] / 1024:.0f} KiB a token) bends the curve."
        )
    return " ".join(parts)


def draw(data: dict[str, Any], axes: Any) -> None:
    """Throughput and step time over the batch, with the limits where they are known."""
    rate, step = axes[0]
    batches = np.array(data["sizes"]["batches"], float)
    for index, context in enumerate(data["sizes"]["contexts"]):
        cells = [cell for cell in data["cells"] if cell["context"] == context]
        x, label = [cell["batch"] for cell in cells], f"context {context:,}"
        rate.plot(x, [cell["tokens_per_second"] for cell in cells], label=label, **style(index))
        step.plot(x, [cell["step"] * 1e3 for cell in cells], label=label, **style(index))
    if limits := data.get("limits"):
        wide = np.geomspace(1, max(batches[-1], 1.6 * limits["ridge"]), 50)
        rate.plot(wide, wide / limits["weights_seconds"], color="0.4", ls=":", label="if only weights were read")
        rate.axhline(1 / limits["token_seconds"], color="0.4", ls="-.", lw=1, label="limit of arithmetic")
        rate.axvline(limits["ridge"], color="0.85", lw=5, zorder=0)
        rate.annotate(f"ridge: {limits['ridge']:.0f}", (limits["ridge"], 0.03), fontsize=8, ha="right",
                      xycoords=("data", "axes fraction"))  # fmt: skip
        step.axhline(limits["weights_seconds"] * 1e3, color="0.4", ls=":", label="reading the weights")
    rate.set_yscale("log")
    rate.set_ylabel("tokens a second, all sequences")
    step.set_ylabel("time of a step = between tokens (ms)")
    step.set_ylim(bottom=0)
    for axis in (rate, step):
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.set_xlabel("sequences in a step")
        axis.grid(lw=0.3)
        legend(axis, loc="upper left")


GRID, SIZE = (1, 2), (10.0, 3.8)
