"""The picture: tokens a second by cell and peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jcb.bench.experiments.picture import HATCHES, legend
from jcb.bench.peers import figures
from jcb.bench.peers.run import Run

_SHADES = ("0.2", "0.6", "0.95", "0.4", "0.78", "1.0", "0.5")


def _fill(index: int) -> dict[str, Any]:
    """Bar number `index`: shades and hatches of different periods, so that 42 are told apart without colour."""
    return {"color": _SHADES[index % 7], "hatch": HATCHES[index % 6], "edgecolor": "black", "lw": 0.6}


def draw(runs: Sequence[Run], path: Path, *, note: str) -> None:
    """Write a PNG: a group of bars a cell, medians with minimum and maximum."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells, peers = figures.cells_of(runs), figures.names(runs)
    width = 0.84 / len(peers)
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6}):
        figure, axis = plt.subplots(
            figsize=(max(8.0, 2.5 + 0.22 * len(cells) * (len(peers) + 1)), 5), layout="constrained"
        )
        for index, peer in enumerate(peers):
            found = [(at, figures.rates(runs, cell, peer)) for at, cell in enumerate(cells)]
            there = [(at, spread) for at, spread in found if spread is not None]
            places = [at + width * (index - (len(peers) - 1) / 2) for at, _ in there]
            heights = [spread.median for _, spread in there]
            spread = [[s.median - s.low for _, s in there], [s.high - s.median for _, s in there]]
            drawn = axis.bar(places, heights, width, yerr=spread, capsize=1.5, label=peer, **_fill(index),
                             error_kw={"lw": 0.8, "ecolor": "0.4"})  # fmt: skip
            axis.bar_label(drawn, labels=[f"{value:.0f}" for value in heights], padding=4, fontsize=6.5, rotation=90)
        axis.set_xticks(range(len(cells)), [cell.title.replace(", ", "\n") for cell in cells])
        axis.set_ylabel("output tokens a second")
        axis.margins(x=0.02, y=0.12)
        axis.grid(axis="y", color="0.85", lw=0.6)
        axis.set_axisbelow(True)
        figure.suptitle("The same prompts and weights, output tokens a second", x=0.01, ha="left", weight="bold")
        axis.set_title(f"bars: median, minimum to maximum\n{note}", fontsize=8, loc="left")
        legend(axis, ncols=min(len(peers), 5), loc="upper center", bbox_to_anchor=(0.5, -0.12))
        figure.savefig(path, dpi=130)
        plt.close(figure)
