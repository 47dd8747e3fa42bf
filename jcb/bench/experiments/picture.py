"""Pictures of studies: a title that says what ran, panels, and the finding below; readable without colour."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jcb.bench.experiments.study import Study

Draw = Callable[[Any, Any], None]
"""Draws a study's data on a row (or grid) of axes: (data, axes)."""

LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "x")
SHADES = ("0.05", "0.35", "0.55", "0.7", "0.2", "0.45")
HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def style(index: int) -> dict[str, Any]:
    """Line, marker and shade number `index`, told apart without colour."""
    return {"ls": LINES[index % 6], "marker": MARKERS[index % 6], "color": SHADES[index % 6], "ms": 4, "lw": 1.5}


def fill(index: int) -> dict[str, Any]:
    """Bar number `index`, told apart without colour."""
    return {"color": ("0.25", "0.6", "0.9", "0.45", "0.75", "1.0")[index % 6], "hatch": HATCHES[index % 6],
            "edgecolor": "black", "lw": 0.6}  # fmt: skip


def paint(study: Study, draw: Draw, path: Path, *, grid: tuple[int, int], size: tuple[float, float]) -> None:
    """Writes `study` as a PNG. grid: rows and columns of panels; size: inches of panels, before title and caption."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width = int(size[0] * 14.6)
    caption = textwrap.fill(study.finding, width)
    heading = textwrap.fill(f"{study.model} on {study.place}: {study.workload}", width)
    lines = caption.count("\n") + 1
    below, above = (0.2 + 0.17 * lines) / size[1], (0.45 + 0.17 * (heading.count("\n") + 1)) / size[1]
    total = size[1] * (1 + below + above)
    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6}):
        layout = ConstrainedLayoutEngine(rect=(0, below / (1 + below + above), 1, 1 / (1 + below + above)))
        figure, axes = plt.subplots(*grid, figsize=(size[0], total), layout=layout, squeeze=False)
        figure.suptitle(study.question, x=0.01, y=1 - 0.06 / total, ha="left", va="top", fontsize=12, weight="bold")
        figure.text(0.01, 1 - 0.36 / total, heading, ha="left", va="top", fontsize=9)
        figure.text(0.01, 0.08 / total, caption, ha="left", va="bottom", fontsize=9, style="italic")
        draw(study.data, axes)
        figure.savefig(path, dpi=110)
        plt.close(figure)


def legend(axis: Any, **options: Any) -> None:
    """A legend without a frame that covers the curves."""
    axis.legend(**{"fontsize": 8, "frameon": True, "framealpha": 0.9, "edgecolor": "0.8"} | options)


def milliseconds(values: Sequence[float]) -> list[float]:
    """Seconds as milliseconds."""
    return [value * 1e3 for value in values]
