"""What a run found, as tables, sentences and JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jcb.bench.peers import figures
from jcb.bench.peers.figures import Spread
from jcb.bench.peers.run import Findings, Run

_TIMED = ("mix",)  # cells whose latencies are told, beside those through HTTP


def show(findings: Findings, jcb: Sequence[str], console: Console) -> None:
    """Print everything: who ran, the rates, the ratios, the latencies, the machine, the sentences."""
    parts: list[RenderableType] = [_peers(findings)]
    if findings.runs:
        tables = [_rates(findings.runs), _ratios(findings.runs, jcb), _latencies(findings.runs)]
        parts += [table for table in tables if table.row_count and len(table.columns) > 1]
        parts.append(machine(findings.runs))
        parts += [Text(sentence) for sentence in figures.sentences(findings.runs, jcb)]
    console.print(Group(*parts))


def as_json(findings: Findings, jcb: Sequence[str]) -> dict[str, Any]:
    """Everything as data."""
    return {
        "peers": findings.told,
        "failures": findings.failures,
        "first_tokens": findings.samples,
        "cells": {cell.name: cell.title for cell in figures.cells_of(findings.runs)},
        "sentences": list(figures.sentences(findings.runs, jcb)),
        "ratios": _ratio_data(findings.runs, jcb),
        "runs": [figures.as_json(run) for run in findings.runs],
    }


def machine(runs: Sequence[Run]) -> Text:
    """How steady the machine was."""
    copy = Spread.of([run.moment.copy / 1e9 for run in runs])
    matmul = Spread.of([run.moment.matmul / 1e9 for run in runs])
    return Text(f"beside the cells: copy {copy.show('.1f')} GB/s, float32 matmul {matmul.show()} GFLOP/s")


def _peers(findings: Findings) -> Table:
    table = Table("peer", "versions", "precision", "first tokens", "load s", "peak MB", title="peers")
    reference = next(iter(findings.samples.values()), [])
    for name, told in findings.told.items():
        versions = ", ".join(f"{package} {version}" for package, version in told.get("versions", {}).items())
        agreed = _agreement(findings.samples.get(name), reference)
        rss = max((run.measured.rss for run in findings.runs if run.peer == name), default=0)
        memory = f"{rss / 1e6:.0f}" if rss and not name.endswith(" server") else ""
        table.add_row(name, versions, told.get("precision", ""), agreed, f"{told['load_seconds']:.0f}", memory)
    for name, error in findings.failures.items():
        table.add_row(name, Text(f"failed: {error}", style="bold"))
    return table


def _agreement(sample: Sequence[int] | None, reference: Sequence[int]) -> str:
    """How many tokens of the probe's answer are those of the first peer, from the first on."""
    if not sample:
        return ""
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(sample, reference, strict=False)))
    return f"{same} of {len(reference)} equal"


def _rates(runs: Sequence[Run]) -> Table:
    peers = figures.names(runs)
    table = Table("cell", *peers, title="output tokens a second: median (minimum to maximum)")
    for cell in figures.cells_of(runs):
        spreads = [figures.rates(runs, cell, peer) for peer in peers]
        table.add_row(cell.title, *["" if spread is None else spread.show() for spread in spreads])
    return table


def _ratios(runs: Sequence[Run], jcb: Sequence[str]) -> Table:
    data = _ratio_data(runs, jcb)
    pairs = list(dict.fromkeys((entry["jcb"], entry["peer"]) for entry in data))
    heads = [f"{mine} / {other}" for mine, other in pairs]
    table = Table("cell", *heads, title="ratios, repeat by repeat: median (minimum to maximum)")
    for cell in figures.cells_of(runs):
        found = {(e["jcb"], e["peer"]): Spread(e["median"], e["min"], e["max"]) for e in data if e["cell"] == cell.name}
        table.add_row(cell.title, *[found[pair].show(".2f") if pair in found else "" for pair in pairs])
    return table


def _ratio_data(runs: Sequence[Run], jcb: Sequence[str]) -> list[dict[str, Any]]:
    entries = []
    others = [peer for peer in figures.names(runs) if peer not in jcb]
    for cell, mine, other in itertools.product(figures.cells_of(runs), jcb, others):
        found = figures.ratio(figures.of_cell(runs, cell, mine), figures.of_cell(runs, cell, other))
        if found is not None:
            spread = {"median": found.median, "min": found.low, "max": found.high}
            entries.append({"cell": cell.name, "jcb": mine, "peer": other} | spread)
    return entries


def _latencies(runs: Sequence[Run]) -> Table:
    heads = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")
    table = Table("cell", "peer", "requests", *heads, title="milliseconds, all repeats together")
    for cell in figures.cells_of(runs):
        if not cell.http and cell.name not in _TIMED:
            continue
        for peer in figures.names(runs):
            found = figures.latency(runs, cell, peer)
            if found:
                count = str(cell.requests * len(figures.of_cell(runs, cell, peer)))
                table.add_row(cell.title, peer, count, *[f"{value:.0f}" for value in found.values()])
    return table
