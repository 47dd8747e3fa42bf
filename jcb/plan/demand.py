"""How large steps are: counted in a recording, or found by letting the real scheduler serve given lengths."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jcb.config import Limits, SchedulerConfig, ServeConfig
from jcb.engine.core import EngineCore
from jcb.recording import Recording
from jcb.scheduler.scheduler import Scheduler
from jcb.simulate.clock import VirtualClock
from jcb.simulate.executor import SimExecutor
from jcb.steps.shapes import Shapes
from jcb.types import Request, SamplingParams, StepPlan

MAX_LENGTH = 1 << 20
"""Most tokens of a request that is believed; and most requests of one kind."""

_TIMEOUT = 1e12  # virtual seconds


@dataclass(frozen=True)
class Demand:
    """Steps by size. decode: rows → steps with one token a row. mixed: (tokens, rows) → the other steps."""

    decode: Counter[int] = field(default_factory=Counter)
    mixed: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, tokens: int, rows: int) -> None:
        """One more step."""
        if tokens == rows:
            self.decode[rows] += 1
        else:
            self.mixed[tokens, rows] += 1

    @property
    def steps(self) -> int:
        return self.decode.total() + self.mixed.total()

    @property
    def tokens(self) -> int:
        """Tokens that were asked for."""
        mixed = sum(tokens * count for (tokens, _), count in self.mixed.items())
        return mixed + sum(rows * count for rows, count in self.decode.items())

    def padded(self, shapes: Shapes) -> int:
        """Tokens that programs of `shapes` compute. Raises LookupError when a step fits none."""
        return sum(count * shape.num_tokens for count, shape in self._fitted(shapes))

    def padded_rows(self, shapes: Shapes) -> int:
        """Rows whose logits programs of `shapes` compute."""
        return sum(count * shape.num_rows for count, shape in self._fitted(shapes))

    def _fitted(self, shapes: Shapes) -> Iterator:
        for rows, count in self.decode.items():
            yield count, shapes.fit(rows, rows, only_decodes=True)
        for (tokens, rows), count in self.mixed.items():
            yield count, shapes.fit(tokens, rows, only_decodes=False)


def recorded_demand(recording: Recording) -> Demand:
    """The steps of a recording. Raises ValueError when there are none."""
    demand = Demand()
    for step in recording.steps():
        demand.add(step.num_tokens, len(step.rows))
    if not demand.steps:
        raise ValueError(f"recording {recording.path} holds no step")
    return demand


def read_lengths(path: Path) -> list[tuple[int, int, int]]:
    """(prompt tokens, output tokens, how often) of each line of a file of JSON objects.

    Keys: prompt_tokens, output_tokens, count (1 when left out). Raises ValueError that names a bad line.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            values = (entry["prompt_tokens"], entry["output_tokens"], entry.get("count", 1))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f'{path}, line {number}: must be like {{"prompt_tokens": 100, "output_tokens": 20, "count": 3}}, '
                f"got {line[:60]!r}"
            ) from error
        if not all(type(value) is int and 1 <= value <= MAX_LENGTH for value in values):
            raise ValueError(
                f"{path}, line {number}: lengths and count must be whole numbers of at least 1, and at most "
                f"{MAX_LENGTH:,}: {str(values)[:64]}"
            )
        found.append(values)
    if not found:
        raise ValueError(f"{path} holds no lengths")
    return found


def simulated_demand(
    lengths: Sequence[tuple[int, int, int]],
    scheduler: SchedulerConfig,
    limits: Limits,
    *,
    requests: int = 2000,
    concurrency: int = 0,
    seed: int = 0,
) -> Demand:
    """The steps of the production scheduler when `concurrency` clients ask one request after another.

    lengths: (prompt tokens, output tokens, weight) to draw `requests` from. concurrency: 0 is max_num_seqs.
    RequestError when a request can never fit.
    """
    scheduler = dataclasses.replace(scheduler, queue_timeout=_TIMEOUT, run_timeout=_TIMEOUT)
    clock, demand = VirtualClock(), Demand()

    def cost(plan: StepPlan) -> float:
        demand.add(plan.num_tokens, len(plan.rows))
        return 1.0

    core = EngineCore(
        Scheduler(scheduler, limits, enable_prefix_caching=False),
        SimExecutor(clock, cost, vocab_size=limits.vocab_size),
        clock=clock,
    )
    rng = random.Random(seed)
    weights = [count for _, _, count in lengths]
    drawn = iter(rng.choices([(prompt, output) for prompt, output, _ in lengths], weights, k=requests))
    left, running = requests, 0
    while left or core.has_work:
        while left and running < (concurrency or scheduler.max_num_seqs):
            prompt, output = next(drawn)
            core.add(_request(requests - left, prompt, output, clock(), limits))
            left, running = left - 1, running + 1
        running -= sum(output.finish_reason is not None for output in core.step())
    return demand


def _request(number: int, prompt: int, output: int, now: float, limits: Limits) -> Request:
    output = min(output, limits.max_model_len - prompt)
    return Request(
        request_id=str(number),
        prompt_token_ids=(number % limits.vocab_size,) * prompt,
        params=SamplingParams(max_tokens=output, ignore_eos=True),
        max_tokens=output,
        arrival_time=now,
    )


def is_recording(path: Path) -> bool:
    """Whether the file begins as a recording does. Raises ValueError when it cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            return '"jcb_recording"' in file.readline(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}") from error


def limits_for(lengths: Sequence[tuple[int, int, int]], config: ServeConfig) -> Limits:
    """Limits under which all lengths fit: pages for max_num_seqs full sequences unless the cache's are given."""
    page_size = config.cache.page_size or 16
    longest = config.scheduler.max_model_len or max(prompt + output for prompt, output, _ in lengths)
    pages = config.cache.num_pages or config.scheduler.max_num_seqs * -(-longest // page_size) + 1
    return Limits(page_size=page_size, num_pages=pages, max_model_len=longest, vocab_size=1 << 16)
