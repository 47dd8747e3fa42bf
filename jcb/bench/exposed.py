"""How much of a step the host adds to the device's own time, with the real default model."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jcb.bench.offline import random_prompt
from jcb.bench.rows import narrow_config
from jcb.bench.spread import spread
from jcb.engine.build import Engine, load_engine
from jcb.engine.core import Executor
from jcb.engine.output import OutputProcessor
from jcb.types import Request, SamplingParams, StepPlan, StepResult

PROMPT = 128
"""Tokens of each prompt."""


def exposed_host(rows: int, *, blocks: int = 5, steps: int = 16, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Decode steps of `rows` rows, in turn with everything (scheduler, packing, text) and with the device alone, which
    runs the last of those plans again and always has one queued. What the host exposes is the difference. Each figure:
    [median, least, most].
    """
    say(f"the default model at {rows} rows: loading and compiling ...")
    tokens = (blocks + 1) * steps + 8
    config = narrow_config(rows=(rows,), tokens=512, longest=PROMPT + tokens)
    engine = load_engine(config)
    answers = Answers(engine, rows, tokens)
    whole, alone, host = [], [], []
    for block in range(blocks + 1):
        device = seconds_of_steps(engine, answers.tap.last_plan, steps)
        began, counted = time.perf_counter(), engine.metrics.step_host_seconds.total
        for _ in range(steps):
            answers.step()
        if block:  # the first warms the caches
            whole.append((time.perf_counter() - began) / steps * 1e3)
            alone.append(device * 1e3)
            host.append((engine.metrics.step_host_seconds.total - counted) / steps * 1e3)
    shares = [100 * (a - b) / a for a, b in zip(whole, alone, strict=True)]
    figures = {"step ms": whole, "device ms": alone, "host ms": host, "exposed %": shares}
    spreads = {name: spread(values) for name, values in figures.items()}
    for name, (median, least, most) in spreads.items():
        say(f"  {name:<12}{median:>9.2f}  ({least:.2f} … {most:.2f})")
    return {"rows": rows, **spreads}


def seconds_of_steps(engine: Engine, plan: StepPlan, steps: int) -> float:
    """Seconds of one step of `plan`, run `steps` times with one always queued behind the one that runs."""
    executor, queue = engine.executor, deque([engine.executor.dispatch(plan)])
    began = time.perf_counter()
    for _ in range(steps):
        queue.append(executor.dispatch(plan))
        executor.collect(queue.popleft())
    seconds = time.perf_counter() - began
    executor.collect(queue.popleft())
    return seconds / steps


class Tap:
    """An executor that remembers the last plan it passed on."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self.last_plan = executor, StepPlan(0, ())

    def dispatch(self, plan: StepPlan) -> Any:
        """The executor's."""
        self.last_plan = plan
        return self._executor.dispatch(plan)

    def collect(self, handle: Any) -> StepResult:
        """The executor's."""
        return self._executor.collect(handle)

    def reset(self) -> None:
        """The executor's."""
        self._executor.reset()


class Answers:
    """`rows` requests that each write `tokens` tokens, and their text; begun until each has two."""

    def __init__(self, engine: Engine, rows: int, tokens: int) -> None:
        self._core, self._text = engine.core, OutputProcessor(engine.tokenizer, metrics=engine.metrics)
        self.tap = engine.core.executor = Tap(engine.executor)
        rng, params = random.Random(1), SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        for number in range(rows):
            ids = tuple(random_prompt(rng, PROMPT, engine.info.vocab_size))
            request = Request(
                request_id=f"{number}", prompt_token_ids=ids, params=params, max_tokens=tokens,
                arrival_time=time.monotonic(),
            )  # fmt: skip
            self._core.add(request)
            self._text.add(request)
        tokens_seen = engine.metrics.generation_tokens
        while self._core.scheduler.num_waiting or tokens_seen.value < 2 * rows:
            self.step()

    def step(self) -> None:
        """One turn of the engine and the text of what it yields."""
        self._text.process(self._core.step())
