"""Continuous against static batching through the HTTP server, the same requests, interleaved in one run.

    python -m jcb.bench.batching [--output FILE.json] [--picture FILE.png]

Two servers differ in one setting, scheduler.admission: "paged" swaps a finished request for a waiting one at every
step, "static" fills a batch, runs it to its end, then takes the next. Answers' lengths follow an exponential
distribution (mean 64, clipped to 8 … 256), where static batching waits for the longest; with constant lengths nobody
waits and the two must be about equal: the control.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from jcb.bench.server_process import metric, model_id, serving
from jcb.bench.spread import spread

MODES = ("paged", "static")
MEAN, SHORTEST, LONGEST = 64, 8, 256


@dataclass(frozen=True)
class Cell:
    """One timed run of one workload on one server."""

    mode: str
    workload: str
    seconds: float
    tokens: int
    latencies: list[float]

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds


def exponential_lengths(count: int, seed: int) -> list[int]:
    """Answer lengths: exponential with mean 64, clipped to 8 … 256."""
    rng = random.Random(seed)
    return [min(max(round(rng.expovariate(1 / MEAN)), SHORTEST), LONGEST) for _ in range(count)]


async def run_requests(
    url: str, model: str, lengths: list[int], concurrency: int, seed: int = 0
) -> tuple[float, list[float]]:
    """Send one request a length, `concurrency` at a time: wall seconds, and each request's latency."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(concurrency)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=3600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(length: int) -> float:
            prompt = [rng.randrange(1000, 40_000) for _ in range(32)]
            body = {"model": model, "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
            async with gate:
                start = time.perf_counter()
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                    if response.status != 200:
                        raise RuntimeError(f"{response.status}: {answer}")
                    if answer["usage"]["completion_tokens"] != length:
                        raise RuntimeError(f"asked for {length} tokens, got {answer['usage']}")
                return time.perf_counter() - start

        start = time.perf_counter()
        latencies = await asyncio.gather(*[one(length) for length in lengths])
        return time.perf_counter() - start, latencies


def measure(url: str, mode: str, workload: str, lengths: list[int], concurrency: int) -> Cell:
    """One cell, printed as it is done."""
    seconds, latencies = asyncio.run(run_requests(url, model_id(url), lengths, concurrency))
    cell = Cell(mode, workload, seconds, sum(lengths), latencies)
    print(f"  {workload:24} {mode:7} {cell.rate:8.1f} tokens/s  ({cell.tokens} tokens in {seconds:.1f} s)", flush=True)
    return cell


def compare(urls: dict[str, str], requests: int, repeats: int) -> list[Cell]:
    """Every workload on every server in turn, `repeats` times, the order reversed each time."""
    workloads = {"exponential lengths": exponential_lengths(requests, seed=7), "constant lengths": [MEAN] * requests}
    cells = []
    for repeat in range(repeats):
        for name, lengths in workloads.items():
            for mode in MODES if repeat % 2 == 0 else reversed(MODES):
                cells.append(measure(urls[mode], mode, name, lengths, concurrency=requests))
    return cells


def scaling(url: str, repeats: int) -> list[Cell]:
    """Concurrency 1 against 32 on the continuous server."""
    cells = []
    for _ in range(repeats):
        cells.append(measure(url, "paged", "concurrency 1", [MEAN] * 3, concurrency=1))
        cells.append(measure(url, "paged", "concurrency 32", [MEAN] * 64, concurrency=32))
    return cells


def ratios(cells: list[Cell], workload: str, other: str | None = None) -> list[float]:
    """Pair by pair: paged over static of one workload, or one workload over `other` on one server."""
    mine = [c.rate for c in cells if c.workload == workload and c.mode == "paged"]
    if other is None:
        theirs = [c.rate for c in cells if c.workload == workload and c.mode == "static"]
    else:
        theirs = [c.rate for c in cells if c.workload == other]
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def show(name: str, values: list[float]) -> str:
    """Median with minimum and maximum."""
    median, least, most = spread(values)
    return f"{name}: {median:.2f} x (min {least:.2f}, max {most:.2f})"


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; exit status 0 when it ran, whatever it found."""
    parser = argparse.ArgumentParser(description="continuous against static batching through the HTTP server")
    parser.add_argument("--requests", type=int, default=128, help="requests a cell (128)")
    parser.add_argument("--repeats", type=int, default=3, help="times each pair of cells is run (3)")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="batch slots of the compared servers (16)")
    parser.add_argument("--output", type=Path, help="write every number as JSON")
    parser.add_argument("--picture", type=Path, help="draw the result as PNG (needs matplotlib)")
    options = parser.parse_args(arguments)
    common = ["--max-model-len", "512", "--no-enable-prefix-caching", "--set", "scheduler.max_queued=1024"]
    common += ["--set", "scheduler.queue_timeout=3600", "--set", "scheduler.run_timeout=3600"]
    common += ["--set", "scheduler.max_queued_tokens=1000000"]
    with ExitStack() as stack:
        print("starting the servers ...", flush=True)
        seats = ["--max-num-seqs", str(options.max_num_seqs)]
        urls = {
            mode: stack.enter_context(serving([*common, *seats, "--set", f"scheduler.admission={mode}"]))
            for mode in MODES
        }
        cells = compare(urls, options.requests, options.repeats)
        wide = stack.enter_context(serving([*common, "--max-num-seqs", "32"]))
        cells += scaling(wide, options.repeats)
        compiles = sum(metric(url, "jcb:compiles_after_ready_total") for url in (*urls.values(), wide))
    found = {
        "continuous over static, exponential lengths": ratios(cells, "exponential lengths"),
        "continuous over static, constant lengths (control)": ratios(cells, "constant lengths"),
        "concurrency 32 over 1": ratios(cells, "concurrency 32", "concurrency 1"),
    }
    print(*(show(name, values) for name, values in found.items()), f"compiles after ready: {compiles:.0f}", sep="\n")
    rows = [{**asdict(cell), "rate": cell.rate} for cell in cells]
    if options.output:
        data = {"ratios": found, "cells": rows}
        options.output.write_text(json.dumps(data, indent=1) + "\n")
    if options.picture:
        from jcb.bench.batching_picture import draw

        draw(rows, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
