"""What the host takes for a step: with a device that takes no time, and beside the real default model.

python -m jcb.bench.host [--rows 1 32 256] [--waiting 100 10000] [--no-model] [--output FILE]

The empty device packs every plan and unpacks an output of the right shape, as the real one does, and computes nothing.
Each figure is a median over blocks of steps, measured in turn, with the least and the most.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jcb.checkpoint.default_model import default_model_path
from jcb.checkpoint.reader import open_checkpoint
from jcb.config import Limits, SchedulerConfig
from jcb.engine.core import EngineCore
from jcb.engine.output import OutputProcessor
from jcb.metrics import EngineMetrics
from jcb.scheduler.scheduler import Scheduler
from jcb.steps import outputs
from jcb.steps.packer import Packer
from jcb.steps.shapes import Shapes
from jcb.text.tokenizer import Tokenizer, load_tokenizer
from jcb.types import Request, SamplingParams, StepPlan, StepResult

PROMPT = 32
"""Tokens of a prompt."""

GOAL_TOKENS = 100_000
"""Tokens a second that the host should be able to schedule at the largest number of rows."""


class EmptyDevice:
    """An Executor that packs and unpacks as the real one and computes nothing; every row samples `token`."""

    def __init__(self, scheduler: SchedulerConfig, limits: Limits, token: int = 65) -> None:
        self._shapes = Shapes.make(scheduler, limits)
        self._packer = Packer(limits, scheduler.max_num_seqs)
        self._output = np.zeros((max(shape.num_rows for shape in self._shapes.prefill), outputs.WIDTH), np.int32)
        self._output[:, 0] = token
        self._output[:, 2] = 1  # finite
        self.dispatch_seconds = self.collect_seconds = 0.0

    def dispatch(self, plan: StepPlan) -> StepPlan:
        """Packs the plan."""
        began = time.perf_counter()
        self.pack(plan)
        self.dispatch_seconds += time.perf_counter() - began
        return plan

    def pack(self, plan: StepPlan) -> np.ndarray:
        """The array that a device would get."""
        return self._packer.pack(plan, self._shapes.choose(plan))

    def collect(self, handle: StepPlan) -> StepResult:
        """The outputs of so many rows."""
        began = time.perf_counter()
        result = outputs.unpack(handle, self._output[: len(handle.rows)].copy(), {})
        self.collect_seconds += time.perf_counter() - began
        return result

    def reset(self) -> None:
        """There is nothing to forget."""


@dataclass(frozen=True)
class Parts:
    """Microseconds of one step: plan (scheduler, metrics), pack, unpack, text (detokenising)."""

    plan: float
    pack: float
    unpack: float
    text: float

    @property
    def total(self) -> float:
        return self.plan + self.pack + self.unpack + self.text


class Bench:
    """`rows` sequences in the middle of their answers and `waiting` more in the queue, on an empty device."""

    def __init__(self, rows: int, waiting: int, tokenizer: Tokenizer | None = None, *, steps: int) -> None:
        longest = PROMPT + steps + 8
        pages = (rows + 1) * -(-longest // 16) * 2
        limits = Limits(page_size=16, num_pages=pages, max_model_len=longest, vocab_size=49_152)
        config = SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=max(rows, 512), max_queued=rows + waiting + 1,
            max_queued_tokens=(rows + waiting + 1) * PROMPT, queue_timeout=3600.0, run_timeout=3600.0,
        )  # fmt: skip
        self.device = EmptyDevice(config, limits)
        self.rows = rows
        self.metrics = EngineMetrics(max_num_seqs=rows)
        scheduler = Scheduler(config, limits, enable_prefix_caching=True)
        self.core = EngineCore(scheduler, self.device, metrics=self.metrics)
        self._text = None if tokenizer is None else OutputProcessor(tokenizer, metrics=self.metrics)
        self._text_seconds = 0.0
        self._written: set[str] = set()  # who has written a token
        for number in range(rows + waiting):
            self._add(number, longest)
        while len(self._written) < rows:
            self._step()

    def _add(self, number: int, longest: int) -> None:
        params = SamplingParams(max_tokens=longest - PROMPT, ignore_eos=True)
        prompt = tuple((number * 7919 + i) % 40_000 + 256 for i in range(PROMPT))
        request = Request(
            request_id=f"r{number}", prompt_token_ids=prompt, params=params, max_tokens=longest - PROMPT,
            arrival_time=time.monotonic(),
        )  # fmt: skip
        self.core.add(request)
        if self._text is not None:
            self._text.add(request)

    def _step(self) -> None:
        made = self.core.step()
        if len(self._written) < self.rows:
            self._written.update(output.request_id for output in made)
        if self._text is not None:
            began = time.perf_counter()
            self._text.process(made)
            self._text_seconds += time.perf_counter() - began

    def block(self, steps: int) -> Parts:
        """Microseconds a step over `steps` steps in which every row decodes one token."""
        device, before = self.device, (self.device.dispatch_seconds, self.device.collect_seconds, self._text_seconds)
        began = time.perf_counter()
        for _ in range(steps):
            self._step()
        total = time.perf_counter() - began
        pack, unpack = device.dispatch_seconds - before[0], device.collect_seconds - before[1]
        text = self._text_seconds - before[2]
        parts = (total - pack - unpack - text, pack, unpack, text)
        return Parts(*(seconds / steps * 1e6 for seconds in parts))


@dataclass(frozen=True)
class Line:
    """Of one number of rows: medians of each part, and least and most of their sum (microseconds a step)."""

    rows: int
    waiting: int
    parts: Parts
    least: float
    most: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the scheduler and the packing could feed to a device that takes no time."""
        return self.rows / (self.parts.total - self.parts.text) * 1e6


