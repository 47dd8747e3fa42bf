"""The picture of `jcb.bench.batching`: throughput side by side, and when each request was answered."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_STYLES = {"static": {"color": "0.65", "hatch": "//"}, "paged": {"color": "0.2", "hatch": ""}}
_NAMES = {"static": "static batching", "paged": "continuous batching"}


def draw(cells: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG of `cells` (see `jcb.bench.batching.Cell`); readable in greyscale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, curve) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    workloads = [w for w in dict.fromkeys(c["workload"] for c in cells) if "lengths" in w]
    for index, mode in enumerate(("static", "paged")):
        rates = [[c["rate"] for c in cells if c["workload"] == w and c["mode"] == mode] for w in workloads]
        medians = [statistics.median(r) for r in rates]
        pairs = list(zip(medians, rates, strict=True))
        spread = [[m - min(r) for m, r in pairs], [max(r) - m for m, r in pairs]]
        places = [w + 0.38 * index for w in range(len(workloads))]
        drawn = bars.bar(places, medians, 0.36, yerr=spread, capsize=3, label=_NAMES[mode], **_STYLES[mode])
        bars.bar_label(drawn, fmt="%.0f", padding=3)
        latencies = sorted(
            x for c in cells if c["workload"] == workloads[0] and c["mode"] == mode for x in c["latencies"]
        )
        share = [(i + 1) / len(latencies) for i in range(len(latencies))]
        curve.plot(
            latencies, share, color=_STYLES[mode]["color"], ls="--" if mode == "static" else "-", label=_NAMES[mode]
        )
    bars.set_xticks([w + 0.19 for w in range(len(workloads))], workloads)
    bars.set_ylabel("output tokens a second")
    bars.set_title("throughput, same requests (bars: median, min to max)")
    bars.margins(y=0.15)
    bars.legend()
    curve.set_xlabel("seconds from sending to the whole answer")
    curve.set_ylabel("share of requests answered")
    curve.set_title("exponential lengths: when answers are complete")
    curve.legend()
    figure.savefig(path, dpi=120)
