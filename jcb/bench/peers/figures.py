"""From runs to figures: medians with minimum and maximum, ratios pair by pair, percentiles, sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jcb.bench.peers.cells import Cell
from jcb.bench.peers.run import Run
from jcb.bench.spread import spread

PERCENTILES = (50, 99)


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of what was repeated."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(*spread(values))

    def show(self, form: str = ".0f") -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def of_cell(runs: Iterable[Run], cell: Cell, peer: str, through: str = "") -> list[Run]:
    """The runs of a peer at a cell, by repeat; through: as the cell is meant where it is not named."""
    through = through or ("http" if cell.http else "engine")
    found = [run for run in runs if (run.cell.name, run.peer, run.through) == (cell.name, peer, through)]
    return sorted(found, key=lambda run: run.repeat)


def rates(runs: Iterable[Run], cell: Cell, peer: str, through: str = "") -> Spread | None:
    """Output tokens a second; None where the peer has no run."""
    found = of_cell(runs, cell, peer, through)
    return Spread.of([run.rate for run in found]) if found else None


def ratio(mine: Sequence[Run], theirs: Sequence[Run]) -> Spread | None:
    """My rate over theirs, repeat by repeat; None where they share no repeat."""
    other = {run.repeat: run.rate for run in theirs}
    pairs = [run.rate / other[run.repeat] for run in mine if run.repeat in other]
    return Spread.of(pairs) if pairs else None


def names(runs: Iterable[Run]) -> list[str]:
    """Peers that ran, in the order in which they first did."""
    return list(dict.fromkeys(run.peer for run in runs))


def cells_of(runs: Iterable[Run]) -> list[Cell]:
    """Cells that ran, in order."""
    return list({run.cell.name: run.cell for run in runs}.values())


def best(runs: Sequence[Run], cell: Cell, peers: Iterable[str]) -> str | None:
    """The peer with the highest median rate at a cell; None where none ran."""
    found = {peer: spread.median for peer in peers if (spread := rates(runs, cell, peer))}
    return max(found, key=found.__getitem__) if found else None


def latency(runs: Sequence[Run], cell: Cell, peer: str, through: str = "") -> dict[str, float]:
    """ttft_p50 … itl_p99 in milliseconds over all repeats together; empty where the peer has no run."""
    found = of_cell(runs, cell, peer, through)
    values = {
        "ttft": [value for run in found for value in run.measured.ttfts],
        "itl": [value for run in found for value in run.measured.itls],
    }
    return {
        f"{name}_p{part}": float(np.percentile(seconds, part)) * 1e3
        for name, seconds in values.items()
        for part in PERCENTILES
        if seconds
    }


def sentences(runs: Sequence[Run], jcb: Sequence[str]) -> Iterator[str]:
    """For every cell: the best mode of jcb, the best peer, and their ratio."""
    others = [peer for peer in names(runs) if peer not in jcb]
    for cell in cells_of(runs):
        mine, other = best(runs, cell, jcb), best(runs, cell, others)
        if mine is None:
            continue
        rate = rates(runs, cell, mine)
        assert rate is not None
        text = f"{cell.title}: {mine} writes {rate.median:.0f} tokens/s"
        gain = ratio(of_cell(runs, cell, mine), of_cell(runs, cell, other)) if other else None
        if gain is not None:
            text += f", {gain.show('.2f')} × the best peer, {other}"
        if cell.http and (cost := ratio(of_cell(runs, cell, mine), of_cell(runs, cell, mine, "engine"))):
            text += f", {cost.show('.2f')} × its own engine without HTTP"
        yield text + "."


def as_json(run: Run) -> dict[str, Any]:
    """One run as numbers, its many latencies as percentiles."""
    measured = run.measured
    return {
        "cell": run.cell.name,
        "peer": run.peer,
        "through": run.through,
        "repeat": run.repeat,
        "seconds": measured.seconds,
        "tokens_asked": run.asked,
        "tokens_written": run.emitted,
        "tokens_per_second": run.rate,
        "peak_rss_bytes": measured.rss,
        "copy_bytes_per_second": run.moment.copy,
        "matmul_flops_per_second": run.moment.matmul,
        **latency([run], run.cell, run.peer, run.through),
    }