def measure(
    cases: Sequence[tuple[int, int]], tokenizer: Tokenizer | None, *, blocks: int = 7, steps: int = 20
) -> list[Line]:
    """One line for each (rows, waiting), their blocks in turn so that a slow moment of the machine hits all."""
    benches = [Bench(rows, waiting, tokenizer, steps=(blocks + 1) * steps) for rows, waiting in cases]
    found: list[list[Parts]] = [[] for _ in cases]
    for block in range(blocks + 1):
        for bench, parts in zip(benches, found, strict=True):
            one = bench.block(steps)
            if block:  # the first warms the caches
                parts.append(one)
    return [line_of(*case, parts) for case, parts in zip(cases, found, strict=True)]


def line_of(rows: int, waiting: int, parts: list[Parts]) -> Line:
    """What the blocks of one bench say."""
    names = [field.name for field in dataclasses.fields(Parts)]
    medians = Parts(*(statistics.median(getattr(each, name) for each in parts) for name in names))
    totals = [each.total for each in parts]
    return Line(rows, waiting, medians, min(totals), max(totals))


def table(lines: list[Line]) -> list[str]:
    """The table's lines."""
    heads = "".join(f"{head:>10}" for head in ("plan", "pack", "unpack", "text", "all", "min", "max"))
    made = [f"{'rows':>5}{'waiting':>9}{heads}  µs a step{'tokens/s':>12} without text"]
    for line in lines:
        p = line.parts
        figures = (p.plan, p.pack, p.unpack, p.text, p.total, line.least, line.most)
        made.append(
            f"{line.rows:>5}{line.waiting:>9,}"
            + "".join(f"{figure:>10,.0f}" for figure in figures)
            + f"{line.tokens_per_second:>23,.0f}"
        )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m jcb.bench.host", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256], help="sequences that write at once")
    parser.add_argument("--waiting", type=int, nargs="+", default=[100, 10_000], help="queue beside the most rows")
    parser.add_argument("--blocks", type=int, default=7, help="repetitions that count")
    parser.add_argument("--steps", type=int, default=20, help="steps of a repetition")
    parser.add_argument("--no-model", action="store_true", help="leave the real model out")
    parser.add_argument("--model-rows", type=int, default=32, help="rows of the real model's steps")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures there as JSON")
    flags = parser.parse_args(arguments)
    if min(*flags.rows, flags.blocks, flags.steps, flags.model_rows) < 1 or min(flags.waiting) < 0:
        parser.error("rows, blocks and steps must be at least 1, waiting must not be negative")
    document: dict[str, Any] = {"empty": []}
    most = max(flags.rows)
    cases = [(rows, 0) for rows in flags.rows] + [(most, waiting) for waiting in flags.waiting]
    lines = measure(
        cases, load_tokenizer(open_checkpoint(default_model_path())), blocks=flags.blocks, steps=flags.steps
    )
    print("an empty device:", *table(lines), sep="\n")
    document["empty"] = [dataclasses.asdict(line) for line in lines]
    ceiling = next(line for line in lines if line.rows == most).tokens_per_second
    print(f"the host's ceiling at {most} rows: {ceiling:,.0f} tokens/s (goal {GOAL_TOKENS:,})")
    queued = [line for line in lines if line.waiting and line.rows == most]
    if len(queued) > 1:
        growth = queued[-1].parts.total / queued[0].parts.total
        document["growth"] = growth
        print(f"{queued[-1].waiting:,} waiting cost {growth:.2f} x what {queued[0].waiting:,} do (goal < 1.2)")
    if not flags.no_model:
        from jcb.bench.exposed import exposed_host

        document["model"] = exposed_host(flags.model_rows, say=print)
    if flags.output is not None:
        flags.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
